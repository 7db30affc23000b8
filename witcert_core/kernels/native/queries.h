// The packed INT8 cache as it is given to a kernel, and queries as signed bytes that meet its codes.
//
// A group of 32 channels of a query shares a power of two: q ~ unit (256 high + low), for fp32 queries with one byte
// more. Products of bytes are exact integers; what the bytes lose of a query is known and is part of the radius.
#pragma once
#include "numbers.h"
#include "philox.h"
#include "places.h"

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

  Paged keys() const { return {(const char*)k, k_page, k_token, k_head, head_dim}; }
  Paged values() const { return {(const char*)v, v_page, v_token, v_head, v_dim}; }
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

}  // namespace witcert
