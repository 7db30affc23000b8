// The meter on a CPU over a pool that another kernel attends: logits again, radii from witnesses, and the sums.
#include "../native/exact.h"
#include "../native/places.h"

namespace witcert {

constexpr int ROWS = 16;  // of a request that share the reading of a tile
constexpr uint8_t UNKNOWN = 255;
constexpr float CERTAIN = 0.5f * (1.0f + 0x1p-15f) * UP16, LIKELY = (0x1p-9f + 0x1p-16f) * UP16;

// Mirrored field for field by `cpu.Arguments`.
struct Arguments {
  Pages pages;
  const void *q, *k, *v;
  const uint8_t *witness, *value_witness;
  const uint16_t* steps;
  const int32_t* band;
  const float *levels, *delta_loc;
  const int32_t *row_request, *row_position;
  const float* sinks;
  float *acc, *omega, *lse;
  int64_t q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head;
  int64_t rows, heads, kv_heads, head_dim, v_dim, page_size, bands, q_dtype, dtype, window_left, threads;
  double sm_scale, soft_cap, engine_constant;

  Paged keys() const { return paged(k, k_page, k_token, k_head, head_dim); }
  Paged values() const { return paged(v, v_page, v_token, v_head, v_dim); }

 private:
  Paged paged(const void* at, int64_t page, int64_t token, int64_t head, int64_t channels) const {
    const int64_t size = size_of(dtype);
    return {(const char*)at, page * size, token * size, head * size, channels * size};
  }
};

struct PoolTile : ExactTile {
  alignas(64) float residual[MAX_SIDES][TILE];  // by band, 0 where unknown
  alignas(64) float step[MAX_GROUPS][TILE];     // by group, 0 where unknown

  void read(const Arguments& a, const Places& t, int64_t kv_head, int seen) {
    const void* keys[TILE];
    int64_t line[TILE];
    const int64_t size = size_of(a.dtype);
    for (int i = 0; i < TILE; i++) {
      keys[i] = (const char*)a.k + t.k[i] + kv_head * a.k_head * size;
      line[i] = t.slot[i] * a.kv_heads + kv_head;
    }
    read_keys(keys, a.head_dim, seen, t.count, a.dtype, true);
    for (int i = 0; a.v && i < t.count; i++)
      v_square[i] = square_of((const char*)a.v + t.v[i] + kv_head * a.v_head * size, a.v_dim, a.dtype);
    alignas(64) uint8_t codes[MAX_SIDES][TILE], of_value[TILE];
    for (int i = 0; i < TILE; i++) {
      for (int64_t b = 0; b < a.bands; b++) codes[b][i] = a.witness[line[i] * a.bands + b];
      of_value[i] = a.v ? a.value_witness[line[i]] : UNKNOWN;
    }
    for (int64_t b = 0; b < a.bands; b++) known_of(codes[b], a.levels, residual[b], unknown);
    known_of(of_value, a.levels, rho, v_unknown);
    sort_out_values();
    for (int i = 0; a.steps && i < TILE; i++)
      for (int64_t g = 0, groups = (a.head_dim + 31) / 32; g < groups; g++) {
        const float x = half_to_float(a.steps[line[i] * groups + g]);
        const bool fine = x >= 0.0f && x < INF;
        if (!fine) unknown[i] = INF;
        step[g][i] = fine ? x : 0.0f;
      }
  }

 private:
  // What codes stand for, 0 where it is infinite, which `never` is told.
  static void known_of(const uint8_t* codes, const float* levels, float* to, float* never) {
    for (int i = 0; i < TILE; i += LANES) {
      const vf level = looked_up(levels, codes + i);
      const vi fine = level < INF;
      store(to + i, fine ? level : splat(0.0f));
      store(never + i, fine ? load(never + i) : splat(INF));
    }
  }
};

// A query of one head, as the radii take it.
struct Query {
  std::vector<float> norm;           // by band, times the scale
  std::vector<float> norm1, square;  // by group
  float tail = 0.0f;

  Query(const Arguments& a, const float* q, double delta, int64_t num_visible) {
    const double scale = std::fabs(a.sm_scale);
    std::vector<double> of_band((size_t)a.bands), sum1((size_t)(a.head_dim + 31) / 32), sum2(sum1.size());
    for (int64_t c = 0; c < a.head_dim; c++) {
      const double x = q[c];
      of_band[a.band[c]] += x * x, sum1[c / 32] += std::fabs(x), sum2[c / 32] += x * x;
    }
    for (double x : of_band) norm.push_back((float)(std::sqrt(x) * scale) * UP16 * UP16);
    for (double x : sum1) norm1.push_back((float)(x * scale) * UP16);
    for (double x : sum2) square.push_back((float)(x * scale * scale) * UP16);
    if (delta > 0.0)
      tail = (float)(std::sqrt(2.0 * std::log(2.0 * (double)std::max<int64_t>(num_visible, 1) / delta)) *
                     std::sqrt((1.0 - 0x1p-16) / 12.0)) *
             1.0001f;
  }

  // `c`: of the product.
  vf radius(const Arguments& a, const PoolTile& t, int i, vf c) const {
    for (int64_t b = 0; b < a.bands; b++) c += load(t.residual[b] + i) * norm[b];
    if (a.steps) {
      vf l1 = splat(0.0f), variance = l1;
      for (size_t g = 0; g < norm1.size(); g++) {
        const vf s = load(t.step[g] + i);
        l1 += s * norm1[g], variance += s * s * square[g];
      }
      vf own = l1 * CERTAIN;
      if (tail > 0.0f) own = smaller(root(variance) * tail + l1 * LIKELY, own);
      c += own * UP16;
    }
    return c * UP16;
  }
};

template <int N>
void measure(const Arguments& a, const PoolTile& t, const float* q, const Query* of, const Span* spans, int64_t begin,
             Sums* sums, Lanes* lanes) {
  alignas(64) float logits[N][TILE], weights[TILE], product[TILE], both[TILE];
  t.logits<N>(q, (float)a.sm_scale, a.soft_cap, logits);
  // The engine may add products in any order, and truncate.
  const float scale = std::fabs((float)a.sm_scale), own = chain_error(a.head_dim), engine = dot_error(a.head_dim);
  Tile tile(t, begin, t.count, fixed_radius(a.soft_cap));
  for (int m = 0; m < N; m++) {
    const float length = t.length_of(q + m * a.head_dim) * scale;
    for (int j = 0; j < TILE; j += LANES) {
      const vf x = load(t.key_length + j) * length;
      store(product + j, x * own), store(both + j, x * ((own + engine) * UP16));
    }
    const auto radius = [&](int i) { return of[m].radius(a, t, i, load(product + i)); };
    tile.weigh(sums[m], lanes[m], spans[m], logits[m], weights, true, radius, both);
  }
}

// Rows of one request, and heads that are taken one after the other at every tile: they lie side by side in memory.
struct Task {
  std::vector<int64_t> rows;
  int64_t first_head, heads;
};

// What is known of a KV head's (row, query head) pairs.
struct Pairs {
  std::vector<float> q;
  std::vector<Query> of;
  std::vector<Sums> sums;
  std::vector<Lanes> lanes;
  std::vector<Merged> all;
};

int64_t measure_rows(const Arguments& a, const Task& task, PoolTile& tile, Places* places) {
  const int64_t request = a.row_request[task.rows[0]], dim = a.head_dim;
  const int group = (int)(a.heads / a.kv_heads), pairs = (int)task.rows.size() * group;
  const int64_t length = a.pages.length(request, a.page_size);
  std::vector<Span> spans;
  int64_t first = length, last = 0;
  for (int p = 0; p < pairs; p++) {
    Span sees = span_at(a.row_position[task.rows[p / group]], a.window_left);
    sees.limit = std::min(sees.limit, length);
    spans.push_back(sees);
    first = std::min(first, sees.first), last = std::max(last, sees.limit);
  }
  std::vector<Pairs> of_head((size_t)task.heads);
  for (int64_t h = 0; h < task.heads; h++) {
    Pairs& x = of_head[h];
    x.q.resize((size_t)pairs * dim), x.sums.resize((size_t)pairs), x.lanes.resize((size_t)pairs),
        x.all.resize((size_t)pairs);
    for (int p = 0; p < pairs; p++) {
      const int64_t row = task.rows[p / group], head = (task.first_head + h) * group + p % group;
      const char* at = (const char*)a.q + (row * a.q_row + head * a.q_head) * size_of(a.q_dtype);
      for (int64_t c = 0; c < dim; c++) x.q[p * dim + c] = number(at, c, a.q_dtype);
      const double delta = a.steps && a.delta_loc ? a.delta_loc[row] : 0.0;
      x.of.emplace_back(a, &x.q[p * dim], delta, spans[p].limit - spans[p].first);
    }
  }
  const auto find = [&](Places& to, int64_t begin) {
    to.find(a.pages, request, a.page_size, begin, std::min(begin + TILE, last), a.keys(), a.values());
  };
  const auto merge = [&] {
    for (Pairs& x : of_head)
      for (int p = 0; p < pairs; p++) {
        x.sums[p].take(x.lanes[p], true);
        x.all[p].take(x.sums[p], nullptr, 0), x.sums[p] = Sums();
      }
  };
  int64_t begin = first / TILE * TILE;
  if (begin < last) find(places[0], begin);
  for (int current = 0; begin < last; begin += TILE, current = 1 - current) {
    Places& next = places[1 - current];
    const bool more = begin + TILE < last;
    if (more) find(next, begin + TILE);
    for (int64_t h = 0; h < task.heads; h++) {
      const int from = (int)(h * TILE / task.heads), to = (int)((h + 1) * TILE / task.heads);
      if (more) {
        // Little is computed of much memory: waiting for it now is faster than prefetching it meanwhile.
        char all = 0;
        const auto each = [&](const char* at) { all |= *at; };
        next.lines(from, to, a.keys(), a.values(), task.first_head, task.heads, each);
        next.lines(from, to, a.witness, a.kv_heads * a.bands, each);
        asm volatile("" ::"r"(all));
      }
      tile.read(a, places[current], task.first_head + h, (int)std::max<int64_t>(first - begin, 0));
      Pairs& x = of_head[h];
      const auto some = [&](auto n, int p) {
        measure<decltype(n)::value>(a, tile, &x.q[p * dim], &x.of[p], &spans[p], begin, &x.sums[p], &x.lanes[p]);
      };
      by_pairs(pairs, some);
    }
    if ((begin + TILE) % SPLIT == 0) merge();
  }
  merge();
  int64_t cells = 0;
  for (int64_t h = 0; h < task.heads; h++)
    for (int p = 0; p < pairs; p++) {
      Merged& all = of_head[h].all[p];
      const int64_t head = (task.first_head + h) * group + p % group, cell = task.rows[p / group] * a.heads + head;
      const bool known = all.sums.sees && !all.sums.broken;
      const float omega = all.sums.omega + (float)a.engine_constant;
      if (a.sinks) all.sink(a.sinks[head]);
      a.lse[cell] = all.base2_lse();
      a.omega[cell] = known ? omega * (1.0f + 0x1p-20f) : INF;
      cells += all.fields(a.acc + cell * NUM_FIELDS, spans[p].limit);
    }
  return cells;
}

}  // namespace witcert

// Returns how many cells were measured.
extern "C" int64_t witcert_run(const witcert::Arguments* given) {
  using namespace witcert;
  const Arguments& a = *given;
  std::vector<int64_t> order((size_t)a.rows);
  for (int64_t i = 0; i < a.rows; i++) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t x, int64_t y) { return a.row_request[x] < a.row_request[y]; });
  std::vector<Task> tasks;
  const int64_t heads = a.threads > 1 ? 1 : a.kv_heads;
  for (int64_t n = 0; n < a.rows;) {
    std::vector<int64_t> rows{order[n++]};
    while (n < a.rows && rows.size() < ROWS && a.row_request[order[n]] == a.row_request[rows[0]])
      rows.push_back(order[n++]);
    for (int64_t h = 0; h < a.kv_heads; h += heads) tasks.push_back({rows, h, heads});
  }
  int64_t cells = 0;
#pragma omp parallel num_threads((int)a.threads) reduction(+ : cells)
  {
    std::vector<PoolTile> tile(1);
    std::vector<Places> places(2);
#pragma omp for schedule(dynamic, 1)
    for (size_t n = 0; n < tasks.size(); n++) cells += measure_rows(a, tasks[n], tile[0], places.data());
  }
  return cells;
}
