// Philox4x32-10 (Salmon et al., SC 2011), a counter a lane: the dither of as many tokens at once.
#pragma once
#include "vec.h"

namespace witcert {

struct Words {
  vu w[4];
};

inline void multiply(vu a, uint32_t by, vu& high, vu& low) {
#if defined(WITCERT_AVX512)
  const __m512i m = _mm512_set1_epi32((int)by);
  __m512i even = _mm512_mul_epu32((__m512i)a, m), odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), m);
  high = (vu)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  low = (vu)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
#elif defined(WITCERT_AVX2)
  const __m256i m = _mm256_set1_epi32((int)by);
  __m256i even = _mm256_mul_epu32((__m256i)a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), m);
  high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#else
  uint32_t x[LANES], up[LANES];
  std::memcpy(x, &a, sizeof a);
  for (int i = 0; i < LANES; i++) up[i] = (uint32_t)((uint64_t)x[i] * by >> 32);
  std::memcpy(&high, up, sizeof high);
  low = a * by;
#endif
}

// The words of counters (pass, layer, head, block) under `key`; byte i of the four is j of channel 16 block + i.
inline Words philox(vu pass, uint32_t layer, uint32_t head, uint32_t block, uint64_t key) {
  vu c0 = pass, c1 = splat_word(layer), c2 = splat_word(head), c3 = splat_word(block);
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    vu high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ splat_word(k0);
    c1 = low1;
    c2 = high0 ^ c3 ^ splat_word(k1);
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

// The dither of channel 16 block + i, in the first lane's row.
inline float dither_of(const Words& w, int i) {
  return ((float)((w.w[i / 4][0] >> (8 * (i % 4))) & 0xFF) + 0.5f) / 256.0f - 0.5f;
}

}  // namespace witcert
