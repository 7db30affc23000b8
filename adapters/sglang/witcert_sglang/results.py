"""The way of a measurement from the forward pass to the client, exactly as far as its tokens were committed.

SGLang runs one step ahead under its overlap scheduler, so a pass may have computed a row for a request that had just
finished. A step's cells therefore travel on the logits output (`DeviceAuxiliaryOutput`) and reach the ledger only when
the scheduler commits that step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from torch import Tensor

from witcert_core.serving import META_KEY, Runtime, StepCells

HEALTH_CHECK = "HEALTH_CHECK"  # how SGLang's own probes begin their request ids


@dataclass
class StepOutput:
    """A step's cells on SGLang's way from the logits to the committed tokens."""

    runtime: Runtime
    step: StepCells

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> StepOutput:
        """Part of `DeviceAuxiliaryOutput`. The reference meter's cells are on the host already."""
        return self

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Part of `HostAuxiliaryOutput`: count the rows of every request whose step was committed."""
        committed = {
            index
            for index, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True))
            # Without a commit a finished request's row was computed ahead, unless it asked for no token at all.
            if commit is not None or not (req.is_retracted or (req.finished() and not req.is_prefill_only))
            if not getattr(req, "witcert_reported", False)
            if not self.step.request_ids[index].startswith(HEALTH_CHECK)
        }
        right = {index: len(commit.token_ids) - 1 for index, commit in enumerate(commits) if commit is not None}
        for index, why in self.step.count(self.runtime.ledger, committed, right).items():
            if self.runtime.policy.gate.on_exhausted == "abort":
                abort(batch.reqs[index], why)


def send_along(logits_output: Any, step: StepOutput) -> None:
    """Let a step travel with its logits to where its tokens are committed, if it does not yet."""
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    under_way = logits_output.auxiliary_device_output
    if any(output is step for output in getattr(under_way, "outputs", [under_way])):
        return
    logits_output.auxiliary_device_output = append_auxiliary_output(logits_output.auxiliary_device_output, step)


def abort(req: Any, why: str) -> None:
    """End a request whose damage could not be repaired (`gate.on_exhausted: abort`)."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if not req.finished():
        req.to_finish = FINISH_ABORT(f"witcert: a cell stays above the gate's target: {why}")


def report(runtime: Runtime, req: Any) -> dict[str, Any]:
    """The summary of a request that has ended; what a pass still under way computed for it counts no more.

    SGLang's own probes are forgotten without one.
    """
    req.witcert_reported = True
    if req.rid.startswith(HEALTH_CHECK):
        runtime.forget(req.rid)
        return {}
    # One that ended while it waited has no reason yet.
    reason = req.finished_reason.to_json().get("type") if req.finished_reason else "abort"
    return runtime.finish(req.rid, str(reason))


def streamer_class(runtime: Runtime, base: type[Any]) -> type[Any]:
    """`base` (SGLang's output streamer) with the request's summary added to its last output."""
    return type("WitCertStreamer", (WitCertStreamer, base), {"witcert_runtime": runtime})


class WitCertStreamer(SchedulerOutputStreamer):
    """What is added to an output streamer."""

    has_additional_customized_info = True
    witcert_runtime: Runtime

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
        summaries = [report(self.witcert_runtime, req) if req.finished() else {} for req in reqs]
        if self.witcert_runtime.policy.report.per_request:
            info[META_KEY] = [[summary] if summary else [] for summary in summaries]
        return info
