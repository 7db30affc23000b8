"""SGLang's pool as a packed INT8 cache: its buffers, its cell size, and attention that reads codes.

The pool reports int8, so no fused path of SGLang writes 16-bit keys into it. Attention never dequantizes more than
the tokens a request sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import KVCacheQuantMethodBase
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from witcert_core.errors import UnsupportedError
from witcert_core.layout import KVLayout
from witcert_core.packed import PackedCache, PackedLayer, ReadTokens
from witcert_core.quantizers.base import Quantizer
from witcert_core.repair import LayerCall
from witcert_sglang import measuring
from witcert_sglang.calls import AttentionCall, Coded
from witcert_sglang.results import StepCells
from witcert_sglang.rows import RowPlan

if TYPE_CHECKING:
    from witcert_sglang.runtime import Runtime


class PackedMethod(KVCacheQuantMethodBase):
    """Lets `MHATokenToKVPool` allocate codes and scales. Reading and writing go through `PackedCache`."""

    name = "witcert_packed"

    def __init__(self, stored_witness: bool) -> None:
        self.stored_witness = stored_witness
        self.k_witness_buffer: list[Tensor] = []

    def create_buffers(self, size: int, head_num: int, head_dim: int, layer_num: int, device: str) -> dict[str, Any]:
        groups = -(-head_dim // 32)

        def buffers(width: int, value: float, dtype: torch.dtype) -> list[Tensor]:
            shape = (size, head_num, width)
            return [torch.full(shape, value, dtype=dtype, device=device) for _ in range(layer_num)]

        if self.stored_witness:
            self.k_witness_buffer = buffers(groups, 255, torch.uint8)
        return {
            "k_buffer": [
                torch.zeros(size, head_num, head_dim, dtype=torch.int8, device=device) for _ in range(layer_num)
            ],
            "v_buffer": [
                torch.zeros(size, head_num, head_dim, dtype=torch.int8, device=device) for _ in range(layer_num)
            ],
            "k_scale_buffer": buffers(groups, float("inf"), torch.float16),  # infinite: nothing written, radius unknown
            "v_scale_buffer": buffers(groups, float("inf"), torch.float16),
            "dq_k_buffer": None,
            "dq_v_buffer": None,
            "store_dtype": torch.int8,
        }

    def needs_plain_kv_dequant_read(self) -> bool:
        return False

    def compute_cell_size(self, head_num: int, head_dim: int, num_layers: int, kv_size: int) -> int:
        return KVLayout(head_dim, stored_witness=self.stored_witness).bytes_per_token_head * head_num * num_layers

    def quantize_and_store(self, *_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError(
            "a packed WitCert pool is written by its attention backend only; this write is unmetered"
        )

    def dequantize_prev_kv(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a packed WitCert pool is read by its attention backend only")


def packed_layers(pool: Any) -> dict[int, PackedLayer]:
    """The pool's buffers by global layer id."""
    witnesses = pool.quant_method.k_witness_buffer or [None] * pool.layer_num
    return {
        pool.start_layer + i: PackedLayer(
            pool.k_buffer[i], pool.v_buffer[i], pool.k_scale_buffer[i], pool.v_scale_buffer[i], witnesses[i]
        )
        for i in range(pool.layer_num)
    }


@dataclass
class Gathered:
    """The tokens all requests of a pass read, one request after the other: M tokens.

    k [M, Hkv, D], v [M, Hkv, Dv] float32; `radii` of the M tokens; `starts` [requests + 1].
    """

    k: Tensor
    v: Tensor
    radii: ReadTokens
    starts: list[int]


def gather(cache: PackedCache, layer: int, slots: list[Tensor], own: list[tuple[Tensor, Tensor]] | None) -> Gathered:
    """What each request reads: slots[i] [S_i] in order of position.

    own: exact keys and values of each request's own chunk, which then replace its last tokens (their slots are not
    written yet); None when the chunk reads what is stored.
    """
    flat = torch.cat(slots)
    k, v = cache.read(layer, flat)
    exact = torch.zeros(flat.numel(), dtype=torch.bool)
    starts = [0]
    for i, mine in enumerate(slots):
        end = starts[-1] + mine.numel()
        if own is not None:
            first = end - own[i][0].shape[0]
            k[first:end], v[first:end], exact[first:end] = own[i][0].float(), own[i][1].float(), True
        starts.append(end)
    return Gathered(k, v, ReadTokens(cache[layer], flat, exact), starts)


def attend(q: Tensor, read: Gathered, new: list[int], sm_scale: float) -> Tensor:
    """Outputs [TOKENS, H, Dv] in q's dtype: causal attention of each request's new[i] last tokens, in float32."""
    outputs = []
    token = 0
    for i, count in enumerate(new):
        span = slice(read.starts[i], read.starts[i + 1])
        k, v = (x[span].transpose(0, 1) for x in (read.k, read.v))
        total = k.shape[1]
        seen = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        mine = q[token : token + count].float().transpose(0, 1)
        out = scaled_dot_product_attention(
            mine[None], k[None], v[None], attn_mask=seen, scale=sm_scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
        token += count
    return torch.cat(outputs).to(q.dtype)


class PackedStorage:
    """The packed pool of one scheduler process: encodes what is written, attends over codes, meters the rows."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        geometry = runtime.geometry
        layers = packed_layers(runtime.pool)
        self.cache = PackedCache(layers, runtime.row_ids, runtime.dither_key, geometry.kv_head_ids)
        self.exact_k: dict[int, Tensor] = {}
        if runtime.policy.meter.audit_every > 0:
            shape = (geometry.num_slots, geometry.num_kv_heads, geometry.head_dim)
            self.exact_k = {layer: torch.zeros(shape, dtype=geometry.pool_dtype) for layer in geometry.layers}

    bytes_side = 0  # codes, scales and witnesses are the pool itself

    @property
    def bytes_audit(self) -> int:
        return sum(t.nbytes for t in self.exact_k.values())

    def begin_pass(self, slots: Tensor) -> None:
        """Nothing to prepare: a write replaces all that a slot said."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def moved(self, target: Tensor, source: Tensor) -> None:
        """SGLang copies codes without their scales and rows."""
        raise UnsupportedError(
            "the engine copied rows of the packed pool without their scales; what they hold is unknown"
        )

    def overwritten(self, slots: Tensor) -> None:
        """SGLang restores codes without their scales and rows."""
        raise UnsupportedError(
            "the engine restored rows of the packed pool without their scales; what they hold is unknown"
        )

    def status(self) -> dict[str, int]:
        return {"bytes_shadow": 0, "shadow_slots": 0, "bytes_packed_pool": self.cache.nbytes}

    def attend(self, call: AttentionCall, plan: RowPlan, step: StepCells) -> Tensor:
        """Attention over codes; a chunk reads itself exactly, or as stored, and is packed either way."""
        layer_id = call.layer.layer_id
        if call.layer.logit_cap or call.layer.sliding_window_size >= 0 or call.kwargs:
            raise UnsupportedError(
                f"layer {layer_id} uses a logit cap, a sliding window or {sorted(call.kwargs)}: the packed cache "
                "attends to all tokens plainly; set quantizer.storage to 'simulated'"
            )
        k, v = self.runtime.encode(call)
        if layer_id in self.exact_k:
            self.exact_k[layer_id][call.slots] = call.exact_k
        if call.reads_stored:
            self._write(call, k, v)
            read = gather(self.cache, layer_id, plan.requests, None)
        else:
            own = list(zip(call.exact_k.split(plan.new_tokens), call.exact_v.split(plan.new_tokens), strict=True))
            read = gather(self.cache, layer_id, plan.requests, own)
        geometry = self.runtime.geometry
        q = call.q.reshape(-1, geometry.num_qo_heads, geometry.head_dim)
        out = attend(q, read, plan.new_tokens, call.layer.scaling)
        self._measure(call, read, q, plan, step)
        if not call.reads_stored:
            self._write(call, k, v)
        return out.reshape(q.shape[0], -1)

    def _write(self, call: AttentionCall, k: Coded, v: Coded) -> None:
        if k.codes is None or v.codes is None:
            raise UnsupportedError(f"quantizer {self.runtime.quantizer.name!r} gives no codes to pack")
        self.cache.write(call.layer.layer_id, call.slots, call.exact_k, call.exact_v, k.codes, v.codes)

    def _measure(self, call: AttentionCall, read: Gathered, q: Tensor, plan: RowPlan, step: StepCells) -> None:
        layer_id = call.layer.layer_id
        if not plan.rows or layer_id not in self.runtime.metered_layers:
            return
        places = [torch.arange(read.starts[r.request], read.starts[r.request] + r.position + 1) for r in plan.rows]
        exact = self.exact_k.get(layer_id)
        layer_call = LayerCall(
            layer=layer_id,
            k_cache=read.k,
            v_cache=read.v,
            sm_scale=call.layer.scaling,
            exact_k=None if exact is None else exact[read.radii.slots],
        )
        gathered = replace(plan, kv_indices=torch.cat(places))
        deltas, form = self.runtime.deltas(plan), self.runtime.policy.meter.form
        measuring.observe(step, gathered, layer_call, q[plan.tokens], read.radii, deltas, form)


# Hooks: what SGLang is told about the pool -----------------------------------------------------------------------


def around_configure_dtype(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> tuple[str, torch.dtype]:
    """Report int8: models look for a bfloat16 pool before they fuse the write of keys into the rotary embedding."""
    return PackedMethod.name, torch.int8


def around_build_method(quantizer: Quantizer) -> Callable[..., PackedMethod]:
    """The hook that gives the pool its method."""

    def around_build(_original: Callable[..., Any], _configurator: Any, **_kwargs: Any) -> PackedMethod:
        return PackedMethod(quantizer.stored_witness)

    return around_build
