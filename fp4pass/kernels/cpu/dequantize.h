// Packed 4-bit codes to numbers. Inductor pastes this into the code of its graphs too.
#ifndef FP4PASS_DEQUANTIZE
#define FP4PASS_DEQUANTIZE

#include <algorithm>

#include "few_rows.h"

namespace fp4pass {

// kLanes numbers, rounded to T.
template <typename T>
inline void store(T* to, Floats values) {
  for (int i = 0; i < kLanes; i++) to[i] = from_float<T>(values[i]);
}

template <>
inline void store<float>(float* to, Floats values) {
  std::memcpy(to, &values, sizeof values);
}

template <>
inline void store<BFloat16>(BFloat16* to, Floats values) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  const Words bits = (Words)values;
  const Words rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const Words is_nan = (Words)((bits & 0x7FFFFFFF) > 0x7F800000);
  const Halves found = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7FC0), Halves);
  std::memcpy(to, &found, sizeof found);
}

// What each of the 256 scales of a block multiplies its codes by.
struct Steps {
  float of[256];

  explicit Steps(const Weight& weight) {
    std::memcpy(of, weight.steps, sizeof of);
    if (const float* number = weight.global_scale)
      for (float& step : of) step = weight.multiplies ? step * *number : step / *number;
  }
};

// Blocks [first, last) of codes to numbers: each code's value times its block's step, rounded to T.
template <typename T>
void dequantize_blocks(
    const Weight& weight, const Steps& steps, T* y, int64_t first, int64_t last) {
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
      const float step = steps.of[weight.scale[(vector + i) / each]];
      store(y + (vector + i) * kLanes, decode(weight.values, code) * step);
    }
  }
}

#if defined(__AVX512BW__)

// Blocks [first, last) of B codes, by the numbers that a block of each scale can have: 32 at a
// time, and of an odd number of blocks of 16 the last by itself.
template <int B>
void look_up(
    const uint8_t* packed, const uint8_t* scale, const BFloat16 (*numbers)[16], BFloat16* y,
    int64_t first, int64_t last) {
  constexpr int kBlocks = 32 / B;
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
    const Weight& weight, const Steps& steps, BFloat16* y, int64_t first, int64_t last) {
  BFloat16 numbers[256][16];
  for (int i = 0; i < 256; i++) store(numbers[i], load(weight.values) * steps.of[i]);
  weight.block == 16 ? look_up<16>(weight.packed, weight.scale, numbers, y, first, last)
                     : look_up<32>(weight.packed, weight.scale, numbers, y, first, last);
}

#endif

// Rows [first, last) of a weight to y [last - first, k].
template <typename T>
void dequantize(const Weight& weight, int64_t first, int64_t last, T* y, int threads) {
  const Steps steps(weight);
  const int64_t each = weight.k / weight.block, blocks = (last - first) * each;
  T* const origin = y - first * weight.k;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < threads; i++)
    dequantize_blocks(
        weight, steps, origin, first * each + blocks * i / threads,
        first * each + blocks * (i + 1) / threads);
}

}  // namespace fp4pass

#endif
