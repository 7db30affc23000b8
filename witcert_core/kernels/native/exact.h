// Keys and values in 32 or 16 bit as an attention kernel reads them: tiles of 64 tokens, products in float32.
#pragma once
#include "attention.h"
#include "numbers.h"

namespace witcert {

constexpr int CHAIN = 16;  // products that are added one after the other; their sums then are

// Error of a logit, as a share of sum_c |q_c| |k_c|: each product is rounded up to CHAIN times, the sums of so many as
// often as there are, the softmax scale once and the factor to base 2 twice. Of IEEE float32, fused or not.
inline float chain_error(int64_t channels) {
  return (float)(CHAIN + (channels + CHAIN - 1) / CHAIN + 4) * 0x1p-24f * UP16;
}

struct ExactTile : Measured {
  alignas(64) float key[MAX_DIM][TILE];    // by channel
  alignas(64) float value[TILE][MAX_DIM];  // by token
  alignas(64) float largest_key[MAX_DIM];  // by channel: at least every |k| of the tile that is ordinary
  alignas(64) float key_length[TILE];      // ||k / largest_key||
  int count;
  int64_t head_dim;

  // `n` tokens, of which somebody sees those from `seen` on: their keys begin at `keys[i]`. What the sums need of them
  // only with `meter`.
  void read_keys(const void* const* keys, int64_t dim, int seen, int n, int64_t dtype, bool meter) {
    count = n, head_dim = dim;
    alignas(64) float rows[LANES][MAX_DIM];
    std::fill(largest_key, largest_key + dim, 0x1p-60f);
    for (int sub = 0; sub < SUB; sub++) {
      for (int i = 0; i < LANES; i++)
        for (int64_t c = 0; c < dim; c += LANES)
          store(rows[i] + c, numbers(keys[std::min(LANES * sub + i, n - 1)], c, dtype));
      for (int64_t c = 0; c < dim; c += WORDS) {
        const void* from[LANES];
        for (int i = 0; i < LANES; i++) from[i] = rows[i] + c;
        vi words[WORDS];
        transpose(from, words);
        for (int i = 0; i < WORDS; i++) store(key[c + i] + LANES * sub, (vf)words[i]);
      }
      for (int64_t c = 0; meter && c < dim; c += LANES) {
        vf most = load(largest_key + c);
        for (int i = std::max(seen - LANES * sub, 0); i < LANES; i++)
          most = larger((vf)((vi)load(rows[i] + c) & 0x7FFFFFFF), most);
        store(largest_key + c, smaller(most, splat(0x1p60f)));
      }
    }
    if (meter) measure_keys();
  }

  // The same tokens' values, to be attended.
  void read_values(const void* const* values, int64_t v_dim, int64_t dtype, bool meter) {
    for (int i = 0; i < count; i++) {
      for (int64_t c = 0; c < v_dim; c += LANES) store(value[i] + c, numbers(values[i], c, dtype));
      if (meter) v_square[i] = square_of(value[i], v_dim, FLOAT32);
    }
    if (meter) sort_out_values();
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

  // Logits of `N` queries `q [N][head_dim]`.
  template <int N>
  void logits(const float* q, float sm_scale, double soft_cap, float (*to)[TILE]) const {
    constexpr int AT_ONCE = N > 4 ? 1 : 2;  // of few queries, as many more tokens: sums must not wait for themselves
    for (int sub = 0; sub < SUB; sub += AT_ONCE) {
      vf z[N][AT_ONCE];
      for (auto& x : z)
        for (vf& y : x) y = splat(0.0f);
      for (int64_t first = 0; first < head_dim; first += CHAIN) {
        vf part[N][AT_ONCE];
        for (auto& x : part)
          for (vf& y : x) y = splat(0.0f);
        for (int64_t c = first; c < first + CHAIN; c++)
          for (int j = 0; j < AT_ONCE; j++) {
            const vf k = load(key[c] + LANES * (sub + j));
            for (int m = 0; m < N; m++) part[m][j] += k * q[m * head_dim + c];
          }
        for (int m = 0; m < N; m++)
          for (int j = 0; j < AT_ONCE; j++) z[m][j] += part[m][j];
      }
      for (int m = 0; m < N; m++)
        for (int j = 0; j < AT_ONCE; j++) {
          const vf scaled = z[m][j] * sm_scale;
          store(to[m] + LANES * (sub + j), soft_cap > 0.0 ? soft_capped(scaled, (float)soft_cap) : scaled);
        }
    }
  }

  // Times a token's key_length at least sum_c |q_c| |k_c|, by Cauchy-Schwarz: in units of the tile's largest keys no
  // channel stands out, as outlier channels do from others, which small queries meet. What it says depends on the
  // tokens that are read beside one, so bounds may differ with the rows that share a tile; weights and outputs do not.
  float length_of(const float* q) const {
    vf square = splat(0.0f);
    for (int64_t c = 0; c < head_dim; c += LANES) {
      const vf x = load(q + c) * load(largest_key + c);
      square += x * x;
    }
    return (std::sqrt(sum(square)) + 0x1p-58f) * UP16;
  }

 private:
  void measure_keys() {
    vf square[SUB];
    for (vf& x : square) x = splat(0.0f);
    for (int64_t c = 0; c < head_dim; c++) {
      const float unit = 1.0f / largest_key[c];
      for (int j = 0; j < SUB; j++) {
        const vf x = load(key[c] + LANES * j) * unit;
        square[j] += x * x;
      }
    }
    for (int j = 0; j < SUB; j++) {
      store(key_length + LANES * j, root(square[j]) * UP16 + 0x1p-58f);
      for (float* x : {unknown, v_unknown, rho, v_square}) store(x + LANES * j, splat(0.0f));
    }
  }
};

}  // namespace witcert
