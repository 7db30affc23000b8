"""What this adapter refuses: the tables of `docs/limits.md`. Importable without SGLang."""

from witcert_core.serving import CACHE_ROWS, GROUP_ROWS, OUTLIER_ROWS, QUERY_HEADS, Section
from witcert_sglang import windows
from witcert_sglang.adapter import ADAPTER
from witcert_sglang.refusals.model import ROWS as MODEL_ROWS
from witcert_sglang.refusals.server import ENGINE_ROWS, GRAPH_ROWS, NO_MODEL, NO_PORT, SERVER_ROWS
from witcert_sglang.refusals.worker import (
    FLASHINFER_ROWS,
    LAYER_ROWS,
    ONE_LAYER_EACH,
    ONE_SHAPE,
    OUTER_POOL_ROWS,
    POOL_ROWS,
)

SECTIONS = (
    Section("The server", (ADAPTER.version_row(), *SERVER_ROWS, NO_MODEL, NO_PORT)),
    Section("The cache", (*CACHE_ROWS, *GROUP_ROWS)),
    Section("CUDA graphs", GRAPH_ROWS),
    Section("SGLang's own cache (`quantizer.name: engine`)", (*ENGINE_ROWS, *FLASHINFER_ROWS)),
    Section("The model", (*MODEL_ROWS, *OUTLIER_ROWS)),
    Section(
        "The pool and the layers, in a scheduler",
        (*OUTER_POOL_ROWS, *POOL_ROWS, *LAYER_ROWS, ONE_LAYER_EACH, QUERY_HEADS, ONE_SHAPE, *windows.LAYER_ROWS),
    ),
)
"""The page's tables of this adapter."""
