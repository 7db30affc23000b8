"""From command-line words to policies: which quantizer with which parameters, in which mode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from yaml import YAMLError

from witcert_core.errors import InputError, PolicyError, did_you_mean, listed
from witcert_core.policy.loader import read_yaml
from witcert_core.policy.model import Policy, load_policy, parse_policy
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers.apart import KeysAndValues
from witcert_core.quantizers.base import Quantizer

Mode = Literal["raw", "gated", "exact"]
MODES: tuple[Mode, ...] = get_args(Mode)
SKETCH_BITS = ("0", "2", "4", "8")
EXACT = "none"
"""The quantizer that does nothing: what `exact` runs with."""


@dataclass(frozen=True)
class QuantizerSpec:
    """A quantizer as written: `name`, `name:param=value,param=value`, `k=one,v=another` for keys and values apart, any
    of them with `@BITS` for residual sketches.

    sketch_bits: `meter.sketch_bits`, None to leave it to the policy. apart: those of keys and of values.
    """

    label: str
    name: str
    params: Mapping[str, Any]
    sketch_bits: int | None = None
    apart: tuple[QuantizerSpec, QuantizerSpec] | None = None

    @property
    def section(self) -> dict[str, Any]:
        """What it is in a policy's `quantizer` section."""
        if self.apart is None:
            return {"name": self.name, "params": dict(self.params)}
        return dict(zip(("k", "v"), (kind.section for kind in self.apart), strict=True))

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer itself; QuantizerError for one that there is not."""
        if self.apart is None:
            return quantizer_registry().get(self.name, self.params)
        return KeysAndValues(*(kind.quantizer for kind in self.apart))


def parse_quantizer(text: str) -> QuantizerSpec:
    """Values are read as in a policy file, so `bits=4` is an integer; InputError for what is not so written."""
    written, sketched, bits = text.partition("@")
    if sketched and bits not in SKETCH_BITS:
        raise InputError(f"quantizer {text!r}: @{bits} is no sketch; allowed are {', '.join(SKETCH_BITS)} bits")
    if apart := re.fullmatch(r"k=(.+?),v=(.+)", written):
        k, v = parse_quantizer(apart[1]), parse_quantizer(apart[2])
        return QuantizerSpec(text, f"k={k.name},v={v.name}", {}, int(bits) if sketched else None, (k, v))
    if written.startswith(("k=", "v=")):
        raise InputError(f"quantizer {text!r}: keys and values apart are written k=NAME,v=NAME")
    name, separator, rest = written.partition(":")
    params: dict[str, Any] = {}
    for part in rest.split(",") if separator else []:
        key, given, value = part.partition("=")
        if not given or not key or key in params:
            raise InputError(f"quantizer {text!r}: {part!r} is no parameter; write name:param=value,param=value")
        try:
            params[key] = read_yaml(value)
        except YAMLError as error:
            raise InputError(f"quantizer {text!r}: {value!r} is no value") from error
    return QuantizerSpec(text, name, params, int(bits) if sketched else None)


def parse_mode(text: str) -> Mode:
    """InputError for anything but raw, gated and exact."""
    for mode in MODES:
        if text == mode:
            return mode
    raise InputError(f"mode is {text!r}{did_you_mean(text, MODES)}; allowed are {listed(MODES)}")


def base_settings(path: Path | None, *, stride: int | None = None, audit_every: int | None = None) -> dict[str, Any]:
    """The sections of a policy file; without one, every row metered and audited. What is not None wins."""
    given = {"stride": stride, "audit_every": audit_every}
    asked = {name: value for name, value in given.items() if value is not None}
    if path is not None:
        load_policy(path)  # refuses what is wrong with it, by name
        data: dict[str, Any] = read_yaml(path.read_text(encoding="utf-8"))
        del data["quantizer"]
        return {**data, "meter": {**(data.get("meter") or {}), **asked}} if asked else data
    return {"version": 1, "meter": {"stride": 1, "audit_every": 1, **asked}}


def build_policy(
    base: Mapping[str, Any], spec: QuantizerSpec, mode: Mode, layers: tuple[int, ...] | None = None
) -> Policy:
    """The policy of one run.

    `raw` and `exact` never repair; `gated` repairs with the gate of `base`, or `combined` where that only observes.
    layers: those that are quantized, None for all.
    """
    data = {key: value for key, value in base.items() if key != "quantizer"}
    gate = dict(data.get("gate") or {})
    if mode != "gated":
        gate["kind"] = "observe"
    elif gate.get("kind", "observe") == "observe":
        gate["kind"] = "combined"
    meter = dict(data.get("meter") or {})
    if mode == "gated":
        meter.pop("stride", None)  # a gate that repairs makes it 1
    quantizer: dict[str, Any] = {"name": EXACT} if mode == "exact" else spec.section
    if mode != "exact" and layers is not None:
        quantizer["layers"] = list(layers)
    if spec.sketch_bits is not None and mode != "exact":
        meter["sketch_bits"] = spec.sketch_bits
    if mode == "exact":
        meter |= {"tier": "auto", "sketch_bits": 0}
    try:
        return parse_policy({**data, "quantizer": quantizer, "gate": gate, "meter": meter}, f"quantizer {spec.label}")
    except PolicyError as error:
        raise PolicyError(f"{mode}: {error}") from error
