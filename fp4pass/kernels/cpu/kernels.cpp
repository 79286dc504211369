// What eager PyTorch calls on a CPU: products of few rows, and numbers to codes and back.
#include "weights.h"

namespace fp4pass {

// How a block of activations is rounded. An element's code is the number of `middles` below it, and
// a scale's byte the number of `limits` below amax / full.
struct Rounding {
  const float* middles;  // [7], padded to 16
  const float* limits;   // infinity where there are no more
  const uint8_t* below;  // [2048], limits below the floats of 11 bits: between two is one at most
  const float* steps;    // [256]
  int nan;               // the scale of blocks that are not finite
  float global_scale, full;
  bool has_zero;  // whether a block whose scale is nearest to zero has codes 0
};

inline Floats load_numbers(const float* from) { return load<Floats>(from); }

inline Floats load_numbers(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
}

inline uint32_t largest_of(Words x) {
  uint32_t parts[kLanes];
  std::memcpy(parts, &x, sizeof parts);
  return *std::max_element(parts, parts + kLanes);
}

// One block of B numbers to B / 2 bytes of codes, the first of two low; its scale is returned.
template <typename T, int B>
inline uint8_t quantize_block(const T* x, uint8_t* packed, const Rounding& to) {
  typedef uint64_t Pairs __attribute__((vector_size(4 * kLanes)));
  typedef uint8_t Bytes __attribute__((vector_size(kLanes / 2)));
  Floats block[B / kLanes];
  Words sizes = {};
  for (int i = 0; i < B / kLanes; i++) {
    block[i] = load_numbers(x + i * kLanes);
    const Words size = (Words)block[i] & 0x7FFFFFFF;
    sizes = size > sizes ? size : sizes;
  }
  const uint32_t largest = largest_of(sizes);
  const bool finite = largest < 0x7F800000;
  const float quotient = finite ? load<float>(&largest) / to.full : 0.0f;
  int found = to.below[load<uint32_t>(&quotient) >> 20 & 0x7FF];
  found += quotient > to.limits[found];
  const bool vanishes = !finite || (to.has_zero && found == 0);
  const int byte = std::max(found, 1);
  const float step = to.steps[byte] * to.global_scale;
  for (int i = 0; i < B / kLanes; i++) {
    const Floats y = block[i] / step;
    const Words bits = (Words)y;
    const Floats size = (Floats)(bits & 0x7FFFFFFF);
    Words code = (Words)(size > to.middles[3]) & 4;
    code += (Words)(size > decode(to.middles, code + 1)) & 2;
    code -= (Words)(size > decode(to.middles, code));
    code |= bits >> 31 << 3;
    // No number divided by a step that is zero is the positive zero.
    const Pairs pairs = (Pairs)(vanishes ? Words{} : code & (Words)(y == y));
    const Bytes bytes = __builtin_convertvector(pairs | pairs >> 28, Bytes);
    std::memcpy(packed + i * kLanes / 2, &bytes, sizeof bytes);
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

#define FUNCTIONS(T, NAME)                                                                       \
  extern "C" void product_##NAME(                                                                \
      const T* x, int64_t m, const Weight* weight, const T* bias, T* y, int threads) {           \
    product(x, m, *weight, bias, y, threads);                                                    \
  }                                                                                              \
  extern "C" void quantize_##NAME(                                                               \
      const T* x, uint8_t* packed, uint8_t* scale, int64_t blocks, int block, const Rounding* to, \
      int threads) {                                                                             \
    block == 16 ? quantize<T, 16>(x, packed, scale, blocks, *to, threads)                        \
                : quantize<T, 32>(x, packed, scale, blocks, *to, threads);                       \
  }                                                                                              \
  extern "C" void dequantize_##NAME(                                                             \
      const Weight* weight, int64_t first, int64_t last, T* y, int threads) {                    \
    dequantize(*weight, first, last, y, threads);                                                \
  }

FUNCTIONS(float, float)
FUNCTIONS(BFloat16, bfloat16)
