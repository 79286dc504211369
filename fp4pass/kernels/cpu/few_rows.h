// y = x W^T for a few rows of x and W in packed 4-bit codes, each decoded in a register, where it
// is summed: of W no number is stored. Inductor pastes this into the code of its graphs too.
#ifndef FP4PASS_FEW_ROWS
#define FP4PASS_FEW_ROWS

#include <cstdint>
#include <cstring>
#include <memory>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fp4pass {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Vectors of the compiler, which splits them where the machine's are smaller.
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

struct BFloat16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To load(const From* from) {
  To found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  return load<float>(&bits);
}

// To nearest, ties to even.
inline void store(float* to, float x) { *to = x; }

inline void store(BFloat16* to, float x) {
  const uint32_t bits = load<uint32_t>(&x);
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  to->bits = uint16_t(is_nan ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The numbers of a table at each index, of which the lowest bits count.
inline Floats pick(Floats table, Words index) {
#if defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
#else
  Floats found;
  for (int i = 0; i < kLanes; i++) found[i] = table[index[i] % kLanes];
  return found;
#endif
}

// The values of the codes in the low 4 bits of each word. Those with the sign bit are the negatives
// of those without.
inline Floats decode(const float* values, Words words) {
  if (kLanes >= 8) {
    const Floats found = pick(load<Floats>(values), words);
    return kLanes == 16 ? found : (Floats)((Words)found ^ (words & 8) << 28);
  }
  Floats found;
  for (int i = 0; i < kLanes; i++) found[i] = values[words[i] & 15];
  return found;
}

inline float sum_of(Floats x) {
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  std::memcpy(parts, &x, sizeof parts);
  Four sum = parts[0];
  for (int i = 1; i < kLanes / 4; i++) sum += parts[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// A packed weight [n, k]: 8 codes a word, and for each `block` codes a scale of which `steps` has
// the number. The global scale may be null; it multiplies or divides.
struct Weight {
  const uint8_t* packed;
  const uint8_t* scale;
  const float* global_scale;
  const float* values;  // [16]
  const float* steps;   // [256]
  int64_t n, k, block;
  bool multiplies;

  float times_global(float x) const {
    return !global_scale ? x : multiplies ? x * *global_scale : x / *global_scale;
  }
};

// Rows [first, last) of the weight times M rows of x. Of x, number 8 * w + p of row m is lane
// w % kLanes of x[(w / kLanes * 8 + p) * M + m], and what is beyond k is zero.
template <typename T, int M>
void product_of_rows(
    const Floats* x, const Weight& weight, const T* bias, T* y, int64_t first, int64_t last) {
  const int64_t words = weight.k / 8, blocks = weight.k / weight.block;
  const int64_t whole = words / kLanes;
  // Words that share a scale, 2 or 4, and scales of a vector of words.
  const int repeats = int(weight.block / 8), scales = kLanes / repeats;
  // The numbers of a row's scales, and those of a group that are its words'.
  std::unique_ptr<float[]> steps(new float[blocks + kLanes]());
  Words of_word;
  for (int lane = 0; lane < kLanes; lane++) of_word[lane] = lane / repeats;
  for (int64_t n = first; n < last; n++) {
    const uint8_t* codes = weight.packed + n * words * 4;
    const uint8_t* scale = weight.scale + n * blocks;
    for (int64_t j = 0; j < blocks; j++) steps[j] = weight.steps[scale[j]];
    Floats total[M] = {};
    const auto add = [&](Words word, int64_t g) {
      Floats sum[M] = {};
      const Floats* numbers = x + g * 8 * M;
#pragma GCC unroll 8
      for (int p = 0; p < 8; p++) {
        const Floats value = decode(weight.values, word >> (4 * p));
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sum[m] = multiply_add(value, numbers[p * M + m], sum[m]);
      }
      const Floats step = pick(load<Floats>(steps.get() + g * scales), of_word);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) total[m] = multiply_add(sum[m], step, total[m]);
    };
    for (int64_t g = 0; g < whole; g++) add(load<Words>(codes + g * sizeof(Words)), g);
    if (whole * kLanes < words) {
      Words word = {};
      std::memcpy(&word, codes + whole * sizeof word, (words - whole * kLanes) * 4);
      add(word, whole);
    }
    for (int m = 0; m < M; m++) {
      float found = weight.times_global(sum_of(total[m]));
      if (bias) found += to_float(bias[n]);
      store(y + m * weight.n + n, found);
    }
  }
}

template <typename T, int M>
void few_rows(const T* x, const Weight& weight, const T* bias, T* y, int threads) {
  const int64_t words = weight.k / 8, groups = (words + kLanes - 1) / kLanes;
  std::unique_ptr<Floats[]> ordered(new Floats[groups * 8 * M]());
  float* to = reinterpret_cast<float*>(ordered.get());
  for (int m = 0; m < M; m++)
    for (int64_t w = 0; w < words; w++)
      for (int p = 0; p < 8; p++)
        to[((w / kLanes * 8 + p) * M + m) * kLanes + w % kLanes] =
            to_float(x[m * weight.k + 8 * w + p]);
  const Floats* numbers = ordered.get();
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < threads; i++)
    product_of_rows<T, M>(
        numbers, weight, bias, y, weight.n * i / threads, weight.n * (i + 1) / threads);
}

// The same for one to four rows of x [m, k]; y is [m, n] and bias, if not null, [n].
template <typename T>
void product(const T* x, int64_t m, const Weight& weight, const T* bias, T* y, int threads) {
  if (m == 4) few_rows<T, 4>(x, weight, bias, y, threads);
  if (m == 3) few_rows<T, 3>(x, weight, bias, y, threads);
  if (m == 2) few_rows<T, 2>(x, weight, bias, y, threads);
  if (m == 1) few_rows<T, 1>(x, weight, bias, y, threads);
}

}  // namespace fp4pass

#endif
