"""Results through vLLM's KV connector: it moves no keys, only what was measured.

The worker's half hands a pass's cells to the scheduler's half, which counts the rows whose tokens the scheduler
commits and gives a finished request its summary (`kv_transfer_params["witcert"]`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from witcert_core.errors import UnsupportedError
from witcert_core.serving import META_KEY, StepCells, make_ledger, without_cache
from witcert_vllm import process
from witcert_vllm.geometry import attention_groups, layer_ids, num_hidden_layers, total_qo_heads
from witcert_vllm.installation import current
from witcert_vllm.metrics import CountedStats, Recorder, Shown


@dataclass
class StepMetadata(KVConnectorWorkerMetadata):
    """The cells of one pass, all heads; only the reporting rank sends them."""

    step: StepCells

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise UnsupportedError("two ranks reported the same pass; one of them must gather the heads of all")


@dataclass
class PassMetadata(KVConnectorMetadata):
    """Scheduler to worker: blocks that were just allocated, so that nothing is known of what they hold.

    unknown: their numbers, by the size of a block and a layer of the cache group that has them.
    """

    unknown: dict[tuple[int, str], list[int]] = field(default_factory=dict)


class WitCertConnector(KVConnectorBase_V1, SupportsHMA):
    """One half in the scheduler, one in each worker; offers no tokens and keeps no blocks."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.policy = current()
        self.finished: list[dict[str, Any]] = []
        self.beside_another = bool(self._kv_transfer_config.get_from_extra_config("beside", False))
        self._computed: dict[str, int] = {}  # request -> tokens found in vLLM's own prefix cache
        self._groups = attention_groups(kv_cache_config, vllm_config)
        self._unknown: dict[tuple[int, str], list[int]] = {}
        if role is KVConnectorRole.SCHEDULER:
            self.recorder = Recorder() if self.policy.report.prometheus else None
            layers = sorted(layer_ids([name for group in self._groups.values() for name in group.layers]).values())
            others = without_cache(layers, num_hidden_layers(vllm_config))
            self.ledger = make_ledger("vllm", self.policy, layers, total_qo_heads(vllm_config), self.recorder, others)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Python must run in every attention layer; a fully captured pass would replay without it."""
        return True

    # Worker -----------------------------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before the pass: forget what blocks held that another connector may fill."""
        if isinstance(kv_connector_metadata, PassMetadata):
            for (size, layer_name), blocks in kv_connector_metadata.unknown.items():
                process.runtime().forget_blocks(blocks, size, layer_name)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        step = process.end_pass()
        return None if step is None else StepMetadata(step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        for request_id in finished_req_ids:
            process.runtime().forget(request_id)
        return None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to save."""

    # Scheduler --------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if self.beside_another:
            self._computed[request.request_id] = num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing of ours is loaded into them, but what another connector loads has no witness."""
        if self.beside_another:
            computed, ids = self._computed.pop(request.request_id, 0), blocks.get_block_ids()
            for number, group in self._groups.items():
                new = ids[number][computed // group.block_size :]
                self._unknown.setdefault((group.block_size, group.layers[0]), []).extend(new)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        unknown, self._unknown = self._unknown, {}
        return PassMetadata(unknown)

    def commit(
        self, step: StepCells, committed: Iterable[int], right: Mapping[int, int] | None = None
    ) -> dict[str, str]:
        """Count the rows of the committed requests, by index in the batch. right: how many drafts of each were.

        Returns, by request id, why a repairing gate gave up, where that must end the request.
        """
        gave_up = step.count(self.ledger, set(committed), right)
        if self.policy.gate.on_exhausted != "abort":
            return {}
        return {step.request_ids[index]: why for index, why in gave_up.items()}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        reason = request.get_finished_reason()
        summary = self.ledger.finish(request.request_id, "unknown" if reason is None else str(reason))
        if not self.policy.report.per_request:
            return False, None
        self.finished.append(summary)
        return False, {META_KEY: summary}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """What vLLM asks where a cache may have several groups; nothing of ours is kept in any."""
        return self.request_finished(request, [])

    # Metrics ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> CountedStats | None:
        if self.role is not KVConnectorRole.SCHEDULER:
            return None
        finished, self.finished = self.finished, []
        stats = CountedStats({"events": self.recorder.take() if self.recorder else [], "summaries": finished})
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CountedStats:
        """For vLLM's periodic log line, which has nothing to say of these; under MultiConnector as well."""
        return CountedStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Shown:
        return Shown(vllm_config, metric_types, labelnames, per_engine_labelvalues)
