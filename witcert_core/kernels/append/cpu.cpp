// The INT8 writer on a CPU: what append/reference.py stores, code for code, in one pass over each token.
#include "../native/packed.h"

namespace witcert {

constexpr int GROUP = 32;
constexpr double INFINITE = std::numeric_limits<double>::infinity();

// Mirrored field for field by `cpu.Arguments`.
struct Arguments {
  Cache cache;
  const void *key, *value;
  const int64_t* slots;
  int64_t key_token, key_head, value_token, value_head, tokens, threads;
};

// The smallest float16 s >= 0 with 127 s >= amax; infinite where amax is no number or beyond what float16 can scale.
uint16_t scale_of(double amax) {
  if (!(amax <= 65504.0 * 127.0)) return 0x7C00;
  // Through float32 a number may round twice, which the comparison below makes good in either direction.
  uint16_t bits = float_to_half((float)(amax / 127.0));
  while (bits > 0 && (double)half_to_float(bits - 1) * 127.0 >= amax) bits--;
  while ((double)half_to_float(bits) * 127.0 < amax) bits++;
  return bits;
}

// Codes and scales of `n` channels x with dither u, 32 to a group; the witness of each group if wanted.
void encode(const float* x, const float* u, int64_t n, int8_t* codes, uint16_t* scales, uint8_t* witness) {
  for (int64_t first = 0; first < n; first += GROUP, x += GROUP, u += GROUP, codes += GROUP) {
    const int count = (int)std::min<int64_t>(GROUP, n - first);
    const int64_t g = first / GROUP;
    vf most = splat(0.0f);
    vi wrong = splat(0);
    for (int i = 0; i < count; i += LANES) {
      const vf size = larger(load(x + i), -load(x + i));
      wrong |= ~(size < INF) | (load(x + i) != load(x + i));
      most = larger(size, most);
    }
    scales[g] = scale_of(any(wrong) ? INFINITE : (double)largest(most));
    const double s = half_to_float(scales[g]);
    const bool usable = s > 0.0 && s < INFINITE;
    if (!usable) std::fill(codes, codes + count, (int8_t)0);
    // One step a loop, so that each is done in vectors.
    double code[GROUP];
    for (int i = 0; usable && i < count; i++) code[i] = std::nearbyint((double)x[i] / s + (double)u[i]);
    for (int i = 0; usable && i < count; i++) codes[i] = (int8_t)code[i];
    if (!witness) continue;
    double square[GROUP] = {}, whole = 0.0;
    for (int i = 0; usable && i < count; i++) {
      const double residual = (double)(float)(s * (code[i] - (double)u[i])) - (double)x[i];
      square[i] = residual * residual;
    }
    for (int part = 0; part < 8; part++)
      whole += (square[part] + square[part + 8]) + (square[part + 16] + square[part + 24]);
    const double unit = s * (std::sqrt((double)GROUP) / 510.0);
    const double steps = usable ? std::ceil(std::sqrt(whole) * (1.0 + 0x1p-48) / unit * (1.0 + 0x1p-40)) : 0.0;
    witness[g] = s < INFINITE ? (uint8_t)std::min(steps, 255.0) : 255;
  }
}

}  // namespace witcert

extern "C" int64_t witcert_run(const witcert::Arguments* given) {
  using namespace witcert;
  const Arguments& a = *given;
  const Cache& to = a.cache;
  // The cache is read through pointers to const everywhere but here.
  int8_t *k = const_cast<int8_t*>(to.k), *v = const_cast<int8_t*>(to.v);
  uint16_t *k_scales = const_cast<uint16_t*>(to.k_scales), *v_scales = const_cast<uint16_t*>(to.v_scales);
  uint8_t* witness = const_cast<uint8_t*>(to.witness);
#pragma omp parallel num_threads((int)a.threads)
  {
    std::vector<float> u((size_t)to.kv_heads * MAX_DIM);
    float x[MAX_DIM];
    const float none[MAX_DIM] = {};
    int64_t drawn = -1;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.tokens; t++) {
      const int64_t slot = a.slots[t];
      if (slot < 0) continue;
      const int64_t page = slot / to.page_size, offset = slot % to.page_size, pass = (uint32_t)to.pass_ids[slot];
      for (int64_t h = 0; pass != drawn && h < to.kv_heads; h++)
        for (int64_t block = 0; 16 * block < to.head_dim; block++) {
          const Words w = philox(splat_word((uint32_t)pass), (uint32_t)to.layer, (uint32_t)to.head_ids[h],
                                 (uint32_t)block, to.seed);
          for (int i = 0; i < 16; i++) {
            const int64_t c = 16 * block + i;
            const bool spared = to.keep && c < to.head_dim && !to.keep[h * to.head_dim + c];
            u[h * MAX_DIM + c] = spared ? 0.0f : dither_of(w, i);
          }
        }
      drawn = pass;
      for (int64_t h = 0; h < to.kv_heads; h++) {
        const int64_t line = slot * to.kv_heads + h;
        for (int64_t c = 0; c < to.head_dim; c += LANES)
          store(x + c, numbers(a.key, t * a.key_token + h * a.key_head + c, to.dtype));
        for (int64_t c = 0; c < to.bypassed; c++) {
          float& spared = x[to.channels[h * to.bypassed + c]];
          put(const_cast<void*>(to.bypass), line * to.bypassed + c, spared, to.dtype);
          spared = 0.0f;
        }
        encode(x, &u[h * MAX_DIM], to.head_dim, k + page * to.k_page + offset * to.k_token + h * to.k_head,
               k_scales + line * to.groups(), witness ? witness + line * to.groups() : nullptr);
        for (int64_t c = 0; c < to.v_dim; c += LANES)
          store(x + c, numbers(a.value, t * a.value_token + h * a.value_head + c, to.dtype));
        encode(x, none, to.v_dim, v + page * to.v_page + offset * to.v_token + h * to.v_head,
               v_scales + line * to.v_groups(), nullptr);
      }
    }
  }
  return a.tokens;
}
