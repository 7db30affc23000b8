"""The way of a measurement from the forward pass to the client, exactly as far as its tokens were committed.

SGLang runs one step ahead under its overlap scheduler, so a pass may have computed a row for a request that had just
finished. A step's cells therefore travel on the logits output (`DeviceAuxiliaryOutput`) and reach the ledger only when
the scheduler commits that step's tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from witcert_core.meter import CellBatch
from witcert_sglang.rows import MeteredRow

if TYPE_CHECKING:
    from witcert_sglang.runtime import Runtime

META_KEY = "witcert"
HEALTH_CHECK = "HEALTH_CHECK"  # how SGLang's own probes begin their request ids


@dataclass(frozen=True)
class Verdict:
    """What a repairing gate did for request `index` of the batch in one layer; status [R, H] int64 of `CellStatus`."""

    index: int
    status: Tensor
    repaired_blocks: int
    repaired_bytes: int
    gave_up: str

    @classmethod
    def joined(cls, parts: Sequence[Verdict]) -> Verdict:
        """The verdicts of all ranks on the same rows, heads side by side."""
        reasons = sorted({part.gave_up for part in parts if part.gave_up})
        return cls(
            parts[0].index,
            torch.cat([part.status for part in parts], 1),
            sum(part.repaired_blocks for part in parts),
            sum(part.repaired_bytes for part in parts),
            "; ".join(reasons),
        )


@dataclass
class StepCells:
    """All cells of one forward pass: per layer, R rows, in the order of `rows`.

    witness_layers: the same rows under the deterministic radii, when `layers` used the dither law.
    verdicts: what a repairing gate did, one for each layer and request.
    """

    runtime: Runtime
    rids: list[str]
    rows: list[MeteredRow]
    layers: dict[int, CellBatch] = field(default_factory=dict)
    witness_layers: dict[int, CellBatch] = field(default_factory=dict)
    unmetered: Counter[tuple[int, str]] = field(default_factory=Counter)
    verdicts: list[Verdict] = field(default_factory=list)

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> StepCells:
        """Part of `DeviceAuxiliaryOutput`. The reference meter's cells are on the host already."""
        return self

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Part of `HostAuxiliaryOutput`: count the rows of every request whose step was committed."""
        counted = {
            index
            for index, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True))
            # Without a commit a finished request's row was computed ahead, unless it asked for no token at all.
            if commit is not None or not (req.is_retracted or (req.finished() and not req.is_prefill_only))
            if not self.rids[index].startswith(HEALTH_CHECK)
        }
        ledger = self.runtime.ledger
        for number, row in enumerate(self.rows):
            if row.request not in counted:
                continue
            rid = self.rids[row.request]
            for layer, cells in self.layers.items():
                ledger.observe(
                    rid,
                    layer,
                    row.ordinal,
                    row.position,
                    cells,
                    number,
                    # A row beyond the declared ones was metered deterministically to begin with.
                    witness_cells=self.witness_layers.get(layer) if float(cells.delta_loc[number]) > 0 else None,
                )
        for (index, reason), count in self.unmetered.items():
            if index in counted:
                ledger.count_unknown(self.rids[index], count, reason)
        for verdict in self.verdicts:
            if verdict.index not in counted:
                continue
            rid = self.rids[verdict.index]
            ledger.count_verdict(rid, verdict.status)
            ledger.count_repair(rid, verdict.repaired_blocks, verdict.repaired_bytes)
            if verdict.gave_up and self.runtime.policy.gate.on_exhausted == "abort":
                abort(batch.reqs[verdict.index], verdict.gave_up)


def send_along(logits_output: Any, step: StepCells) -> None:
    """Let a step travel with its logits to where its tokens are committed."""
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    logits_output.auxiliary_device_output = append_auxiliary_output(logits_output.auxiliary_device_output, step)


def abort(req: Any, why: str) -> None:
    """End a request whose damage could not be repaired (`gate.on_exhausted: abort`)."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if not req.finished():
        req.to_finish = FINISH_ABORT(f"witcert: not certified: {why}")


def streamer_class(runtime: Runtime, base: type[Any]) -> type[Any]:
    """`base` (SGLang's output streamer) with the request's summary added to its last output."""

    class WitCertStreamer(base):  # type: ignore[misc]
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            reported = [req.finished() and not req.rid.startswith(HEALTH_CHECK) for req in reqs]
            summaries = [[runtime.finish(req)] if done else [] for req, done in zip(reqs, reported, strict=True)]
            if runtime.policy.report.per_request:
                info[META_KEY] = summaries
            return info

    return WitCertStreamer
