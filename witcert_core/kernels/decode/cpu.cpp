// Decode attention over the packed INT8 cache on a CPU, with the meter's sums in the same pass.
#include "../native/packed.h"

namespace witcert {

constexpr int SPLITS_A_TASK = 8;

// Mirrored field for field by `cpu.Arguments`.
struct Arguments {
  Cache cache;
  Pages pages;
  const void* q;
  const float *delta_loc, *sinks;
  void* out;
  float *lse, *acc;
  int64_t q_row, q_head, batch, q_len, heads, window_left, meter, threads;
  double sm_scale, soft_cap;
};

}  // namespace witcert

// Returns how many cells see something.
extern "C" int64_t witcert_run(const witcert::Arguments* given) {
  using namespace witcert;
  const Arguments& a = *given;
  const Cache& cache = a.cache;
  const int group = (int)(a.heads / cache.kv_heads), pairs = (int)a.q_len * group;
  struct Task {
    int64_t request, first, last;  // splits
  };
  // A task takes all heads of a tile of tokens after one another: they lie side by side in memory.
  const int64_t at_once = a.threads > 1 ? 1 : SPLITS_A_TASK;
  std::vector<int64_t> splits((size_t)a.batch), offset((size_t)a.batch + 1, 0);
  std::vector<Task> tasks;
  for (int64_t b = 0; b < a.batch; b++) {
    splits[b] = (a.pages.length(b, cache.page_size) + SPLIT - 1) / SPLIT;
    offset[b + 1] = offset[b] + splits[b] * cache.kv_heads;
    for (int64_t i = 0; i < splits[b]; i += at_once) tasks.push_back({b, i, std::min<int64_t>(i + at_once, splits[b])});
  }
  std::vector<Sums> sums((size_t)offset[a.batch] * pairs);
  std::vector<float> parts((size_t)offset[a.batch] * pairs * cache.v_dim, 0.0f);
  const std::vector<char> meter((size_t)pairs, a.meter != 0);
  const auto span_of = [&](int64_t length, int p) { return span_at(length - a.q_len + p / group, a.window_left); };
#pragma omp parallel num_threads((int)a.threads)
  {
    std::vector<PackedTile> tile(1);
    std::vector<Tokens> tokens(2);
    std::vector<Queries> x;
    std::vector<Span> spans;
    std::vector<Lanes> lanes((size_t)cache.kv_heads * pairs);
    int64_t request = -1, first = 0;
#pragma omp for schedule(dynamic, 1)
    for (size_t n = 0; n < tasks.size(); n++) {
      const Task& task = tasks[n];
      const int64_t length = a.pages.length(task.request, cache.page_size);
      if (task.request != request) {
        request = task.request, first = length;
        x.clear(), spans.clear();
        for (int p = 0; p < pairs; p++) {
          spans.push_back(span_of(length, p));
          first = std::min(first, spans[p].first);
        }
        for (int64_t h = 0; h < cache.kv_heads; h++) {
          x.emplace_back(cache, h, pairs);
          for (int p = 0; p < pairs; p++) {
            const int64_t row = request * a.q_len + p / group, head = h * group + p % group;
            const char* q = (const char*)a.q + (row * a.q_row + head * a.q_head) * size_of(cache.dtype);
            x[h].set(p, q, a.sm_scale, a.delta_loc ? a.delta_loc[row] : 0.0, spans[p].limit - spans[p].first);
          }
        }
      }
      const int64_t end = std::min<int64_t>(task.last * SPLIT, length);
      int64_t begin = std::max(task.first * SPLIT, first / TILE * TILE);
      int current = 0;
      if (begin < end) tokens[0].find(cache, a.pages, request, begin, end);
      for (; begin < end; begin += TILE, current = 1 - current) {
        const Tokens &here = tokens[current], &next = tokens[1 - current];
        const bool last = begin + TILE >= end;
        tokens[current].ask(cache);
        if (!last) tokens[1 - current].find(cache, a.pages, request, begin + TILE, end), next.fetch_writers(cache);
        for (int64_t h = 0; h < cache.kv_heads; h++) {
          const size_t part = ((size_t)offset[request] + h * splits[request] + begin / SPLIT) * pairs;
          tile[0].ahead.clear(0);
          if (!last)
            next.lines(cache, (int)(h * TILE / cache.kv_heads), (int)((h + 1) * TILE / cache.kv_heads), tile[0].ahead);
          tile[0].read(cache, here, h, a.meter);
          attend_packed(tile[0], x[h], begin, spans.data(), (const bool*)meter.data(), a.sm_scale, a.soft_cap,
                        &sums[part], &lanes[(size_t)h * pairs], &parts[part * cache.v_dim]);
          if (last || (begin + TILE) % SPLIT == 0)
            for (int p = 0; p < pairs; p++) sums[part + p].take(lanes[(size_t)h * pairs + p], a.meter);
        }
      }
    }
  }
  int64_t cells = 0;
  for (int64_t b = 0; b < a.batch; b++)
    for (int64_t h = 0; h < cache.kv_heads; h++)
      for (int p = 0; p < pairs; p++) {
        const int64_t head = h * group + p % group, cell = (b * a.q_len + p / group) * a.heads + head;
        Merged all;
        for (int64_t i = 0; i < splits[b]; i++) {
          const size_t part = ((size_t)offset[b] + h * splits[b] + i) * pairs + p;
          all.take(sums[part], &parts[part * cache.v_dim], cache.v_dim);
        }
        if (a.sinks) all.sink(a.sinks[head]);
        for (int64_t c = 0; c < cache.v_dim; c++) put(a.out, cell * cache.v_dim + c, all.output(c), cache.dtype);
        a.lse[cell] = all.base2_lse();
        const Span seen = span_of(a.pages.length(b, cache.page_size), p);
        if (a.meter) cells += all.fields(a.acc + cell * NUM_FIELDS, seen.limit);
      }
  return cells;
}
