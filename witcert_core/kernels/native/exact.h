// Keys and values in 32 or 16 bit as an attention kernel reads them: tiles of 64 tokens, products in float32.
#pragma once
#include "attention.h"
#include "numbers.h"

namespace witcert {

struct ExactTile : Measured {
  alignas(64) float key[MAX_DIM][TILE];    // by channel
  alignas(64) float value[TILE][MAX_DIM];  // by token
  alignas(64) float key_length[TILE];
  int count;
  int64_t head_dim;

  // `n` tokens: their keys begin at `keys[i]`. What the sums need of them only with `meter`.
  void read_keys(const void* const* keys, int64_t dim, int n, int64_t dtype, bool meter) {
    count = n, head_dim = dim;
    alignas(64) float rows[LANES][MAX_DIM];
    for (int sub = 0; sub < SUB; sub++) {
      for (int i = 0; i < LANES; i++)
        for (int64_t c = 0; c < dim; c += LANES)
          store(rows[i] + c, numbers(keys[std::min(LANES * sub + i, n - 1)], c, dtype));
      vf square = splat(0.0f);
      for (int64_t c = 0; c < dim; c += WORDS) {
        const void* from[LANES];
        for (int i = 0; i < LANES; i++) from[i] = rows[i] + c;
        vi words[WORDS];
        transpose(from, words);
        for (int i = 0; i < WORDS; i++) {
          store(key[c + i] + LANES * sub, (vf)words[i]);
          square += (vf)words[i] * (vf)words[i];
        }
      }
      if (!meter) continue;
      store(key_length + LANES * sub, root(square) * UP16 + 0x1p-58f);
      for (float* x : {unknown, v_unknown, rho, v_square}) store(x + LANES * sub, splat(0.0f));
    }
  }

  // The same tokens' values, to be attended.
  void read_values(const void* const* values, int64_t v_dim, int64_t dtype, bool meter) {
    for (int i = 0; i < count; i++) {
      for (int64_t c = 0; c < v_dim; c += LANES) store(value[i] + c, numbers(values[i], c, dtype));
      if (meter) v_square[i] = square_of(value[i], v_dim, FLOAT32);
    }
  }

  // ||v||^2 of one.
  static float square_of(const void* one, int64_t v_dim, int64_t dtype) {
    vf square = splat(0.0f);
    for (int64_t c = 0; c < v_dim; c += LANES) {
      const vf x = numbers(one, c, dtype);
      square += x * x;
    }
    return sum(square);
  }

  // Products of `N` queries `q [N][head_dim]` with LANES tokens.
  template <int N>
  void products(int sub, const float* q, vf* z) const {
    for (int m = 0; m < N; m++) z[m] = splat(0.0f);
    for (int64_t c = 0; c < head_dim; c++) {
      const vf k = load(key[c] + LANES * sub);
      for (int m = 0; m < N; m++) z[m] += k * q[m * head_dim + c];
    }
  }
};

inline double length_of(const float* q, int64_t dim) {
  double square = 0.0;
  for (int64_t c = 0; c < dim; c++) square += (double)q[c] * q[c];
  return std::sqrt(square);
}

}  // namespace witcert
