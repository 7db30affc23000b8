"""The packed INT8 cache read by kernels: codes are appended, attended and metered on the device, nothing is gathered.

Decode rows, and chunks under `prefill_reads: stored`, go through the decode kernel; a chunk that reads its own exact
keys goes through the extend kernel, over its prefix, and is packed afterwards. A request whose prefix another one
computes in the same pass is attended after that one is packed. On a GPU, or on a CPU under TRITON_INTERPRET=1 (tests).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from witcert_core.cache.outliers import masked_query
from witcert_core.cache.packed import PackedLayer
from witcert_core.cache.radii import radius_dither
from witcert_core.errors import UnsupportedError
from witcert_core.kernels.append import append_int8
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.decode.reference import lost_share
from witcert_core.kernels.extend import extend_int8
from witcert_core.kernels.host import slack
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.dispatch import kernels_serve, own_arithmetic
from witcert_core.kernels.host.pages import PageTable
from witcert_core.meter.audit import Audit, FormatError, compare_rows
from witcert_core.meter.cells import CellBatch
from witcert_core.policy.model import Policy
from witcert_core.quantizers.int8_dither import Int8Dither
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.cells import kernel_cells, output_norm, spend_down, token_pages, visible_tokens
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RowPlan
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage.gathered import gather
from witcert_core.serving.storage.measuring import compare, joined
from witcert_core.serving.storage.packed import PackedStorage


def packed_storage(
    policy: Policy, geometry: Geometry, layers: Mapping[int, PackedLayer], encoder: Encoder
) -> PackedStorage:
    """The packed cache of this device: kernels on a GPU (or under the interpreter), else the reference.

    A gate that repairs asks for every token of a cell, not for sums over them: it is left to the reference anywhere.
    """
    kind = KernelPacked if kernels_serve(geometry.device) and not policy.repairs else PackedStorage
    return kind(policy, geometry, layers, encoder)


@dataclass(frozen=True)
class Group:
    """Requests that one launch serves: their indices in the batch and the places of their tokens among the N new ones.

    stored: whether they read what is stored of their own tokens, so by the decode kernel. tokens [T] int64; rows:
    numbers of the planned rows among them; local [R]: where those are in `tokens`. table: the pages of their tokens,
    or of their prefixes where not stored, the longest of max_kv_len tokens.
    """

    requests: list[int]
    stored: bool
    tokens: Tensor
    rows: list[int]
    local: Tensor
    table: PageTable
    max_kv_len: int


class KernelPacked(PackedStorage):
    """`PackedStorage` with attention and meter in the kernels of this package."""

    def __init__(self, policy: Policy, geometry: Geometry, layers: Mapping[int, PackedLayer], encoder: Encoder) -> None:
        super().__init__(policy, geometry, layers, encoder)
        if not isinstance(encoder.quantizer, Int8Dither):
            raise UnsupportedError(
                f"quantizer {encoder.quantizer.name!r} brings its own codes; the kernels write those of int8_dither, "
                "int8_dither_w and int8_dither_bypass: name one of these, or set quantizer.storage to 'simulated'"
            )
        if policy.meter.form == "extremal":
            raise UnsupportedError(
                "meter.form is 'extremal', which needs every token of a cell, not sums over them as kernels give; "
                "set meter.form to 'auto'"
            )
        self.head_ids = torch.tensor(geometry.kv_head_ids, dtype=torch.int32, device=geometry.device)
        self.pass_bits = encoder.pass_ids.to(torch.int32)
        self.bypassed = self._bypassed(layers)
        self.groups: list[Group] | None = None  # of this pass: the same for all its layers

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

    def begin_pass(self, slots: Tensor, requests: Sequence[Tensor]) -> None:
        # The bits of a uint32; the runtime has just put this pass's row there.
        self.pass_bits[slots] = self.encoder.pass_ids[slots].to(torch.int32)
        self.groups = None

    def attend(self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float]) -> Tensor:
        """Attention over codes, [N, H * Dv]; a chunk reads itself exactly, or as stored, and is packed either way."""
        sinks = None if call.spec.sinks is None else call.spec.sinks.float()
        call = replace(call, spec=replace(call.spec, sinks=sinks, arithmetic=own_arithmetic(call.q.dtype)))
        if call.layer in self.exact_k:
            self.exact_k[call.layer][call.slots] = call.exact_k
        self._choose_channels(call)
        early = call.early
        if bool(early.any()):
            own = call.part(early)
            self.append(own, own.slots)
        metered = call.layer in self.metered_layers
        out = torch.empty(*call.q.shape[:2], self.geometry.v_head_dim, dtype=call.q.dtype, device=call.q.device)
        cells: dict[int, tuple[CellBatch, CellBatch | None, int]] = {}
        if self.groups is None:
            self.groups = self._groups(plan, early)
        for group in self.groups:
            attended, found, certain = self._launch(call, plan, group, deltas, metered)
            out[group.tokens] = attended
            if metered and (plan.sample is not None or plan.sketches is not None):
                read = partial(self._read_row, call, plan, group.stored)
                error = self._format_error(call, None if group.stored else self._own(call, group))
                compare(step, plan, call, call.q[plan.tokens], read, group.rows, error)
            if not group.stored:
                written = call.part(torch.zeros_like(early).index_fill(0, group.tokens, True))
                self.append(written, written.slots)
            if found is not None:
                cells |= {number: (found, certain, i) for i, number in enumerate(group.rows)}
        if cells:
            in_order = [cells[number] for number in range(len(plan.rows))]
            step.layers[call.layer] = joined([row_of(found, i) for found, _, i in in_order])
            if any(delta > 0 for delta in deltas):
                beside = [row_of(certain or found, i) for found, certain, i in in_order]
                step.deterministic_layers[call.layer] = joined(beside)
        return out.reshape(call.q.shape[0], -1)

    def _read_row(self, call: AttentionCall, plan: RowPlan, stored: bool, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values that row `number` reads; its own chunk's are not packed yet unless `stored`."""
        row, slots = plan.rows[number], plan.seen_by(number, call.spec)
        k, v = self.cache.read(call.layer, slots)
        if not stored:
            new = plan.new_tokens[row.request]
            own = row.position + 1 - (plan.requests[row.request].numel() - new)  # tokens of its chunk up to the row
            own = min(own, slots.numel())
            first = row.token + 1 - own
            k[-own:], v[-own:] = (x[first : row.token + 1].to(y) for x, y in ((call.exact_k, k), (call.exact_v, v)))
        return k, v

    def _groups(self, plan: RowPlan, early: Tensor) -> list[Group]:
        """Single stored tokens together, chunks of stored tokens one by one, exact chunks together; wave by wave."""
        starts = torch.tensor([0, *plan.new_tokens]).cumsum(0).tolist()
        stored = [bool(early[start]) for start in starts[:-1]]
        members: list[list[int]] = []
        for wave in waves(plan, stored):
            members.append([i for i in wave if stored[i] and plan.new_tokens[i] == 1])
            members.append([i for i in wave if not stored[i]])
            members += [[i] for i in wave if stored[i] and plan.new_tokens[i] > 1]
        groups = []
        for requests in members:
            if not requests:
                continue
            tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in requests])
            rows = [number for number, row in enumerate(plan.rows) if row.request in requests]
            place = {int(token): i for i, token in enumerate(tokens)}
            local = torch.tensor([place[plan.rows[number].token] for number in rows], dtype=torch.int64)
            read = [plan.requests[i] if stored[i] else plan.requests[i][: -plan.new_tokens[i]] for i in requests]
            table, longest = token_pages(read, self.pass_bits.device)
            device = early.device
            groups.append(
                Group(requests, stored[requests[0]], tokens.to(device), rows, local.to(device), table, longest)
            )
        return groups

    def _launch(
        self, call: AttentionCall, plan: RowPlan, group: Group, deltas: list[float], metered: bool
    ) -> tuple[Tensor, CellBatch | None, CellBatch | None]:
        """Outputs [T, H, Dv] of a group, its cells and, under the dither law, those of the deterministic radii."""
        rows = group.rows if metered else []
        spent = [deltas[number] for number in rows]
        attend = self._decode if group.stored else self._extend
        out, acc = attend(call, plan, group, rows, spent)
        if not rows:
            return out, None, None
        found = self._cells(call, plan, group, acc, out[group.local], spent, self._audit(call, plan, group, out))
        if not any(spent):
            return out, found, None
        nothing = [0.0] * len(rows)
        certain = attend(call, plan, group, rows, nothing)[1]
        return out, found, self._cells(call, plan, group, certain, out[group.local], nothing, None)

    def _decode(
        self, call: AttentionCall, plan: RowPlan, group: Group, rows: list[int], spent: list[float]
    ) -> tuple[Tensor, Tensor]:
        delta = torch.zeros(len(group.tokens), dtype=torch.float32, device=call.q.device)
        delta[group.local[: len(rows)]] = spend_down(spent, call.q.device)
        layer = self.cache[call.layer]
        out, _, acc = decode_int8(
            call.q[group.tokens].contiguous(),
            paged(layer),
            layer.k_scale[:, None],
            layer.v_scale[:, None],
            group.table,
            self.pass_bits,
            max_kv_len=group.max_kv_len,
            q_len=plan.new_tokens[group.requests[0]],
            meter=bool(rows),
            delta_loc=delta,
            **self.options(call),
        )
        return out, acc[group.local] if rows else acc

    def _extend(
        self, call: AttentionCall, plan: RowPlan, group: Group, rows: list[int], spent: list[float]
    ) -> tuple[Tensor, Tensor]:
        new = [plan.new_tokens[i] for i in group.requests]
        layer = self.cache[call.layer]
        device = call.q.device
        out, _, acc = extend_int8(
            call.q[group.tokens].contiguous(),
            call.exact_k[group.tokens].to(call.q.dtype),
            call.exact_v[group.tokens].to(call.q.dtype),
            paged(layer),
            layer.k_scale[:, None],
            layer.v_scale[:, None],
            torch.tensor([0, *new], device=device).cumsum(0).to(torch.int32),
            group.table,
            self.pass_bits,
            max_q_len=max(new),
            max_kv_len=max(group.max_kv_len, 1),
            meter_rows=group.local[: len(rows)].to(torch.int32),
            delta_loc=spend_down(spent, device),
            **self.options(call),
        )
        return out, acc

    def options(self, call: AttentionCall) -> dict[str, Any]:
        """What both kernels take alike."""
        layer = self.cache[call.layer]
        return {
            "layer": call.layer,
            "head_ids": self.head_ids,
            "key": self.encoder.dither_key,
            "witness": None if layer.k_witness is None else layer.k_witness[:, None],
            "sm_scale": call.spec.sm_scale,
            "window_left": call.spec.window_left,
            "logits_soft_cap": call.spec.logits_soft_cap,
            "sinks": call.spec.sinks,
            "bypass": self.bypassed.get(call.layer),
        }

    def append(self, call: AttentionCall, slots: Tensor) -> None:
        """The call's tokens as codes, scales, witness and outliers into `slots` [N]; negative: nowhere. Device only."""
        layer = self.cache[call.layer]
        append_int8(
            call.exact_k.contiguous(),
            call.exact_v.contiguous(),
            paged(layer),
            layer.k_scale[:, None],
            layer.v_scale[:, None],
            self.pass_bits,
            layer=call.layer,
            head_ids=self.head_ids,
            dither_key=self.encoder.dither_key,
            slot_mapping=slots.to(torch.int64),
            witness=None if layer.k_witness is None else layer.k_witness[:, None],
            bypass=self.bypassed.get(call.layer),
        )

    def _choose_channels(self, call: AttentionCall) -> None:
        """The outlier channels of a layer, in place: a captured graph keeps the addresses."""
        earlier = self.outliers.before(call)
        layer = self.cache[call.layer]
        if layer.k_bypass is not None and layer.channels is None:
            raise UnsupportedError(f"layer {call.layer} keeps outliers but has chosen no channels for them")
        if earlier is None or layer.channels is None:
            return
        bypassed = self.bypassed[call.layer]
        bypassed.keep.fill_(1)
        bypassed.keep.scatter_(1, layer.channels, 0)
        bypassed.channels.copy_(layer.channels)
        for written in earlier:
            self.pass_bits[written.slots] = self.encoder.pass_ids[written.slots].to(torch.int32)
            self.append(written, written.slots)

    def _cells(
        self,
        call: AttentionCall,
        plan: RowPlan,
        group: Group,
        acc: Tensor,
        out: Tensor,
        spent: list[float],
        audit: Audit | None,
    ) -> CellBatch:
        visible = visible_tokens([plan.rows[number] for number in group.rows], call.spec.window_left)
        return kernel_cells(
            acc,
            output_norm(out),
            num_visible=visible,
            num_quantized=torch.tensor(visible) - torch.tensor(self._read_exactly(plan, group, visible)),
            delta_loc=spent,
            form=self.policy.meter.form,
            has_sink=call.spec.has_sink,
            v_dim=out.shape[-1],
            arithmetic=own_arithmetic(call.q.dtype),
            audit=audit,
        )

    @staticmethod
    def _read_exactly(plan: RowPlan, group: Group, visible: list[int]) -> list[int]:
        """How many of the tokens each row sees are of its own chunk, which is packed after its attention."""
        if group.stored:
            return [0] * len(visible)
        rows = [plan.rows[number] for number in group.rows]
        prefixes = [plan.requests[row.request].numel() - plan.new_tokens[row.request] for row in rows]
        own = (row.position + 1 - prefix for row, prefix in zip(rows, prefixes, strict=True))
        return [min(mine, seen) for mine, seen in zip(own, visible, strict=True)]

    def _audit(self, call: AttentionCall, plan: RowPlan, group: Group, out: Tensor) -> Audit | None:
        """Of the rows of a group whose outputs are out [T, H, Dv], those that are audited."""
        kept = self.exact_k.get(call.layer)
        if kept is None or not group.rows:
            return None
        own = None if group.stored else self._own(call, group)
        packed = self.cache[call.layer]

        def read(slots: Tensor) -> tuple[Tensor, Tensor]:
            found = gather([slots], packed, functools.partial(self.cache.read, call.layer), own)
            return found.k, found.v

        return compare_rows(
            call.q[group.tokens[group.local]],
            list(out[group.local]),
            [plan.seen_by(number, call.spec) for number in group.rows],
            read,
            kept.__getitem__,
            plan.audited[group.rows],
            call.spec,
            self._format_error(call, own),
        )

    @staticmethod
    def _own(call: AttentionCall, group: Group) -> AttentionCall:
        """A chunk's own tokens, which are not packed yet and are read exactly."""
        chosen = torch.zeros(call.slots.numel(), dtype=torch.bool, device=call.slots.device)
        return call.part(chosen.index_fill(0, group.tokens, True))

    def _format_error(self, call: AttentionCall, own: AttentionCall | None) -> FormatError:
        """That of the kernels' product with the codes in some slots; `own` tokens are read exactly."""
        packed, digits = self.cache[call.layer], call.q.dtype != torch.float32

        def format_error(q: Tensor, slots: Tensor) -> Tensor:
            error = packed_dot_error(packed, q, slots, call.spec.sm_scale, digits)
            return error if own is None else error.masked_fill(torch.isin(slots, own.slots), 0.0)

        return format_error


def packed_dot_error(layer: PackedLayer, q: Tensor, slots: Tensor, sm_scale: float, digits: bool) -> Tensor:
    """``[H, S]``: how far the kernels' product of q [H, D] with codes is from that with what the codes stand for.

    It errs by a share of 127.5 steps of a scale, whatever the number that is stored; digits: of 16-bit queries.
    """
    if layer.channels is not None:
        q = masked_query(q, layer.channels)
    scales = layer.k_scale[slots]
    share = slack.int8_dot_error(scales.shape[-1]) + (lost_share(q) if digits else 0.0)
    return radius_dither(q, scales, sm_scale, 0.0, slots.numel()) * (2.0 * slack.MAX_CODE * share)


def waves(plan: RowPlan, stored: Sequence[bool]) -> list[list[int]]:
    """The requests of a pass, in the order in which they may attend: those of a wave read nothing that another one of
    the same wave or a later one writes only after its attention (requests i with stored[i] false).

    An engine may hand out a prefix in the very pass that computes it; its codes must be there before they are read.
    """
    count = len(plan.requests)
    late = [i for i in range(count) if not stored[i] and plan.new_tokens[i]]
    if not late or count < 2:
        return [list(range(count))]
    written = torch.cat([plan.requests[i][-plan.new_tokens[i] :] for i in late])
    slots, order = written.sort()
    sizes = torch.tensor([plan.new_tokens[i] for i in late])
    writer = torch.tensor(late).repeat_interleave(sizes).to(order.device)[order]
    prefixes = [seen[: seen.numel() - new] for seen, new in zip(plan.requests, plan.new_tokens, strict=True)]
    lengths = torch.tensor([prefix.numel() for prefix in prefixes])
    read = torch.cat(prefixes)
    reader = torch.arange(count).repeat_interleave(lengths).to(read.device)
    nearest = torch.searchsorted(slots, read).clamp(max=slots.numel() - 1)
    found = slots[nearest] == read
    awaits = torch.unique(torch.stack([reader[found], writer[nearest[found]]], 1), dim=0).tolist()
    wave = [0] * count
    for _ in range(count):
        for mine, other in awaits:
            wave[mine] = max(wave[mine], wave[other] + 1)
    if max(wave) >= count:
        raise UnsupportedError(
            "two requests of a pass each read what the other one computes in it, so no order serves both; unset "
            "WITCERT_POLICY to serve without a meter"
        )
    return [[i for i in range(count) if wave[i] == number] for number in range(max(wave) + 1)]


def paged(layer: PackedLayer) -> tuple[Tensor, Tensor]:
    """The codes as pages of one token, [SLOTS, 1, Hkv, D]."""
    return layer.k[:, None], layer.v[:, None]


def row_of(cells: CellBatch, row: int) -> CellBatch:
    """One row of a batch."""
    only: dict[str, Any] = {}
    for field in fields(CellBatch):
        whole = getattr(cells, field.name)
        only[field.name] = None if whole is None else whole[row : row + 1]
    return replace(cells, **only)
