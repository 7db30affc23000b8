"""A model's files that say what it is, without its weights: `config.json`, and ModelOpt's `hf_quant_config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from witcert_core.errors import InputError
from witcert_core.serving.models.fields import Fields, text_part

CONFIG = "config.json"
_MODELOPT = "hf_quant_config.json"
_PLAIN = ("", "auto", "none")


def config_file(path: str | Path) -> Path | None:
    """The `config.json` that `path` is or holds; None where there is no such file."""
    found = Path(path).expanduser()
    found = found / CONFIG if found.is_dir() else found
    return found if found.is_file() else None


def read_config(file: Path) -> Any:
    """What Transformers makes of a `config.json`, or the mapping in it, where it is not installed or does not know it.

    Raises:
        InputError: no such file, no JSON, or none of a model that Transformers can read.
    """
    settings = _mapping(file, "give a config.json or its directory")
    part = text_part(settings)
    if not isinstance(part, dict):
        raise InputError(f"{file}: {type(part).__name__} is where a mapping is expected; is this a config.json?")
    kind = settings.get("model_type")
    if not isinstance(kind, str) or find_spec("transformers") is None:
        return settings
    known = import_module("transformers").CONFIG_MAPPING
    if kind not in known:
        return settings
    try:
        return known[kind].from_pretrained(str(file))
    except unreadable_errors() as error:
        said = " ".join(str(error).split())
        raise InputError(f"{file}: Transformers cannot read it as a {kind} model: {said}") from error


def declared_cache(config: Any, folder: Path) -> str:
    """What a checkpoint says of a cache that it is quantized for, as messages say it; '' where it says nothing.

    Engines take it up where `--kv-cache-dtype` is auto: `kv_cache_quant_algo` of ModelOpt (also in a file of its own in
    `folder`), `kv_cache_scheme` of compressed-tensors.
    """
    sections = [Fields(config, str(folder)).section("quantization_config")]
    if (folder / _MODELOPT).is_file():
        sections.append(Fields(_mapping(folder / _MODELOPT, "it should say how ModelOpt quantized"), _MODELOPT))
    for section in sections:
        for part in (section, section and section.section("quantization")):
            if part is None:
                continue
            algorithm, scheme = part("kv_cache_quant_algo"), part("kv_cache_scheme")
            if isinstance(algorithm, str) and algorithm.lower() not in _PLAIN:
                return f"kv_cache_quant_algo {algorithm}"
            if isinstance(scheme, Mapping) and scheme:
                return f"kv_cache_scheme of {scheme.get('num_bits')} bit {scheme.get('type')}"
    return ""


def unreadable_errors() -> tuple[type[Exception], ...]:
    """What engines and Transformers raise over a configuration that is none, or lacks what their code asks of it."""
    badly_typed = import_module("huggingface_hub.errors").StrictDataclassError
    usual = (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError, ArithmeticError, AssertionError)
    return (*usual, badly_typed)


def _mapping(file: Path, instead: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; {instead}") from error
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of thousands of digits
        raise InputError(f"{file}: is not JSON that can be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file}: {type(found).__name__} is where a mapping is expected; {instead}")
    return found
