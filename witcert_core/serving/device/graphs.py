"""Decode steps of the packed cache inside a captured graph: launches captured once over static inputs, and refilled.

A graph is a batch of some number of rows. At capture every layer's launches are recorded over the inputs below; before
a replay only these are filled (`load`), after it cells are read where the stride asked for some (`read`): only then is
the device waited for. Rows beyond the batch see no token, are written nowhere and count nothing.

Shapes: R rows of a captured batch of at most RMAX, N requests in it, H query heads, T tokens of all requests together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.kernels.decode import Workspace, decode_int8
from witcert_core.kernels.host.pages import PageTable
from witcert_core.kernels.host.slack import MAX_KV_LEN
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.captured import REASON, CapturedCells, LayerFacts
from witcert_core.serving.device.rows import spend_down
from witcert_core.serving.forward import Pass
from witcert_core.serving.storage.packed import PackedStorage

INT32_MAX = 2**31 - 1


class CapturedDecode:
    """Static inputs and results of all graphs of one process; they share them, and the largest sets their size.

    max_kv_len: longest request a replay may see; fixes the launch grids. uses_dither: cells may spend failure
    probability, so that the deterministic ones are measured beside them.
    """

    def __init__(self, storage: PackedStorage, max_rows: int, max_kv_len: int, *, uses_dither: bool) -> None:
        if storage.kernels is None or storage.repaired is not None:
            raise UnsupportedError(
                "captured graphs are metered for a packed pool read by kernels, without a gate that repairs; serve "
                "without graphs"
            )
        if max_kv_len > MAX_KV_LEN or max_rows * max_kv_len > INT32_MAX:
            raise UnsupportedError(
                f"captured graphs of {max_rows} requests of up to {max_kv_len} tokens: the kernels take {MAX_KV_LEN} "
                f"tokens, and {INT32_MAX} of all requests together; capture fewer requests, shorten the context, or "
                "serve without graphs"
            )
        geometry = storage.geometry
        device = torch.device(geometry.device)
        self.storage = storage
        self.kernels = storage.kernels
        self.max_rows = max_rows
        self.max_kv_len = max_kv_len
        self.capturing: int | None = None
        self.captured: dict[int, set[int]] = {}  # rows of a graph -> layers whose launches it holds

        def filled(size: int, value: int, dtype: torch.dtype) -> Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        self.indptr = filled(max_rows + 1, 0, torch.int32)
        self.indices = filled(max_rows * max_kv_len, 0, torch.int32)
        self.last_page_len = filled(max_rows, 1, torch.int32)
        self.slots = filled(max_rows, -1, torch.int64)
        self.delta = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.nothing = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.flag = filled(1, 1, torch.int32)
        heads = geometry.num_qo_heads
        layers = sorted(storage.metered_layers)
        self.cells = CapturedCells(layers, max_rows, heads, device)
        self.deterministic = CapturedCells(layers, max_rows, heads, device) if uses_dither else None
        self.workspace = Workspace.allocate(max_rows, heads, geometry.v_head_dim, max_kv_len, device)
        self.lse = torch.zeros(max_rows, heads, device=device)

    @property
    def nbytes(self) -> int:
        """Memory of the static tensors."""
        own = (self.indptr, self.indices, self.last_page_len, self.slots, self.delta, self.nothing, self.lse)
        cells = self.cells.nbytes + (0 if self.deterministic is None else self.deterministic.nbytes)
        return cells + sum(t.nbytes for t in (*own, self.workspace.part_o, self.workspace.part_m))

    # Capture ----------------------------------------------------------------------------------------------------

    def begin_capture(self, rows: int) -> None:
        """Passes of `rows` rows follow, of which one is captured; all of them are of nobody's tokens."""
        self.capturing = rows
        self.captured[rows] = set()
        self._fill([], [], rows)
        self.flag.fill_(1)

    def attend(self, call: AttentionCall) -> Tensor:
        """The launches of one layer over R rows, [R, H * Dv]. Device work only, nothing depends on host values."""
        rows = self.capturing
        if rows is None or call.q.shape[0] != rows:
            raise UnsupportedError(
                f"layer {call.layer} attends {call.q.shape[0]} rows while a graph of {rows} is captured; serve without "
                "graphs"
            )
        self.captured[rows].add(call.layer)
        self.kernels.append(call, self.slots[:rows])
        if call.layer not in self.storage.metered_layers:
            return self._decode(call, rows, None, None).reshape(rows, -1)
        facts = LayerFacts(call.spec.window_left, call.spec.has_sink)
        out = self._decode(call, rows, self.cells, self.delta)
        self.cells.keep(call.layer, out, facts)
        if self.deterministic is not None:
            again = torch.empty_like(out)  # the same outputs; garbage where the flag is 0
            self._decode(call, rows, self.deterministic, self.nothing, out=again)
            self.deterministic.keep(call.layer, out, facts)
        return out.reshape(rows, -1)

    def _decode(
        self,
        call: AttentionCall,
        rows: int,
        cells: CapturedCells | None,
        delta: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One launch; the second of a layer (`out` given) leaves everything alone where the flag is 0."""
        pages = self.kernels.pages[call.layer]
        metered: dict[str, Any] = {}
        if cells is not None and delta is not None:
            acc = cells.acc[cells.index(call.layer), :rows]
            metered = {"acc": acc, "counters": cells.counters, "flag": self.flag, "delta_loc": delta[:rows]}
        result, _, _ = decode_int8(
            call.q.contiguous(),
            pages.codes,
            pages.k_scales,
            pages.v_scales,
            PageTable(self.indptr[: rows + 1], self.indices, self.last_page_len[:rows]),
            self.kernels.pass_bits,
            max_kv_len=self.max_kv_len,
            meter=cells is not None,
            unmetered=out is None,
            out=out,
            lse=self.lse[:rows],
            workspace=Workspace(self.workspace.part_o[:rows], self.workspace.part_m[:rows]),
            **metered,
            **self.kernels.options(call),
        )
        return result

    # Replay -----------------------------------------------------------------------------------------------------

    def load(self, rows: int, table: Tensor, lengths: Sequence[int], now: Pass) -> None:
        """Fill the inputs of the graph of `rows` rows for a pass: N requests of lengths[i] tokens, then padding.

        table [T]: the slots of all tokens, request by request, the new ones last. Nothing is read from the device.
        """
        layers = set(self.storage.geometry.layers)
        if self.captured.get(rows) != layers:
            raise UnsupportedError(
                f"the graph of {rows} rows was captured with attention of layers {sorted(self.captured.get(rows, ()))} "
                f"of {sorted(layers)}: some attention bypasses the meter, so nothing is served"
            )
        if max(lengths) > self.max_kv_len:
            raise UnsupportedError(f"a request of {max(lengths)} tokens in a graph for up to {self.max_kv_len}")
        self.capturing = None
        self.storage.outliers.settle()  # what a replay writes cannot be written again
        spent = [0.0] * rows
        for row in now.plan.rows:
            spent[row.token] = row.delta_loc
        self._fill(lengths, spent, rows)
        self.slots[: len(lengths)].copy_(now.slots)
        self.indices[: table.numel()].copy_(table)
        self.flag.fill_(1 if now.plan.rows else 0)
        if now.plan.rows:
            self.cells.begin()
            if self.deterministic is not None:
                self.deterministic.begin()

    def _fill(self, lengths: Sequence[int], spent: Sequence[float], rows: int) -> None:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        starts += starts[-1:] * (rows + 1 - len(starts))
        self.indptr[: rows + 1].copy_(torch.tensor(starts, dtype=torch.int32))
        self.slots[:rows].fill_(-1)
        self.delta.zero_()
        if spent:
            self.delta[:rows].copy_(spend_down(spent, torch.device("cpu")))

    def read(self, now: Pass, form: str, *, padding: int) -> None:
        """Put the sums of the step just replayed into its pass; what was not measured of it is lost."""
        plan, step = now.plan, now.step
        if not plan.rows:
            return
        batch = len(plan.requests)
        found = self.cells.read(plan.rows, now.deltas, form, batch=batch, padding=padding)
        beside = found
        if self.deterministic is not None:
            beside = self.deterministic.read(plan.rows, now.nothing, form, batch=batch, padding=padding)
        measured = found.keys() & beside.keys()
        step.summed |= {layer: sums for layer, sums in found.items() if layer in measured}
        if now.spends:
            step.deterministic_summed |= {layer: sums for layer, sums in beside.items() if layer in measured}
        step.lost |= dict.fromkeys(sorted(self.storage.metered_layers - measured), REASON)
