"""Ready policy files, commented; `witcert policy init --preset NAME` writes one."""

from __future__ import annotations

from importlib.resources import files

from witcert_core.errors import PolicyError, did_you_mean, listed

PRESETS = ("observe", "int8", "gated")


def preset_text(name: str) -> str:
    """The YAML of a preset; PolicyError lists the known ones otherwise."""
    if name not in PRESETS:
        raise PolicyError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}; known: {listed(PRESETS)}")
    return files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
