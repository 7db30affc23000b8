"""What SGLang's attention backends make of a layer's sliding window, logit cap and sinks: one table.

A layer whose window is w tokens, its own included, has `sliding_window_size` w - 1, so that a row should see its own
token and that many before it. Not every backend attends so, and a bound over other tokens than those attended to bounds
nothing. Files and lines are those of SGLang 0.5.23, below `sglang/srt/layers/attention` where no other place is named.

| backend | decode rows see | rows of a prompt chunk see | logit cap | sinks |
|---|---|---|---|---|
| torch_native | w: mask k >= q - sliding_window_size, `torch_native_backend.py:42-45` | w, the same mask over prefix and chunk, `:156-164` | ignored: `forward_decode` hands on the scale only, `:403-420` | none: its methods take no `sinks`, `:276-284` |
| triton | w - 1: `min(seq_lens, sliding_window_size)` tokens, the row's own among them, `triton_backend.py:2869-2872`, read at `:921-932` and `:2379-2392` | w: the prefix is cut to its last w - 1 tokens (`:1090-1104`), and prefix and chunk are masked by q <= k + sliding_window_size, `sglang/kernels/ops/attention/extend_attention.py:563-569` and `:765-778`; in its unified kernel likewise, `:1339-1354` | both kernels, `:355` and `:710` of `decode_attention.py`, `:648` and `:814` of `extend_attention.py` | in the denominator, `decode_attention.py:1010`, `extend_attention.py:873` |
| flashinfer | w: `clamp(seq_lens, max=sliding_window_size + 1)`, `flashinfer_backend.py:1687-1692` | a first chunk sees everything: `:1464-1471` pass no `window_left` (refused) | both, `:1370` and `:1570` | none |
| fa3 | w: `window_size=(sliding_window_size, 0)`, `flashattention_backend.py:2141-2149` | w, the same pair, `:1557-1571` | both, `softcap=layer.logit_cap` at `:1783` and `:2296` | both, `sinks=` |

A pass that mixes a chunk with generated tokens, and rows that verify drafts, come through `forward_extend` as a whole, so
what counts is the method that was called. Triton and FlashInfer cut by the window of the *model runner*; a layer with
another one is refused. A packed pool is attended by our own kernels, over w tokens everywhere.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from witcert_core.errors import UnsupportedError
from witcert_core.serving import KernelArithmetic, Refusal, refuse


@dataclass(frozen=True)
class Convention:
    """How one backend class attends.

    decode_less: tokens that a decode row sees less than `sliding_window_size` before its own. windows, soft_cap:
    whether it follows them everywhere. one_window: whether the model runner's window cuts its reads, not the layer's.
    merges: whether it may round outputs over parts of the tokens before it merges them.
    """

    decode_less: int = 0
    windows: bool = True
    soft_cap: bool = True
    one_window: bool = False
    merges: bool = True


CONVENTIONS: dict[str, Convention] = {
    "TorchNativeAttnBackend": Convention(soft_cap=False, merges=False),
    "TritonAttnBackend": Convention(decode_less=1, one_window=True, merges=False),
    "FlashInferAttnBackend": Convention(windows=False, one_window=True),
    "FlashAttentionBackend": Convention(),
}
"""By the name of SGLang's class."""


def convention_of(backend: type[Any]) -> Convention:
    """That of a backend's class, or of the class of SGLang's that it derives from."""
    return CONVENTIONS[stock_class(backend).__name__]


def stock_class(backend: type[Any]) -> type[Any]:
    """SGLang's class that `backend` is or derives from; UnsupportedError for another one."""
    for base in backend.__mro__:
        if base.__name__ in CONVENTIONS:
            return base
    raise UnsupportedError(
        f"attention backend {backend.__name__} is not one whose windows and logit caps are known; use one of SGLang's "
        f"{', '.join(CONVENTIONS)}"
    )


def window_left(backend: type[Any], layer: Any, is_decode: bool) -> int:
    """Tokens before its own that a row attends to in `layer` (a RadixAttention), negative for all of them."""
    size = int(layer.sliding_window_size)
    return size if size < 0 or not is_decode else size - convention_of(backend).decode_less


def arithmetic(backend: type[Any], q: torch.dtype, pool: torch.dtype) -> KernelArithmetic | None:
    """What a backend's kernels may do to weights and outputs; None where no more is known than dtypes."""
    if pool.itemsize < 2 or convention_of(backend).merges:
        return None
    return replace(KernelArithmetic.of(q, pool), merges=False)


@dataclass(frozen=True)
class Attending:
    """A layer (SGLang's `RadixAttention`) under an attention backend."""

    layer: Any
    backend: Any

    @property
    def kind(self) -> Convention:
        return convention_of(type(self.backend))

    @property
    def windowed(self) -> bool:
        return bool(self.layer.sliding_window_size >= 0)

    @property
    def named(self) -> str:
        return f"attention layer {self.layer.layer_id}"


def _other_window(found: Attending) -> str | bool:
    own, size = getattr(found.backend, "sliding_window_size", None), found.layer.sliding_window_size
    reads = f"a {type(found.backend).__name__} that reads {'all' if own is None else own + 1} of them"
    other = found.windowed and found.kind.one_window and own != size
    return other and f"{found.named} has a window of {size + 1} tokens under {reads}"


WINDOW_POOL_UNREAD: Refusal[Any] = Refusal(
    "layers with a window in a pool of their own (`SWAKVPool`) with `torch_native`",
    "SGLang's torch_native backend writes there by the slots of that pool and reads by those of the other",
    "use `--attention-backend triton`, or `--disable-hybrid-swa-memory`, under which every layer keeps every token",
)
LAYER_ROWS: tuple[Refusal[Attending], ...] = (
    WINDOW_POOL_UNREAD.where(
        lambda found: (
            found.windowed
            and stock_class(type(found.backend)).__name__ == "TorchNativeAttnBackend"
            and getattr(found.backend, "use_sliding_window_kv_pool", False)
            and f"{found.named} has a window in a pool of its own"
        )
    ),
    Refusal(
        "sliding windows with `flashinfer`",
        "SGLang's flashinfer backend leaves the window out of first chunks",
        "use `--attention-backend triton`",
        lambda found: found.windowed and not found.kind.windows and f"{found.named} has a sliding window",
    ),
    Refusal(
        "layers of several windows with `triton`",
        "it cuts reads by one window for all layers, so which tokens are attended to is not known",
        "use `--attention-backend fa3` or `torch_native`",
        _other_window,
    ),
    Refusal(
        "layers with capped logits with `torch_native`",
        "SGLang's torch_native backend ignores the cap",
        "use `--attention-backend triton`",
        lambda found: (
            found.layer.logit_cap > 0
            and not found.kind.soft_cap
            and f"{found.named} caps its logits at {found.layer.logit_cap:g}"
        ),
    ),
)


def check_backend(layers: Sequence[Any], backend: Any) -> None:
    """Raise UnsupportedError for layers whose window or logit cap this backend does not follow."""
    convention_of(type(backend))
    for layer in layers:
        refuse(LAYER_ROWS, Attending(layer, backend))
