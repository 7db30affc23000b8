"""The packed INT8 cache read by kernels: codes are appended, attended and metered on the device, nothing is gathered.

Decode rows, and chunks under `prefill_reads: stored`, go through the decode kernel; a chunk that reads its own exact
keys goes through the extend kernel, over its prefix, and is packed afterwards. A request whose prefix another one
computes in the same pass is attended after that one is packed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from witcert_core.cache.outliers import masked_query
from witcert_core.cache.packed import PackedKV, PackedLayer
from witcert_core.cache.radii import radius_dither
from witcert_core.errors import UnsupportedError
from witcert_core.kernels.append import append_int8
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.decode.reference import lost_share
from witcert_core.kernels.extend import extend_int8
from witcert_core.kernels.host import slack
from witcert_core.kernels.host.arguments import PackedCache
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.dispatch import own_arithmetic
from witcert_core.kernels.host.pages import PageTable
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.audit import FormatError
from witcert_core.meter.sums import NUM_ACC_FIELDS
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.layer_pages import LayerPages
from witcert_core.serving.device.rows import spend_down, token_pages, visible_tokens
from witcert_core.serving.device.sums import DeviceSums, output_norm
from witcert_core.serving.device.waves import waves
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.forward import Pass
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.storage.attended import Attended, RowTokens
from witcert_core.serving.storage.gathered import gather


@dataclass(frozen=True)
class Group:
    """Requests that one launch serves, and what it takes of them: made once, the same for all layers of a pass.

    stored: whether they read what is stored of their own tokens, so by the decode kernel. tokens int64 [T]: the places
    of their tokens among the N new ones; lengths: new tokens of each, indptr int32 [requests + 1]. table: the pages of
    their tokens, or of their prefixes where not stored, the longest of max_kv_len tokens. whole: nobody else has new
    tokens.
    rows: numbers of the planned rows among them, int64 [R] as `numbers`; local [R]: where those are in `tokens`. deltas
    float32 [R]: what each may spend of the failure budget. row_table: the pages that each of the rows sees.
    """

    requests: list[int]
    stored: bool
    whole: bool
    tokens: Tensor
    lengths: list[int]
    indptr: Tensor
    table: PageTable
    max_kv_len: int
    rows: list[int]
    numbers: Tensor
    local: Tensor
    deltas: Tensor
    row_table: PageTable | None


@dataclass
class Accumulated:
    """Accumulators [ROWS, H, 16] of the planned rows of a layer, group by group; deterministic: the other lane."""

    law: Tensor
    deterministic: Tensor | None

    @classmethod
    def of(cls, now: Pass, heads: int) -> Accumulated:
        shape = (len(now.plan.rows), heads, NUM_ACC_FIELDS)

        def lane() -> Tensor:
            return torch.full(shape, float("inf"), dtype=torch.float32, device=now.device)

        return cls(lane(), lane() if now.spends else None)


class PackedKernels:
    """The kernels over a packed cache: append, decode, extend, and the sums of metered rows."""

    def __init__(self, cache: PackedKV, geometry: Geometry, encoder: Encoder, form: str) -> None:
        self.cache = cache
        self.geometry = geometry
        self.encoder = encoder
        self.form = form
        self.head_ids = torch.tensor(geometry.kv_head_ids, dtype=torch.int32, device=geometry.device)
        self.pass_bits = encoder.pass_ids.to(torch.int32)
        self.bypassed = self._bypassed(cache.layers)
        self.pages = {number: LayerPages.of(layer) for number, layer in cache.layers.items()}
        self._checked: dict[tuple[int, torch.dtype], PackedCache] = {}
        self._waves: list[list[int]] = []  # of this pass
        self._groups: dict[frozenset[int], list[Group]] = {}  # of this pass, by the requests that are served
        self._quantized: dict[int, tuple[list[int], Tensor]] = {}  # of this pass, by window

    @staticmethod
    def _bypassed(layers: Mapping[int, PackedLayer]) -> dict[int, BypassedKeys]:
        """Where outlier channels will be noted. Allocated at once: a captured graph keeps the addresses."""
        found = {}
        for number, layer in layers.items():
            if layer.k_bypass is not None:
                heads, width = layer.k_bypass.shape[1:]
                device = layer.k.device
                channels = torch.zeros(heads, width, dtype=torch.int32, device=device)
                keep = torch.ones(*layer.k.shape[1:], dtype=torch.uint8, device=device)
                found[number] = BypassedKeys(channels, keep, layer.k_bypass[:, None])
        return found

    def begin_pass(self, now: Pass) -> None:
        # The bits of a uint32; the runtime has just put this pass's row there.
        self.pass_bits[now.slots] = self.encoder.pass_ids[now.slots].to(torch.int32)
        self._waves = waves(now.plan, now.plan.attends_quantized)
        self._groups.clear()
        self._quantized.clear()

    def attend(self, call: AttentionCall, now: Pass, out: Tensor, metered: bool, exact_k: Tensor | None) -> Attended:
        """Attention of all requests into out [N, H, Dv], those that read themselves exactly packed afterwards; metered:
        with the sums of the planned rows."""
        call = self._as_kernels_attend(call)
        found = Accumulated.of(now, call.q.shape[1]) if metered and now.plan.rows else None
        for group in self._grouped(now, range(len(now.plan.requests))):
            self._launch(call, group, out, found)
        sums = None
        if found is not None:
            norm = output_norm(out[now.tokens])
            deterministic = found.deterministic
            beside = None if deterministic is None else self._sums(call, now, deterministic, norm, now.nothing)
            sums = self._sums(call, now, found.law, norm, now.deltas), beside
        rows = functools.partial(self._rows, call, now, exact_k)
        return Attended(call, out.reshape(len(out), -1), out, rows, exact_k, sums, self._format_error(call, now))

    def attend_some(self, call: AttentionCall, now: Pass, requests: Iterable[int], out: Tensor) -> None:
        """Attention of some requests of which no row is metered into out [N, H, Dv]."""
        call = self._as_kernels_attend(call)
        for group in self._grouped(now, requests):
            self._launch(call, group, out, None)

    def chosen(self, number: int, earlier: Sequence[AttentionCall]) -> None:
        """The outlier channels of a layer were chosen; noted in place, since a captured graph keeps the addresses.

        earlier: what is to be written again for it, under the pass that wrote it last.
        """
        layer, bypassed = self.cache[number], self.bypassed[number]
        if layer.channels is None:
            raise UnsupportedError(f"layer {number} keeps outliers but has chosen no channels for them")
        bypassed.keep.fill_(1)
        bypassed.keep.scatter_(1, layer.channels, 0)
        bypassed.channels.copy_(layer.channels)
        for written in earlier:
            self.pass_bits[written.slots] = self.encoder.pass_ids[written.slots].to(torch.int32)

    def options(self, call: AttentionCall) -> dict[str, Any]:
        """What both kernels take alike."""
        return {
            "layer": call.layer,
            "head_ids": self.head_ids,
            "key": self.encoder.dither_key,
            "witness": self.pages[call.layer].witness,
            "sm_scale": call.spec.sm_scale,
            "window_left": call.spec.window_left,
            "logits_soft_cap": call.spec.logits_soft_cap,
            "sinks": call.spec.sinks,
            "bypass": self.bypassed.get(call.layer),
            "checked": self._checked_for(call.layer, call.q.dtype),
        }

    def _checked_for(self, layer: int, dtype: torch.dtype) -> PackedCache:
        """A layer's cache as kernels have checked it for keys or queries of `dtype`."""
        found = self._checked.get((layer, dtype))
        if found is None:
            pages, ids = self.pages[layer], self.head_ids
            given = (*pages.arguments, self.pass_bits, ids, pages.witness, self.bypassed.get(layer))
            found = self._checked[layer, dtype] = PackedCache.checked(*given, dtype)
        return found

    def append(self, call: AttentionCall, slots: Tensor) -> None:
        """The call's tokens as codes, scales, witness and outliers into `slots` [N]; negative: nowhere. Device only."""
        pages = self.pages[call.layer]
        append_int8(
            call.exact_k.contiguous(),
            call.exact_v.contiguous(),
            *pages.arguments,
            self.pass_bits,
            layer=call.layer,
            head_ids=self.head_ids,
            dither_key=self.encoder.dither_key,
            slot_mapping=slots.to(torch.int64),
            witness=pages.witness,
            bypass=self.bypassed.get(call.layer),
            checked=self._checked_for(call.layer, call.exact_k.dtype),
        )

    @staticmethod
    def _as_kernels_attend(call: AttentionCall) -> AttentionCall:
        return replace(call, spec=as_kernels_attend(call.spec, call.q.dtype, call.q.device))

    def _grouped(self, now: Pass, requests: Iterable[int]) -> list[Group]:
        """Single stored tokens together, chunks of stored tokens one by one, exact chunks together; wave by wave."""
        served = frozenset(requests)
        if served not in self._groups:
            plan = now.plan
            stored = plan.attends_quantized
            members: list[list[int]] = []
            for whole in self._waves:
                wave = [i for i in whole if i in served]
                members.append([i for i in wave if stored[i] and plan.new_tokens[i] == 1])
                members.append([i for i in wave if not stored[i]])
                members += [[i] for i in wave if stored[i] and plan.new_tokens[i] > 1]
            self._groups[served] = [self._group(now, group) for group in members if group]
        return self._groups[served]

    def _group(self, now: Pass, requests: list[int]) -> Group:
        plan, device = now.plan, now.device
        starts = torch.tensor([0, *plan.new_tokens]).cumsum(0).tolist()
        stored = plan.attends_quantized[requests[0]]
        tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in requests])
        lengths = [plan.new_tokens[i] for i in requests]
        rows = [number for number, row in enumerate(plan.rows) if row.request in requests]
        place = {token: i for i, token in enumerate(tokens.tolist())}
        read = [plan.requests[i] if stored else plan.requests[i][: -plan.new_tokens[i]] for i in requests]
        table, longest = token_pages(read, device)
        # A row of a chunk sees less than its request; rows of single tokens see all of it.
        beside = stored and any(plan.rows[number].delta_loc > 0 for number in rows)
        row_table = token_pages([plan.slots_of(number) for number in rows], device)[0] if beside else None
        return Group(
            requests=requests,
            stored=stored,
            whole=len(requests) == len(plan.requests),
            tokens=tokens.to(device),
            lengths=lengths,
            indptr=torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
            table=table,
            max_kv_len=longest,
            rows=rows,
            numbers=torch.tensor(rows, dtype=torch.int64).to(device),
            local=torch.tensor([place[plan.rows[n].token] for n in rows], dtype=torch.int64).to(device),
            deltas=spend_down([plan.rows[number].delta_loc for number in rows], device),
            row_table=row_table,
        )

    def _launch(self, call: AttentionCall, group: Group, out: Tensor, found: Accumulated | None) -> None:
        """Outputs of a group into out [N, H, Dv] and, of its metered rows, accumulators into `found`."""
        if not group.rows:
            found = None
        if group.stored:
            self._decode(call, group, out, found)
        else:
            self._extend(call, group, out, found)
            own = call.part(group.tokens)
            self.append(own, own.slots)

    def _decode(self, call: AttentionCall, group: Group, out: Tensor, found: Accumulated | None) -> None:
        delta = None
        if found is not None:
            delta = torch.zeros(len(group.tokens), dtype=torch.float32, device=call.q.device)
            delta[group.local] = group.deltas
        # Where they are all tokens of the pass, as of most passes, nothing is copied.
        alone = group.whole and len(group.tokens) == len(call.q) and out.is_contiguous()
        q = call.q if alone else call.q[group.tokens]
        to = out if alone else None
        made, acc = self._attended(call, q.contiguous(), group.table, group.max_kv_len, group.lengths[0], delta, to)
        if not alone:
            out[group.tokens] = made
        if found is None:
            return
        found.law[group.numbers] = acc[group.local]
        if found.deterministic is None:
            return
        if group.row_table is None:
            found.deterministic[group.numbers] = acc[group.local]
            return
        # The metered rows once more, each as a request of its own.
        nothing = torch.zeros(len(group.rows), dtype=torch.float32, device=q.device)
        _, acc = self._attended(call, q[group.local].contiguous(), group.row_table, group.max_kv_len, 1, nothing)
        found.deterministic[group.numbers] = acc

    def _attended(
        self,
        call: AttentionCall,
        q: Tensor,
        table: PageTable,
        max_kv_len: int,
        q_len: int,
        delta: Tensor | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs [T, H, Dv] of the decode kernel, into `out` where it is given, and accumulators [T, H, 16]; without
        delta [T] nothing is metered."""
        made, _, acc = decode_int8(
            q,
            *self.pages[call.layer].arguments,
            table,
            self.pass_bits,
            max_kv_len=max_kv_len,
            q_len=q_len,
            meter=delta is not None,
            delta_loc=delta,
            out=out,
            **self.options(call),
        )
        return made, acc

    def _extend(self, call: AttentionCall, group: Group, out: Tensor, found: Accumulated | None) -> None:
        rows, deltas = group.local.to(torch.int32), group.deltas
        both = found is not None and found.deterministic is not None
        if both:  # a row named twice is measured twice: under the law, and with nothing to spend
            rows, deltas = torch.cat([rows, rows]), torch.cat([deltas, torch.zeros_like(deltas)])
        made, _, acc = extend_int8(
            call.q[group.tokens].contiguous(),
            call.exact_k[group.tokens].to(call.q.dtype),
            call.exact_v[group.tokens].to(call.q.dtype),
            *self.pages[call.layer].arguments,
            group.indptr,
            group.table,
            self.pass_bits,
            max_q_len=max(group.lengths),
            max_kv_len=max(group.max_kv_len, 1),
            meter_rows=None if found is None else rows,
            delta_loc=None if found is None else deltas,
            **self.options(call),
        )
        out[group.tokens] = made
        if found is not None:
            found.law[group.numbers] = acc[: len(group.rows)]
        if found is not None and found.deterministic is not None:
            found.deterministic[group.numbers] = acc[len(group.rows) :]

    def _sums(self, call: AttentionCall, now: Pass, acc: Tensor, norm: Tensor, deltas: Sequence[float]) -> DeviceSums:
        visible, quantized = self._counts(now, call.spec.window_left)
        return DeviceSums(
            acc,
            norm,
            None,
            num_visible=visible,
            num_quantized=quantized,
            delta_loc=deltas,
            form=self.form,
            has_sink=call.spec.has_sink,
            v_dim=self.geometry.v_head_dim,
            arithmetic=own_arithmetic(call.q.dtype, call.q.device),
        )

    def _counts(self, now: Pass, window_left: int) -> tuple[list[int], Tensor]:
        """How many tokens each row sees, and how many of them [R, 1] are codes: its own chunk is packed afterwards."""
        if window_left not in self._quantized:
            plan = now.plan
            visible = visible_tokens(plan.rows, window_left)
            codes = []
            for row, seen in zip(plan.rows, visible, strict=True):
                prefix = plan.requests[row.request].numel() - plan.new_tokens[row.request]
                exact = 0 if plan.attends_quantized[row.request] else min(row.position + 1 - prefix, seen)
                codes.append(seen - exact)
            self._quantized[window_left] = visible, torch.tensor(codes, dtype=torch.int64)[:, None]
        return self._quantized[window_left]

    def _rows(self, call: AttentionCall, now: Pass, exact_k: Tensor | None) -> RowTokens:
        """What the audited and the sketched rows read; nothing is gathered of requests without any."""
        plan = now.plan
        _, own = now.attends_quantized.split(call)
        wanted = {row.request for row in plan.rows if row.audited or row.sketched}
        requests = [slots if i in wanted else slots[:0] for i, slots in enumerate(plan.requests)]
        packed = self.cache[call.layer]
        read = gather(
            requests,
            packed,
            functools.partial(self.cache.read, call.layer),
            own,
            [new if i in wanted else 0 for i, new in enumerate(plan.new_tokens)],
            others="stored",
        )
        digits, exact = call.q.dtype != torch.float32, read.radii.exact

        def format_error(q: Tensor, places: Tensor) -> Tensor:
            error = packed_dot_error(packed, q, read.radii.slots[places], call.spec.sm_scale, digits)
            return error if exact is None else error.masked_fill(exact[places], 0.0)

        return read.rows(plan.rows, exact_k, format_error)

    def _format_error(self, call: AttentionCall, now: Pass) -> FormatError:
        """That of the kernels' product with the codes in some slots; new tokens that are read exactly have none."""
        packed, digits = self.cache[call.layer], call.q.dtype != torch.float32

        def format_error(q: Tensor, slots: Tensor) -> Tensor:
            error = packed_dot_error(packed, q, slots, call.spec.sm_scale, digits)
            _, own = now.attends_quantized.split(call)
            return error if own is None else error.masked_fill(torch.isin(slots, own.slots), 0.0)

        return format_error


def as_kernels_attend(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
    """How a layer attends with these kernels, for queries of `dtype`."""
    if spec.sinks is not None:  # parameters of the model, which a server may be given anew
        return replace(spec, sinks=spec.sinks.float(), arithmetic=own_arithmetic(dtype, device))
    return _without_sinks(spec, dtype, device)


@functools.lru_cache(maxsize=1024)
def _without_sinks(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
    return replace(spec, arithmetic=own_arithmetic(dtype, device))


def packed_dot_error(layer: PackedLayer, q: Tensor, slots: Tensor, sm_scale: float, digits: bool) -> Tensor:
    """``[H, S]``: how far the kernels' product of q [H, D] with codes is from that with what the codes stand for.

    It errs by a share of 127.5 steps of a scale, whatever the number that is stored; digits: of 16-bit queries.
    """
    if layer.channels is not None:
        q = masked_query(q, layer.channels)
    scales = layer.k_scale[slots]
    share = slack.int8_dot_error(scales.shape[-1]) + (lost_share(q) if digits else 0.0)
    return radius_dither(q, scales, sm_scale, 0.0, slots.numel()) * (2.0 * slack.MAX_CODE * share)
