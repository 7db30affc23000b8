"""Which software made the numbers of a run."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions_of(engine: str) -> dict[str, str]:
    """Distribution -> version, of those that are installed: ours, PyTorch's and the engine's."""
    found = {}
    for name in ("witcert", f"witcert-{engine}", engine, "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
