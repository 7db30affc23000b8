// The norms of what tokens lost in a cache, rounded up to their codes, on a CPU.
#include <algorithm>
#include <vector>

#include "../native/numbers.h"

namespace witcert {

constexpr double NORM_UP = 1.0 + 0x1p-40;  // covers the float64 rounding of a norm over up to 2^10 channels
constexpr int UNKNOWN = 255;

// Mirrored field for field by `cpu.Arguments`.
struct Arguments {
  const void *exact_k, *exact_v, *stored_k, *stored_v;
  uint8_t *witness, *value_witness;
  const int64_t* slots;
  const int32_t* band;
  const double* levels;  // what each code stands for, ascending
  int64_t tokens, heads, head_dim, v_dim, bands, k_dtype, v_dtype, stored_k_dtype, stored_v_dtype, threads;
};

// The smallest code that stands for the root of `square` at least; 255 where that is no number or too large.
uint8_t code_of(double square, const double* levels) {
  const double norm = std::sqrt(square) * NORM_UP;
  if (!(norm <= levels[UNKNOWN - 1])) return UNKNOWN;
  return (uint8_t)(std::lower_bound(levels, levels + UNKNOWN, norm) - levels);
}

}  // namespace witcert

extern "C" int64_t witcert_run(const witcert::Arguments* given) {
  using namespace witcert;
  const Arguments& a = *given;
#pragma omp parallel num_threads((int)a.threads)
  {
    std::vector<double> square((size_t)a.bands);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.tokens; t++) {
      if (a.slots[t] < 0) continue;
      for (int64_t h = 0; h < a.heads; h++) {
        const int64_t from = t * a.heads + h, to = a.slots[t] * a.heads + h;
        std::fill(square.begin(), square.end(), 0.0);
        for (int64_t c = 0; c < a.head_dim; c += LANES) {
          const vf exact = numbers(a.exact_k, from * a.head_dim + c, a.k_dtype);
          const vf stored = numbers(a.stored_k, from * a.head_dim + c, a.stored_k_dtype);
          for (int i = 0; i < LANES; i++) {
            const double lost = (double)stored[i] - (double)exact[i];
            square[a.band[c + i]] += lost * lost;
          }
        }
        for (int64_t b = 0; b < a.bands; b++) a.witness[to * a.bands + b] = code_of(square[b], a.levels);
        double whole = 0.0;
        for (int64_t c = 0; c < a.v_dim; c += LANES) {
          const vf exact = numbers(a.exact_v, from * a.v_dim + c, a.v_dtype);
          const vf stored = numbers(a.stored_v, from * a.v_dim + c, a.stored_v_dtype);
          for (int i = 0; i < LANES; i++) {
            const double lost = (double)stored[i] - (double)exact[i];
            whole += lost * lost;
          }
        }
        a.value_witness[to] = code_of(whole, a.levels);
      }
    }
  }
  return a.tokens;
}
