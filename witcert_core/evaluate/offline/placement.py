"""Where the weights of an offline model lie: on one device, or its layers on several, as Accelerate spreads them.

The cache and the meter stay on the host, so the arithmetic of every bound is the same wherever a layer multiplies: a
layer's queries, keys and values come over, and its outputs go back (`bridge.attention`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from witcert_core.errors import InputError, UnsupportedError, listed
from witcert_core.evaluate.extras import require

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Names that transformers knows for a `device_map`."""


@dataclass(frozen=True)
class Placement:
    """device: of all weights. device_map: one of `MAPS`, or module -> device, in place of it."""

    device: str = "cpu"
    device_map: str | dict[str, str | int] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of `from_pretrained`."""
        return {} if self.device_map is None else {"device_map": self.device_map}

    @property
    def about(self) -> dict[str, Any]:
        """What records of a run depend on; nothing of the host."""
        if self.device_map is not None:
            return {"device_map": self.device_map}
        return {} if self.device == "cpu" else {"device": self.device}


HOST = Placement()


def parse_placement(device: str | None, device_map: str | None) -> Placement:
    """Of `--device` and `--device-map`, of which one may be given.

    Raises:
        InputError: both, or one that is no device and no map.
        UnsupportedError: a device that this machine does not have, or a map without Accelerate.
    """
    if device_map is None:
        return Placement(_checked(device or "cpu"))
    if device is not None:
        raise InputError("--device and --device-map are both given; one says where the layers are: leave the other out")
    require("accelerate")
    if device_map in MAPS:
        return Placement(device_map=device_map)
    try:
        modules = json.loads(device_map)
    except ValueError:
        modules = None
    if not isinstance(modules, dict) or not modules:
        raise InputError(
            f"device_map is {device_map!r}; allowed are {listed(MAPS)}, or a JSON object of modules and their devices: "
            '{"model.embed_tokens": 0, "model.layers.0": 0, ...}'
        )
    for module, where in modules.items():
        number = isinstance(where, int) and not isinstance(where, bool)
        if not number and not isinstance(where, str):
            raise InputError(f"device_map puts {module!r} on {where!r}; write a device, or the number of a GPU")
        _checked(f"cuda:{where}" if number else where)
    return Placement(device_map=modules)


def _checked(device: str) -> str:
    """A device that is here."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise InputError(f"device is {device!r}; allowed are cpu, cuda and cuda:N, a GPU by its number")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise UnsupportedError(f"device is {device!r}, but PyTorch {torch.__version__} finds no GPU here; take cpu")
        if (found.index or 0) >= count:
            raise UnsupportedError(f"device is {device!r}, but there are {count} GPUs here, numbered from 0")
    return device


def device_of(module: Any) -> torch.device:
    """Where a module takes its inputs; the host where Accelerate brings them to its weights."""
    tensors = [*module.parameters(), *module.buffers()]
    found = {tensor.device for tensor in tensors} - {torch.device("meta")}
    return found.pop() if found else torch.device("cpu")
