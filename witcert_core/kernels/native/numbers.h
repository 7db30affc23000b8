// Numbers of 32 and 16 bit as the engines' tensors hold them.
#pragma once
#include "vec.h"

namespace witcert {

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8_E4M3FN = 3, FLOAT8_E5M2 = 4 };

inline int64_t size_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : dtype >= FLOAT8_E4M3FN ? 1 : 2; }

// Four bits of exponent (bias 7) and three of fraction; no infinity.
inline float e4m3_to_float(uint8_t bits) {
  const int exponent = (bits >> 3) & 15, fraction = bits & 7;
  if (exponent == 15 && fraction == 7) return __builtin_nanf("");
  const float size = exponent ? std::ldexp(8.0f + (float)fraction, exponent - 10) : std::ldexp((float)fraction, -9);
  return bits & 0x80 ? -size : size;
}

struct EightBits {
  float e4m3[256];
  EightBits() {
    for (int i = 0; i < 256; i++) e4m3[i] = e4m3_to_float((uint8_t)i);
  }
};
inline const EightBits EIGHT_BITS;

inline float number(const void* at, int64_t i, int64_t dtype) {
  if (dtype == FLOAT32) return ((const float*)at)[i];
  if (dtype == FLOAT8_E4M3FN) return EIGHT_BITS.e4m3[((const uint8_t*)at)[i]];
  if (dtype == FLOAT8_E5M2) return half_to_float((uint16_t)(((const uint8_t*)at)[i] << 8));
  const uint16_t bits = ((const uint16_t*)at)[i];
  if (dtype == FLOAT16) return half_to_float(bits);
  const uint32_t word = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

// As many as a vector has lanes, side by side.
inline vf numbers(const void* at, int64_t i, int64_t dtype) {
  if (dtype == FLOAT32) return load((const float*)at + i);
  if (dtype == FLOAT16) return halves_to_float((const uint16_t*)at + i);
  if (dtype == BFLOAT16) {
#if defined(WITCERT_AVX512)
    const __m256i bits = _mm256_loadu_si256((const __m256i*)((const uint16_t*)at + i));
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(WITCERT_AVX2)
    const __m128i bits = _mm_loadu_si128((const __m128i*)((const uint16_t*)at + i));
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#endif
  }
  float x[LANES];
  for (int j = 0; j < LANES; j++) x[j] = number(at, i + j, dtype);
  return load(x);
}

// x rounded to nearest, ties to even.
inline uint16_t float_to_half(float x) {
  const _Float16 half = (_Float16)x;
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

inline void put(void* to, int64_t i, float x, int64_t dtype) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (dtype == FLOAT32)
    ((float*)to)[i] = x;
  else if (dtype == FLOAT16)
    ((uint16_t*)to)[i] = float_to_half(x);
  else
    ((uint16_t*)to)[i] = x != x ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace witcert
