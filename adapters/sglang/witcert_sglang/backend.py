"""The metered attention backend: SGLang's own class, extended where it attends and where graphs are captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_sglang.runtime import SglangRuntime


class MeteredBackend(AttentionBackend):
    """What is added to a backend class: every attention call and every captured graph goes by the runtime."""

    witcert_runtime: SglangRuntime

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kw: Any
    ) -> Tensor:
        return self.witcert_runtime.attend_layer(
            super().forward_decode, q, k, v, layer, forward_batch, save_kv_cache, True, kw, type(self)
        )

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kw: Any
    ) -> Tensor:
        masked = getattr(getattr(self, "forward_metadata", None), "custom_mask", None) is not None
        if masked and not forward_batch.forward_mode.is_target_verify():  # whose mask is that of a chain of drafts
            raise UnsupportedError(
                f"layer {layer.layer_id} attends under a mask of its own (tokens of an image attend to each other), "
                "which the meter does not follow; ask without images, or unset WITCERT_POLICY"
            )
        return self.witcert_runtime.attend_layer(
            super().forward_extend, q, k, v, layer, forward_batch, save_kv_cache, False, kw, type(self)
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kw: Any) -> None:
        """Buffers of our own launches; the stock ones would be of kernels that do not run."""
        self.witcert_runtime.init_graphs(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.witcert_runtime.eager()
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture, and before every replay. `forward_batch` is the padded batch, or a view of it."""
        if self.witcert_runtime.graphs is None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
        elif in_capture:
            self.witcert_runtime.begin_capture(forward_batch.batch_size)
        else:
            self.witcert_runtime.prepare_replay(forward_batch)

    def get_fused_kv_write_buffers(self, layer: Any, forward_batch: Any) -> None:
        """No fused writer: it would store keys the quantizer never saw."""
        return None


@functools.cache
def metered(base: type[Any]) -> type[Any]:
    """A subclass of the backend class `base` that hands every attention call to the runtime.

    A subclass of the same layout, so that a built backend can change its class and stay an instance of `base`.
    """
    return type(f"Metered{base.__name__}", (MeteredBackend, base), {})


def metered_factory(
    stock: Callable[[Any], Any], make_runtime: Callable[[Any, Any], SglangRuntime]
) -> Callable[[Any], Any]:
    """A factory for `ATTENTION_BACKENDS` that builds the stock backend and puts the meter around it."""

    def create(runner: Any) -> Any:
        backend = stock(runner)
        if runner.is_draft_worker:  # what it writes decides which drafts are made, not what is served
            return backend
        runtime = make_runtime(runner, backend)
        backend.__class__ = metered(type(backend))  # type: ignore[arg-type]
        backend.witcert_runtime = runtime
        return backend

    create.witcert_stock = stock  # type: ignore[attr-defined]
    return create


def no_fused_write(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> bool:
    """Models ask this before they fuse the write of keys into the rotary embedding, past the quantizer."""
    return False
