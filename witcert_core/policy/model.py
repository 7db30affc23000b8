"""The policy file: what to quantize, how to meter it, what to do about it, what to report.

Every section but `quantizer` may be left out. Unknown keys and impossible values are refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from witcert_core.errors import PluginError, PolicyError, QuantizerError, listed, yaml_word
from witcert_core.policy.gate_registry import SHARED
from witcert_core.policy.gates import Gate
from witcert_core.policy.loader import read_yaml
from witcert_core.policy.messages import describe_validation_error
from witcert_core.policy.plugins import gate_registry, quantizer_registry
from witcert_core.quantizers import Quantizer
from witcert_core.quantizers.apart import KeysAndValues
from witcert_core.quantizers.base import DitheredQuantizer, Tier
from witcert_core.quantizers.coded import why_not_packed
from witcert_core.quantizers.engine import EnginePrecision

MAX_LAYER = 65_535
MAX_INTEGER = 2**63 - 1
STRIDE = 32
NEVER: Literal["never"] = "never"
"""Of meter.stride: no row is metered but those that probes ask for."""
Stride = int | Literal["never"]
GATE_SKETCH_BITS = 4
MAX_BLOCK = 65_536
_RANGE = re.compile(r"([0-9]{1,9})\s*-\s*([0-9]{1,9})")


@contextmanager
def _at_key(key: str) -> Iterator[None]:
    """Put the key path before what a registry has to say."""
    try:
        yield
    except (QuantizerError, PluginError) as error:
        raise ValueError(f"{key}: {error}") from error


def parse_layers(given: object) -> object:
    """A layer list as written (3, "0-3", [0, "4-7"]) as sorted ids; None, every layer, stays None."""
    if given is None:
        return None
    items = list(given) if isinstance(given, (list, tuple)) else [given]
    layers: set[int] = set()
    for item in items:
        layers.update(_layer_range(item))
    if not layers:
        raise ValueError("names no layer; write null for every layer")
    return tuple(sorted(layers))


def _layer_range(item: object) -> range:
    if isinstance(item, int) and not isinstance(item, bool):
        first = last = item
    elif isinstance(item, str) and (match := _RANGE.fullmatch(item.strip())):
        first, last = int(match[1]), int(match[2])
    else:
        raise ValueError(f'has the entry {yaml_word(item)}; allowed: layer ids and ranges, e.g. [0, "4-7"]')
    if not 0 <= first <= last <= MAX_LAYER:
        raise ValueError(f"has the entry {yaml_word(item)}; layers run upwards from 0 to at most {MAX_LAYER}")
    return range(first, last + 1)


def parse_stride(given: object) -> object:
    """A stride as it is written; ValueError for what is none."""
    if given is None or given == NEVER or (type(given) is int and 1 <= given <= MAX_INTEGER):
        return given
    raise ValueError(f"is {yaml_word(given)}; allowed: an integer of at least 1, never, or null")


def _no_lookalike(given: object) -> object:
    """True and 1.0 equal 1, which is all that Literal asks."""
    if isinstance(given, (bool, float)):
        raise ValueError(f"is {yaml_word(given)}, which is no integer; write it as one")
    return given


_NO_LOOKALIKE = BeforeValidator(_no_lookalike)
Layers = Annotated[tuple[int, ...] | None, BeforeValidator(parse_layers)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        """YAML reads the key `on` as true and `~` as null."""
        cls.check_keys(data if isinstance(data, dict) else ())
        return data

    @classmethod
    def check_keys(cls, keys: Iterable[object]) -> None:
        """ValueError for a key that is no text."""
        for key in keys:
            if not isinstance(key, str):
                raise ValueError(f"has the key {yaml_word(key)}, which is no text; allowed: {listed(cls.model_fields)}")

    @field_validator("*", mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"is {yaml_word(value)}; allowed: at most 2^63 - 1")
        return value


class KindSettings(_Section):
    """The quantizer of keys, or of values, and its parameters."""

    name: str
    params: dict[str, Any] = Field(default_factory=dict)


class QuantizerSettings(_Section):
    """Which quantizer, its parameters, and the layers it applies to (null: all; the others stay exact).

    k, v: one for keys and one for values, in the place of name and params; the name is then made of theirs.
    """

    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    k: KindSettings | None = None
    v: KindSettings | None = None
    storage: Literal["simulated", "packed"] = "simulated"
    layers: Layers = None

    @model_validator(mode="before")
    @classmethod
    def _name_of_both(cls, data: Any) -> Any:
        """Keys and values apart have no other name."""
        if not isinstance(data, dict) or data.get("k") is data.get("v") is None:
            return data
        if beside := sorted({"name", "params"} & set(data)):
            raise ValueError(f"has k and v, and {listed(beside)} beside them; give either")
        names = [data[kind].get("name") if isinstance(data.get(kind), dict) else None for kind in ("k", "v")]
        if None in names:
            raise ValueError("has only one of k and v, or one without a name; write {k: {name: ...}, v: {name: ...}}")
        return {**data, "name": f"k={names[0]},v={names[1]}"}

    def layers_of(self, model_layers: Sequence[int]) -> tuple[int, ...]:
        """Those of the model's layer ids that are quantized; PolicyError if one named is not among them."""
        return _choose(self.layers, model_layers, "quantizer.layers")


class MeterSettings(_Section):
    """What is measured, how often, and with which claim."""

    tier: Literal["auto", "deterministic", "probabilistic"] = "auto"
    form: Literal["auto", "extremal", "tanh", "jensen", "needle", "eform", "rms"] = "auto"
    sketch_bits: Annotated[Literal[0, 2, 4, 8] | None, _NO_LOOKALIKE] = None
    bands: Annotated[Literal[16, 32] | None, _NO_LOOKALIKE] = None
    delta: float = Field(default=0.01, gt=0, lt=1)
    max_rows: int = Field(default=8, ge=1)
    stride: Annotated[Stride | None, BeforeValidator(parse_stride)] = None
    layers: Layers = None
    audit_every: int = Field(default=0, ge=0)
    audit_share: float = Field(default=0.0, ge=0, le=1)
    sketch_share: float = Field(default=0.0, ge=0, le=1)
    share_bytes: int = Field(default=2**28, ge=1)
    share_seed: int | None = None
    declared_rows: int | None = Field(default=None, ge=1)

    def layers_of(self, model_layers: Sequence[int]) -> tuple[int, ...]:
        """Those of the model's layer ids that are metered; PolicyError if one named is not among them."""
        return _choose(self.layers, model_layers, "meter.layers")


class GateSettings(_Section):
    """What is done about a cell whose bound is too high."""

    kind: str = "observe"
    params: dict[str, Any] = Field(default_factory=dict)
    target: Literal["tv", "output", "both"] = "both"
    tau: float = Field(default=0.2, gt=0, le=1)
    tau_out: float = Field(default=0.1, gt=0)
    risk_tau: float = Field(default=5.0, gt=0)
    block_size: int = Field(default=16, ge=1, le=MAX_BLOCK)
    max_pagein_bytes: int | None = Field(default=None, ge=0)
    copy_bytes: int | None = Field(default=None, ge=1)
    on_exhausted: Literal["serve", "abort"] = "serve"


class ReportSettings(_Section):
    """Where the measurements go."""

    jsonl: Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]*$")] | None = None
    cells: Literal["none", "worst", "all"] = "none"
    prometheus: bool = True
    per_request: bool = True
    control: bool = False


class Policy(_Section):
    """A checked policy; PolicyError, in one line, for what is wrong with one.

    Example:
        >>> import witcert_core as wc
        >>> policy = wc.Policy(version=1, quantizer={"name": "int8_dither"}, gate={"kind": "combined", "tau": 0.1})
        >>> policy.stride, policy.sketch_bits, policy.tier
        (1, 4, 'deterministic')
    """

    version: Annotated[Literal[1], _NO_LOOKALIKE]
    quantizer: QuantizerSettings
    prefill_reads: Literal["chunk_exact", "stored"] = "chunk_exact"
    meter: MeterSettings = Field(default_factory=MeterSettings)
    gate: GateSettings = Field(default_factory=GateSettings)
    report: ReportSettings = Field(default_factory=ReportSettings)
    _quantizer: Quantizer = PrivateAttr()
    _gate: Gate = PrivateAttr()

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise PolicyError(describe_validation_error(error, Policy)) from error

    @model_validator(mode="after")
    def _check_together(self) -> Policy:
        wanted = self.quantizer
        if wanted.k is None or wanted.v is None:
            self._quantizer = _quantizer_of("quantizer", wanted.name, wanted.params)
        else:
            k, v = (
                _quantizer_of(f"quantizer.{kind}", of.name, of.params)
                for kind, of in (("k", wanted.k), ("v", wanted.v))
            )
            with _at_key("quantizer"):
                self._quantizer = KeysAndValues(keys=k, values=v)
        with _at_key("gate.kind"):
            gate_registry().cls(self.gate.kind)
        with _at_key("gate.params"):
            shared = {key: getattr(self.gate, key) for key in SHARED}
            self._gate = gate_registry().build(self.gate.kind, shared, self.gate.params)
        self._check_tier()
        self._check_audits()
        self._check_sketch_share()
        self._check_bands()
        self._check_storage()
        self._check_engine()
        self._check_stride()
        if self.report.cells != "none" and self.report.jsonl is None:
            raise ValueError(
                f"report.cells: is {self.report.cells!r}, but cell records go to report.jsonl, which is "
                "null; give it a path or set report.cells to 'none'"
            )
        return self

    def _check_tier(self) -> None:
        if self.meter.tier == "probabilistic" and self._quantizer.tier != "probabilistic":
            raise ValueError(
                f"meter.tier: is 'probabilistic', but quantizer {self.quantizer.name!r} has no dither law; "
                "allowed: 'auto', 'deterministic', or a dithered quantizer such as 'int8_dither'"
            )
        if self.meter.sketch_bits and self.meter.tier == "probabilistic":
            raise ValueError(
                f"meter.sketch_bits: is {self.meter.sketch_bits}, but meter.tier is 'probabilistic', whose bound is "
                "from the law and not from sketches; allowed: 0, or meter.tier 'auto' or 'deterministic'"
            )
        if self.meter.sketch_bits and self.quantizer.storage == "packed" and not self.stores_parts:
            raise ValueError(
                f"meter.sketch_bits: is {self.meter.sketch_bits}, but the packed cache of {self.quantizer.name!r} "
                "keeps no sketches; allowed: 0, or quantizer.storage 'simulated'"
            )

    def _check_audits(self) -> None:
        if self.meter.audit_share and self.meter.audit_every:
            raise ValueError(
                f"meter.audit_share: is {self.meter.audit_share}, but meter.audit_every is {self.meter.audit_every}, "
                "which audits every request already; set one of them to 0"
            )

    def _check_sketch_share(self) -> None:
        if not self.meter.sketch_share:
            return
        said = f"meter.sketch_share: is {self.meter.sketch_share}, but "
        if self.meter.sketch_bits:
            raise ValueError(
                f"{said}meter.sketch_bits is {self.meter.sketch_bits}, which sketches every request already; set one "
                "of them to 0"
            )
        if self._gate.repairs:
            raise ValueError(
                f"{said}gate {self.gate.kind!r} repairs, which writes other keys and values than were sketched; "
                "allowed: 0, or gate.kind 'observe'"
            )
        if self._quantizer.bypass_pairs:
            raise ValueError(
                f"{said}quantizer {self.quantizer.name!r} chooses its outlier channels after the first tokens, which "
                "are then written once more; allowed: 0, or a quantizer without bypass"
            )

    def _check_bands(self) -> None:
        if self.meter.bands is not None and self.quantizer.storage == "packed" and not self.stores_parts:
            raise ValueError(
                f"meter.bands: is {self.meter.bands}, but the packed cache of {self.quantizer.name!r} keeps no bands; "
                "allowed: null, or quantizer.storage 'simulated'"
            )

    def _check_storage(self) -> None:
        if self.quantizer.storage == "simulated":
            if self._quantizer.bypass_pairs:
                raise ValueError(
                    f"quantizer.storage: is 'simulated', but quantizer {self.quantizer.name!r} keeps outliers beside "
                    "its codes; allowed: 'packed', or a quantizer without bypass"
                )
            return
        if why := why_not_packed(self._quantizer):
            raise ValueError(
                f"quantizer.storage: is 'packed', but quantizer {self.quantizer.name!r} {why}; allowed: "
                "'simulated', or what `witcert quantizers` calls packed, such as 'int8_dither' or 'int4_token_group'"
            )
        if self.quantizer.layers is not None:
            raise ValueError(
                "quantizer.storage: is 'packed', but quantizer.layers names some layers only; the packed cache holds "
                "every layer: set quantizer.layers to null or storage to 'simulated'"
            )

    def _check_engine(self) -> None:
        """The engine's own cache holds every layer and has no room for exact blocks."""
        if not self.meters_engine:
            return
        if self.quantizer.layers is not None:
            raise ValueError(
                "quantizer.layers: names some layers only, but quantizer 'engine' is whatever the engine stores, in "
                "every layer; set quantizer.layers to null"
            )
        if self._gate.repairs:
            raise ValueError(
                f"gate.kind: is {self.gate.kind!r}, which repairs, but the engine's own cache has no room for exact "
                "blocks; set gate.kind to 'observe' or name a quantizer"
            )

    def _check_stride(self) -> None:
        if self._gate.repairs and self.meter.stride not in (None, 1):
            raise ValueError(
                f"meter.stride: is {yaml_word(self.meter.stride)}, but gate {self.gate.kind!r} repairs and needs every "
                "cell; leave the key out, set it to 1, or set gate.kind to 'observe'"
            )

    @property
    def stride(self) -> Stride:
        """One row in so many is metered, or none by itself: meter.stride, or without one STRIDE, and 1 with a gate that
        repairs."""
        return self.meter.stride or (1 if self._gate.repairs else STRIDE)

    @property
    def rows_metered(self) -> str:
        """The stride in words."""
        if self.stride == NEVER:
            return "no row but those that probes ask for"
        return "every row" if self.stride == 1 else f"one generated row in {self.stride}"

    @property
    def sketch_bits(self) -> int:
        """Bits a channel of the residuals' sketches, 0 for none.

        Without a sketch a gate has to restore nearly every block of a coarse quantizer (docs/meter.md, 2).
        """
        if self.meter.sketch_bits is not None:
            return self.meter.sketch_bits
        usable = self.meter.tier != "probabilistic" and (self.quantizer.storage == "simulated" or self.stores_parts)
        return GATE_SKETCH_BITS if self._gate.repairs and usable else 0

    @property
    def stores_parts(self) -> bool:
        """Whether the pool holds the parts of a coded quantizer, with a witness beside them."""
        return self.quantizer.storage == "packed" and not isinstance(self._quantizer, DitheredQuantizer)

    @property
    def repairs(self) -> bool:
        """Whether the gate writes exact blocks back."""
        return self._gate.repairs

    @property
    def meters_engine(self) -> bool:
        """Whether the engine's own cache is metered by reading it back (quantizer.name: engine)."""
        return isinstance(self._quantizer, EnginePrecision)

    @property
    def tier(self) -> Tier:
        """The tier the meter claims: meter.tier, or with 'auto' the quantizer's own, deterministic with sketches."""
        if self.meter.tier != "auto":
            return self.meter.tier
        return "deterministic" if self.sketch_bits else self._quantizer.tier

    @property
    def resolved_quantizer(self) -> Quantizer:
        """The quantizer of `quantizer.name` with its `quantizer.params`; frozen, always the same one."""
        return self._quantizer

    @property
    def resolved_gate(self) -> Gate:
        """The gate of `gate.kind` with its thresholds; frozen, always the same one."""
        return self._gate


def _quantizer_of(key: str, name: str, params: dict[str, Any]) -> Quantizer:
    with _at_key(f"{key}.name"):
        quantizer_registry().cls(name)
    with _at_key(f"{key}.params"):
        return quantizer_registry().get(name, params)


def _choose(named: tuple[int, ...] | None, model_layers: Sequence[int], key: str) -> tuple[int, ...]:
    if named is None:
        return tuple(model_layers)
    missing = [layer for layer in named if layer not in set(model_layers)]
    if missing:
        raise PolicyError(
            f"{key}: names layer {missing[0]}, but the model's attention layers are {_compact(model_layers)}"
        )
    return named


def _compact(layers: Sequence[int]) -> str:
    contiguous = list(layers) == list(range(layers[0], layers[-1] + 1)) if layers else False
    return f"{layers[0]}-{layers[-1]}" if contiguous else str(list(layers))


def parse_policy(data: object, origin: str = "policy") -> Policy:
    """A Policy from loaded YAML; PolicyError (one line, starting with `origin`) if it is not a valid one."""
    if not isinstance(data, dict):
        holds = "is empty" if data is None else f"holds {yaml_word(data)}"
        raise PolicyError(
            f"{origin}: {holds}, expected a mapping with at least version and quantizer; "
            "`witcert policy init` writes one"
        )
    try:
        Policy.check_keys(data)
        return Policy(**data)
    except ValueError as error:
        raise PolicyError(f"{origin}: {error}") from error


def load_policy(path: str | Path) -> Policy:
    """Read and check a policy file; PolicyError names the file, key path, value and what is allowed.

    Example:
        >>> import pathlib, tempfile, witcert_core as wc
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "policy.yaml"
        >>> _ = file.write_text("version: 1\\nquantizer: {name: int4_token_group}\\n")
        >>> wc.load_policy(file).quantizer.name
        'int4_token_group'
    """
    if not isinstance(path, (str, Path)):
        raise PolicyError(f"{yaml_word(path)} is no path; a policy that is no file is made by Policy(version=1, ...)")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise PolicyError(f"{path}: cannot be read: {reason}") from error
    try:
        data = read_yaml(text)
    except yaml.YAMLError as error:
        raise PolicyError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    return parse_policy(data, str(path))
