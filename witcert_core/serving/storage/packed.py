"""The packed INT8 cache in an engine's pool: encodes what is written, attends over codes, meters the rows.

Attention never dequantizes more than the tokens a request sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from witcert_core.cache.packed import PackedKV, PackedLayer
from witcert_core.errors import UnsupportedError
from witcert_core.meter.kernel_error import KernelArithmetic
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall, Quantized
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RowPlan
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage import measuring
from witcert_core.serving.storage.exact_blocks import RepairedCache
from witcert_core.serving.storage.gated_rows import LayerCall
from witcert_core.serving.storage.gathered import Gathered, gather
from witcert_core.serving.storage.outliers import OutlierChoice
from witcert_core.serving.storage.repair import BlockRepairer
from witcert_core.serving.storage.simulated import Rewritten, block_repairer, exact_copies


class PackedStorage:
    """The packed pool of one scheduler process; `layers` are its buffers by global layer id."""

    def __init__(self, policy: Policy, geometry: Geometry, layers: Mapping[int, PackedLayer], encoder: Encoder) -> None:
        self.policy = policy
        self.geometry = geometry
        self.encoder = encoder
        self.metered_layers = frozenset(policy.meter.layers_of(geometry.layers))
        self.cache = PackedKV(layers, encoder.pass_ids, encoder.dither_key, geometry.kv_head_ids, geometry.rotary)
        pairs = encoder.quantizer.bypass_pairs
        if pairs and any(layer.k_bypass is None for layer in layers.values()):
            raise UnsupportedError(
                f"quantizer {encoder.quantizer.name!r} keeps {pairs} channel pairs in 16 bit, for which the pool of "
                f"{geometry.backend} has no room; name a quantizer without bypass"
            )
        self.outliers = OutlierChoice(self.cache)
        self.rewritten: Rewritten | None = None  # without outliers, a token keeps the codes it was written with
        self.repaired: RepairedCache | None = None
        self.repairer: BlockRepairer | None = None
        if policy.repairs:
            copies = exact_copies(policy, geometry)
            self.repaired = RepairedCache(self.cache, copies, geometry.num_slots, geometry.num_kv_heads)
            self.repairer = block_repairer(policy, self.repaired, copies, len(self.metered_layers))
        self.exact_k: dict[int, Tensor] = {}
        if policy.meter.audit_every > 0:
            shape = (geometry.num_slots, geometry.num_kv_heads, geometry.head_dim)
            self.exact_k = {
                layer: torch.zeros(shape, dtype=geometry.pool_dtype, device=geometry.device)
                for layer in geometry.layers
            }

    bytes_side = 0  # codes, scales and witnesses are the pool itself

    @property
    def bytes_audit(self) -> int:
        return sum(t.nbytes for t in self.exact_k.values())

    def begin_pass(self, slots: Tensor, requests: Sequence[Tensor]) -> None:
        """A pass is about to write into `slots`; without a gate that repairs there is nothing to prepare."""
        if self.repaired is not None and self.repairer is not None:
            self.repaired.begin_pass(slots)
            self.repairer.begin_pass()

    def forget(self, request_id: str) -> None:
        if self.repairer is not None:
            self.repairer.forget(request_id)

    def moved(self, target: Tensor, source: Tensor) -> None:
        """Engines copy codes without their scales and rows."""
        raise UnsupportedError(
            "the engine copied rows of the packed pool without their scales; what they hold is unknown"
        )

    def overwritten(self, slots: Tensor) -> None:
        """Engines restore codes without their scales and rows."""
        raise UnsupportedError(
            "the engine restored rows of the packed pool without their scales; what they hold is unknown"
        )

    def status(self) -> dict[str, int]:
        copies = None if self.repaired is None else self.repaired.copies
        return {
            "bytes_copies": 0 if copies is None else copies.nbytes,
            "copy_slots": 0 if copies is None else copies.num_rows,
            "bytes_packed_pool": self.cache.nbytes,
        }

    def attend(self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float]) -> Tensor:
        """Attention over codes, [N, H * Dv]; a chunk reads itself exactly, or as stored, and is packed either way."""
        spec = replace(call.spec, arithmetic=KernelArithmetic((), call.q.dtype))  # that of `attend`
        if spec.logits_soft_cap or spec.window_left >= 0 or spec.has_sink:
            raise UnsupportedError(
                f"layer {call.layer} uses a logit cap, a sliding window or sinks: the packed cache "
                "attends to all tokens plainly; set quantizer.storage to 'simulated'"
            )
        call = replace(call, spec=spec)
        for earlier in self.outliers.before(call) or ():
            self._store(earlier, *self._encode(earlier))
        k, v = self._encode(call)
        if call.layer in self.exact_k:
            self.exact_k[call.layer][call.slots] = call.exact_k
        early, late = call.early, ~call.early
        if early.any():
            self._write(call.part(early), k.part(early), v.part(early))
        source = self.cache if self.repaired is None else self.repaired
        own = call.read_exactly
        read = gather(plan.requests, source[call.layer], lambda flat: source.read(call.layer, flat), own)
        out = attend(call.q, read, plan.new_tokens, spec.sm_scale)
        if self.repairer is None:
            self._measure(call, read, plan, step, deltas, out)
        else:
            self._gate(call, plan, step, deltas, out)
        if own is not None:
            self._write(own, k.part(late), v.part(late))
        return out.reshape(call.q.shape[0], -1)

    def stored(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that the codes in `slots` [N] stand for."""
        return self.cache.read(layer, slots)

    def _encode(self, call: AttentionCall) -> tuple[Quantized, Quantized]:
        coded_k = self.cache.to_encode(call.layer, call.exact_k)
        return self.encoder.encode(call.layer, call.slots, call.positions, coded_k, call.exact_v)

    def _write(self, call: AttentionCall, k: Quantized, v: Quantized) -> None:
        self._store(call, k, v)
        if self.repaired is not None:
            self.repaired.copies.put(call.layer, call.slots, call.exact_k, call.exact_v)

    def _store(self, call: AttentionCall, k: Quantized, v: Quantized) -> None:
        if k.codes is None or v.codes is None:
            raise UnsupportedError(f"quantizer {self.encoder.quantizer.name!r} gives no codes to pack")
        self.cache.write(call.layer, call.slots, call.exact_k, call.exact_v, k.codes, v.codes)

    def _gate(self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float], out: Tensor) -> None:
        """Gate the planned rows; repaired rows of out [N, H, Dv] are computed again."""
        if not plan.rows or call.layer not in self.metered_layers or self.repaired is None or self.repairer is None:
            return
        layer_call = LayerCall(
            layer=call.layer,
            pool=self.repaired,
            spec=call.spec,
            exact_k=self.exact_k.get(call.layer),
        )
        own = call.part(~call.early)
        with self.repaired.chunk(own.slots, own.exact_k, own.exact_v):
            measuring.gate(step, plan, layer_call, call.q[plan.tokens], out, self.repairer, deltas)

    def _measure(
        self, call: AttentionCall, read: Gathered, plan: RowPlan, step: StepCells, deltas: list[float], out: Tensor
    ) -> None:
        if plan.rows and call.layer in self.metered_layers:
            exact = self.exact_k.get(call.layer)
            audited = None if exact is None else exact[read.slots]
            seen, form, made = read.seen(plan.rows), self.policy.meter.form, list(out[plan.tokens])
            measuring.observe(step, plan, call, seen, read.read, read.radii, audited, deltas, form, made)


def attend(q: Tensor, read: Gathered, new: list[int], sm_scale: float) -> Tensor:
    """Outputs [TOKENS, H, Dv] in q's dtype: causal attention of each request's new[i] last tokens, in float32."""
    outputs = []
    token = 0
    for i, count in enumerate(new):
        span = slice(read.starts[i], read.starts[i + 1])
        k, v = (x[span].transpose(0, 1) for x in (read.k, read.v))
        total = k.shape[1]
        seen = torch.ones(count, total, dtype=torch.bool, device=q.device).tril(total - count)
        mine = q[token : token + count].float().transpose(0, 1)
        # A mask does not keep what is no number from rows that do not see it: those are then taken one by one.
        apart = count > 1 and not bool(k.isfinite().all() & v.isfinite().all())
        for rows in [slice(i, i + 1) for i in range(count)] if apart else [slice(0, count)]:
            end = total - count + rows.stop
            out = scaled_dot_product_attention(
                mine[None, :, rows],
                k[None, :, :end],
                v[None, :, :end],
                attn_mask=seen[rows, :end],
                scale=sm_scale,
                enable_gqa=True,
            )
            outputs.append(out[0].transpose(0, 1))
        token += count
    return torch.cat(outputs).to(q.dtype)
