// What every attention kernel here shares: weights of a tile of 64 tokens, the sums the meter is made of, and the merge
// of splits. decode/reference.py and meter/sums.py say what the sums are and what may not be fallen below.
//
// Weights are relative to 2^ref with an integer ref, so that rescaling is exact. A split of SPLIT tokens is summed by
// itself and splits are merged in order, so that a row's bits do not depend on its batch or on the number of threads.
// Sums over a split are float32, lane by lane: of at most 128 numbers above 0, so within 2^-16, and SUM_UP allows
// 2^-12. Sums over splits are float64. Constants are those of kernels/host/slack.py, rounded outward.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "vec.h"

namespace witcert {

constexpr int TILE = 64, SUB = TILE / LANES, SPLIT = 512, NUM_FIELDS = 16;
constexpr int MAX_DIM = 256, MAX_GROUPS = MAX_DIM / 32, MAX_SIDES = 64;
constexpr int PAIRS = LANES == 16 ? 8 : 4;  // (query row, head) pairs that share a pass over a tile
constexpr float UP16 = 1.0f + 0x1p-16f, SOFTMAX = 0x1p-20f + 0x1p-40f, SOFTCAP = 0x1p-21f, FAR_SHARE = 0x1p-22f;
constexpr float LOG2E = 1.44269504f, SQUARE_MAX = 2.4e17f, LOST_WEIGHT = 0x1p-120f, NO_NUMBER = __builtin_nanf("");
constexpr double SUM_UP = 1.0 + 0x1p-12;

// (channels + 2) 2^-23: an fp32 dot product in any order.
inline float dot_error(int64_t channels) { return (float)(channels + 2) * 0x1p-23f; }

// Tokens first .. limit - 1.
struct Span {
  int64_t first, limit;
};

inline Span span_at(int64_t position, int64_t window_left) {
  return {window_left >= 0 ? std::max<int64_t>(position - window_left, 0) : 0, std::max<int64_t>(position + 1, 0)};
}

// Pages of some requests, as FlashInfer has them.
struct Pages {
  const int32_t *indptr, *indices, *last_page_len;

  int64_t length(int64_t request, int64_t page_size) const {
    const int64_t count = indptr[request + 1] - indptr[request];
    return count > 0 ? (count - 1) * page_size + last_page_len[request] : 0;
  }
};

// Lines of memory that are read soon. They are fetched a few at a time while others are attended: of many at once a
// processor drops most, and waits for the rest.
struct Ahead {
  std::vector<const char*> line;
  size_t count = 0, next = 0;

  // Of at most `most` lines.
  void clear(size_t most) {
    if (line.size() < most) line.resize(most);
    count = next = 0;
  }

  void add(const char* at) { line[count++] = at; }

  void fetch(size_t most) {
    const size_t last = std::min(next + most, count);
    for (; next < last; next++) __builtin_prefetch(line[next], 0, 2);
  }
};

// What the sums need of 64 tokens of one KV head.
struct Measured {
  mutable Ahead ahead;
  alignas(64) float unknown[TILE];    // infinite where a key's radius is
  alignas(64) float v_unknown[TILE];  // infinite where a value's is
  alignas(64) float rho[TILE], v_square[TILE];

  // Values of which something is no number, or beyond all, are unknown: a weight of 0 makes nothing of the others.
  void sort_out_values() {
    for (int i = 0; i < TILE; i += LANES)
      for (float* x : {rho, v_square}) {
        const vi fine = load(x + i) < INF;
        store(v_unknown + i, fine ? load(v_unknown + i) : splat(INF));
        store(x + i, fine ? load(x + i) : splat(0.0f));
      }
  }
};

// The extremes of what a row sees of a tile's values.
struct Extremes {
  float rho_max = 0.0f, rho_min = INF, v_max = 0.0f;
  bool unknown = false;

  Extremes(const Measured& of, const vi* visible) {
    vf most = splat(0.0f), least = splat(INF), square_most = most;
    vi wrong = splat(0);
    for (int j = 0; j < SUB; j++) {
      const vf rho = load(of.rho + LANES * j), square = load(of.v_square + LANES * j);
      most = larger(visible[j] ? rho : splat(0.0f), most);
      least = smaller(visible[j] ? rho : splat(INF), least);
      square_most = larger(visible[j] ? square : splat(0.0f), square_most);
      wrong |= visible[j] & (load(of.v_unknown + LANES * j) > 0.0f);
    }
    rho_max = largest(most), rho_min = -largest(-least), v_max = largest(square_most), unknown = any(wrong);
  }
};

inline double grown(float c) { return (double)growth(splat(c))[0]; }

// Sums of one pair over some tiles of a split, lane by lane: a tile then needs no number of a whole vector. Each lane
// keeps the heaviest of its tokens apart from the sums over the others.
struct Lanes {
  vf mass{}, rest{}, eta{}, q{}, v2{}, rho1{}, rho2{}, heaviest{}, heaviest_c{}, most{}, omega{};

  void add(vf w, vf c) {
    const vf g = growth(c), first = w * g;
    rest += w, eta += first, q += first * smaller(g, splat(SQUARE_MAX));
    most = larger(c, most);
  }

  void meet(vf w, vf c) {
    const vf lighter = smaller(w, heaviest), lighter_c = w > heaviest ? heaviest_c : c;
    heaviest_c = w > heaviest ? c : heaviest_c, heaviest = larger(w, heaviest);
    add(lighter, lighter_c);
  }

  // To go on with in registers, and to come back from there.
  Lanes heaviest_alone() const {
    Lanes x;
    x.heaviest = heaviest, x.heaviest_c = heaviest_c;
    return x;
  }

  void join(const Lanes& x) {
    mass += x.mass, rest += x.rest, eta += x.eta, q += x.q, v2 += x.v2, rho1 += x.rho1, rho2 += x.rho2;
    heaviest = x.heaviest, heaviest_c = x.heaviest_c, most = larger(x.most, most), omega = larger(x.omega, omega);
  }
};

// Sums of one pair, relative to 2^ref.
struct Sums {
  double mass = 0, rest = 0, eta = 0, q = 0, v2 = 0, rho1 = 0, rho2 = 0, heaviest = -1;
  float ref = -INF, heaviest_c = 0, most = 0, rho_max = 0, rho_min = INF, v_max = 0, omega = 0;
  bool sees = false, broken = false, v_unknown = false;

  // To a reference of at least `to`; the exact factor of what was summed before.
  double raise(float to) {
    if (to == ref) return 1.0;
    const double by = ref == -INF ? 0.0 : std::ldexp(1.0, (int)std::max(ref - to, -2000.0f));
    for (double* x : {&mass, &rest, &eta, &q, &v2, &rho1, &rho2}) *x *= by;
    if (heaviest > 0) heaviest *= by;
    ref = to;
    return by;
  }

  // A weight that is not the heaviest.
  void add(double w, float c) {
    const double g = grown(c);
    rest += w, eta += w * g, q += w * g * std::min(g, (double)SQUARE_MAX);
    most = std::max(most, c);
  }

  // The heaviest of some tokens whose others are in the sums already.
  void meet(double w, float c) {
    if (heaviest < 0) {
      heaviest = w, heaviest_c = c;
    } else if (w > heaviest) {
      add(heaviest, heaviest_c);
      heaviest = w, heaviest_c = c;
    } else {
      add(w, c);
    }
  }

  // What lanes hold, which are then empty.
  void take(Lanes& x, bool meter) {
    mass += (double)sum(x.mass);
    const float top = meter ? largest(x.heaviest) : 0.0f;
    if (top > 0.0f) {
      const int at = first_of(x.heaviest == splat(top));
      const vi others = lane_index() != splat(at);
      float c[LANES];
      store(c, x.heaviest_c);
      x.add(others ? x.heaviest : splat(0.0f), others ? x.heaviest_c : splat(0.0f));
      meet(top, c[at]);
      rest += (double)sum(x.rest), eta += (double)sum(x.eta), q += (double)sum(x.q);
      v2 += (double)sum(x.v2), rho1 += (double)sum(x.rho1), rho2 += (double)sum(x.rho2);
      most = std::max(most, largest(x.most)), omega = std::max(omega, largest(x.omega));
    }
    x = Lanes();
  }

  // Other tokens' sums; the factor of those here.
  double join(const Sums& x) {
    sees |= x.sees, broken |= x.broken, v_unknown |= x.v_unknown;
    omega = std::max(omega, x.omega), most = std::max(most, x.most), v_max = std::max(v_max, x.v_max);
    rho_max = std::max(rho_max, x.rho_max), rho_min = std::min(rho_min, x.rho_min);
    const double own = raise(std::max(ref, x.ref)), factor = factor_of(x);
    mass += x.mass * factor, rest += x.rest * factor, eta += x.eta * factor, q += x.q * factor;
    v2 += x.v2 * factor, rho1 += x.rho1 * factor, rho2 += x.rho2 * factor;
    if (x.heaviest >= 0) meet(x.heaviest * factor, x.heaviest_c);
    return own;
  }

  double factor_of(const Sums& x) const {
    return x.ref == -INF ? 0.0 : std::ldexp(1.0, (int)std::max(x.ref - ref, -2000.0f));
  }
};

// `some(N, p)` for all pairs p .. p + N - 1, PAIRS at a time and then what is left; N is a constant of its type.
template <class Some>
void by_pairs(int pairs, Some some) {
  int p = 0;
  for (; p + PAIRS <= pairs; p += PAIRS) some(std::integral_constant<int, PAIRS>(), p);
  if (PAIRS > 4 && pairs - p >= 4) some(std::integral_constant<int, 4>(), p), p += 4;
  if (pairs - p == 3) some(std::integral_constant<int, 3>(), p);
  if (pairs - p == 2) some(std::integral_constant<int, 2>(), p);
  if (pairs - p == 1) some(std::integral_constant<int, 1>(), p);
}

// What a weight's exponent and the cap may be off by, the same for every token, as a radius.
inline float fixed_radius(double soft_cap) { return SOFTMAX + (float)std::max(soft_cap, 0.0) * SOFTCAP; }

inline vf soft_capped(vf z, float cap) { return cap - 2.0f * cap / (1.0f + exponential(2.0f * z / cap)); }

// A tile's logits for several pairs: what does not depend on the pair is looked up once.
class Tile {
 public:
  // Of `count` tokens from token `begin`; `fixed` as fixed_radius has it.
  Tile(const Measured& about, int64_t first_token, int tokens, float fixed_error)
      : side(about), begin(first_token), count(tokens), fixed(fixed_error) {}

  // Weights `w [TILE]` of a pair's logits; the factor of what was summed before. With `meter` also its sums, from
  // `radius` (of LANES tokens, by the index of the first); and the largest omega of this kernel and another one, from
  // what the `products` behind each logit err by in both together, if given.
  template <class Radius>
  float weigh(Sums& own, Lanes& lanes, Span sees, const float* logits, float* w_out, bool meter, Radius radius,
              const float* products = nullptr) {
    const int low = (int)std::max<int64_t>(sees.first - begin, 0);
    const int high = (int)std::min<int64_t>(std::max<int64_t>(sees.limit - begin, 0), count);
    if (low == 0 && high == TILE) return weigh<true>(own, lanes, low, high, logits, w_out, meter, radius, products);
    return weigh<false>(own, lanes, low, high, logits, w_out, meter, radius, products);
  }

 private:
  const Measured& side;
  const int64_t begin;
  const int count;
  const float fixed;
  std::optional<Extremes> of_all;

  // Of tokens low .. high - 1; ALL: of all 64.
  template <bool ALL, class Radius>
  float weigh(Sums& own, Lanes& lanes, int low, int high, const float* logits, float* w_out, bool meter, Radius radius,
              const float* products) {
    vf z[SUB], most = splat(-INF);
    vi visible[SUB], wrong = splat(0);
    for (int j = 0; j < SUB; j++) {
      const vi token = lane_index() + LANES * j;
      visible[j] = ALL ? splat(-1) : (token >= splat(low)) & (token < splat(high));
      z[j] = seen<ALL>(visible[j], load(logits + LANES * j) * LOG2E, -INF);
      wrong |= z[j] != z[j];
      most = larger(z[j], most);
    }
    own.sees |= low < high;
    float factor = 1.0f;
    // Where no logit is above the reference, that is all that is asked of them.
    if (own.ref == -INF || any_above(most, splat(own.ref)) || any(wrong)) {
      const float top = largest(most);
      // No number, or nothing above -inf: there are no weights to speak of.
      own.broken |= low < high && (any(wrong) || top == INF || (top == -INF && own.ref == -INF));
      if (low < high && !own.broken && top > own.ref) {
        if (own.ref > -INF) own.take(lanes, meter);
        factor = (float)own.raise(std::max(own.ref, std::ceil(top)));
      }
    }
    if (low >= high || own.broken) {
      std::fill(w_out, w_out + TILE, 0.0f);
      return 1.0f;
    }
    vf gap[SUB], w[SUB];
    for (int j = 0; j < SUB; j++) {
      gap[j] = z[j] - own.ref;
      w[j] = exp2_down(gap[j]);
      lanes.mass += w[j];
      store(w_out + LANES * j, w[j]);
    }
    if (!meter) return factor;
    Lanes x = lanes.heaviest_alone();
    for (int j = 0; j < SUB; j++) {
      const vf error = smaller(-gap[j], splat(150.0f)) * FAR_SHARE + fixed;
      const vf c = radius(LANES * j) + error + load(side.unknown + LANES * j);
      x.meet(w[j], seen<ALL>(visible[j], c, 0.0f));
      if (products) {
        const vf both = load(products + LANES * j) + (error + fixed);
        x.omega = larger(seen<ALL>(visible[j], both == both ? both : splat(INF), 0.0f), x.omega);
      }
      const vf of_rho = w[j] * load(side.rho + LANES * j);
      x.v2 += w[j] * load(side.v_square + LANES * j);
      x.rho1 += of_rho, x.rho2 += of_rho * load(side.rho + LANES * j);
    }
    lanes.join(x);
    if (ALL && !of_all) of_all.emplace(side, visible);
    const Extremes of = ALL ? *of_all : Extremes(side, visible);
    own.rho_max = std::max(own.rho_max, of.rho_max), own.rho_min = std::min(own.rho_min, of.rho_min);
    own.v_max = std::max(own.v_max, of.v_max), own.v_unknown |= of.unknown;
    return factor;
  }

  template <bool ALL>
  static vf seen(vi visible, vf x, float otherwise) {
    return ALL ? x : visible ? x : splat(otherwise);
  }
};

// Add sum_t w_t v_t of `N` pairs to their outputs `out [N][width]`, at channels first .. last - 1, which share a
// weight; `values` gives LANES of them from token and channel.
template <int N, class Values>
void add_values(float* out, int64_t width, int64_t first, int64_t last, int count, const float (*w)[TILE],
                const float* factor, Values values) {
  int64_t c = first;
  for (; c + 2 * LANES <= last; c += 2 * LANES) {
    vf low[N], high[N];
    for (int m = 0; m < N; m++) low[m] = high[m] = splat(0.0f);
    for (int i = 0; i < count; i++) {
      const vf one = values(i, c), two = values(i, c + LANES);
      for (int m = 0; m < N; m++) low[m] += one * w[m][i], high[m] += two * w[m][i];
    }
    for (int m = 0; m < N; m++) {
      float* o = out + m * width + c;
      store(o, load(o) * factor[m] + low[m]);
      store(o + LANES, load(o + LANES) * factor[m] + high[m]);
    }
  }
  for (; c < last; c += LANES) {
    vf sum[N];
    for (int m = 0; m < N; m++) sum[m] = splat(0.0f);
    for (int i = 0; i < count; i++) {
      const vf one = values(i, c);
      for (int m = 0; m < N; m++) sum[m] += one * w[m][i];
    }
    for (int m = 0; m < N; m++) {
      float* o = out + m * width + c;
      store(o, load(o) * factor[m] + sum[m]);
    }
  }
}

// A pair's splits so far, merged in order.
struct Merged {
  Sums sums;
  std::vector<double> out;

  void take(const Sums& part, const float* values, int64_t width) {
    if (!part.sees) return;
    const double own = sums.join(part), factor = sums.factor_of(part);
    if (!values) return;
    if (out.empty()) out.assign((size_t)width, 0.0);
    for (int64_t c = 0; c < width; c++) out[c] = out[c] * own + (double)values[c] * factor;
  }

  // A learned sink: one more token, of value 0 and next to no radius.
  void sink(float logit) {
    const double at = (double)logit * 1.4426950408889634;
    if (!(std::fabs(at) < (double)INF)) {
      sums.broken = sums.broken || !(logit == -INF);
      return;
    }
    const double own = sums.raise(std::max(sums.ref, (float)std::ceil(at)));
    for (double& x : out) x *= own;
    const double w = std::exp2(at - sums.ref);
    sums.mass += w, sums.rho_min = 0.0f, sums.sees = true;
    sums.meet(w, SOFTMAX);
  }

  float base2_lse() const {
    return !sums.sees ? -INF : sums.broken ? NO_NUMBER : (float)(sums.ref + std::log2(sums.mass));
  }

  // sum p v of channel c: 0 where nothing is seen, no number where weights are none.
  float output(int64_t c) const {
    if (!sums.sees) return 0.0f;
    return sums.broken ? NO_NUMBER : out.empty() ? 0.0f : (float)(out[c] / sums.mass);
  }

  // The sixteen fields of AccField over `num_visible` tokens; true where there is something to measure.
  bool fields(float* acc, int64_t num_visible) const {
    if (!sums.sees || sums.broken) {
      for (int i = 0; i < NUM_FIELDS; i++) acc[i] = INF;
      return sums.sees;
    }
    const Sums& s = sums;
    const double inverse = 1.0 / s.mass, cap = SQUARE_MAX;
    const double lost_at_all = (double)std::max<int64_t>(num_visible, 1) * LOST_WEIGHT;
    const double lost = s.most == 0.0f ? 0.0 : lost_at_all;
    const double g_lost = grown(s.most), g_h = grown(s.heaviest_c), p_h = std::max(s.heaviest, 0.0) * inverse;
    const double mass_r = s.rest * inverse * SUM_UP + lost, eta_r = s.eta * inverse * SUM_UP + lost * g_lost;
    const double q_r = s.q * inverse * SUM_UP + lost * g_lost * std::min(g_lost, cap);
    const double eta = eta_r + p_h * g_h * SUM_UP, q = q_r + p_h * g_h * std::min(g_h, cap) * SUM_UP;
    const double m = std::max(s.most, s.heaviest_c), log_a = std::min(std::log1p(eta) * (1.0 + 0x1p-15), m);
    const double about[10] = {eta, q, m, p_h * (1.0 - 0x1p-12), s.heaviest_c, eta_r, q_r, s.most, mass_r, log_a};
    const double of_values[6] = {s.v2 * inverse * SUM_UP + lost_at_all * s.v_max,
                                 s.rho1 * inverse * SUM_UP + lost_at_all * s.rho_max,
                                 s.rho2 * inverse * SUM_UP + lost_at_all * s.rho_max * s.rho_max,
                                 s.rho_max * SUM_UP,
                                 s.rho_min * (1.0 - 0x1p-12),
                                 std::sqrt((double)s.v_max) * SUM_UP};
    bool known = !s.v_unknown;
    for (double x : of_values) known &= x < (double)INF;
    for (int i = 0; i < 10; i++) acc[i] = about[i] == about[i] ? (float)about[i] : INF;
    for (int i = 0; i < 6; i++) acc[10 + i] = known ? (float)of_values[i] : INF;
    return true;
  }
};

}  // namespace witcert
