// Vectors in GCC's and Clang's portable form, as wide as the processor's own; where it has instructions for a step that
// the compiler does not find, those. No step here is approximate in a way its comment does not bound; nothing may be
// compiled with -ffast-math.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define WITCERT_AVX512 1
#elif defined(__AVX2__) && defined(__F16C__)
#define WITCERT_AVX2 1
#endif

namespace witcert {

#if defined(WITCERT_AVX512)
constexpr int LANES = 16;
#elif defined(WITCERT_AVX2)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int WORDS = 16;  // of a row that are transposed at once
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

constexpr float INF = std::numeric_limits<float>::infinity();

inline vf splat(float x) { return x - vf{}; }
inline vi splat(int32_t x) { return x - vi{}; }
inline vu splat_word(uint32_t x) { return (vu)splat((int32_t)x); }

inline vi lane_index() {
  alignas(64) static constexpr int32_t index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vi x;
  std::memcpy(&x, index, sizeof x);
  return x;
}

inline vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
// NaN in `a` gives `b`.
#if defined(WITCERT_AVX512)
inline vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline vf smaller(vf a, vf b) { return a < b ? a : b; }
#endif

inline float sum(vf x) {
#if defined(WITCERT_AVX512)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float part[LANES];
  store(part, x);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) part[i] += part[i + n];
  return part[0];
#endif
}

// The largest lane that is a number, -inf where none is above it.
inline float largest(vf x) {
  x = larger(x, splat(-INF));
#if defined(WITCERT_AVX512)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float part[LANES];
  store(part, x);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) part[i] = part[i] > part[i + n] ? part[i] : part[i + n];
  return part[0];
#endif
}

inline bool any(vi mask) {
#if defined(WITCERT_AVX512)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(WITCERT_AVX2)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int64_t words[LANES / 2], all = 0;
  std::memcpy(words, &mask, sizeof mask);
  for (int64_t word : words) all |= word;
  return all != 0;
#endif
}

inline bool any_above(vf a, vf b) {
#if defined(WITCERT_AVX512)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#else
  return any(a > b);
#endif
}

// The first lane of a mask that is set, -1 where none is.
inline int first_of(vi mask) {
#if defined(WITCERT_AVX512)
  const int bits = _mm512_movepi32_mask((__m512i)mask);
#elif defined(WITCERT_AVX2)
  const int bits = _mm256_movemask_ps((__m256)mask);
#else
  int32_t lanes[LANES];
  int bits = 0;
  std::memcpy(lanes, &mask, sizeof mask);
  for (int i = 0; i < LANES; i++) bits |= (lanes[i] & 1) << i;
#endif
  return bits ? __builtin_ctz((unsigned)bits) : -1;
}

inline vf root(vf x) {
#if defined(WITCERT_AVX512)
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(WITCERT_AVX2)
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  float part[LANES];
  store(part, x);
  for (float& y : part) y = __builtin_sqrtf(y);
  return load(part);
#endif
}

// At least the root of x, by 2^-13 of itself at most and 2^-63; x >= 0. No number where x is infinite.
inline vf root_up(vf x) {
#if defined(WITCERT_AVX512)
  const vf above = larger(x, splat(0x1p-126f));
  return above * (vf)_mm512_rsqrt14_ps((__m512)above) * (1.0f + 0x1p-13f);
#else
  return root(x) * (1.0f + 0x1p-20f);
#endif
}

// Nearest integer of |x| < 2^22, by leaving no fraction bits.
inline vf nearest(vf x) { return (x + 12582912.0f) - 12582912.0f; }

// 2^n for integers -126 <= n <= 127.
inline vf power_of_two(vf n) { return (vf)((__builtin_convertvector(n, vi) + 127) << 23); }

// 2^x within 2^-22 for x <= 0; 0 below -126, where the caller has an allowance (slack.LOST_WEIGHT).
inline vf exp2_down(vf x) {
  vf inside = larger(x, splat(-126.0f));
  vf n = nearest(inside), f = inside - n;
  vf p = splat(1.5252733804e-5f);
  p = p * f + 1.5403530394e-4f;
  p = p * f + 1.3333558146e-3f;
  p = p * f + 9.6181291076e-3f;
  p = p * f + 5.5504108665e-2f;
  p = p * f + 2.4022650696e-1f;
  p = p * f + 6.9314718056e-1f;
  p = p * f + 1.0f;
  vf y = p * power_of_two(n);
  return x >= -126.0f ? y : splat(0.0f);
}

// e^f - 1 for |f| <= ln(2) / 2, within a few 2^-24 of itself.
inline vf little_growth(vf f) {
  vf p = splat(1.9841270e-4f);
  p = p * f + 1.3888889e-3f;
  p = p * f + 8.3333333e-3f;
  p = p * f + 4.1666667e-2f;
  p = p * f + 1.6666667e-1f;
  p = p * f + 0.5f;
  return (p * f) * f + f;
}

// e^x as 2^n (1 + rest), |x| <= 80.
struct Power {
  vf scale, rest;
};

inline Power power_of_e(vf x) {
  vf n = nearest(x * 1.44269504f);
  vf f = (x - n * 0.693145751953125f) - n * 1.428606765330187e-6f;
  return {power_of_two(n), little_growth(f)};
}

// expm1(min(c, 80)) for c >= 0, rounded up by at most 2^-19 of itself.
inline vf growth(vf c) {
  constexpr float UP = 1.0000014f;
  if (!any_above(c, splat(0.34f))) return little_growth(c) * UP;
  const Power e = power_of_e(smaller(c, splat(80.0f)));
  return (e.rest * e.scale + (e.scale - 1.0f)) * UP;
}

// exp(x) within 2^-20 for |x| <= 80; clamped there.
inline vf exponential(vf x) {
  const Power e = power_of_e(smaller(larger(x, splat(-80.0f)), splat(80.0f)));
  return (e.rest + 1.0f) * e.scale;
}

// acc + sum of four products of unsigned bytes `a` and signed bytes `b` in each lane, exact.
inline vi dot_bytes(vi acc, vi a, vi b) {
#if defined(WITCERT_AVX512) && defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(WITCERT_AVX2) && defined(__AVXVNNI__)
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#else
  // Sums of two products of 16 bit numbers: nothing saturates, as it would in pmaddubsw.
  const vi a_even = a & 0x00FF00FF, a_odd = (vi)((vu)a >> 8) & 0x00FF00FF;
  typedef int16_t vs __attribute__((vector_size(4 * LANES)));
  const vs b_even = (vs)((vs)b << 8) >> 8, b_odd = (vs)b >> 8;
#if defined(WITCERT_AVX512)
  return acc + (vi)_mm512_madd_epi16((__m512i)a_even, (__m512i)b_even) +
         (vi)_mm512_madd_epi16((__m512i)a_odd, (__m512i)b_odd);
#elif defined(WITCERT_AVX2)
  return acc + (vi)_mm256_madd_epi16((__m256i)a_even, (__m256i)b_even) +
         (vi)_mm256_madd_epi16((__m256i)a_odd, (__m256i)b_odd);
#elif defined(__SSE2__)
  return acc + (vi)_mm_madd_epi16((__m128i)a_even, (__m128i)b_even) +
         (vi)_mm_madd_epi16((__m128i)a_odd, (__m128i)b_odd);
#else
  const auto of_pairs = [](vi x, vs y) { return (x & 0xFFFF) * (((vi)y << 16) >> 16) + (x >> 16) * ((vi)y >> 16); };
  return acc + of_pairs(a_even, b_even) + of_pairs(a_odd, b_odd);
#endif
#endif
}

// Magnitudes of signed bytes.
inline vi bytes_abs(vi x) {
#if defined(WITCERT_AVX512)
  return (vi)_mm512_abs_epi8((__m512i)x);
#else
  typedef int8_t vb __attribute__((vector_size(4 * LANES)));
  typedef uint8_t vc __attribute__((vector_size(4 * LANES)));
  const vc negative = (vc)((vb)x < 0);
  return (vi)(((vc)x ^ negative) - negative);
#endif
}

// Signed bytes side by side as floats.
inline vf bytes_to_float(const int8_t* p) {
#if defined(WITCERT_AVX512)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(WITCERT_AVX2)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(__SSE4_1__)
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return (vf)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(word)));
#else
  float x[LANES];
  for (int i = 0; i < LANES; i++) x[i] = (float)p[i];
  return load(x);
#endif
}

// Entries of a table of 256 at bytes side by side.
inline vf looked_up(const float* table, const uint8_t* p) {
#if defined(WITCERT_AVX512)
  return (vf)_mm512_i32gather_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), table, 4);
#else
  float x[LANES];
  for (int i = 0; i < LANES; i++) x[i] = table[p[i]];
  return load(x);
#endif
}

// A row of WORDS words for each lane: out[c] holds word c of every row.
inline void transpose(const void* const* rows, vi* out) {
#if defined(WITCERT_AVX512)
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; j++) {
    __m512i a = _mm512_shuffle_i32x4(r[j], r[j + 4], 0x88), b = _mm512_shuffle_i32x4(r[j], r[j + 4], 0xdd);
    __m512i c = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0x88), d = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0xdd);
    out[j] = (vi)_mm512_shuffle_i32x4(a, c, 0x88);
    out[j + 8] = (vi)_mm512_shuffle_i32x4(a, c, 0xdd);
    out[j + 4] = (vi)_mm512_shuffle_i32x4(b, d, 0x88);
    out[j + 12] = (vi)_mm512_shuffle_i32x4(b, d, 0xdd);
  }
#elif defined(WITCERT_AVX2)
  for (int half = 0; half < 2; half++) {
    __m256i r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const __m256i*)rows[i] + half);
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
      out[8 * half + j] = (vi)_mm256_permute2x128_si256(r[j], r[j + 4], 0x20);
      out[8 * half + j + 4] = (vi)_mm256_permute2x128_si256(r[j], r[j + 4], 0x31);
    }
  }
#else
  for (int i = 0; i < LANES; i++) {
    int32_t words[WORDS];
    std::memcpy(words, rows[i], sizeof words);
    for (int c = 0; c < WORDS; c++) ((int32_t*)(out + c))[i] = words[c];
  }
#endif
}

inline float half_to_float(uint16_t bits) {
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3FF;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 5.9604644775390625e-8f;
  uint32_t word = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
  float x;
  std::memcpy(&x, &word, 4);
  return x;
#endif
}

// Halves side by side as floats.
inline vf halves_to_float(const uint16_t* p) {
#if defined(WITCERT_AVX512)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(WITCERT_AVX2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  float x[LANES];
  for (int i = 0; i < LANES; i++) x[i] = half_to_float(p[i]);
  return load(x);
#endif
}

}  // namespace witcert
