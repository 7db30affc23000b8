// Vectors of 16 lanes in GCC's and Clang's portable form; where a processor has wider instructions for a step, those.
// No step here is approximate in a way its comment does not bound; nothing may be compiled with -ffast-math.
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
#endif

namespace witcert {

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));

constexpr float INF = std::numeric_limits<float>::infinity();

inline vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline vi splat(int32_t x) { return vi{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline vi lane_index() { return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

inline vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
// NaN in `a` gives `b`.
inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline vf smaller(vf a, vf b) { return a < b ? a : b; }

inline float sum(vf x) {
#ifdef WITCERT_AVX512
  return _mm512_reduce_add_ps((__m512)x);
#else
  float part[8];
  for (int i = 0; i < 8; i++) part[i] = x[i] + x[i + 8];
  for (int n = 4; n; n /= 2)
    for (int i = 0; i < n; i++) part[i] += part[i + n];
  return part[0];
#endif
}

// The largest lane that is a number, -inf where none is above it.
inline float largest(vf x) {
  x = larger(x, splat(-INF));
#ifdef WITCERT_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = -INF;
  for (int i = 0; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

inline bool any(vi mask) {
#ifdef WITCERT_AVX512
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < LANES; i++) all |= mask[i];
  return all != 0;
#endif
}

inline vf root(vf x) {
#ifdef WITCERT_AVX512
  return (vf)_mm512_sqrt_ps((__m512)x);
#else
  for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
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

// e^x as 2^n (1 + rest), |x| <= 80; rest within a few 2^-24 of itself.
struct Power {
  vf scale, rest;
};

inline Power power_of_e(vf x) {
  vf n = nearest(x * 1.44269504f);
  vf f = (x - n * 0.693145751953125f) - n * 1.428606765330187e-6f;
  vf p = splat(1.9841270e-4f);
  p = p * f + 1.3888889e-3f;
  p = p * f + 8.3333333e-3f;
  p = p * f + 4.1666667e-2f;
  p = p * f + 1.6666667e-1f;
  p = p * f + 0.5f;
  return {power_of_two(n), (p * f) * f + f};
}

// expm1(min(c, 80)) for c >= 0, rounded up by at most 2^-19 of itself.
inline vf growth(vf c) {
  const Power e = power_of_e(smaller(c, splat(80.0f)));
  return (e.rest * e.scale + (e.scale - 1.0f)) * 1.0000014f;
}

// exp(x) within 2^-20 for |x| <= 80; clamped there.
inline vf exponential(vf x) {
  const Power e = power_of_e(smaller(larger(x, splat(-80.0f)), splat(80.0f)));
  return (e.rest + 1.0f) * e.scale;
}

// acc + sum of four products of unsigned bytes `a` and signed bytes `b` in each lane, exact.
inline vi dot_bytes(vi acc, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(WITCERT_AVX512)
  // Products of 16 bit pairs: no saturation, unlike vpmaddubsw.
  const __m512i low = _mm512_set1_epi16(0xFF);
  __m512i even =
      _mm512_madd_epi16(_mm512_and_si512((__m512i)a, low), _mm512_srai_epi16(_mm512_slli_epi16((__m512i)b, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)a, 8), _mm512_srai_epi16((__m512i)b, 8));
  return acc + (vi)_mm512_add_epi32(even, odd);
#else
  vi first = (a & 0xFF) * ((b << 24) >> 24), second = ((a >> 8) & 0xFF) * ((b << 16) >> 24);
  vi third = ((a >> 16) & 0xFF) * ((b << 8) >> 24), fourth = (vi)((vu)a >> 24) * (b >> 24);
  return acc + (first + second) + (third + fourth);
#endif
}

// Lane i: the sum of squares of bytes 4 i to 4 i + 3 of `count` (64 at most) signed bytes, none of them -128.
inline vi squares_of_bytes(const int8_t* p, int64_t count) {
#ifdef WITCERT_AVX512
  const __m512i x = _mm512_abs_epi8(_mm512_maskz_loadu_epi8(count >= 64 ? ~0ull : (1ull << count) - 1, p));
  return dot_bytes(splat(0), (vi)x, (vi)x);
#else
  alignas(64) int8_t x[64] = {};
  std::memcpy(x, p, (size_t)(count < 64 ? count : 64));
  vi total = splat(0);
  for (int i = 0; i < LANES; i++)
    for (int j = 4 * i; j < 4 * i + 4; j++) total[i] += (int32_t)x[j] * x[j];
  return total;
#endif
}

// Sixteen signed bytes as floats.
inline vf bytes_to_float(const int8_t* p) {
#ifdef WITCERT_AVX512
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  typedef int8_t vb __attribute__((vector_size(16)));
  vb x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vf);
#endif
}

// Sixteen rows of sixteen words: out[c] holds word c of every row.
inline void transpose(const void* const* rows, vi* out) {
#ifdef WITCERT_AVX512
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
#else
  for (int c = 0; c < 16; c++)
    for (int i = 0; i < 16; i++) {
      int32_t word;
      std::memcpy(&word, (const char*)rows[i] + 4 * c, 4);
      out[c][i] = word;
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

// Up to eight halves as floats, 0 beyond `count`.
inline void halves_to_float(const uint16_t* from, int count, float* to) {
#ifdef WITCERT_AVX512
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_maskz_loadu_epi16((__mmask8)((1u << count) - 1), from)));
#else
  for (int i = 0; i < 8; i++) to[i] = i < count ? half_to_float(from[i]) : 0.0f;
#endif
}

}  // namespace witcert
