"""What every quantizer must keep to, as checks that name the broken promise; plugins can use them too."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from witcert_core.errors import QuantizerError
from witcert_core.quantizers.base import (
    KINDS,
    CalibratedQuantizer,
    DitheredQuantizer,
    Kind,
    QuantContext,
    Quantizer,
    check_kinds_alike,
)
from witcert_core.quantizers.coded import CodedQuantizer, token_layout, why_not_packed
from witcert_core.quantizers.dither import FP16_MAX, DitherKey, num_groups
from witcert_core.quantizers.packing import TokenLayout
from witcert_core.quantizers.rotary import RotarySpec

_LAYER = 3
_NUM_GROUPS_OF_TOKENS = 5
_FIRST_HEAD = 4


def check_quantizer(quantizer: Quantizer, head_dim: int = 128, num_heads: int = 3, latent_dim: int = 0) -> None:
    """Raise QuantizerError unless the quantizer keeps its contract at this head_dim.

    latent_dim: of a latent cache, whose keys are `latent_dim` channels of the latent and then the rotated ones; keys
    alone are checked there, for nothing else is quantized.

    For K and V: shape, dtype and finiteness of the result; the input untouched; the same result again, for a
    token alone as in any batch, and for a head alone as on any tensor-parallel rank; a NaN or Inf confined to
    its own token (group) and head; a plausible number of bytes. Of a calibrated one also its state, of a coded one
    that its codes fit their bits and take the bytes it declares.

    Example:
        >>> import witcert_core as wc
        >>> @wc.quantizer("nosy")
        ... def nosy(x):
        ...     return x - x.mean()
        >>> wc.check_quantizer(wc.Policy(version=1, quantizer={"name": "nosy"}).resolved_quantizer)
        Traceback (most recent call last):
        ...
        witcert_core.errors.QuantizerError: quantizer 'nosy', head_dim 128, kind 'k': ...
    """
    if not isinstance(quantizer, Quantizer):
        raise QuantizerError(
            f"{quantizer!r} is no quantizer; expected an instance of a class of Quantizer, such as the "
            "resolved_quantizer of a policy"
        )
    if quantizer.of("k") is not quantizer:  # two, each with a contract of its own
        for kind in KINDS:
            check_quantizer(quantizer.of(kind), head_dim, num_heads, latent_dim)
        return
    try:
        case = _Case(quantizer, head_dim, num_heads, latent_dim)
    except Exception as error:
        raise QuantizerError(
            f"quantizer {quantizer.name!r}, head_dim {head_dim}: calibration failed: {type(error).__name__}: {error}"
        ) from error
    for kind in case.kinds:
        for check in (
            _check_state,
            _check_form,
            _check_repeatable,
            _check_tokens,
            _check_heads,
            _check_nonfinite,
            _check_empty,
            _check_codes,
            _check_alike,
        ):
            try:
                check(case, kind)
            except Exception as error:
                cause = str(error) if isinstance(error, QuantizerError) else f"{type(error).__name__}: {error}"
                where = f"quantizer {quantizer.name!r}, head_dim {head_dim}, kind {kind!r}"
                raise QuantizerError(f"{where}: {' '.join(cause.split())}") from error
    _check_bytes(case)


class _Case:
    """One quantizer with inputs of one shape. N tokens are whole token groups."""

    def __init__(self, quantizer: Quantizer, head_dim: int, num_heads: int, latent_dim: int = 0) -> None:
        self.quantizer = quantizer
        self.num_tokens = _NUM_GROUPS_OF_TOKENS * quantizer.token_group
        self.head_dim = head_dim
        self.kinds: tuple[Kind, ...] = ("k",) if latent_dim else KINDS
        rotary_dim = head_dim - latent_dim if latent_dim else None
        self.rotary = RotarySpec(head_dim, rotary_dim=rotary_dim, latent_dim=latent_dim)
        self.head_ids = tuple(range(_FIRST_HEAD, _FIRST_HEAD + num_heads))
        generator = torch.Generator().manual_seed(head_dim)
        shape = (self.num_tokens, num_heads, head_dim)
        self.x = torch.randn(shape, generator=generator)
        self.x[:, 1, 0] += 40.0  # an outlier channel, as key biases make
        self.x[1, 0, :] = 0.0
        self.x[2, 0, :] = 0.75
        self.pass_ids = torch.arange(1, self.num_tokens + 1)
        prefix = (quantizer.calibration_tokens, num_heads, head_dim)
        self.prefix = torch.randn(prefix, generator=generator)
        self.prefix[:, 1, 0] += 40.0
        self.prefix[:, 2:, 1] = 0.0
        self._states = {kind: self.calibrated(self.prefix, kind) for kind in KINDS}

    def calibrated(self, prefix: Tensor, kind: Kind, heads: tuple[int, ...] | None = None) -> Tensor | None:
        """The state [H, W] of a request that begins with `prefix` [C, H, D]; None for a quantizer without one."""
        if not isinstance(self.quantizer, CalibratedQuantizer):
            return None
        index = torch.arange(len(prefix))
        ctx = self.context(index + 1, self.head_ids if heads is None else heads)
        return self.quantizer.calibrate(prefix, kind=kind, layer=_LAYER, positions=index, ctx=ctx)

    def run(self, x: Tensor, kind: Kind, tokens: Tensor | None = None, heads: tuple[int, ...] | None = None) -> Tensor:
        """Quantize x [N, H, D]; tokens and heads say which of the case's it holds (None: all)."""
        index = torch.arange(self.num_tokens) if tokens is None else tokens
        ctx = self.seen(kind, index, self.head_ids if heads is None else heads)
        return self.quantizer.fake_quantize(x, kind=kind, layer=_LAYER, positions=self.positions[index], ctx=ctx)

    @property
    def positions(self) -> Tensor:
        """Far from the start, where a quantizer may leave sinks alone; the first of a group."""
        return torch.arange(self.num_tokens) + 64 * self.quantizer.token_group

    def seen(self, kind: Kind, index: Tensor, heads: tuple[int, ...]) -> QuantContext:
        """The context of some tokens and heads, the state of their request included."""
        state = self._states[kind]
        if state is not None:
            local = [self.head_ids.index(head) for head in heads]
            state = state[local].expand(len(index), -1, -1)
        return replace(self.context(self.pass_ids[index], heads), state=state)

    def context(self, pass_ids: Tensor, heads: tuple[int, ...]) -> QuantContext:
        return QuantContext(
            head_ids=heads,
            head_dim=self.head_dim,
            rotary=self.rotary,
            storage_dtype=torch.bfloat16,
            pass_ids=pass_ids,
            dither_key=DitherKey(seed=11, nonce=5),
        )


def _check_form(case: _Case, kind: Kind) -> None:
    before = case.x.clone()
    result = case.run(case.x, kind)
    _require(isinstance(result, Tensor), f"the result is {type(result).__name__}, expected a tensor")
    _require(result.shape == before.shape, f"the result has shape {tuple(result.shape)}, not {tuple(before.shape)}")
    _require(result.dtype == torch.float32, f"the result is {result.dtype}, not torch.float32")
    _require(torch.equal(case.x, before), "the input was written to")
    shared = result.untyped_storage().data_ptr() == case.x.untyped_storage().data_ptr()
    _require(not shared, "the result shares memory with the input; return a new tensor, e.g. x.clone()")
    for factor in (1e-30, 1e-6, FP16_MAX / 64):
        scaled = (before * factor).clamp(-FP16_MAX, FP16_MAX)
        _require(bool(case.run(scaled, kind).isfinite().all()), f"finite input (times {factor:g}) gave NaN or Inf")
    if isinstance(case.quantizer, DitheredQuantizer):
        _check_encoding(case, case.quantizer, kind, result)


def _check_encoding(case: _Case, quantizer: DitheredQuantizer, kind: Kind, result: Tensor) -> None:
    positions = case.positions
    ctx = case.context(case.pass_ids, case.head_ids)
    encoded = quantizer.encode(case.x, kind=kind, layer=_LAYER, positions=positions, ctx=ctx)
    scales_shape = (*case.x.shape[:2], num_groups(case.head_dim))
    _require(
        encoded.codes.dtype == torch.int8 and encoded.codes.shape == case.x.shape,
        "codes are not int8 [N, H, D]",
    )
    _require(
        encoded.scales.dtype == torch.float16 and encoded.scales.shape == scales_shape,
        "scales are not float16 [N, H, ceil(D/32)]",
    )
    _require(torch.equal(encoded.values, result), "fake_quantize and encode differ")
    other = quantizer.fake_quantize(
        case.x,
        kind=kind,
        layer=_LAYER,
        positions=positions,
        ctx=case.context(case.pass_ids + 100, case.head_ids),
    )
    # The law is claimed of keys; values have a deterministic bound and need no dither.
    _require(kind == "v" or not torch.equal(other, result), "another dither vector gives the same keys")


def _check_repeatable(case: _Case, kind: Kind) -> None:
    first = case.run(case.x, kind)
    case.run(-case.x.flip(0), "v" if kind == "k" else "k")
    _same(
        case.run(case.x, kind),
        first,
        "the same tensor gives another result the second time, or after the other kind",
    )


def _check_tokens(case: _Case, kind: Kind) -> None:
    """Alone = in any batch. A token group is the smallest thing that can be alone."""
    together = case.run(case.x, kind)
    size = case.quantizer.token_group
    groups = torch.arange(case.num_tokens).reshape(-1, size)
    for group in groups:
        _same(
            case.run(case.x[group], kind, group),
            together[group],
            "a token depends on the others of its batch",
        )
    if case.quantizer.state == "none":
        shuffled = groups.flip(0).reshape(-1)
        _same(
            case.run(case.x[shuffled], kind, shuffled),
            together[shuffled],
            "a token depends on its place in the batch",
        )


def _check_heads(case: _Case, kind: Kind) -> None:
    together = case.run(case.x, kind)
    for local, head in enumerate(case.head_ids):
        alone = case.run(case.x[:, local : local + 1].contiguous(), kind, heads=(head,))
        _same(
            alone,
            together[:, local : local + 1],
            "a head depends on the others, so on the tensor-parallel split",
        )


def _check_nonfinite(case: _Case, kind: Kind) -> None:
    clean = case.run(case.x, kind)
    spoiled_group = torch.arange(case.num_tokens) // case.quantizer.token_group == 3
    token = int(spoiled_group.nonzero()[0])
    for value in (float("nan"), float("inf"), float("-inf")):
        x = case.x.clone()
        x[token, 1, case.head_dim // 2] = value
        result = case.run(x, kind)
        others = ~spoiled_group
        _same(result[others], clean[others], f"{value} in one token changes another")
        _same(result[spoiled_group][:, 0], clean[spoiled_group][:, 0], f"{value} in one head changes another")


def _check_empty(case: _Case, kind: Kind) -> None:
    result = case.run(case.x[:0], kind, torch.arange(0))
    _require(result.shape == case.x[:0].shape, f"no tokens gave shape {tuple(result.shape)}")


def _check_state(case: _Case, kind: Kind) -> None:
    """A calibration: the same again, head by head, not spoiled by another head, and needed."""
    state = case.calibrated(case.prefix, kind)
    if state is None:
        return
    heads = len(case.head_ids)
    _require(
        state.dtype == torch.float32 and state.ndim == 2 and state.shape[0] == heads,
        f"calibrate gives {state.dtype} {tuple(state.shape)}, not torch.float32 [{heads}, W]",
    )
    _require(bool(state.isfinite().all()), "a finite prefix calibrates to NaN or Inf")
    _same(case.calibrated(case.prefix, kind), state, "the same prefix calibrates to another state the second time")
    for local, head in enumerate(case.head_ids):
        alone = case.calibrated(case.prefix[:, local : local + 1].contiguous(), kind, heads=(head,))
        _same(alone, state[local : local + 1], "the state of a head depends on the others")
    spoiled = case.prefix.clone()
    spoiled[0, 1, 0] = float("nan")
    after = case.calibrated(spoiled, kind)
    _require(after is not None and torch.equal(after[0], state[0]), "nan in one head changes the state of another")
    for factor in (0.0, 1e-30, FP16_MAX / 64):
        extreme = case.calibrated((case.prefix * factor).clamp(-FP16_MAX, FP16_MAX), kind)
        _require(
            extreme is not None and bool(extreme.isfinite().all()),
            f"a finite prefix (times {factor:g}) calibrates to NaN or Inf",
        )


def _check_codes(case: _Case, kind: Kind) -> None:
    """Codes fit their bits, whole groups give whole rows, and the values come from them alone."""
    quantizer = case.quantizer
    if not isinstance(quantizer, CodedQuantizer):
        return
    ctx = case.seen(kind, torch.arange(case.num_tokens), case.head_ids)
    parts = quantizer.encode(case.x, kind=kind, layer=_LAYER, positions=case.positions, ctx=ctx)
    rows = (case.num_tokens, case.num_tokens // quantizer.token_group)
    for name, part in parts.items():
        values = part.values
        _require(
            values.shape[0] in rows and values.shape[1] == len(case.head_ids),
            f"part {name!r} has shape {tuple(values.shape)}, not [{rows[0]} or {rows[1]}, {len(case.head_ids)}, ...]",
        )
        if values.is_floating_point():
            _require(8 * values.element_size() == part.bits, f"part {name!r} is {values.dtype} in {part.bits} bits")
        else:
            fits = bool((values >= 0).all() and (values.to(torch.int64) < 2**part.bits).all())
            _require(fits, f"part {name!r} has integers that do not fit {part.bits} bits")
    decoded = quantizer.decode(parts, kind=kind, layer=_LAYER, positions=case.positions, ctx=ctx)
    _same(decoded, case.run(case.x, kind), "fake_quantize is not decode(encode(x))")
    if why_not_packed(quantizer) is None:
        _check_packed(case, quantizer, kind)


def _check_packed(case: _Case, quantizer: CodedQuantizer, kind: Kind) -> None:
    """Bytes of a token are the same alone and in any batch, as many for any token, and all that decode asks for."""
    index = torch.arange(case.num_tokens)
    ctx = case.seen(kind, index, case.head_ids)
    layout = token_layout(quantizer, kind, case.head_dim, ctx)

    def packed(x: Tensor, tokens: Tensor) -> Tensor:
        seen = case.seen(kind, tokens, case.head_ids)
        parts = quantizer.encode(x, kind=kind, layer=_LAYER, positions=case.positions[tokens], ctx=seen)
        return layout.pack(parts)

    together = packed(case.x, index)
    for token in index:
        alone = packed(case.x[token : token + 1], index[token : token + 1])
        _same(alone, together[token : token + 1], "the codes of a token depend on the others of its batch")
    _check_read_back(case, quantizer, kind, layout, together)


def _check_read_back(case: _Case, quantizer: CodedQuantizer, kind: Kind, layout: TokenLayout, packed: Tensor) -> None:
    """Tokens read in another order and without their positions are what `fake_quantize` said."""
    order = torch.arange(case.num_tokens).flip(0)
    ctx = case.seen(kind, order, case.head_ids)
    parts, nowhere = layout.unpack(packed[order]), torch.zeros_like(order)
    read = quantizer.decode(parts, kind=kind, layer=_LAYER, positions=nowhere, ctx=ctx)
    _same(read, case.run(case.x, kind)[order], "what is read back of its bytes is not what fake_quantize gives")


def _check_alike(case: _Case, kind: Kind) -> None:
    """What `kinds_alike` promises; that a token does not depend on the others is checked of every quantizer."""
    if not case.quantizer.kinds_alike:
        return
    check_kinds_alike(case.quantizer)
    _same(case.run(case.x, "k"), case.run(case.x, "v"), "kinds_alike is set, but values are quantized unlike keys")


def _check_bytes(case: _Case) -> None:
    quantizer, head_dim = case.quantizer, case.head_dim
    said = f"quantizer {quantizer.name!r}: bytes_per_token_head({head_dim})"
    try:
        size = quantizer.bytes_per_token_head(head_dim)
    except Exception as error:
        raise QuantizerError(f"{said} raised {type(error).__name__}: {' '.join(str(error).split())}") from error
    if isinstance(quantizer, CodedQuantizer):
        counted = 0.0
        for kind in KINDS:
            ctx = case.seen(kind, torch.arange(case.num_tokens), case.head_ids)
            parts = quantizer.encode(case.x, kind=kind, layer=_LAYER, positions=case.positions, ctx=ctx)
            counted += sum(part.nbytes for part in parts.values()) / (case.num_tokens * len(case.head_ids))
        if size is None or abs(counted - size) > 1e-6:
            raise QuantizerError(f"{said} is {size!r}; its codes take {counted:g}")
    if size is not None and not (isinstance(size, (int, float)) and 0 < size <= 8 * head_dim):
        raise QuantizerError(
            f"{said} is {size!r}; expected None or more than 0 and at most {8 * head_dim} (K and V in 32 bit)"
        )


def _same(a: Tensor | None, b: Tensor | None, broken: str) -> None:
    _require(a is not None and b is not None and torch.equal(a, b), broken)


def _require(kept: bool, broken: str) -> None:
    if not kept:
        raise QuantizerError(broken)
