// Where 64 tokens of a request lie in paged tensors, for all heads of a token.
#pragma once
#include "attention.h"

namespace witcert {

// A tensor [page][token][head][channel]: its strides, and what a head's channels take, in bytes.
struct Paged {
  const char* base;
  int64_t page, token, head, row;
};

struct Places {
  int64_t slot[TILE], k[TILE], v[TILE];  // bytes from the beginning of K and of V
  int count;

  // Tokens begin .. end - 1, 64 at most; the last one stands in for those that there are not.
  void find(const Pages& pages, int64_t request, int64_t page_size, int64_t begin, int64_t end, const Paged& of_k,
            const Paged& of_v) {
    count = (int)std::min<int64_t>(TILE, end - begin);
    const int32_t* page = pages.indices + pages.indptr[request] + begin / page_size;
    int64_t offset = begin % page_size;
    for (int i = 0; i < count; i++) {
      slot[i] = *page * page_size + offset;
      k[i] = *page * of_k.page + offset * of_k.token, v[i] = *page * of_v.page + offset * of_v.token;
      if (++offset == page_size) offset = 0, page++;
    }
    for (int i = count; i < TILE; i++) slot[i] = slot[i - 1], k[i] = k[i - 1], v[i] = v[i - 1];
  }

  // Every line of some of them, of heads from `head` on, in the order of memory.
  template <class Each>
  void lines(int first, int last, const Paged& of_k, const Paged& of_v, int64_t head, int64_t heads, Each each) const {
    const auto rows = [&](const Paged& of, int64_t at) {
      const int64_t together = of.head == of.row ? heads : 1;
      for (int64_t h = head; h < head + heads; h += together)
        for (int64_t c = 0; c < together * of.row; c += 64) each(of.base + at + h * of.head + c);
    };
    for (int i = first; i < std::min(last, count); i++) {
      rows(of_k, k[i]);
      if (of_v.base) rows(of_v, v[i]);
    }
  }

  // The same for `bytes` of every slot in a tensor beside them, if there is one.
  template <class Each>
  void lines(int first, int last, const void* side, int64_t bytes, Each each) const {
    for (int i = first; side && i < std::min(last, count); i++)
      for (int64_t c = 0; c < bytes; c += 64) each((const char*)side + slot[i] * bytes + c);
  }
};

}  // namespace witcert
