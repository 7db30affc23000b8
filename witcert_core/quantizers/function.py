"""`@quantizer("name")`: a plain tensor function as a quantizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, make_dataclass
from inspect import Parameter, signature
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from witcert_core.errors import QuantizerError, listed
from witcert_core.quantizers.base import Kind, QuantContext, Quantizer, check_input
from witcert_core.quantizers.coded import CodedQuantizer
from witcert_core.quantizers.packing import Part
from witcert_core.quantizers.registry import REGISTRY, QuantizerRegistry

Function = TypeVar("Function", bound=Callable[..., Tensor | Mapping[str, Part]])
Bytes = float | Callable[[int], float] | None
Param = tuple[str, Any, Any]
_CONTEXT_KEYWORDS = ("kind", "layer", "positions", "ctx")


def quantizer(
    name: str,
    *,
    bytes: Bytes = None,
    decode: Callable[..., Tensor] | None = None,
    registry: QuantizerRegistry | None = None,
) -> Callable[[Function], Function]:
    """Register `f(x) -> x~`, or `f(x) -> parts` beside `decode(parts) -> x~`, and leave f as it is.

    f takes x [N, H, D] float32, its own copy, and returns what the cache would give back. It may ask for any
    of the keywords kind, layer, positions, ctx; its other keyword-only arguments become `quantizer.params`.
    bytes: bytes of K and V together for one token and KV head, a number or a function of head_dim.
    decode: what the parts that f returns (name -> `Part`) stand for, for a quantizer that can be stored as well
    (`CodedQuantizer`); it may ask for the same keywords and for parameters of f. Its bytes are those of its parts.

    Example:
        >>> import witcert_core as wc
        >>> @wc.quantizer("halves", bytes=lambda head_dim: 2.0 * head_dim)
        ... def halves(x, *, step: float = 0.5):
        ...     return (x / step).round().clamp(-127, 127) * step
        >>> policy = wc.Policy(version=1, quantizer={"name": "halves", "params": {"step": 0.25}})
        >>> policy.resolved_quantizer.bytes_per_token_head(128)
        256.0
        >>> def signs(parts):
        ...     return parts["size"].values.float()[..., None] * (1 - 2.0 * parts["sign"].values)
        >>> @wc.quantizer("sign_and_size", decode=signs)
        ... def sign_and_size(x):
        ...     size = x.abs().amax(-1).clamp(max=65504).half()
        ...     return {"sign": wc.Part((x < 0).byte(), 1), "size": wc.Part(size, 16)}
        >>> wc.Policy(version=1, quantizer={"name": "sign_and_size"}).resolved_quantizer.bytes_per_token_head(128)
        36.0
    """

    if not isinstance(name, str):
        raise QuantizerError(
            f"quantizer name is {name!r}; expected text: @witcert_core.quantizer('name') above the function"
        )
    if bytes is not None and not callable(bytes) and not isinstance(bytes, (int, float)):
        raise QuantizerError(f"quantizer {name!r}: bytes is {bytes!r}; expected a number or a function of head_dim")
    if bytes is not None and decode is not None:
        raise QuantizerError(f"quantizer {name!r}: its bytes are those of the parts it returns; leave bytes out")

    def register(function: Function) -> Function:
        made = _class_of(name, function, bytes) if decode is None else _coded_class_of(name, function, decode)
        (registry or REGISTRY).register(made)
        return function

    return register


def _coded_class_of(
    name: str, function: Callable[..., Any], decode_parts: Callable[..., Tensor]
) -> type[CodedQuantizer]:
    keywords, params = _read_signature(name, function)
    wanted, own = _read_signature(name, decode_parts)
    own_names, names = [key for key, _, _ in own], [key for key, _, _ in params]
    if unknown := sorted(set(own_names) - set(names)):
        raise QuantizerError(
            f"quantizer {name!r}: decode takes {listed(unknown)}; it may take parameters of "
            f"{function.__qualname__}{signature(function)} only"
        )

    def encode(self: Quantizer, x: Tensor, **known: Any) -> Mapping[str, Part]:
        check_input(name, x, known["kind"], known["positions"], known["ctx"])
        given = {key: known[key] for key in keywords}
        parts: Mapping[str, Part] = function(x.clone(), **given, **{key: getattr(self, key) for key in names})
        if not isinstance(parts, Mapping) or not all(isinstance(part, Part) for part in parts.values()):
            raise QuantizerError(
                f"quantizer {name!r}: with decode, {function.__qualname__} must return a dict of witcert_core.Part, "
                f"not {type(parts).__name__}"
            )
        return parts

    def decode(self: Quantizer, parts: Mapping[str, Part], **known: Any) -> Tensor:
        values: Tensor = decode_parts(
            parts, **{k: known[k] for k in wanted}, **{k: getattr(self, k) for k in own_names}
        )
        return values

    return _made(name, function, CodedQuantizer, params, {"encode": encode, "decode": decode})


def _class_of(name: str, function: Callable[..., Any], bytes: Bytes) -> type[Quantizer]:
    keywords, params = _read_signature(name, function)

    def fake_quantize(
        self: Quantizer, x: Tensor, *, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext
    ) -> Tensor:
        check_input(name, x, kind, positions, ctx)
        known = {"kind": kind, "layer": layer, "positions": positions, "ctx": ctx}
        given = {key: known[key] for key in keywords}
        # x may be the engine's own exact keys: a function that writes to them would hide its error.
        values: Tensor = function(x.clone(), **given, **{key: getattr(self, key) for key, _, _ in params})
        return values

    def bytes_per_token_head(self: Quantizer, head_dim: int) -> float | None:
        return bytes(head_dim) if callable(bytes) else bytes

    own = {"fake_quantize": fake_quantize, "bytes_per_token_head": bytes_per_token_head}
    return _made(name, function, Quantizer, params, own)


def _made(
    name: str, function: Callable[..., Any], base: type[Any], params: list[Param], methods: dict[str, Any]
) -> type[Any]:
    """A class of quantizers that is known by its function."""
    about = {"__module__": function.__module__, "__qualname__": function.__qualname__, "__doc__": function.__doc__}
    namespace = {"name": name, **methods, **about}
    return make_dataclass(function.__name__, params, bases=(base,), frozen=True, namespace=namespace)


def _read_signature(name: str, function: Callable[..., Any]) -> tuple[list[str], list[Param]]:
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
    params: list[Param] = []
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
