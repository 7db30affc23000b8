"""vLLM's forward passes and attention calls as the runtime of the core takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from witcert_core import AttentionSpec
from witcert_core.errors import UnsupportedError
from witcert_core.serving import DECOMPRESSED, AttentionCall, GroupSlots, KernelArithmetic, RequestPass, Runtime


class VllmRuntime(Runtime):
    """The meter of one worker process; its ledger is the scheduler's (`connector.py`).

    tables: by cache group of the core, the number of vLLM's, which has a block table and may have layers of several
    shapes. block_sizes: by vLLM's. written: by vLLM's, the slots [N] of the pass's new tokens. facts_of: what is
    known of a request of the pass, for probes.
    """

    facts_of: Callable[[str], dict[str, str | int]]
    layer_ids: dict[str, int]
    tables: list[int]
    block_sizes: list[int]
    written: list[Tensor]
    positions: Tensor

    def table_of(self, layer_name: str) -> int:
        """The number of vLLM's cache group that an attention layer belongs to."""
        return self.tables[self.group_of[self.layer_ids[layer_name]]]

    def written_of(self, layer: int) -> Tensor:
        """The slots [N] of the pass's new tokens in a layer."""
        return self.written[self.tables[self.group_of[layer]]]

    def begin_pass(
        self, request_ids: Sequence[str], groups: Sequence[Any], drafts: Sequence[int], absorbed: int | None = None
    ) -> None:
        """A pass over `request_ids`, described by vLLM's `CommonAttentionMetadata` of each cache group.

        drafts: how many of each request's last new tokens are drafts.
        absorbed: of a latent cache, how many of the first requests attend to latents; the others' are multiplied out
        to keys and values of heads. None of a cache of keys and values.
        """
        metadata = groups[0]
        if metadata.causal is not True or metadata.mm_req_doc_ranges is not None:
            raise UnsupportedError("a pass attends bidirectionally, which the meter does not follow")
        starts = metadata.query_start_loc_cpu[: len(request_ids) + 1].tolist()
        lengths = metadata.seq_lens[: len(request_ids)].tolist()
        new = [end - begin for begin, end in pairwise(starts)]
        # Of each new token: its request and its place in the request.
        rows = [(i, place) for i, end in enumerate(lengths) for place in range(end - new[i], end)]
        device = metadata.slot_mapping.device
        request, self.positions = torch.tensor(rows, dtype=torch.int64, device=device).unbind(1)
        self.written = [of.slot_mapping[: starts[-1]].to(torch.int64) for of in groups]
        places = []
        for number, of in enumerate(groups):
            slots = slots_of(of.block_table_tensor[: len(request_ids)], max(lengths), self.block_sizes[number])
            if not torch.equal(slots[request, self.positions], self.written[number]):
                raise UnsupportedError(
                    "the slots vLLM writes are not the last ones of its block tables, so the meter would read others; "
                    "install the vLLM version that docs/limits.md names, or unset WITCERT_POLICY"
                )
            mine = [slots[i, :length] for i, length in enumerate(lengths)]
            if (window := self.groups[self.tables.index(number)].geometry.window) is not None:
                # vLLM frees blocks that left the window, and leaves their numbers in the tables of the worker.
                for own, count in zip(mine, new, strict=True):
                    own[: max(own.numel() - count - window, 0)] = 0
            places.append(GroupSlots(mine, self.written[number]))
        prefilling: Sequence[bool | None] = [None] * len(new)
        if metadata.is_prefilling is not None:
            prefilling = metadata.is_prefilling[: len(new)].tolist()
        stored = self._reads_stored(prefilling, new, drafts)
        followed = len(new) if absorbed is None else absorbed
        # Of drafts too latents may be multiplied out: those of the pass are exact then.
        stored[followed:] = [reads and not count for reads, count in zip(stored, drafts, strict=True)][followed:]
        if any(stored[followed:]):
            raise UnsupportedError("generated tokens read latents that were multiplied out, which is not followed")
        requests = [
            RequestPass(
                rid,
                places[0].requests[i],
                new[i],
                prefilling[i],
                stored[i],
                not_followed="" if i < followed else DECOMPRESSED,
                drafts=drafts[i],
                facts=self.facts_of(rid) if self.planner.watches else {},
            )
            for i, rid in enumerate(request_ids)
        ]
        self.begin(requests, self.written[0], [places[number] for number in self.tables[1:]])

    def _reads_stored(
        self, prefilling: Sequence[bool | None], new_tokens: Sequence[int], drafts: Sequence[int]
    ) -> list[bool]:
        """Whose new tokens read their quantized selves. A chunk's last is no decode row."""
        if self.policy.prefill_reads == "stored":
            return [True] * len(new_tokens)
        if None in prefilling:
            raise UnsupportedError("vLLM does not say which requests are prefilling, so chunks cannot be told apart")
        counts = zip(prefilling, new_tokens, drafts, strict=True)
        return [not chunk and count == 1 + guessed for chunk, count, guessed in counts]

    def forget_blocks(self, blocks: Sequence[int], size: int, layer_name: str) -> None:
        """Nothing is known any more of what these blocks of `size` tokens of a layer's cache group hold: something else
        may write them.

        Model runner V2 says so when the pass has begun; what that pass itself writes will be known.
        """
        table = self.table_of(layer_name)
        device = self.groups[0].pass_ids.device
        first = torch.tensor(list(blocks), dtype=torch.int64, device=device) * size
        slots = (first[:, None] + torch.arange(size, device=device)).flatten()
        if self.in_pass:
            slots = slots[~torch.isin(slots, self.written[table])]
        for group, of in enumerate(self.tables):
            if of == table:
                self.overwritten(slots, group)

    def attend_latent(
        self, impl: Any, layer: int, query: Tensor, rows: Tensor, run: Callable[[Tensor | None, Tensor | None], Tensor]
    ) -> Tensor:
        """One layer over latents: query [M, H, D] of the M first tokens, those that attend to latents; rows [>= N, D],
        what the model handed over for all."""
        g = self.geometry
        slots = self.written_of(layer)
        exact = rows[: slots.numel(), None].to(g.pool_dtype)
        arithmetic = None
        if query.device.type == "cpu":
            merged = self.block_sizes[self.tables[self.group_of[layer]]]
            arithmetic = replace(cpu_arithmetic(query.dtype, impl), merged_tokens=merged)
        return self.attend(
            AttentionCall(
                layer=layer,
                q=query,
                exact_k=exact,
                exact_v=exact[..., : g.v_head_dim],
                slots=slots,
                positions=self.positions,
                spec=AttentionSpec(sm_scale=float(impl.scale), arithmetic=arithmetic),
                run=run,
            )
        )

    def attend_layer(
        self,
        impl: Any,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        run: Callable[[Tensor | None, Tensor | None], Tensor],
    ) -> Tensor:
        """One call of an implementation's `forward`: query [N, H, D], key and value [>= N, Hkv, D]."""
        if key is None or value is None:
            raise UnsupportedError(
                f"layer {layer.layer_name} attends without writing its own keys (shared KV): what is stored cannot be "
                "metered; unset WITCERT_POLICY for this model"
            )
        number, count = self.layer_ids[layer.layer_name], query.shape[0]
        g = self.geometry_of(number)
        cap = getattr(impl, "logits_soft_cap", None) or 0.0  # 0 or None: no cap
        return self.attend(
            AttentionCall(
                layer=number,
                q=query.reshape(count, g.num_qo_heads, g.head_dim),
                # Exact is what a plain pool would have held: rounding to its dtype is not the quantizer's doing, and
                # must come first, or the dither's radius would miss it.
                exact_k=key[:count].reshape(count, g.num_kv_heads, g.head_dim).to(g.pool_dtype),
                exact_v=value[:count].reshape(count, g.num_kv_heads, g.v_head_dim).to(g.pool_dtype),
                slots=self.written_of(number),
                positions=self.positions,
                spec=AttentionSpec(
                    sm_scale=float(impl.scale),
                    logits_soft_cap=float(cap),
                    # vLLM counts the row's own token among those of the window.
                    window_left=-1 if layer.sliding_window is None else layer.sliding_window - 1,
                    sinks=sinks_of(impl),
                    arithmetic=cpu_arithmetic(query.dtype, impl) if query.device.type == "cpu" else None,
                ),
                run=run,
            )
        )


def cpu_arithmetic(dtype: torch.dtype, impl: Any) -> KernelArithmetic:
    """What vLLM's CPU kernels do in the layouts that can be read (`pool.READABLE_ISA`).

    Over a cache in the model's own dtype weights stay in float32. Outputs in bfloat16 are truncated, not rounded, by
    the builds for processors that have no instruction for it.
    """
    plain = getattr(impl, "kv_cache_dtype", "auto") == "auto"
    exact = dtype != torch.bfloat16 or torch.cpu._is_avx512_bf16_supported()
    return KernelArithmetic(() if plain else KernelArithmetic.of(dtype).weights, dtype, truncates=not exact)


def slots_of(tables: Tensor, longest: int, block_size: int) -> Tensor:
    """The slots [R, >= longest] int64 of requests by position, from their block tables [R, BLOCKS].

    Block b holds the slots from b * block_size on.
    """
    blocks = tables[:, : -(-longest // block_size)].to(torch.int64)
    return (blocks[:, :, None] * block_size + torch.arange(block_size, device=tables.device)).flatten(1)


def sinks_of(impl: Any) -> Tensor | None:
    """Learned sink logits [H] of an implementation, or None."""
    sinks = getattr(impl, "sinks", None)
    return sinks if isinstance(sinks, torch.Tensor) else None
