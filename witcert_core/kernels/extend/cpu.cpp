// Extend attention on a CPU: a packed prefix, then the chunk's own exact keys, causal; rows asked for are measured.
#include "../native/exact.h"
#include "../native/packed.h"

namespace witcert {

constexpr int ROWS = 16;  // of a request that share the reading of a tile

// Mirrored field for field by `cpu.Arguments`.
struct Arguments {
  Cache cache;
  Pages pages;
  const void *q, *k_new, *v_new;
  const int32_t *qo_indptr, *meter_rows;
  const float *delta_loc, *sinks;
  void* out;
  float *lse, *acc;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head, batch, heads, metered, window_left, threads;
  double sm_scale, soft_cap;
};

// `N` pairs from `p` over a tile of exact tokens that begins at position `begin`.
template <int N>
void attend_exact(const Arguments& a, const ExactTile& t, const float* q, int p, int64_t begin, const Span* spans,
                  const bool* meter, Sums* sums, Lanes* lanes, float* out) {
  alignas(64) float logits[N][TILE], weights[N][TILE];
  float factor[N];
  const int64_t dim = a.cache.head_dim, width = a.cache.v_dim;
  const float unit = std::fabs((float)a.sm_scale) * chain_error(dim);
  t.logits<N>(q + p * dim, (float)a.sm_scale, a.soft_cap, logits);
  Tile tile(t, begin, t.count, fixed_radius(a.soft_cap));
  for (int m = 0; m < N; m++) {
    const float length = meter[p + m] ? t.length_of(q + (p + m) * dim) * unit : 0.0f;
    const auto radius = [&](int i) { return load(t.key_length + i) * length; };
    factor[m] = tile.weigh(sums[p + m], lanes[p + m], spans[p + m], logits[m], weights[m], meter[p + m], radius);
  }
  add_values<N>(out + p * width, width, 0, width, t.count, weights, factor,
                [&](int i, int64_t c) { return load(t.value[i] + c); });
}

struct Work {
  Tokens tokens;
  PackedTile packed;
  ExactTile exact;
};

// A row of a chunk and the index it is measured under, or -1; a row may be measured more than once.
struct Entry {
  int64_t row, which;
};

// Some rows of a request's chunk, in order, for one KV head.
int64_t attend_rows(const Arguments& a, int64_t request, int64_t kv_head, const std::vector<Entry>& entries,
                    Work& work) {
  const Cache& cache = a.cache;
  const int64_t low = a.qo_indptr[request], prefix = a.pages.length(request, cache.page_size), dim = cache.head_dim;
  const int group = (int)(a.heads / cache.kv_heads), pairs = (int)entries.size() * group;
  const int64_t size = size_of(cache.dtype), width = cache.v_dim;
  Queries x(cache, kv_head, pairs);
  std::vector<float> q((size_t)pairs * dim), parts((size_t)pairs * width);
  std::vector<Span> spans;
  std::vector<char> meter;
  std::vector<Sums> sums;
  std::vector<Lanes> lanes((size_t)pairs);
  std::vector<Merged> all((size_t)pairs);
  const int64_t last = entries.back().row + 1;
  int64_t begin_seen = prefix + last;
  for (int p = 0; p < pairs; p++) {
    const int64_t own = entries[p / group].row, row = low + own, which = entries[p / group].which;
    const char* at = (const char*)a.q + (row * a.q_row + (kv_head * group + p % group) * a.q_head) * size;
    spans.push_back(span_at(prefix + own, a.window_left));
    begin_seen = std::min(begin_seen, spans[p].first);
    meter.push_back(which >= 0);
    const double delta = which >= 0 && a.delta_loc ? a.delta_loc[which] : 0.0;
    x.set(p, at, a.sm_scale, delta, std::max<int64_t>(prefix - spans[p].first, 1));
    for (int64_t c = 0; c < dim; c++) q[p * dim + c] = number(at, c, cache.dtype);
  }
  const bool some = std::any_of(meter.begin(), meter.end(), [](char y) { return y; });
  const bool* of_meter = (const bool*)meter.data();
  const auto merge = [&] {
    for (int p = 0; p < pairs; p++) {
      sums[p].take(lanes[p], meter[p]);
      all[p].take(sums[p], &parts[(size_t)p * width], width);
    }
  };
  const auto start = [&] {
    sums.assign((size_t)pairs, Sums());
    std::fill(parts.begin(), parts.end(), 0.0f);
  };
  for (int64_t split = begin_seen / SPLIT * SPLIT; split < prefix; split += SPLIT) {
    start();
    const int64_t end = std::min(split + SPLIT, prefix);
    for (int64_t begin = split; begin < end; begin += TILE) {
      if (begin + TILE <= begin_seen) continue;
      work.tokens.find(cache, a.pages, request, begin, end);
      work.tokens.ask(cache);
      work.packed.read(cache, work.tokens, kv_head, some);
      attend_packed(work.packed, x, begin, spans.data(), of_meter, a.sm_scale, a.soft_cap, sums.data(), lanes.data(),
                    parts.data());
    }
    merge();
  }
  const char* keys = (const char*)a.k_new + (low * a.k_row + kv_head * a.k_head) * size;
  const char* values = (const char*)a.v_new + (low * a.v_row + kv_head * a.v_head) * size;
  for (int64_t split = std::max<int64_t>(begin_seen - prefix, 0) / SPLIT * SPLIT; split < last; split += SPLIT) {
    start();
    for (int64_t begin = split; begin < std::min(split + SPLIT, last); begin += TILE) {
      if (prefix + begin + TILE <= begin_seen) continue;
      const int count = (int)std::min<int64_t>(TILE, last - begin);
      const void *key[TILE], *value[TILE];
      for (int i = 0; i < count; i++) {
        key[i] = keys + (begin + i) * a.k_row * size;
        value[i] = values + (begin + i) * a.v_row * size;
      }
      work.exact.read_keys(key, dim, 0, count, cache.dtype, some);
      work.exact.read_values(value, width, cache.dtype, some);
      const auto args = [&](auto n, int p) {
        attend_exact<decltype(n)::value>(a, work.exact, q.data(), p, prefix + begin, spans.data(), of_meter,
                                         sums.data(), lanes.data(), parts.data());
      };
      by_pairs(pairs, args);
    }
    merge();
  }
  int64_t cells = 0;
  for (int p = 0; p < pairs; p++) {
    const int64_t row = low + entries[p / group].row, head = kv_head * group + p % group, cell = row * a.heads + head;
    if (a.sinks) all[p].sink(a.sinks[head]);
    for (int64_t c = 0; c < width; c++) put(a.out, cell * width + c, all[p].output(c), cache.dtype);
    a.lse[cell] = all[p].base2_lse();
    if (meter[p])
      cells += all[p].fields(a.acc + (entries[p / group].which * a.heads + head) * NUM_FIELDS, spans[p].limit);
  }
  return cells;
}

}  // namespace witcert

// Returns how many cells were measured.
extern "C" int64_t witcert_run(const witcert::Arguments* given) {
  using namespace witcert;
  const Arguments& a = *given;
  struct Task {
    int64_t request, kv_head;
    std::vector<Entry> entries;
  };
  std::vector<std::vector<int64_t>> measured((size_t)a.qo_indptr[a.batch]);
  for (int64_t i = 0; i < a.metered; i++) measured[a.meter_rows[i]].push_back(i);
  std::vector<Task> tasks;
  for (int64_t b = 0; b < a.batch; b++)
    for (int64_t first = 0, rows = a.qo_indptr[b + 1] - a.qo_indptr[b]; first < rows; first += ROWS) {
      std::vector<Entry> entries;
      for (int64_t row = first; row < std::min<int64_t>(first + ROWS, rows); row++) {
        const std::vector<int64_t>& own = measured[a.qo_indptr[b] + row];
        if (own.empty()) entries.push_back({row, -1});
        for (int64_t which : own) entries.push_back({row, which});
      }
      for (int64_t h = 0; h < a.cache.kv_heads; h++) tasks.push_back({b, h, entries});
    }
  int64_t cells = 0;
#pragma omp parallel num_threads((int)a.threads) reduction(+ : cells)
  {
    std::vector<Work> work(1);
#pragma omp for schedule(dynamic, 1)
    for (size_t n = 0; n < tasks.size(); n++)
      cells += attend_rows(a, tasks[n].request, tasks[n].kv_head, tasks[n].entries, work[0]);
  }
  return cells;
}
