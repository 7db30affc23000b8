"""The metered attention backends by the name of the one they wrap: `witcert_vllm.backends.TRITON_ATTN`, ...

vLLM looks backends up by dotted path. Their classes are made on first use, so that no backend is imported that is
not used (most of them need a GPU).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from witcert_core.errors import UnsupportedError

STOCK: dict[str, str] = {}
"""Enum member -> dotted path of the class it named before."""


def take_over(names: Iterable[str]) -> None:
    """Put the metered classes in the place of what is registered now.

    Called again where an engine and a worker begin: another plugin may have registered its own since.
    """
    for name in names:
        member = AttentionBackendEnum[name]
        try:
            path = member.get_path()
        except ValueError:  # CUSTOM, while nobody has registered one
            continue
        if not path.startswith(__name__):
            STOCK[name] = path
            register_backend(member, f"{__name__}.{name}")


def is_stock(name: str) -> bool:
    """Whether the backend of that name is vLLM's, not a class of the user's own."""
    return STOCK.get(name, "vllm.").startswith("vllm.")


def described(name: str) -> str:
    """A backend's name, with the class where that is the user's own."""
    return name if is_stock(name) else f"{name} ({STOCK[name]})"


def __getattr__(name: str) -> Any:
    if name not in STOCK:
        raise AttributeError(f"no metered backend {name!r}")
    from witcert_vllm.attention import check_contract, metered
    from witcert_vllm.installation import current
    from witcert_vllm.packed import packed_backend

    installation = current()
    stock = resolve_obj_by_qualname(STOCK[name])
    check_contract(name, stock)
    packed = installation.policy.quantizer.storage == "packed"
    if packed and not is_stock(name):
        raise UnsupportedError(
            f"attention backend {described(name)} with quantizer.storage: packed: only the CPU's reference attention "
            "reads codes, so that class would never run; set quantizer.storage to 'simulated'"
        )
    cls = metered(stock, own_pages=packed)
    if packed:
        cls = packed_backend(cls, installation.quantizer)
    cls.__module__, cls.__qualname__ = __name__, name  # the path by which vLLM finds it again
    return cls
