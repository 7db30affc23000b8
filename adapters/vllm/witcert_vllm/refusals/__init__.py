"""What this adapter refuses: the tables of `docs/limits.md`. Importable without vLLM."""

from witcert_core.serving import CACHE_ROWS as CORE_CACHE_ROWS
from witcert_core.serving import GROUP_ROWS, OUTLIER_ROWS, QUERY_HEADS, Section
from witcert_vllm.adapter import ADAPTER
from witcert_vllm.refusals.model import ROWS as MODEL_ROWS
from witcert_vllm.refusals.server import CACHE_ROWS, CONFIG_ROWS, ENGINE_ROWS, RESOLVED_ROWS, SERVER_ROWS
from witcert_vllm.refusals.worker import CLASS_ROWS, LAYER_ROWS, PLAIN_ATTENTION, RUNNER, SPEC

SECTIONS = (
    Section("The server", (ADAPTER.version_row(), *SERVER_ROWS, *RESOLVED_ROWS, *CONFIG_ROWS)),
    Section("The cache", (*CACHE_ROWS, *CORE_CACHE_ROWS, *GROUP_ROWS)),
    Section("vLLM's own cache (`quantizer.name: engine`)", ENGINE_ROWS),
    Section("The model", (*MODEL_ROWS, *OUTLIER_ROWS)),
    Section("The layers and their cache, in a worker", (RUNNER, SPEC, PLAIN_ATTENTION, *LAYER_ROWS, QUERY_HEADS)),
    Section("Classes and layouts, in a worker", CLASS_ROWS),
)
"""The page's tables of this adapter."""
