"""Does the attention backend attend as it is metered? Asked at start, of random keys, before anything is served.

One request longer than the layer's window is put into the empty pool; a few tokens are computed over it as a prompt
chunk, one more as a decode step, and the outputs are compared with float64 attention over what the pool holds. Tokens
about the far end of the window carry most of the weight, so that one more or less of them shows. The pool, and what
says which slots a request has, are left as they were.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from witcert_core import AttentionSpec
from witcert_core.errors import UnsupportedError
from witcert_core.serving import output_excess
from witcert_sglang import windows
from witcert_sglang.sub_pools import sub_pools

CHECKED = ("TorchNativeAttnBackend", "TritonAttnBackend")
"""Classes whose passes are made here as SGLang makes them, which a test says; the first audits say it of the others."""
CHUNK = 4
PREFIX = 40
LONGEST = 512


@dataclass(frozen=True)
class Kind:
    """What layers may differ in; sinks: whether a learned sink is given."""

    window: int
    cap: float
    scale: float
    sinks: bool

    def __str__(self) -> str:
        parts = [f"a window of {self.window + 1} tokens"] * (self.window >= 0)
        parts += [f"logits capped at {self.cap:g}"] * (self.cap > 0) + ["sinks"] * self.sinks
        return f" with {', '.join(parts)}" if parts else ""


def check_attention(backend: Any, layers: Sequence[Any], requests: Any, pool: Any, dtype: torch.dtype) -> list[str]:
    """What was compared, a line each; UnsupportedError naming backend and pass for outputs of another attention.

    backend: SGLang's own, over `pool` and `requests` (its `ReqToTokenPool`), both unused so far. layers: the model's
    `RadixAttention`s, of which one of each kind is asked. dtype: the model's.
    """
    stock = windows.stock_class(type(backend))
    name = stock.__name__
    if name not in CHECKED:
        return []
    takes_sinks = "sinks" in inspect.signature(stock.forward_decode).parameters
    said = []
    kinds: dict[tuple[Any, ...], tuple[Kind, Any]] = {}
    for layer in layers:
        shape = layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
        for sinks in {False, takes_sinks}:
            kind = Kind(layer.sliding_window_size, layer.logit_cap, layer.scaling, sinks)
            kinds.setdefault((kind, *shape), (kind, layer))
    for kind, layer in kinds.values():
        room = min(requests.req_to_token.shape[1], pool.size, getattr(pool, "size_swa", pool.size))
        length = min(max(kind.window + 1, 0) + PREFIX, room) - CHUNK - 1
        if length < 1:
            return []
        for is_decode, excess in _Probe(backend, layer, requests, pool, dtype, kind, length).run():
            what = f"{'decode steps' if is_decode else 'prompt chunks'} of {name}{kind}"
            if excess > 0:
                raise UnsupportedError(
                    f"{what} are not attention over what the cache holds: on random keys an output is {excess:.2g} "
                    "further off than rounding explains, so nothing it serves could be metered; use another "
                    "--attention-backend"
                )
            said.append(what)
    return said


def check_shapes(config: Any) -> list[str]:
    """`check_attention` of `torch_native`, without a server: a layer of each kind of a model's, over a pool of its own.

    config: SGLang's `ModelConfig`. Windows are taken as `LONGEST` tokens at most: what is asked is where they end.
    """
    from types import SimpleNamespace

    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool

    text = config.hf_text_config
    heads, kv_heads, dim = config.num_attention_heads, config.get_total_num_kv_heads(), config.head_dim
    window = min(getattr(text, "sliding_window", None) or 0, LONGEST)
    windows_of = {-1, window - 1} if window > 1 else {-1}
    scale = (getattr(text, "query_pre_attn_scalar", None) or dim) ** -0.5
    size = window + PREFIX + 2
    requests = ReqToTokenPool(size=2, max_context_len=size, device="cpu", enable_memory_saver=False)
    pool: Any = MHATokenToKVPool(size, 1, config.dtype, kv_heads, dim, 1, "cpu", False)
    values = dim
    if config.attention_arch.name == "MLA":
        values, turned = config.kv_lora_rank, config.qk_rope_head_dim
        kv_heads, dim, scale = 1, values + turned, config.scaling
        pool = MLATokenToKVPool(size, 1, config.dtype, values, turned, 1, "cpu", False, dcp_replicated=True)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=pool)
    layers = [
        RadixAttention(
            heads, dim, scale, num_kv_heads=kv_heads, layer_id=0, sliding_window_size=left, v_head_dim=values
        )
        for left in sorted(windows_of)
    ]
    return check_attention(TorchNativeAttnBackend(runner), layers, requests, pool, config.dtype)


class _Probe:
    """One request of `length` tokens, CHUNK more as a prompt chunk and one as a decode step, in one layer."""

    def __init__(
        self, backend: Any, layer: Any, requests: Any, pool: Any, dtype: torch.dtype, kind: Kind, length: int
    ) -> None:
        self.backend, self.layer, self.requests, self.pool, self.kind = backend, layer, requests, pool, kind
        self.length, self.dtype, self.device = length, dtype, pool.device
        self.heads = layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num
        self.generator = torch.Generator().manual_seed(length)
        first = max(getattr(pool, "page_size", 1), 1)  # the first page is for padding
        self.slots = torch.arange(first, first + length + CHUNK + 1, device=self.device)
        # Where a pool of their own keeps the tokens of layers with a window, these are in other slots.
        apart = any(sub.windowed and layer.layer_id in sub.layers for sub in sub_pools(pool))
        self.own = self.slots.flip(0) if apart else self.slots
        self.sinks = self._drawn(self.heads[0]).float() + math.log(length) if kind.sinks else None
        self.base = self._drawn(self.heads[1], layer.qk_head_dim).float()  # what all queries of a KV head are close to

    def run(self) -> list[tuple[bool, float]]:
        """Whether a pass was a decode step, and the largest excess of its outputs."""
        row, table = 1, self.requests.req_to_token
        before = table[row].clone(), [x[self.own].clone() for x in self._buffers()]
        table[row, : len(self.slots)] = self.slots.to(table.dtype)
        mapping = getattr(self.pool, "full_to_swa_index_mapping", None)  # to the slots of layers with a window
        mapped = None if mapping is None else mapping[self.slots].clone()
        if mapping is not None:
            mapping[self.slots] = self.slots.flip(0).to(mapping.dtype)
        try:
            for buffer in self._buffers():
                buffer[self.own] = self._drawn(len(self.own), *buffer.shape[1:]).to(buffer.dtype)
            keys, _ = self._buffers()
            keys[self._far_end()] = self._heavy().to(keys.dtype)
            return [self._pass(row, self.length, CHUNK), self._pass(row, self.length + CHUNK, 1)]
        finally:
            table[row] = before[0]
            if mapping is not None:
                mapping[self.slots] = mapped
            for buffer, kept in zip(self._buffers(), before[1], strict=True):
                buffer[self.own] = kept

    def _pass(self, row: int, prefix: int, count: int) -> tuple[bool, float]:
        is_decode = count == 1
        q, k, v = (self._drawn(count, heads * width) for heads, width in zip(self.heads, self._widths(), strict=True))
        q = (0.05 * q + self.base.repeat_interleave(self.heads[0] // self.heads[1], 0).flatten()).to(self.dtype)
        batch = forward_batch(row, prefix, self.slots[prefix : prefix + count], is_decode, self.device)
        k, v = (x.view(count, heads, -1) for x, heads in ((k, self.heads[1]), (v, self.heads[2])))
        plan_slots(self.backend, batch)
        self.backend.init_forward_metadata(batch)
        attend = self.backend.forward_decode if is_decode else self.backend.forward_extend
        given = {} if self.sinks is None else {"sinks": self.sinks}
        out = attend(q.clone(), k, v, self.layer, batch, save_kv_cache=True, **given)
        left = windows.window_left(type(self.backend), self.layer, is_decode)
        keys, values = self._buffers()
        spec = AttentionSpec(self.kind.scale, self.kind.cap, left, self.sinks)
        worst = 0.0
        for i in range(count):
            seen = spec.visible(self.own[: prefix + i + 1])
            query, made = q[i].view(self.heads[0], -1), out.reshape(count, self.heads[0], -1)[i]
            excess = output_excess(query, made, keys[seen], values[seen], spec)
            worst = max(worst, float(excess.nan_to_num(nan=0.0).max()))
        return is_decode, worst

    def _far_end(self) -> Tensor:
        """Slots of the oldest tokens that a row sees, and of those that it just does not see."""
        if self.kind.window < 0:
            return self.own[:2]
        return self.own[max(self.length - self.kind.window - 2, 0) : self.length + CHUNK - self.kind.window + 2]

    def _heavy(self) -> Tensor:
        """A key ``[Hkv, D]`` that has about as much weight as all ordinary ones together."""
        norm = self.base.square().sum(-1, keepdim=True)
        return self.base * (math.log(self.length + 8.0) / (self.kind.scale * norm))

    def _buffers(self) -> tuple[Tensor, Tensor]:
        number = self.layer.layer_id
        return self.pool.get_key_buffer(number), self.pool.get_value_buffer(number)

    def _widths(self) -> tuple[int, int, int]:
        return self.layer.qk_head_dim, self.layer.qk_head_dim, self.layer.v_head_dim

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)


def plan_slots(backend: Any, batch: Any) -> None:
    """What SGLang prepares of a batch for backends that translate slots for a pool of layers with a window."""
    translator = getattr(backend, "kv_index_translator", None)
    if translator is not None and getattr(backend, "use_sliding_window_kv_pool", False):
        batch.kv_loc_plan = translator.own_plan(batch)


def forward_batch(row: int, prefix: int, slots: Tensor, is_decode: bool, device: Any) -> Any:
    """SGLang's batch of one request, in `row` of the request table, of which `slots` [N] are new after `prefix`."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    count, total = slots.numel(), prefix + slots.numel()
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.zeros(count, dtype=torch.int64, device=device),
        req_pool_indices=torch.tensor([row], device=device),
        seq_lens=torch.tensor([total], device=device),
        out_cache_loc=slots,
        seq_lens_sum=total,
    )
    batch.positions = torch.arange(prefix, total, device=device)
    if not is_decode:
        batch.extend_seq_lens = torch.tensor([count], device=device)
        batch.extend_prefix_lens = torch.tensor([prefix], device=device)
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = [count], [prefix]
    return batch
