"""The packed INT8 cache in an engine's pool: encodes what is written and attends over codes.

In plain torch, or in the kernels of this package. Beside a gate that repairs, the kernels still write, and serve the
requests of which the gate looks at no row; the rows it looks at, and so those that read what it restored, are attended
in torch, which reads no more tokens than a request sees.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from witcert_core.cache.packed import PackedKV
from witcert_core.errors import UnsupportedError
from witcert_core.meter.kernel_error import KernelArithmetic
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.packed import PackedKernels
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.forward import Pass
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.storage.accounts import copies_status
from witcert_core.serving.storage.attended import Attended, attends_plainly
from witcert_core.serving.storage.exact_blocks import RepairedCache
from witcert_core.serving.storage.gathered import Gathered, gather
from witcert_core.serving.storage.outliers import OutlierChoice


class PackedStorage:
    """The packed pool of one scheduler process; `layers` are its buffers by global layer id. Part of `Storage`.

    kernels: what writes and attends in the place of torch. repaired: the same cache with exact blocks beside it, for a
    gate that repairs in the `gated` layers.
    """

    bytes_side = 0  # codes, scales and witnesses are the pool itself

    def __init__(
        self,
        policy: Policy,
        geometry: Geometry,
        cache: PackedKV,
        encoder: Encoder,
        kernels: PackedKernels | None = None,
        repaired: RepairedCache | None = None,
    ) -> None:
        pairs = encoder.quantizer.bypass_pairs
        if pairs and any(layer.k_bypass is None for layer in cache.layers.values()):
            raise UnsupportedError(
                f"quantizer {encoder.quantizer.name!r} keeps {pairs} channel pairs in 16 bit, for which the pool of "
                f"{geometry.backend} has no room; name a quantizer without bypass"
            )
        self.geometry = geometry
        self.cache = cache
        self.encoder = encoder
        self.kernels = kernels
        self.repaired = repaired
        self.metered_layers = frozenset(policy.meter.layers_of(geometry.layers))
        self.outliers = OutlierChoice(cache)
        self.exact_k: dict[int, Tensor] = {}
        if policy.meter.audit_every > 0:
            shape = (geometry.num_slots, geometry.num_kv_heads, geometry.head_dim)
            self.exact_k = {
                layer: torch.zeros(shape, dtype=geometry.pool_dtype, device=geometry.device)
                for layer in geometry.layers
            }

    @property
    def bytes_audit(self) -> int:
        return sum(t.nbytes for t in self.exact_k.values())

    def begin_pass(self, now: Pass) -> None:
        if self.kernels is not None:
            self.kernels.begin_pass(now)
        if self.repaired is not None:
            self.repaired.begin_pass(now.slots)

    def moved(self, target: Tensor, source: Tensor) -> None:
        """Refused for any slots [N]: engines copy codes without their scales and rows."""
        raise UnsupportedError(
            "the engine copied rows of the packed pool without their scales; what they hold is unknown"
        )

    def overwritten(self, slots: Tensor) -> None:
        """Refused for any `slots` [N]: engines restore codes without their scales and rows."""
        raise UnsupportedError(
            "the engine restored rows of the packed pool without their scales; what they hold is unknown"
        )

    def stored(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that the codes in `slots` [N] stand for."""
        return self.cache.read(layer, slots)

    def status(self) -> dict[str, int]:
        copies = [] if self.repaired is None else [self.repaired.copies]
        return {**copies_status(copies), "bytes_packed_pool": self.cache.nbytes}

    @contextmanager
    def attending(self, call: AttentionCall, now: Pass) -> Iterator[Attended]:
        """Attention over codes, [N, H * Dv]; a chunk reads itself exactly, or as stored, and is packed either way."""
        if call.layer in self.exact_k:
            self.exact_k[call.layer][call.slots] = call.exact_k
        for earlier in self._choose_channels(call):
            self._write(earlier)
        early, late = now.attends_quantized.split(call)
        if early is not None:
            self._write(early)
            self._copy(early)
        in_torch = self._in_torch(call.layer, now, len(call.q))
        if not in_torch and self.kernels is not None:
            metered = call.layer in self.metered_layers
            yield self.kernels.attend(call, now, self._new_output(call), metered, self.exact_k.get(call.layer))
            if late is not None:  # which is packed already
                self._copy(late)
            return
        out = self._new_output(call)
        if self.kernels is not None:
            self.kernels.attend_some(call, now, set(range(len(now.plan.requests))) - set(in_torch), out)
        call = replace(call, spec=replace(call.spec, arithmetic=KernelArithmetic((), call.q.dtype)))  # of `attend`
        read = self._gather(call, now, late, in_torch)
        attend(call.q, read, now.plan.new_tokens, call.spec.sm_scale, in_torch, out)
        with ExitStack() as until_written:
            if self.repaired is not None and late is not None:
                until_written.enter_context(self.repaired.chunk(late.slots, late.exact_k, late.exact_v))
            exact_k = self.exact_k.get(call.layer)
            rows = functools.partial(read.rows, now.plan.rows, exact_k)
            yield Attended(call, out.reshape(len(out), -1), out, rows, exact_k)
        if late is not None:
            self._write(late)
            self._copy(late)

    def _new_output(self, call: AttentionCall) -> Tensor:
        return torch.empty(*call.q.shape[:2], self.geometry.v_head_dim, dtype=call.q.dtype, device=call.q.device)

    def _in_torch(self, layer: int, now: Pass, asked: int) -> list[int]:
        """The requests of a pass that are attended in torch: all of them, or those of which a gate looks at rows.

        asked: how many tokens have a query; over latents prompts may attend otherwise (`AttentionCall.q`).
        """
        if self.kernels is None:
            ends = accumulate(now.plan.new_tokens)
            return [index for index, end in enumerate(ends) if end <= asked]
        if self.repaired is None or layer not in self.metered_layers:
            return []
        return sorted({row.request for row in now.plan.rows})

    def _gather(self, call: AttentionCall, now: Pass, late: AttentionCall | None, in_torch: Sequence[int]) -> Gathered:
        attends_plainly(call)
        source = self.cache if self.repaired is None else self.repaired
        wanted = set(in_torch)
        requests = [slots if i in wanted else slots[:0] for i, slots in enumerate(now.plan.requests)]
        read = functools.partial(source.read, call.layer)
        return gather(requests, source[call.layer], read, late, now.plan.new_tokens)

    def _choose_channels(self, call: AttentionCall) -> list[AttentionCall]:
        """Decide which outlier channels a layer keeps; what must be written again for it."""
        earlier = self.outliers.before(call)
        layer = self.cache[call.layer]
        if layer.k_bypass is not None and layer.channels is None:
            raise UnsupportedError(f"layer {call.layer} keeps outliers but has chosen no channels for them")
        if earlier is None:
            return []
        if self.kernels is not None:
            self.kernels.chosen(call.layer, earlier)
        return earlier

    def _write(self, call: AttentionCall) -> None:
        """The call's tokens as codes."""
        if self.kernels is not None:
            self.kernels.append(call, call.slots)
            return
        coded_k = self.cache.to_encode(call.layer, call.exact_k)
        k, v = self.encoder.encode(call.layer, call.slots, call.positions, coded_k, call.exact_v)
        if k.codes is None or v.codes is None:
            raise UnsupportedError(f"quantizer {self.encoder.quantizer.name!r} gives no codes to pack")
        self.cache.write(call.layer, call.slots, call.exact_k, call.exact_v, k.codes, v.codes)

    def _copy(self, call: AttentionCall) -> None:
        if self.repaired is not None:
            self.repaired.copies.put(call.layer, call.slots, call.exact_k, call.exact_v)


def attend(
    q: Tensor, read: Gathered, new: Sequence[int], sm_scale: float, requests: Sequence[int], out: Tensor
) -> None:
    """Causal attention of the new[i] last tokens of some requests i, in float32, into out [TOKENS, H, Dv]."""
    starts = torch.tensor([0, *new]).cumsum(0).tolist()
    for i in requests:
        count, token = new[i], starts[i]
        span = slice(read.starts[i], read.starts[i + 1])
        k, v = (x[span].transpose(0, 1) for x in (read.k, read.v))
        total = k.shape[1]
        seen = torch.ones(count, total, dtype=torch.bool, device=q.device).tril(total - count)
        mine = q[token : token + count].float().transpose(0, 1)
        # A mask does not keep what is no number from rows that do not see it: those are then taken one by one.
        apart = count > 1 and not bool(k.isfinite().all() & v.isfinite().all())
        for rows in [slice(j, j + 1) for j in range(count)] if apart else [slice(0, count)]:
            end = total - count + rows.stop
            made = scaled_dot_product_attention(
                mine[None, :, rows],
                k[None, :, :end],
                v[None, :, :end],
                attn_mask=seen[rows, :end],
                scale=sm_scale,
                enable_gqa=True,
            )
            out[token + rows.start : token + rows.stop] = made[0].transpose(0, 1).to(q.dtype)
