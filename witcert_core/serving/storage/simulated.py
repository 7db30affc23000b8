"""Quantization simulated in the engine's own pool: what the cache would give back is what the pool holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.cache.protocols import Pool
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.forward import Pass
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.storage.accounts import Accounts, unquantized
from witcert_core.serving.storage.attended import Attended, Rewritten, nothing_rewritten
from witcert_core.serving.storage.timing import AtOnce, timing


class SimulatedStorage:
    """The engine's pool with the side tensors of every slot; the engine attends. Part of `Storage`."""

    def __init__(
        self,
        policy: Policy,
        geometry: Geometry,
        pool: Pool,
        encoder: Encoder,
        copies: ExactCopies | None = None,
        rewritten: Rewritten = nothing_rewritten,
    ) -> None:
        self.geometry = geometry
        self.pool = pool
        self.accounts = Accounts(policy, geometry, pool, encoder, copies)
        self.store = self.accounts.store
        self.timing = timing(pool, self.accounts, encoder, rewritten)
        exactly = AtOnce(pool, self.accounts, unquantized)
        quantized = policy.quantizer.layers_of(geometry.layers)
        self._timings = {layer: self.timing if layer in quantized else exactly for layer in geometry.layers}

    @property
    def bytes_side(self) -> int:
        return self.store.nbytes + self.timing.nbytes

    @property
    def bytes_audit(self) -> int:
        return self.store.exact_nbytes

    def begin_pass(self, now: Pass) -> None:
        self.timing.begin_pass(now)
        self.accounts.begin_pass(now.slots)

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied slots `source` [N] onto `target` [N]."""
        self.accounts.moved(target, source)
        self.timing.moved(target, source)

    def overwritten(self, slots: Tensor) -> None:
        """The engine wrote `slots` [N] from elsewhere."""
        self.accounts.overwritten(slots)
        self.timing.overwritten(slots)

    @contextmanager
    def attending(self, call: AttentionCall, now: Pass) -> Iterator[Attended]:
        """The engine's attention, which reads a chunk exactly or as stored."""
        with self._timings[call.layer].attending(call, now) as out:
            heads = out.view(-1, self.geometry.num_qo_heads, self.geometry.v_head_dim)
            rows = functools.partial(self.accounts.rows, call.layer, now)
            yield Attended(call, out, heads, rows, self.store.exact_k.get(call.layer))

    def stored(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [N, Hkv, D] and values [N, Hkv, Dv] that attention reads in `slots` [N] from now on."""
        return self.pool.read(layer, slots)

    def status(self) -> dict[str, int]:
        return self.accounts.status()
