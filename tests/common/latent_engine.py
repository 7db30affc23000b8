"""A pool of latents in plain tensors, and a runtime over it, driven as by an engine whose attention is absorbed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from witcert_core.cache.packed import of_latents
from witcert_core.meter.attention import AttentionSpec
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RequestPass
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage.packed import PackedStorage

LATENT, ROPE, HEADS, SLOTS, LAYER = 64, 16, 3, 96, 0
WIDTH = LATENT + ROPE
SPEC = RotarySpec(WIDTH, rotary_dim=ROPE, latent_dim=LATENT)
SCALE = 1.2965 * 24**-0.5  # a model's own: with the square of YaRN's factor, of heads of 24 channels


class LatentPool:
    """`Pool` of one layer: rows [SLOTS, 1, WIDTH], values their first LATENT channels. Counts its writes of tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows = torch.zeros(SLOTS, 1, WIDTH, dtype=dtype)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows[slots]
        return rows, rows[..., :LATENT]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        assert torch.equal(k[..., :LATENT], v)  # nobody quantizes the latent twice
        self.rows[slots] = k

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        assert torch.equal(k[..., :LATENT], v)
        self.rows[slots, head] = k


def attention(q: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Output [H, LATENT] and weights [H, S] of q [H, WIDTH] over rows [S, WIDTH], in float64."""
    weights = (q.double() @ rows.double().T * SCALE).softmax(-1)
    return weights @ rows[:, :LATENT].double(), weights


class LatentEngine:
    """One request; `step` computes its next tokens, attends with float64 in the engine's place and compares."""

    def __init__(self, quantizer: str, dtype: torch.dtype = torch.float32, **sections: Any) -> None:
        meter = {"stride": 1, "audit_every": 1, "max_rows": 4, **sections.pop("meter", {})}
        chosen = {"name": quantizer, "storage": sections.pop("storage", "simulated")}
        policy = parse_policy({"version": 1, "quantizer": chosen, "meter": meter, **sections})
        geometry = Geometry(
            backend="test",
            total_qo_heads=HEADS,
            layers=(LAYER,),
            num_qo_heads=HEADS,
            num_kv_heads=1,
            kv_head_ids=(0,),
            head_dim=WIDTH,
            v_head_dim=LATENT,
            num_slots=SLOTS,
            pool_dtype=dtype,
            rotary=SPEC,
            device="cpu",
        )
        generator = torch.Generator().manual_seed(7)
        self.pool, self.dtype = LatentPool(dtype), dtype
        self.packed = policy.quantizer.storage == "packed"
        codes = of_latents(
            torch.zeros(SLOTS, 1, WIDTH, dtype=torch.int8),
            torch.full((SLOTS, 1, -(-WIDTH // 32)), float("inf"), dtype=torch.float16),
            LATENT,
        )
        self.runtime = Runtime("test", policy, geometry, {LAYER: codes} if self.packed else self.pool, None)
        self.exact = torch.randn(SLOTS, 1, WIDTH, generator=generator).to(dtype)
        self.exact[..., 3] += 6.0  # a channel far off, as normed latents have
        self.queries = torch.randn(SLOTS, HEADS, WIDTH, generator=generator).to(dtype)
        self.slots = torch.randperm(SLOTS, generator=generator)
        self.length = 0

    def step(self, new: int, absorbed: bool = True) -> tuple[StepCells, Tensor]:
        """`new` tokens more: the cells, and the outputs [N, HEADS, LATENT] of those that attend to latents."""
        first, self.length = self.length, self.length + new
        seen, out_slots = self.slots[: self.length], self.slots[first : self.length]
        rows = self.exact[first : self.length]
        asked = self.queries[first : self.length] if absorbed else self.queries[:1]
        self.runtime.begin([RequestPass("r", seen, new, not_followed="" if absorbed else "decompressed")], out_slots)

        def run(k: Tensor | None, v: Tensor | None) -> Tensor:
            self.pool.rows[out_slots] = rows if k is None else k
            outs = [attention(q, self.pool.rows[self.slots[: first + i + 1], 0])[0] for i, q in enumerate(asked)]
            return torch.stack(outs).to(self.dtype)

        call = AttentionCall(
            LAYER,
            asked,
            rows,
            rows[..., :LATENT],
            out_slots,
            torch.arange(first, self.length),
            AttentionSpec(SCALE),
            run,
        )
        out = self.runtime.attend(call)
        step = self.runtime.end()
        assert step is not None
        return step, out

    def stored(self, slots: Tensor) -> Tensor:
        """Rows [S, WIDTH] as attention reads them."""
        storage = self.runtime.groups[0].cache.storage
        if isinstance(storage, PackedStorage) and storage.repaired is not None:
            return storage.repaired.read(LAYER, slots)[0][:, 0]
        return storage.stored(LAYER, slots)[0][:, 0]

    def truth(self, position: int) -> tuple[Tensor, Tensor]:
        """True TV [HEADS] and latent output error [HEADS] of the row at `position`, over what is stored now."""
        q, slots = self.queries[position], self.slots[: position + 1]
        o, p = attention(q, self.exact[: position + 1, 0])
        served, stored = attention(q, self.stored(slots))
        return 0.5 * (p - stored).abs().sum(-1), (o - served).norm(dim=-1)
