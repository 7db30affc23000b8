// The packed INT8 cache as an attention kernel reads it: tiles of codes, and queries as signed bytes that meet them.
//
// A group of 32 channels of a query shares a power of two: q ~ unit (256 high + low), for fp32 queries with one byte
// more. Products of bytes are exact integers; what the bytes lose of a query is known and is part of the radius.
#pragma once
#include "attention.h"
#include "numbers.h"
#include "philox.h"

namespace witcert {

constexpr float MAX_CODE = 127.5f;
constexpr float ARITHMETIC = MAX_CODE * (1.0f + 0x1p-15f) * UP16, CERTAIN = 0.5f * (1.0f + 0x1p-15f) * UP16;

// Mirrored field for field by `native.packed.Cache`.
struct Cache {
  const int8_t *k, *v;
  const uint16_t *k_scales, *v_scales;
  const uint8_t* witness;
  const int32_t *pass_ids, *head_ids;
  const uint8_t* keep;
  const int32_t* channels;
  const void* bypass;
  int64_t k_page, k_token, k_head, v_page, v_token, v_head;
  int64_t kv_heads, head_dim, v_dim, page_size, bypassed, layer, dtype;
  uint64_t seed;

  int groups() const { return (int)(head_dim + 31) / 32; }
  int v_groups() const { return (int)(v_dim + 31) / 32; }
  int digits() const { return dtype == FLOAT32 ? 3 : 2; }
};

inline int channels_of(int64_t head_dim, int g) { return std::min<int>(32, (int)head_dim - 32 * g); }

// `pairs` queries that read one KV head, and their part in the radii.
struct Queries {
  const Cache& cache;
  int64_t kv_head;
  int pairs, digits, groups, words;
  std::vector<int32_t> word;       // [digit][pair][channel / 4], four signed bytes each; digit 0 is the highest
  std::vector<int32_t> digit_sum;  // [digit][pair][group]
  std::vector<float> unit, norm1, square, length, kappa;                       // [pair][group]
  std::vector<float> spared;                                                   // [pair][bypassed channel]
  std::vector<float> arithmetic, known, spared_length, tail, certain, likely;  // [pair]
  std::vector<const void*> at;                                                 // [pair]
  int64_t drawn = -1;

  Queries(const Cache& c, int64_t head, int count)
      : cache(c),
        kv_head(head),
        pairs(count),
        digits(c.digits()),
        groups(c.groups()),
        words(8 * c.groups()),
        word((size_t)digits * pairs * words),
        digit_sum((size_t)digits * pairs * groups),
        at((size_t)pairs) {
    for (auto* x : {&unit, &norm1, &square, &length, &kappa}) x->assign((size_t)pairs * groups, 0.0f);
    for (auto* x : {&arithmetic, &known, &spared_length, &tail, &certain, &likely}) x->assign((size_t)pairs, 0.0f);
    spared.assign((size_t)pairs * c.bypassed, 0.0f);
  }

  bool kept(int64_t channel) const { return !cache.keep || cache.keep[kv_head * cache.head_dim + channel]; }

  // Pair p is the query at `q`; its cell spends `delta` on a union over `num_visible` tokens.
  void set(int p, const void* q, double sm_scale, double delta, int64_t num_visible) {
    at[p] = q;
    const double scale = std::fabs(sm_scale), limit = digits == 3 ? 8355711.0 : 32639.0;  // 127 (1 + 256 (+ 65536))
    double share = 0.0, whole = 0.0;
    for (int g = 0; g < groups; g++) {
      const int n = channels_of(cache.head_dim, g);
      float x[32], most = 0.0f;
      double sum1 = 0.0, sum2 = 0.0, lost = 0.0;
      for (int i = 0; i < n; i++) {
        x[i] = kept(32 * g + i) ? number(q, 32 * g + i, cache.dtype) : 0.0f;
        sum1 += std::fabs((double)x[i]), sum2 += (double)x[i] * x[i];
        most = std::max(most, std::fabs(x[i]));
      }
      const bool finite = sum1 < (double)INF;
      int exponent = 0;
      if (finite && most > 0.0f) {
        std::frexp(most, &exponent);
        exponent -= digits == 3 ? 23 : 15;
        if (std::nearbyint(std::ldexp((double)most, -exponent)) > limit) exponent++;
        exponent = std::max(exponent, 30 - 127);
      }
      const double inverse = std::ldexp(1.0, -exponent);
      for (int i = 0; i < n && finite; i++) {
        const double steps = x[i] * inverse, near = std::nearbyint(steps);
        lost += std::fabs(steps - near);
        int32_t left = (int32_t)near;
        for (int d = digits - 1; d >= 0; d--) {
          const int32_t low = d ? ((left + 128) & 0xFF) - 128 : left;
          left = (left - low) >> 8;
          const size_t line = (size_t)d * pairs + p;
          ((int8_t*)&word[line * words + 8 * g])[i] = (int8_t)low;
          digit_sum[line * groups + g] += low;
        }
      }
      const int at_g = p * groups + g;
      unit[at_g] = finite ? (float)std::ldexp(1.0, exponent) : NO_NUMBER;
      if (sum1 > 0.0 && finite) share = std::max(share, std::ldexp(lost, exponent) / sum1);
      whole += sum1;
      norm1[at_g] = (float)(sum1 * scale) * UP16;
      square[at_g] = (float)(sum2 * scale * scale) * UP16;
      length[at_g] = (float)(std::sqrt(sum2) * scale) * UP16;
    }
    arithmetic[p] = ((float)share + (float)(32 + groups + 8) * 0x1p-23f) * ARITHMETIC;
    double beside = 0.0;
    for (int64_t c = 0; c < cache.bypassed; c++) {
      const float y = number(q, cache.channels[kv_head * cache.bypassed + c], cache.dtype);
      spared[p * cache.bypassed + c] = y;
      beside += (double)y * y;
    }
    known[p] = whole * scale < (double)INF && beside < (double)INF ? 0.0f : INF;
    spared_length[p] = (float)(std::sqrt(beside) * scale) * dot_error(cache.bypassed + 1) * UP16;
    certain[p] = CERTAIN + arithmetic[p];
    if (delta > 0.0) {
      const double root_of_law = std::sqrt((1.0 - 0x1p-16) / 12.0);
      tail[p] =
          (float)(std::sqrt(2.0 * std::log(2.0 * (double)std::max<int64_t>(num_visible, 1) / delta)) * root_of_law) *
          1.0001f;
      likely[p] = (0x1p-9f + 0x1p-16f) * UP16 + arithmetic[p];
    }
  }

  // kappa_g = <q_g, u_g> of every pair, for the dither of one pass.
  void draw(int64_t pass) {
    if (drawn == pass) return;
    drawn = pass;
    float u[MAX_DIM];
    for (int block = 0; 16 * block < cache.head_dim; block++) {
      const Words w = philox(splat_word((uint32_t)pass), (uint32_t)cache.layer, (uint32_t)cache.head_ids[kv_head],
                             (uint32_t)block, cache.seed);
      for (int i = 0; i < 16; i++) u[16 * block + i] = dither_of(w, i);
    }
    for (int p = 0; p < pairs; p++)
      for (int g = 0; g < groups; g++) {
        double total = 0.0;
        for (int i = 32 * g; i < 32 * g + channels_of(cache.head_dim, g); i++)
          if (kept(i)) total += (double)number(at[p], i, cache.dtype) * u[i];
        kappa[p * groups + g] = (float)total;
      }
  }
};

// Where 64 tokens of a request lie in the cache, for all its heads.
struct Tokens {
  int64_t slot[TILE], k[TILE], v[TILE];  // bytes from the beginning of K and of V
  alignas(64) int32_t pass[TILE];        // bits of a uint32
  bool shared[SUB];                      // whether the first token's pass wrote all tokens of a sub-tile
  int count;

  // Tokens begin .. end - 1, 64 at most; after the last one it stands in for those that there are not.
  void find(const Cache& a, const Pages& pages, int64_t request, int64_t begin, int64_t end) {
    count = (int)std::min<int64_t>(TILE, end - begin);
    const int32_t* page = pages.indices + pages.indptr[request] + begin / a.page_size;
    int64_t offset = begin % a.page_size;
    for (int i = 0; i < count; i++) {
      slot[i] = *page * a.page_size + offset;
      k[i] = *page * a.k_page + offset * a.k_token, v[i] = *page * a.v_page + offset * a.v_token;
      pass[i] = a.pass_ids[slot[i]];
      if (++offset == a.page_size) offset = 0, page++;
    }
    for (int i = count; i < TILE; i++) slot[i] = slot[i - 1], k[i] = k[i - 1], v[i] = v[i - 1], pass[i] = pass[i - 1];
    for (int sub = 0; sub < SUB; sub++) {
      shared[sub] = true;
      for (int i = LANES * sub; i < LANES * (sub + 1); i++) shared[sub] &= pass[i] == pass[0];
    }
  }

  // Fetch what is read of some of them, of all heads, while others are attended.
  void fetch(const Cache& a, int first, int last) const {
    const auto rows = [&](const int8_t* at, int64_t head, int64_t channels) {
      const int64_t together = head == channels ? a.kv_heads : 1, apart = a.kv_heads / together;
      for (int64_t h = 0; h < apart; h++)
        for (int64_t c = 0; c < together * channels; c += 64) __builtin_prefetch(at + h * head + c, 0, 2);
    };
    for (int i = first; i < std::min(last, count); i++) {
      rows(a.k + k[i], a.k_head, a.head_dim), rows(a.v + v[i], a.v_head, a.v_dim);
      __builtin_prefetch(a.k_scales + slot[i] * a.kv_heads * a.groups(), 0, 2);
      __builtin_prefetch(a.v_scales + slot[i] * a.kv_heads * a.v_groups(), 0, 2);
      if (a.witness) __builtin_prefetch(a.witness + slot[i] * a.kv_heads * a.groups(), 0, 2);
    }
  }
};

// 64 tokens of one KV head of the cache.
struct PackedTile : Measured {
  alignas(64) vi codes[SUB][MAX_DIM / 4];   // K codes + 128, a word of four channels of LANES tokens
  alignas(64) vi dither[SUB][MAX_DIM / 4];  // bytes j of u, where tokens of a sub-tile have dither of their own
  alignas(64) float k_scale[MAX_GROUPS][TILE], v_scale[MAX_GROUPS][TILE], residual[MAX_GROUPS][TILE];
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
      variance += scale * scale * x.square[p * x.groups + g];
      if (x.cache.witness) stored += load(&residual[g][i]) * x.length[p * x.groups + g];
    }
    vf c = l1 * x.certain[p];
    if (x.tail[p] > 0.0f) c = smaller(root(variance) * x.tail[p] + l1 * x.likely[p], c);
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
    for (int i = 0; i < TILE; i++)
      for (int g = 0; g < groups; g++) by_group[g][i] = side[line[i] * groups + g];
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
    for (int i = 0; i < TILE; i++) {
      for (int g = 0; a.witness && g < a.groups(); g++)
        residual[g][i] = k_scale[g][i] * (float)a.witness[line[i] * a.groups() + g];
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
                   double sm_scale, double soft_cap, Sums* sums, float* out) {
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
    factor[m] = tile.weigh(sums[p + m], spans[p + m], logits[m], weights[m], meter[p + m], radius);
  }
  const int64_t width = x.cache.v_dim;
  for (int g = 0; g < x.cache.v_groups(); g++) {
    for (int m = 0; m < N; m++)
      for (int j = 0; j < TILE; j += LANES) store(scaled[m] + j, load(weights[m] + j) * load(&t.v_scale[g][j]));
    add_values<N>(out + p * width, width, 32 * g, std::min<int64_t>(32 * g + 32, width), t.count, scaled, factor,
                  [&](int i, int64_t c) { return bytes_to_float(t.v[i] + c); });
  }
}

// All pairs over a tile.
inline void attend_packed(const PackedTile& t, Queries& x, int64_t begin, const Span* spans, const bool* meter,
                          double sm_scale, double soft_cap, Sums* sums, float* out) {
  if (t.any_shared()) x.draw((uint32_t)t.tokens->pass[0]);
  auto some = [&](auto n, int p) {
    constexpr int N = decltype(n)::value;
    if (x.digits == 2)
      attend_packed<N, 2>(t, x, p, begin, spans, meter, sm_scale, soft_cap, sums, out);
    else
      attend_packed<N, 3>(t, x, p, begin, spans, meter, sm_scale, soft_cap, sums, out);
  };
  by_pairs(x.pairs, some);
}

}  // namespace witcert
