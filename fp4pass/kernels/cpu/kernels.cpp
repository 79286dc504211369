// What eager PyTorch calls on a CPU: products of few rows, and numbers to codes and back.
#include <algorithm>

#include "dequantize.h"
#include "few_rows.h"

namespace fp4pass {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Binary floats of few bits with gradual underflow below 2^min_exponent, by their index.
struct Grid {
  int mantissa_bits, min_exponent;
  float max;

  // The index nearest to each y >= 0, ties to even: the sum with 1.5 * 2^23 times the step between
  // values in the binade of y rounds it to one of them.
  Words index_of(Floats y) const {
    y = y > max ? Floats{} + max : y;
    const Words least = Words{} + (uint32_t(min_exponent + 127) << 23);
    Words binade = (Words)y & 0x7F800000;
    binade = binade < least ? least : binade;
    const Words anchor = binade + (uint32_t(23 - mantissa_bits) << 23 | 0x400000);
    return (Words)(y + (Floats)anchor) - anchor + (((binade - least) >> 23) << mantissa_bits);
  }
};

// How a block of activations is rounded. Block scales are a grid, or powers of two, where the grid
// has no mantissa: those have the exponent of amax + carry less `shift`.
struct Rounding {
  Grid element, scale;
  int last, nan;  // the largest scale that is written, and the one of blocks that are not finite
  uint32_t carry;
  int shift;
  const float* steps;  // [256]
  float global_scale, full;  // what multiplies; the largest element times that
  bool has_global_scale;
};

inline Floats load_numbers(const float* from) { return load(from); }

inline Floats load_numbers(const BFloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline uint32_t largest_of(Words x) {
  uint32_t parts[kLanes];
  std::memcpy(parts, &x, sizeof parts);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] = std::max(parts[i], parts[i + half]);
  return parts[0];
}

// The bytes of kLanes codes, the first of two low.
inline void pack(Words codes, uint8_t* packed) {
  typedef uint64_t Pairs __attribute__((vector_size(4 * kLanes)));
  typedef uint8_t Bytes __attribute__((vector_size(kLanes / 2)));
  const Pairs pairs = (Pairs)codes;
  const Bytes bytes = __builtin_convertvector(pairs | pairs >> 28, Bytes);
  std::memcpy(packed, &bytes, sizeof bytes);
}

// One block of B numbers to B / 2 bytes of codes; its scale is returned.
template <typename T, int B>
inline uint8_t quantize_block(const T* x, uint8_t* packed, const Rounding& to) {
  constexpr int kVectors = B / kLanes;
  Floats block[kVectors];
  Words sizes = {};
  for (int i = 0; i < kVectors; i++) {
    block[i] = load_numbers(x + i * kLanes);
    const Words size = (Words)block[i] & 0x7FFFFFFF;
    sizes = size > sizes ? size : sizes;
  }
  const uint32_t largest = largest_of(sizes);
  const bool finite = largest < 0x7F800000;
  const float amax = finite ? as_float(largest) : 0.0f;
  bool vanishes = !finite;
  int byte;
  if (to.scale.mantissa_bits) {
    byte = int(to.scale.index_of(Floats{} + amax / to.full)[0]);
    vanishes |= byte == 0;
  } else {
    byte = int((bits_of(amax) + to.carry) >> 23) - to.shift;
  }
  byte = byte < 1 ? 1 : byte > to.last ? to.last : byte;
  float step = to.steps[byte];
  if (to.has_global_scale) step *= to.global_scale;
  for (int i = 0; i < kVectors; i++) {
    const Floats quotient = block[i] / step;
    const Words bits = (Words)quotient;
    const Words code = to.element.index_of((Floats)(bits & 0x7FFFFFFF)) | bits >> 31 << 3;
    // No number divided by a step that is zero is the positive zero.
    pack(vanishes ? Words{} : code & (Words)(quotient == quotient), packed + i * kLanes / 2);
  }
  return uint8_t(finite ? byte : to.nan);
}

template <typename T, int B>
void quantize(
    const T* x, uint8_t* packed, uint8_t* scale, int64_t blocks, const Rounding& to, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t j = 0; j < blocks; j++)
    scale[j] = quantize_block<T, B>(x + j * B, packed + j * B / 2, to);
}

}  // namespace fp4pass

using namespace fp4pass;

extern "C" {

void product_float(
    const float* x, int64_t m, const Weight* weight, const float* bias, float* y, int threads) {
  product(x, m, *weight, bias, y, threads);
}

void product_bfloat16(
    const BFloat16* x, int64_t m, const Weight* weight, const BFloat16* bias, BFloat16* y,
    int threads) {
  product(x, m, *weight, bias, y, threads);
}

void quantize_float(
    const float* x, uint8_t* packed, uint8_t* scale, int64_t blocks, int block, const Rounding* to,
    int threads) {
  block == 16 ? quantize<float, 16>(x, packed, scale, blocks, *to, threads)
              : quantize<float, 32>(x, packed, scale, blocks, *to, threads);
}

void quantize_bfloat16(
    const BFloat16* x, uint8_t* packed, uint8_t* scale, int64_t blocks, int block,
    const Rounding* to, int threads) {
  block == 16 ? quantize<BFloat16, 16>(x, packed, scale, blocks, *to, threads)
              : quantize<BFloat16, 32>(x, packed, scale, blocks, *to, threads);
}

void dequantize_float(
    const Weight* weight, int64_t first, int64_t last, float* y, int threads) {
  dequantize(*weight, first, last, y, threads);
}

void dequantize_bfloat16(
    const Weight* weight, int64_t first, int64_t last, BFloat16* y, int threads) {
  dequantize(*weight, first, last, y, threads);
}

}  // extern "C"
