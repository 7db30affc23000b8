"""`quantizer: engine`: the engine writes and quantizes as it likes, and what it stored is read back and metered."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from witcert_core.cache.protocols import Pool
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.forward import Pass
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.storage.accounts import Accounts, unquantized
from witcert_core.serving.storage.attended import Attended, RowTokens
from witcert_core.serving.storage.gathered import gather


class EngineStorage:
    """The pool as a black box. `pool.read` gives what attention makes of the stored bytes, scales included.

    Whether a chunk reads its own exact keys is the engine's doing; the pass's `attends_quantized` must say what it
    does. Part of `Storage`.
    """

    def __init__(self, policy: Policy, geometry: Geometry, pool: Pool, encoder: Encoder) -> None:
        self.geometry = geometry
        self.pool = pool
        self.accounts = Accounts(policy, geometry, pool, encoder)
        self.store = self.accounts.store

    @property
    def bytes_side(self) -> int:
        return self.store.nbytes

    @property
    def bytes_audit(self) -> int:
        return self.store.exact_nbytes

    def begin_pass(self, now: Pass) -> None: ...

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied slots onto `target` [N]; whether their scales went along is not known."""
        self.overwritten(target)

    def overwritten(self, slots: Tensor) -> None:
        """Nothing is known about `slots` [N] any more."""
        self.accounts.overwritten(slots)

    @contextmanager
    def attending(self, call: AttentionCall, now: Pass) -> Iterator[Attended]:
        """The engine's attention as it is."""
        # A copy: engines divide keys by their scale in place before they store them.
        call = replace(call, exact_k=call.exact_k.clone(), exact_v=call.exact_v.clone())
        out = call.run(None, None)
        self.accounts.write(call, *unquantized(call))
        heads = out.view(-1, self.geometry.num_qo_heads, self.geometry.v_head_dim)
        rows = functools.partial(self._rows, call, now)
        yield Attended(call, out, heads, rows, self.store.exact_k.get(call.layer))

    def stored(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [N, Hkv, D] and values [N, Hkv, Dv] that attention reads in `slots` [N] from now on."""
        return self.pool.read(layer, slots)

    def status(self) -> dict[str, int]:
        return self.accounts.status()

    def _rows(self, call: AttentionCall, now: Pass) -> RowTokens:
        """A request reads exactly what it brings to the pass; what it finds in slots that another one fills in the same
        pass is not known."""
        plan, side = now.plan, self.store[call.layer]
        _, own = now.attends_quantized.split(call)
        read = functools.partial(self.pool.read, call.layer)
        found = gather(plan.requests, side, read, own, plan.new_tokens, others="unknown")
        return found.rows(plan.rows, self.store.exact_k.get(call.layer))
