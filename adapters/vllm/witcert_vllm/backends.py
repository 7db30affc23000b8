"""The metered attention backends by the name of the one they wrap: `witcert_vllm.backends.TRITON_ATTN`, ...

vLLM looks backends up by dotted path. Their classes are made on first use, so that no backend is imported that is
not used (most of them need a GPU).
"""

from __future__ import annotations

from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname

STOCK: dict[str, str] = {}
"""Enum member -> dotted path of the class it named before."""


def __getattr__(name: str) -> Any:
    if name not in STOCK:
        raise AttributeError(f"no metered backend {name!r}")
    from witcert_vllm.attention import metered

    cls = metered(resolve_obj_by_qualname(STOCK[name]))
    cls.__module__, cls.__qualname__ = __name__, name  # the path by which vLLM finds it again
    return cls
