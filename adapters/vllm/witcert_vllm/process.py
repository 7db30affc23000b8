"""What one worker process knows: its runtime, and whose pass is running.

vLLM's attention metadata has no request ids. Both model runners know them just before they build it, so the worker
leaves them here (`announce`) and the metadata builders take them (`metadata_built`): the pass begins when those of all
cache groups are there. Warm-up and profiling passes announce nothing and stay untouched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from witcert_core.errors import UnsupportedError

if TYPE_CHECKING:
    from witcert_core.serving import StepCells
    from witcert_vllm.runtime import VllmRuntime

_runtime: VllmRuntime | None = None
_announced: tuple[list[str], list[int]] | None = None
_built: dict[int, Any] = {}
"""Metadata of the announced pass by vLLM's cache group."""


def set_runtime(runtime: VllmRuntime | None) -> None:
    """The runtime of the engine that was just built in this process."""
    global _runtime, _announced
    _runtime, _announced = runtime, None


def runtime() -> VllmRuntime:
    if _runtime is None:
        raise UnsupportedError(
            "a pass began before the meter was built in this worker, so nothing is served; "
            "unset WITCERT_POLICY to serve without it"
        )
    return _runtime


def in_pass() -> bool:
    return _runtime is not None and _runtime.in_pass


def meters(layer_name: str) -> bool:
    """Whether a pass is running of which this layer is metered: not while drafts are made, nor of layers for that."""
    return _runtime is not None and _runtime.in_pass and layer_name in _runtime.layer_ids


def announce(request_ids: Sequence[str], drafts: Sequence[int]) -> None:
    """The requests of the pass that is about to run, in the order of the batch, and how many drafts of each it
    verifies."""
    global _announced
    _announced = list(request_ids), list(drafts)
    _built.clear()


def metadata_built(layer_names: Sequence[str], metadata: Any, absorbed: int | None = None) -> None:
    """The pass's shapes and slots are known (`CommonAttentionMetadata`) for these layers, all of one cache group.

    Layers that only make drafts may be among them. absorbed: see `VllmRuntime.begin_pass`.
    """
    global _announced
    if _announced is None:
        return
    live = runtime()
    for table in {live.table_of(name) for name in layer_names if name in live.layer_ids}:
        _built.setdefault(table, metadata)
    if len(_built) == len(live.block_sizes):
        (ids, drafts), _announced = _announced, None
        live.begin_pass(ids, [_built[number] for number in range(len(live.block_sizes))], drafts, absorbed)


def end_pass() -> StepCells | None:
    """The cells of the pass that has just run; None after a pass without requests.

    vLLM also ends a pass on the way out of one that failed. Layers are then missing because the model raised, so
    nothing is said of them: an error of ours would come in the place of the cause.
    """
    if not in_pass():
        return None
    if sys.exc_info()[0] is not None:
        runtime().abandon()
        return None
    return runtime().end()
