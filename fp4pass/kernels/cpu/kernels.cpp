// What eager PyTorch calls on a CPU: products of few rows, and numbers to codes and back.
#include <algorithm>

#include "few_rows.h"

namespace fp4pass {

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline void store(BFloat16* to, Floats values) {
  const Words bits = (Words)values;
  const Words rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const Words is_nan = (Words)((bits & 0x7FFFFFFF) > 0x7F800000);
  const Halves found = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7FC0), Halves);
  std::memcpy(to, &found, sizeof found);
}

// Blocks [first, last) of codes to numbers: each code's value times its block's step, rounded to T.
template <typename T>
void dequantize_blocks(
    const Weight& weight, const float* steps, T* y, int64_t first, int64_t last) {
  // Of 8 vectors of codes, that many words: where the word of each code is, and how far up.
  Words word_of[8], shift[8];
  for (int i = 0; i < 8 * kLanes; i++) {
    word_of[i / kLanes][i % kLanes] = i / 8;
    shift[i / kLanes][i % kLanes] = i % 8 * 4;
  }
  const int64_t each = weight.block / kLanes, end = last * each;
  for (int64_t vector = first * each; vector < end; vector += 8) {
    const int count = int(std::min<int64_t>(end - vector, 8));
    Words words = {};
    const uint8_t* codes = weight.packed + vector * kLanes / 2;
    if (count == 8)
      std::memcpy(&words, codes, sizeof words);
    else
      std::memcpy(&words, codes, count * kLanes / 2);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const Words code = (Words)pick((Floats)words, word_of[i]) >> shift[i];
      const float step = steps[weight.scale[(vector + i) / each]];
      store(y + (vector + i) * kLanes, decode(weight.values, code) * step);
    }
  }
}

#if defined(__AVX512BW__)

// Blocks [first, last) of B codes, by the numbers that a block of each scale can have: 32 at a
// time, and of an odd number of blocks of 16 the last by itself.
template <int B>
void look_up(
    const Weight& weight, const BFloat16 (*numbers)[16], BFloat16* y, int64_t first, int64_t last) {
  constexpr int kBlocks = 32 / B;
  const uint8_t *packed = weight.packed, *scale = weight.scale;
  const auto of_block = [=](int64_t j) { return _mm256_loadu_si256((__m256i*)numbers[scale[j]]); };
  // Lanes are picked by five bits. The fifth is 1 where a second block has the upper half.
  const __m512i fifth = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  int64_t j = first;
  for (; j + kBlocks <= last; j += kBlocks) {
    __m512i table = _mm512_castsi256_si512(of_block(j));
    table = _mm512_inserti64x4(table, of_block(j + kBlocks - 1), 1);
    const __m128i bytes = _mm_loadu_si128((const __m128i*)(packed + j * B / 2));
    const __m512i words = _mm512_cvtepu8_epi32(bytes);
    // Each byte's two codes, in the low bits of two halves of a word.
    __m512i lanes = _mm512_or_si512(words, _mm512_slli_epi32(words, 12));
    // lanes & 15 | fifth. With one block for all lanes, both halves of the table are the same.
    if (B == 16) lanes = _mm512_ternarylogic_epi32(lanes, _mm512_set1_epi16(15), fifth, 0xEA);
    _mm512_storeu_si512(y + j * B, _mm512_permutexvar_epi16(lanes, table));
  }
  for (int64_t i = j * B; i < last * B; i++)
    y[i] = numbers[scale[i / B]][packed[i / 2] >> i % 2 * 4 & 15];
}

void dequantize_blocks(
    const Weight& weight, const float* steps, BFloat16* y, int64_t first, int64_t last) {
  BFloat16 numbers[256][16];
  for (int i = 0; i < 256; i++) store(numbers[i], load<Floats>(weight.values) * steps[i]);
  weight.block == 16 ? look_up<16>(weight, numbers, y, first, last)
                     : look_up<32>(weight, numbers, y, first, last);
}

#endif

// Rows [first, last) of a weight to y [last - first, k].
template <typename T>
void dequantize(const Weight& weight, int64_t first, int64_t last, T* y, int threads) {
  float steps[256];
  for (int i = 0; i < 256; i++) steps[i] = weight.times_global(weight.steps[i]);
  const int64_t each = weight.k / weight.block, blocks = (last - first) * each;
  T* const origin = y - first * weight.k;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < threads; i++)
    dequantize_blocks(
        weight, steps, origin, first * each + blocks * i / threads,
        first * each + blocks * (i + 1) / threads);
}

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

// Inlined into its caller, the product of two rows took 17 % longer (GCC 12).
template void fp4pass::product(
    const BFloat16*, int64_t, const Weight&, const BFloat16*, BFloat16*, int);

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
