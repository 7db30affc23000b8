"""The metered schedulers: a pass's cells are counted before its finished requests are let go.

vLLM tells connectors about a pass after its finished requests are gone, so the last row of each would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from witcert_core.errors import UnsupportedError
from witcert_core.serving import AFTER_ITS_ANSWER, META_KEY, StepCells
from witcert_vllm.connector import StepMetadata, WitCertConnector

PROBES = "witcert_probes"
"""What the API server calls `collective_rpc` with."""


class MeteredSchedule(SchedulerInterface):
    """What is added to vLLM's schedulers.

    witcert_verified: a pass whose drafts are being judged, and the requests that it verified some of, by their place
    in its batch.
    """

    witcert_verified: tuple[StepCells, dict[str, int]] | None = None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        connector = own(self.connector)
        step = step_of(model_runner_output.kv_connector_output)
        last_words: list[tuple[int, EngineCoreOutput]] = []
        if step is not None:
            committed = [i for i, rid in enumerate(step.request_ids) if is_committed(self.requests.get(rid))]
            if connector.policy.tier == "probabilistic":
                for rid in (step.request_ids[i] for i in committed):
                    if self.requests[rid].resumable:  # a client goes on with its prompt after it has seen an answer
                        connector.ledger.claim_no_law(rid, AFTER_ITS_ANSWER)
            # How many drafts were right, and are served, is known when each request's tokens are taken.
            self.witcert_verified = step, {step.request_ids[i]: i for i in committed if i in step.drafts}
            gave_up = connector.commit(step, [i for i in committed if i not in step.drafts])
            if gave_up:
                aborted = self.finish_requests(gave_up.keys(), RequestStatus.FINISHED_ABORTED)
                last_words = [(request.client_index, last_word(request, connector)) for request in aborted]
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self.witcert_verified = None
        for client, output in last_words:
            outputs.setdefault(client, EngineCoreOutputs(outputs=[])).outputs.append(output)
        return outputs

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        kept: list[int]
        kept, stopped = super()._update_request_with_output(request, new_token_ids, is_stale=is_stale)
        step, places = self.witcert_verified or (None, {})
        index = places.get(request.request_id)
        if step is not None and index is not None:  # before a request that has ended is let go of
            own(self.connector).commit(step, [index], {index: len(kept) - 1})
        return kept, stopped


def around_collective_rpc(
    original: Callable[..., list[Any]], core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
) -> list[Any]:
    """Take a command about probes, or none, to the workers, and answer for all probes from the ledger, which is here.

    vLLM's engine core calls its workers between two passes, and all get their calls in one order.
    """
    if method != PROBES:
        return original(core, method, timeout, args, kwargs)
    connector, (command,) = own(core.scheduler.connector), args
    if command is not None and connector.policy.report.control:
        original(core, "witcert_command", timeout, (command,), None)
        connector.ledger.probes.command(command)
    return connector.ledger.probes.shown()


def is_committed(request: Any) -> bool:
    """Whether vLLM will keep what this pass computed for a request: not if it is gone, or was preempted meanwhile
    with its output dropped."""
    if request is None or request.is_finished():
        return False
    return not (request.num_stale_output_tokens > 0 and request.drop_stale_output)


def last_word(request: Any, connector: WitCertConnector) -> EngineCoreOutput:
    """The output that tells a client its request was aborted (`gate.on_exhausted: abort`)."""
    summaries = [s for s in connector.finished if s["request_id"] == request.request_id]
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT,
        stop_reason="witcert: a cell stays above the gate's target",
        kv_transfer_params={META_KEY: summaries[-1]} if summaries else None,
    )


def own(connector: Any) -> WitCertConnector:
    """Our half among the scheduler's connectors."""
    for candidate in (connector, *getattr(connector, "sub_connectors", ())):
        if isinstance(candidate, WitCertConnector):
            return candidate
    raise UnsupportedError("the scheduler has no WitCertConnector, so no result would reach a client")


def step_of(connector_output: Any) -> StepCells | None:
    """The cells a worker sent with its output, alone or under `MultiConnector`."""
    metadata = getattr(connector_output, "kv_connector_worker_meta", None)
    for candidate in (metadata, *getattr(metadata, "metadata", ())):
        if isinstance(candidate, StepMetadata):
            return candidate.step
    return None


class MeteredScheduler(MeteredSchedule, Scheduler):
    """`scheduler_config.scheduler_cls` without asynchronous scheduling."""


class MeteredAsyncScheduler(MeteredSchedule, AsyncScheduler):
    """`scheduler_config.scheduler_cls` with it."""
