"""The packed cache of a coded quantizer in an engine's pool: codes of its own, with a witness beside each token.

Attention is plain torch, over tiles that the quantizer decodes; whatever the engine does with slots (sharing a prefix,
moving them, using them again) it does with their bytes, and the witness follows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from witcert_core.cache.coded import CodedPool
from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.cache.layer_witness import LayerWitness
from witcert_core.meter.kernel_error import KernelArithmetic
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.forward import Pass
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.storage.accounts import Accounts, copies_status, unquantized
from witcert_core.serving.storage.attended import Attended, RowTokens, attends_plainly
from witcert_core.serving.storage.exact_blocks import RepairedCache
from witcert_core.serving.storage.gathered import gather
from witcert_core.serving.storage.tiles import attend_tiles


class CodedStorage:
    """The packed pool of one process and the side tensors of its slots. Part of `Storage`.

    copies: exact ones, for a gate that repairs; what it restores is read from them.
    """

    def __init__(
        self,
        policy: Policy,
        geometry: Geometry,
        pool: CodedPool,
        encoder: Encoder,
        copies: ExactCopies | None = None,
    ) -> None:
        self.geometry = geometry
        self.pool = pool
        self.accounts = Accounts(policy, geometry, pool, encoder)
        self.store = self.accounts.store
        self.repaired = None if copies is None else RepairedCache(self, copies, geometry)

    def __getitem__(self, layer: int) -> LayerWitness:
        """What is known of the errors of a layer's tokens."""
        return self.store[layer]

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that the codes in `slots` [S] stand for."""
        return self.pool.read(layer, slots)

    @property
    def bytes_side(self) -> int:
        return self.store.nbytes

    @property
    def bytes_audit(self) -> int:
        return self.store.exact_nbytes

    def begin_pass(self, now: Pass) -> None:
        if self.repaired is not None:
            self.repaired.begin_pass(now.slots)

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied the bytes of slots `source` [N] onto `target` [N]."""
        self.accounts.moved(target, source)
        if self.repaired is not None:
            self.repaired.forget(target)

    def overwritten(self, slots: Tensor) -> None:
        """The engine wrote `slots` [N] from elsewhere."""
        self.accounts.overwritten(slots)
        if self.repaired is not None:
            self.repaired.forget(slots)

    def stored(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [N, Hkv, D] and values [N, Hkv, Dv] that attention reads in `slots` [N] from now on."""
        return self.read(layer, slots)

    def status(self) -> dict[str, int]:
        copies = [] if self.repaired is None else [self.repaired.copies]
        return {**copies_status(copies), "bytes_packed_pool": self.pool.nbytes}

    @contextmanager
    def attending(self, call: AttentionCall, now: Pass) -> Iterator[Attended]:
        """Attention over codes; a chunk reads itself exactly, or as stored, and is packed either way."""
        attends_plainly(call)
        early, late = now.attends_quantized.split(call)
        if early is not None:
            self._write(early)
        if late is not None and now.plan.rows:
            self.store.keep(call.layer, late.slots, late.exact_k, late.exact_v)
        out = torch.empty(*call.q.shape[:2], self.geometry.v_head_dim, dtype=call.q.dtype, device=call.q.device)
        tile = functools.partial(self._tile, call.layer, late)
        attend_tiles(call.q, now.plan.requests, now.plan.new_tokens, tile, call.spec.sm_scale, out)
        call = replace(call, spec=replace(call.spec, arithmetic=KernelArithmetic((), call.q.dtype)))
        with ExitStack() as until_written:
            if self.repaired is not None and late is not None:
                until_written.enter_context(self.repaired.chunk(late.slots, late.exact_k, late.exact_v))
            rows = functools.partial(self._rows, call.layer, now, late)
            yield Attended(call, out.reshape(len(out), -1), out, rows, self.store.exact_k.get(call.layer))
        if late is not None:
            self._write(late)

    def _tile(self, layer: int, late: AttentionCall | None, slots: Tensor) -> tuple[Tensor, Tensor]:
        source = self if self.repaired is None else self.repaired
        found = gather([slots], self.store[layer], functools.partial(source.read, layer), late, [0])
        return found.k, found.v

    def _rows(self, layer: int, now: Pass, late: AttentionCall | None) -> RowTokens:
        """What the metered rows of a pass read, gathered once."""
        source = self if self.repaired is None else self.repaired
        asked = {row.request for row in now.plan.rows}
        requests = [slots if i in asked else slots[:0] for i, slots in enumerate(now.plan.requests)]
        read = functools.partial(source.read, layer)
        found = gather(requests, source[layer], read, late, now.plan.new_tokens)
        return found.rows(now.plan.rows, self.store.exact_k.get(layer))

    def _write(self, call: AttentionCall) -> None:
        """The call's tokens as codes, read back and accounted for."""
        accounted = False
        try:
            self.pool.store(call.layer, call.slots, call.positions, call.exact_k, call.exact_v)
            self.accounts.write(call, *unquantized(call))
            accounted = True
        finally:
            if not accounted:  # a quantizer failed, perhaps after some bytes were written: what the slots said is void
                self.store.mark_unknown(call.layer, call.slots)
        if self.repaired is not None:
            self.repaired.copies.put(call.layer, call.slots, call.exact_k, call.exact_v)
