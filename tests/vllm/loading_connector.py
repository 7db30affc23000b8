"""A KV connector that loads the first tokens of prompts of one length from nowhere: its keys are all one number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

LOADED_LENGTH = 192
LOADED_TOKENS = 64


@dataclass
class Loads(KVConnectorMetadata):
    blocks: list[int] = field(default_factory=list)


class LoadingConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        self.pending: list[int] = []
        self.caches: dict[str, Any] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for block in self._get_connector_metadata().blocks:
            for cache in self.caches.values():
                cache[block].fill_(0.25)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.num_prompt_tokens != LOADED_LENGTH:
            return 0, False
        return max(0, LOADED_TOKENS - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            self.pending += ids[: LOADED_TOKENS // self.block_size]

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        blocks, self.pending = self.pending, []
        return Loads(blocks)
