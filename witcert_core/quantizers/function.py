"""`@quantizer("name")`: a plain tensor function as a quantizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, make_dataclass
from inspect import Parameter, signature
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from witcert_core.errors import QuantizerError
from witcert_core.quantizers.base import Kind, QuantContext, Quantizer, check_input
from witcert_core.quantizers.registry import REGISTRY, QuantizerRegistry

Function = TypeVar("Function", bound=Callable[..., Tensor])
Bytes = float | Callable[[int], float] | None
_CONTEXT_KEYWORDS = ("kind", "layer", "positions", "ctx")


def quantizer(
    name: str, *, bytes: Bytes = None, registry: QuantizerRegistry | None = None
) -> Callable[[Function], Function]:
    """Register `f(x) -> x~` and leave f as it is.

    f takes x [N, H, D] float32, its own copy, and returns what the cache would give back. It may ask for any
    of the keywords kind, layer, positions, ctx; its other keyword-only arguments become `quantizer.params`.
    bytes: bytes of K and V together for one token and KV head, a number or a function of head_dim.

    Example:
        >>> import witcert_core as wc
        >>> @wc.quantizer("halves", bytes=lambda head_dim: 2.0 * head_dim)
        ... def halves(x, *, step: float = 0.5):
        ...     return (x / step).round().clamp(-127, 127) * step
        >>> policy = wc.Policy(version=1, quantizer={"name": "halves", "params": {"step": 0.25}})
        >>> policy.resolved_quantizer.bytes_per_token_head(128)
        256.0
    """

    if not isinstance(name, str):
        raise QuantizerError(
            f"quantizer name is {name!r}; expected text: @witcert_core.quantizer('name') above the function"
        )
    if bytes is not None and not callable(bytes) and not isinstance(bytes, (int, float)):
        raise QuantizerError(f"quantizer {name!r}: bytes is {bytes!r}; expected a number or a function of head_dim")

    def register(function: Function) -> Function:
        (registry or REGISTRY).register(_class_of(name, function, bytes))
        return function

    return register


def _class_of(name: str, function: Callable[..., Tensor], bytes: Bytes) -> type[Quantizer]:
    keywords, params = _read_signature(name, function)

    def fake_quantize(
        self: Quantizer, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        check_input(name, x, kind, positions, ctx)
        known = {"kind": kind, "layer": layer, "positions": positions, "ctx": ctx}
        given = {key: known[key] for key in keywords}
        # x may be the engine's own exact keys: a function that writes to them would hide its error.
        return function(x.clone(), **given, **{key: getattr(self, key) for key, _, _ in params})

    def bytes_per_token_head(self: Quantizer, head_dim: int) -> float | None:
        return bytes(head_dim) if callable(bytes) else bytes

    return make_dataclass(
        function.__name__,
        params,
        bases=(Quantizer,),
        frozen=True,
        namespace={
            "name": name,
            "fake_quantize": fake_quantize,
            "bytes_per_token_head": bytes_per_token_head,
            "__module__": function.__module__,
            "__qualname__": function.__qualname__,
            "__doc__": function.__doc__,
        },
    )


def _read_signature(name: str, function: Callable[..., Tensor]) -> tuple[list[str], list[tuple[str, Any, Any]]]:
    """Which of the context keywords f wants, and its own parameters as dataclass fields."""
    arguments = list(signature(function).parameters.values())
    positional = [a for a in arguments if a.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 1 or any(a.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for a in arguments):
        raise QuantizerError(
            f"quantizer {name!r}: {function.__qualname__}{signature(function)} must take "
            f"exactly one positional argument, the tensor; others are keyword-only: (x, *, bits: int = 4)"
        )
    hints = get_type_hints(function)
    keywords: list[str] = []
    params: list[tuple[str, Any, Any]] = []
    for argument in arguments:
        if argument is positional[0]:
            continue
        if hasattr(Quantizer, argument.name) or argument.name in get_type_hints(Quantizer):
            raise QuantizerError(f"quantizer {name!r}: a parameter cannot be called {argument.name!r}; rename it")
        if argument.name in _CONTEXT_KEYWORDS:
            keywords.append(argument.name)
        elif argument.name not in hints:
            raise QuantizerError(f"quantizer {name!r}: parameter {argument.name!r} needs a type annotation")
        else:
            default = MISSING if argument.default is Parameter.empty else argument.default
            params.append((argument.name, hints[argument.name], field(default=default, kw_only=True)))
    return keywords, params
