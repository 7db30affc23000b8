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
    from witcert_vllm.packed import packed_backend
    from witcert_vllm.plugin import current

    installation = current()
    packed = installation.policy.quantizer.storage == "packed"
    cls = metered(resolve_obj_by_qualname(STOCK[name]), own_pages=packed)
    if packed:
        cls = packed_backend(cls, installation.quantizer)
    cls.__module__, cls.__qualname__ = __name__, name  # the path by which vLLM finds it again
    return cls
