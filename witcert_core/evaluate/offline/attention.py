"""Causal attention over the pool, in float32, as the meter assumes a kernel does it.

Shapes: N query rows, H query heads, Hkv KV heads (H = G Hkv), S tokens, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.meter.attention import AttentionSpec

_MAX_LOGITS = 2**24
"""Logits held at once; longer prompts are done in blocks of rows."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Outputs [N, H, Dv] in q's dtype; the N rows are the last ones of the S tokens.

    q [N, H, D], k [S, Hkv, D], v [S, Hkv, Dv].
    """
    num_rows, num_heads, dim = q.shape
    cap, window_left, sinks = spec.logits_soft_cap, spec.window_left, spec.sinks
    num_tokens, kv_heads = k.shape[0], k.shape[1]
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
    place = torch.arange(num_tokens)
    step = max(1, _MAX_LOGITS // (num_heads * num_tokens))
    parts = []
    for first in range(0, num_rows, step):
        rows = q[first : first + step].float()
        grouped = rows.view(len(rows), kv_heads, -1, dim).permute(1, 2, 0, 3)
        logits = torch.matmul(grouped, keys[:, None]) * spec.sm_scale
        if cap > 0:
            logits = cap * torch.tanh(logits / cap)
        own = place[num_tokens - num_rows + first :][: len(rows), None]
        unseen = place[None] > own
        if window_left >= 0:
            unseen |= place[None] < own - window_left
        logits = logits.masked_fill(unseen, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, len(rows), 1)
            logits = torch.cat([logits, column], -1)
        weights = torch.softmax(logits, -1)[..., :num_tokens]
        out = torch.matmul(weights, values[:, None])
        parts.append(out.permute(2, 0, 1, 3).reshape(len(rows), num_heads, -1))
    return torch.cat(parts).to(q.dtype)
