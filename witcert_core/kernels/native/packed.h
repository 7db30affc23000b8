// The packed INT8 cache as an attention kernel reads it: tiles of codes, their products with queries, their radii.
#pragma once
#include "queries.h"

namespace witcert {

// 64 tokens of a request, for all heads.
struct Tokens : Places {
  alignas(64) int32_t pass[TILE];  // bits of a uint32
  bool shared[SUB];                // whether the first token's pass wrote all tokens of a sub-tile

  void find(const Cache& a, const Pages& pages, int64_t request, int64_t begin, int64_t end) {
    Places::find(pages, request, a.page_size, begin, end, a.keys(), a.values());
  }

  // Who wrote them: of memory that is far, unless it was fetched since they were found.
  void ask(const Cache& a) {
    for (int i = 0; i < TILE; i++) pass[i] = a.pass_ids[slot[i]];
    for (int sub = 0; sub < SUB; sub++) {
      vi ids;
      std::memcpy(&ids, pass + LANES * sub, sizeof ids);
      shared[sub] = !any(ids != splat(pass[0]));
    }
  }

  void fetch_writers(const Cache& a) const {
    for (int i = 0; i < TILE; i++)
      if (!i || slot[i] != slot[i - 1] + 1 || slot[i] % 16 == 0) __builtin_prefetch(a.pass_ids + slot[i], 0, 2);
  }

  // As Places has it, with what stands beside the codes.
  void lines(const Cache& a, int first, int last, Ahead& to) const {
    const int64_t beside = 2 * a.kv_heads * (a.groups() + a.v_groups()) + a.kv_heads * a.groups();
    const int64_t codes = a.kv_heads * (a.head_dim + a.v_dim);
    to.clear((size_t)((last - first) * (codes / 64 + beside / 64 + 2 * a.kv_heads + 5)));
    const auto each = [&](const char* at) { to.add(at); };
    Places::lines(first, last, a.keys(), a.values(), 0, a.kv_heads, each);
    Places::lines(first, last, a.k_scales, 2 * a.kv_heads * a.groups(), each);
    Places::lines(first, last, a.v_scales, 2 * a.kv_heads * a.v_groups(), each);
    Places::lines(first, last, a.witness, a.kv_heads * a.groups(), each);
  }
};

// 64 tokens of one KV head of the cache.
struct PackedTile : Measured {
  alignas(64) vi codes[SUB][MAX_DIM / 4];   // K codes + 128, a word of four channels of LANES tokens
  alignas(64) vi dither[SUB][MAX_DIM / 4];  // bytes j of u, where tokens of a sub-tile have dither of their own
  alignas(64) float k_scale[MAX_GROUPS][TILE], v_scale[MAX_GROUPS][TILE], residual[MAX_GROUPS][TILE];
  alignas(64) float k_square[MAX_GROUPS][TILE];
  alignas(64) float spared_length[TILE];
  const int8_t* v[TILE];
  int64_t line[TILE];
  const Tokens* tokens;
  int count;

  void read(const Cache& a, const Tokens& t, int64_t kv_head, bool meter) {
    tokens = &t, count = t.count;
    const int8_t* k[TILE];
    for (int i = 0; i < TILE; i++) {
      k[i] = a.k + t.k[i] + kv_head * a.k_head, v[i] = a.v + t.v[i] + kv_head * a.v_head;
      line[i] = t.slot[i] * a.kv_heads + kv_head;
    }
    for (int sub = 0; sub < SUB; sub++) {
      for (int64_t c = 0; c < a.head_dim; c += 4 * WORDS) {
        ahead.fetch(8);
        vi* words = &codes[sub][c / 4];
        words_of(k + LANES * sub, c, a.head_dim, words);
        for (int i = 0; i < WORDS; i++) words[i] ^= splat((int32_t)0x80808080);
      }
      vi ids;
      std::memcpy(&ids, t.pass + LANES * sub, sizeof ids);
      for (int block = 0; !t.shared[sub] && 16 * block < a.head_dim; block++) {
        const Words w = philox((vu)ids, (uint32_t)a.layer, (uint32_t)a.head_ids[kv_head], (uint32_t)block, a.seed);
        for (int j = 0; j < 4; j++) dither[sub][4 * block + j] = (vi)w.w[j];
      }
      const vf never = ids == splat(0) ? splat(INF) : splat(0.0f);
      store(unknown + LANES * sub, never);
      store(v_unknown + LANES * sub, never);
    }
    scales(a.k_scales, a.groups(), k_scale, unknown);
    scales(a.v_scales, a.v_groups(), v_scale, v_unknown);
    if (meter) measure(a);
  }

  bool any_shared() const {
    return std::any_of(tokens->shared, tokens->shared + SUB, [](bool x) { return x; });
  }

  // Products of `N` pairs from `p` with LANES tokens, without the softmax scale.
  template <int N, int DIGITS>
  void products(int sub, const Queries& x, int p, vf* z) const {
    const bool own_dither = !tokens->shared[sub];
    for (int m = 0; m < N; m++) z[m] = splat(0.0f);
    for (int g = 0; g < x.groups; g++) {
      ahead.fetch(4);
      vi dot[N][DIGITS];
      meet<N, DIGITS>(codes[sub] + 8 * g, x, p, g, -128, dot);
      const vf scale = load(&k_scale[g][LANES * sub]);
      vf value[N];
      for (int m = 0; m < N; m++) value[m] = joined<DIGITS>(dot[m]) * x.unit[(p + m) * x.groups + g];
      if (own_dither) {
        // <q, u> with u = (j + 1/2) / 256 - 1/2 is 2 <q, j> - 255 <q, 1> in units of 1 / 512.
        meet<N, DIGITS>(dither[sub] + 8 * g, x, p, g, 0, dot);
        for (int m = 0; m < N; m++) {
          for (int d = 0; d < DIGITS; d++) {
            const int32_t whole = x.digit_sum[((size_t)d * x.pairs + p + m) * x.groups + g];
            dot[m][d] = dot[m][d] * 2 - 255 * whole;
          }
          value[m] -= joined<DIGITS>(dot[m]) * (x.unit[(p + m) * x.groups + g] * (1.0f / 512.0f));
        }
      } else {
        for (int m = 0; m < N; m++) value[m] -= x.kappa[(p + m) * x.groups + g];
      }
      for (int m = 0; m < N; m++) z[m] += value[m] * scale;
    }
    const Cache& a = x.cache;
    for (int64_t c = 0; c < a.bypassed; c++) {
      float beside[LANES];
      for (int i = 0; i < LANES; i++)
        beside[i] = LANES * sub + i < count ? number(a.bypass, line[LANES * sub + i] * a.bypassed + c, a.dtype) : 0.0f;
      const vf key = load(beside);
      for (int m = 0; m < N; m++) z[m] += key * x.spared[(p + m) * a.bypassed + c];
    }
  }

  // Quantization's radius and that of the product, of pair `p` and LANES tokens from `i`.
  vf radius(const Queries& x, int i, int p) const {
    vf l1 = splat(0.0f), variance = l1, stored = l1;
    for (int g = 0; g < x.groups; g++) {
      const vf scale = load(&k_scale[g][i]);
      l1 += scale * x.norm1[p * x.groups + g];
      variance += load(&k_square[g][i]) * x.square[p * x.groups + g];
      if (x.cache.witness) stored += load(&residual[g][i]) * x.length[p * x.groups + g];
    }
    vf c = l1 * x.certain[p];
    if (x.tail[p] > 0.0f) c = smaller(root_up(variance) * x.tail[p] + l1 * x.likely[p], c);
    if (x.cache.witness) {
      constexpr float unit = (float)(5.656854249492381 / 510.0 * (1.0 + 0x1p-15)) * UP16 * UP16;
      c = smaller(stored * unit + l1 * x.arithmetic[p], c);
    }
    if (x.cache.bypassed) c += load(&spared_length[i]) * x.spared_length[p];
    return c * UP16 + x.known[p];
  }

 private:
  template <int DIGITS>
  static vf joined(const vi* x) {
    if (DIGITS == 2) return to_float(x[0] * 256 + x[1]);
    return to_float(x[0] * 256 + x[1]) * 256.0f + to_float(x[2]);
  }

  // Exact products of bytes with the digits of `N` pairs in one group, `shift` added to each byte.
  template <int N, int DIGITS>
  static void meet(const vi* bytes, const Queries& x, int p, int g, int32_t shift, vi (*dot)[DIGITS]) {
    const int32_t* word[N][DIGITS];
    for (int m = 0; m < N; m++)
      for (int d = 0; d < DIGITS; d++) {
        const size_t line = (size_t)d * x.pairs + p + m;
        dot[m][d] = splat(shift * x.digit_sum[line * x.groups + g]);
        word[m][d] = &x.word[line * x.words + 8 * g];
      }
    for (int c = 0; c < 8; c++) {
      const vi some = bytes[c];
      for (int m = 0; m < N; m++)
        for (int d = 0; d < DIGITS; d++) dot[m][d] = dot_bytes(dot[m][d], some, splat(word[m][d][c]));
    }
  }

  // Words c / 4 .. c / 4 + 15 of LANES rows of `channels` bytes, 0 beyond the last.
  static void words_of(const int8_t* const* rows, int64_t c, int64_t channels, vi* out) {
    alignas(64) int8_t padded[LANES][4 * WORDS];
    const void* from[LANES];
    const int64_t left = channels - c;
    for (int i = 0; i < LANES; i++) {
      from[i] = rows[i] + c;
      if (left < 4 * WORDS) {
        std::memset(padded[i], 0, sizeof padded[i]);
        std::memcpy(padded[i], from[i], (size_t)left);
        from[i] = padded[i];
      }
    }
    transpose(from, out);
  }

  // Scales `side [slot][groups]` of the tile's tokens by group, 0 where there is none, which `never` is told.
  void scales(const uint16_t* side, int groups, float (*to)[TILE], float* never) const {
    alignas(64) uint16_t by_group[MAX_GROUPS][TILE];
    const auto gather = [&](auto n) {  // a number that the compiler knows where it is a usual one
      for (int i = 0; i < TILE; i++)
        for (int g = 0; g < n; g++) by_group[g][i] = side[line[i] * n + g];
    };
    if (groups == 4)
      gather(std::integral_constant<int, 4>());
    else if (groups == 2)
      gather(std::integral_constant<int, 2>());
    else
      gather(groups);
    for (int i = 0; i < TILE; i += LANES) {
      const vi live = lane_index() + i < splat(count);
      vf told = load(never + i);
      for (int g = 0; g < groups; g++) {
        const vf x = halves_to_float(by_group[g] + i);
        const vi fine = (x >= 0.0f) & (x < INF);
        told = fine ? told : splat(INF);
        store(to[g] + i, fine & live ? x : splat(0.0f));
      }
      store(never + i, told);
    }
  }

  void measure(const Cache& a) {
    for (int i = 0; i < TILE; i += LANES) {
      vf squares = splat(0.0f), of_values = squares;
      for (int g = 0; g < a.v_groups(); g++) {
        const vf x = load(v_scale[g] + i);
        squares += x * x * (float)channels_of(a.v_dim, g);
      }
      store(rho + i, root(squares) * (0.5f * (1.0f + 0x1p-13f) * UP16));
      for (int64_t c = 0; c < a.v_dim; c += 4 * WORDS) {
        vi words[WORDS], sums[2] = {splat(0), splat(0)};
        words_of(v + i, c, a.v_dim, words);
        for (int w = 0; w < WORDS; w++) {
          const vi size = bytes_abs(words[w]);
          sums[w / 8] = dot_bytes(sums[w / 8], size, size);
        }
        for (int g = 0; g < 2 && c + 32 * g < a.v_dim; g++) {
          const vf x = load(v_scale[c / 32 + g] + i);
          of_values += to_float(sums[g]) * (x * x);
        }
      }
      store(v_square + i, of_values);
    }
    sort_out_values();
    for (int g = 0; g < a.groups(); g++)
      for (int i = 0; i < TILE; i += LANES) store(&k_square[g][i], load(&k_scale[g][i]) * load(&k_scale[g][i]));
    for (int i = 0; a.witness && i < TILE; i++)
      for (int g = 0; g < a.groups(); g++) residual[g][i] = k_scale[g][i] * (float)a.witness[line[i] * a.groups() + g];
    for (int i = 0; a.bypassed && i < TILE; i++) {
      float beside = 0.0f;
      for (int64_t c = 0; c < a.bypassed; c++) {
        const float x = number(a.bypass, line[i] * a.bypassed + c, a.dtype);
        beside += x * x;
      }
      spared_length[i] = std::sqrt(beside) * UP16;
      if (!(beside < INF)) unknown[i] = INF;
    }
  }
};

// `N` pairs from `p` over a tile: their sums, and their outputs `out [pairs][v_dim]` relative to the sums' reference.
template <int N, int DIGITS>
void attend_packed(const PackedTile& t, const Queries& x, int p, int64_t begin, const Span* spans, const bool* meter,
                   double sm_scale, double soft_cap, Sums* sums, Lanes* lanes, float* out) {
  alignas(64) float logits[N][TILE], weights[N][TILE], scaled[N][TILE];
  float factor[N];
  for (int sub = 0; sub < SUB; sub++) {
    vf z[N];
    t.products<N, DIGITS>(sub, x, p, z);
    for (int m = 0; m < N; m++) {
      z[m] = z[m] * (float)sm_scale;
      store(logits[m] + LANES * sub, soft_cap > 0.0 ? soft_capped(z[m], (float)soft_cap) : z[m]);
    }
  }
  Tile tile(t, begin, t.count, fixed_radius(soft_cap));
  for (int m = 0; m < N; m++) {
    const auto radius = [&](int i) { return t.radius(x, i, p + m); };
    factor[m] = tile.weigh(sums[p + m], lanes[p + m], spans[p + m], logits[m], weights[m], meter[p + m], radius);
  }
  const int64_t width = x.cache.v_dim;
  for (int g = 0; g < x.cache.v_groups(); g++) {
    for (int m = 0; m < N; m++)
      for (int j = 0; j < TILE; j += LANES) store(scaled[m] + j, load(weights[m] + j) * load(&t.v_scale[g][j]));
    add_values<N>(out + p * width, width, 32 * g, std::min<int64_t>(32 * g + 32, width), t.count, scaled, factor,
                  [&](int i, int64_t c) {
                    if (i % 2 == 0) t.ahead.fetch(1);
                    return bytes_to_float(t.v[i] + c);
                  });
  }
}

// All pairs over a tile.
inline void attend_packed(const PackedTile& t, Queries& x, int64_t begin, const Span* spans, const bool* meter,
                          double sm_scale, double soft_cap, Sums* sums, Lanes* lanes, float* out) {
  if (t.any_shared()) x.draw((uint32_t)t.tokens->pass[0]);
  auto some = [&](auto n, int p) {
    constexpr int N = decltype(n)::value;
    if (x.digits == 2)
      attend_packed<N, 2>(t, x, p, begin, spans, meter, sm_scale, soft_cap, sums, lanes, out);
    else
      attend_packed<N, 3>(t, x, p, begin, spans, meter, sm_scale, soft_cap, sums, lanes, out);
  };
  by_pairs(x.pairs, some);
}

}  // namespace witcert
