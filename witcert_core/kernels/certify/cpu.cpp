// The meter on a CPU over a pool that another kernel attends: logits again, radii from witnesses, and the sums.
#include "../native/exact.h"

namespace witcert {

constexpr int ROWS = 16;  // of a request that share the reading of a tile
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
};

struct PoolTile : ExactTile {
  alignas(64) float residual[MAX_SIDES][TILE];  // by band, 0 where unknown
  alignas(64) float step[MAX_GROUPS][TILE];     // by group, 0 where unknown

  void read(const Arguments& a, int64_t request, int64_t kv_head, int64_t begin, int64_t end) {
    const void *keys[TILE], *values[TILE];
    int64_t line[TILE];
    const int n = (int)std::min<int64_t>(TILE, end - begin);
    const int32_t* page = a.pages.indices + a.pages.indptr[request] + begin / a.page_size;
    int64_t offset = begin % a.page_size;
    const int64_t size = size_of(a.dtype);
    for (int i = 0; i < n; i++) {
      keys[i] = (const char*)a.k + (*page * a.k_page + offset * a.k_token + kv_head * a.k_head) * size;
      if (a.v) values[i] = (const char*)a.v + (*page * a.v_page + offset * a.v_token + kv_head * a.v_head) * size;
      line[i] = (*page * a.page_size + offset) * a.kv_heads + kv_head;
      if (++offset == a.page_size) offset = 0, page++;
    }
    ExactTile::read(keys, a.head_dim, a.v ? values : nullptr, a.v_dim, n, a.dtype, true);
    for (int i = 0; i < TILE; i++) {
      const int64_t at = line[std::min(i, n - 1)];
      for (int64_t b = 0; b < a.bands; b++) {
        const float level = a.levels[a.witness[at * a.bands + b]];
        if (!(level < INF)) unknown[i] = INF;
        residual[b][i] = level < INF ? level : 0.0f;
      }
      for (int64_t g = 0, groups = (a.head_dim + 31) / 32; a.steps && g < groups; g++) {
        const float x = half_to_float(a.steps[at * groups + g]);
        const bool fine = x >= 0.0f && x < INF;
        if (!fine) unknown[i] = INF;
        step[g][i] = fine ? x : 0.0f;
      }
      const float of_value = a.v ? a.levels[a.value_witness[at]] : INF;
      if (!(of_value < INF)) v_unknown[i] = INF;
      rho[i] = of_value < INF ? of_value : 0.0f;
    }
  }
};

// A query of one head, as the radii take it.
struct Query {
  std::vector<float> norm;           // by band, times the scale
  std::vector<float> norm1, square;  // by group
  float length, tail = 0.0f;

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
    length = (float)(length_of(q, a.head_dim) * scale) * dot_error(a.head_dim) * UP16;
    if (delta > 0.0)
      tail = (float)(std::sqrt(2.0 * std::log(2.0 * (double)std::max<int64_t>(num_visible, 1) / delta)) *
                     std::sqrt((1.0 - 0x1p-16) / 12.0)) *
             1.0001f;
  }

  vf radius(const Arguments& a, const PoolTile& t, int i) const {
    vf c = load(t.key_length + i) * length;
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
             Sums* sums) {
  alignas(64) float logits[N][TILE], weights[TILE], product[TILE];
  for (int sub = 0; sub < SUB; sub++) {
    vf z[N];
    t.products<N>(sub, q, z);
    for (int m = 0; m < N; m++) {
      z[m] = z[m] * (float)a.sm_scale;
      store(logits[m] + LANES * sub, a.soft_cap > 0.0 ? soft_capped(z[m], (float)a.soft_cap) : z[m]);
    }
  }
  Tile tile(t, begin, t.count, fixed_radius(a.soft_cap));
  for (int m = 0; m < N; m++) {
    for (int j = 0; j < TILE; j += LANES) store(product + j, load(t.key_length + j) * of[m].length);
    const auto radius = [&](int i) { return of[m].radius(a, t, i); };
    tile.weigh(sums[m], spans[m], logits[m], weights, true, radius, product);
  }
}

int64_t measure_rows(const Arguments& a, const std::vector<int64_t>& rows, int64_t kv_head, PoolTile& tile) {
  const int64_t request = a.row_request[rows[0]], dim = a.head_dim;
  const int group = (int)(a.heads / a.kv_heads), pairs = (int)rows.size() * group;
  const int64_t length = a.pages.length(request, a.page_size);
  std::vector<float> q((size_t)pairs * dim);
  std::vector<Query> of;
  std::vector<Span> spans;
  std::vector<Merged> all((size_t)pairs);
  int64_t first = length, last = 0;
  for (int p = 0; p < pairs; p++) {
    const int64_t row = rows[p / group];
    const char* at = (const char*)a.q + (row * a.q_row + (kv_head * group + p % group) * a.q_head) * size_of(a.q_dtype);
    for (int64_t c = 0; c < dim; c++) q[p * dim + c] = number(at, c, a.q_dtype);
    Span sees = span_at(a.row_position[row], a.window_left);
    sees.limit = std::min(sees.limit, length);
    spans.push_back(sees);
    first = std::min(first, sees.first), last = std::max(last, sees.limit);
    of.emplace_back(a, &q[p * dim], a.steps && a.delta_loc ? a.delta_loc[row] : 0.0, sees.limit - sees.first);
  }
  for (int64_t split = first / SPLIT * SPLIT; split < last; split += SPLIT) {
    std::vector<Sums> sums((size_t)pairs);
    for (int64_t begin = split; begin < std::min(split + SPLIT, last); begin += TILE) {
      if (begin + TILE <= first) continue;
      tile.read(a, request, kv_head, begin, std::min(begin + TILE, last));
      const auto some = [&](auto n, int p) {
        measure<decltype(n)::value>(a, tile, &q[p * dim], &of[p], &spans[p], begin, &sums[p]);
      };
      by_pairs(pairs, some);
    }
    for (int p = 0; p < pairs; p++) all[p].take(sums[p], nullptr, 0);
  }
  int64_t cells = 0;
  for (int p = 0; p < pairs; p++) {
    const int64_t head = kv_head * group + p % group, cell = rows[p / group] * a.heads + head;
    const bool known = all[p].sums.sees && !all[p].sums.broken;
    const float omega = all[p].sums.omega + (float)a.engine_constant;
    if (a.sinks) all[p].sink(a.sinks[head]);
    a.lse[cell] = all[p].base2_lse();
    a.omega[cell] = known ? omega * (1.0f + 0x1p-20f) : INF;
    cells += all[p].fields(a.acc + cell * NUM_FIELDS, spans[p].limit);
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
  std::vector<std::vector<int64_t>> tasks;
  for (int64_t i : order) {
    if (tasks.empty() || tasks.back().size() == ROWS || a.row_request[tasks.back()[0]] != a.row_request[i])
      tasks.push_back({});
    tasks.back().push_back(i);
  }
  int64_t cells = 0;
#pragma omp parallel num_threads((int)a.threads) reduction(+ : cells)
  {
    std::vector<PoolTile> tile(1);
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (size_t n = 0; n < tasks.size(); n++)
      for (int64_t h = 0; h < a.kv_heads; h++) cells += measure_rows(a, tasks[n], h, tile[0]);
  }
  return cells;
}
