"""Writes docs/models.md, what of which family of models is metered: `make docs-models`.

    python adapters/models.py            write it
    python adapters/models.py --check    exit with 1 if the page differs from what would be written

From configurations alone (`tests/data`), and from the rows by which servers and `witcert doctor` refuse a model. Needs
neither engine, nor Transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "adapters" / "sglang"), str(ROOT / "adapters" / "vllm")]

from tests.zoo.families import FAMILIES  # noqa: E402
from witcert_core import Policy  # noqa: E402
from witcert_core.errors import UnsupportedError  # noqa: E402
from witcert_core.serving.models.declared import DeclaredModel, layers_text  # noqa: E402
from witcert_core.serving.refusals import refuse  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
DATA = ROOT / "tests" / "data"
ENGINES = {"SGLang": "sglang", "vLLM": "vllm"}
WITHOUT_CLASS = {"SGLang": ("FalconForCausalLM", "MiniMaxText01ForCausalLM"), "vLLM": ("MiniMaxText01ForCausalLM",)}
"""Of the configurations' architectures those that an engine's version knows neither itself nor through Transformers."""
POLICY = Policy(version=1, quantizer={"name": "int8_token_group"})
HEAD = """# Models

What of which family is metered. `make docs-models` writes this page from configurations alone, layers as published or
as Transformers' class for the family has them unless told otherwise, and from the rows that stop a server and that
`witcert doctor --model` asks, so it says of a family what they say; ask that command of your own model.

*Metered*: a tiny checkpoint of the family with random weights (of Llama the demonstration's, which is trained) is
served by the real engine on a CPU, where every bound, and the engine's own outputs, are audited. *Read in source*: no
row refuses it, and it never ran here: it asks for kernels that a CPU does not have, or for more than the tests of this
project install. *No class*: this version of the engine has none. Which options go with a model is the engine's to say.

"""


def configurations() -> dict[str, dict[str, Any]]:
    """What it is called -> its configuration."""
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(DATA.glob("configs/*/config.json"))}
    return found | json.loads((DATA / "families.json").read_text(encoding="utf-8"))


def refused(model: DeclaredModel, engine: str) -> str:
    """What an adapter refuses of the model, and why; '' where it meters it."""
    try:
        refuse(import_module(f"witcert_{engine}.refusals.model").DECLARED, model)
    except UnsupportedError as error:
        return str(error).partition(";")[0].removeprefix(model.name).lstrip(": ")
    return ""


def attention(model: DeclaredModel) -> str:
    try:
        return layers_text(model.attention)
    except UnsupportedError:
        return "–"


def served() -> dict[str, set[str]]:
    """Family -> engines of which a test serves a checkpoint of it."""
    found = {"llama": set(ENGINES)}
    for family in FAMILIES.values():
        found.setdefault(family.model_type.removesuffix("_text"), set()).update(family.engines)
    return found


def verdict(model: DeclaredModel, engine: str, refused: str, served: set[str]) -> str:
    if refused:
        return "refused"
    if engine in served:
        return "metered"
    return "no class" if model.name in WITHOUT_CLASS[engine] else "read in source"


def rows() -> Iterator[str]:
    here = served()
    for called, config in sorted(configurations().items(), key=lambda item: (item[1]["model_type"], item[0])):
        model = DeclaredModel(config, POLICY, "cuda", DATA / called)
        why = [refused(model, folder) for folder in ENGINES.values()]
        engines = here.get(model.family, set())
        said = [verdict(model, engine, words, engines) for engine, words in zip(ENGINES, why, strict=True)]
        reasons = "; ".join(dict.fromkeys(filter(None, why)))
        yield f"| `{model.family}` | {called} | {attention(model)} | {' | '.join(said)} | {reasons} |"


def written() -> str:
    titles = ["family", "configuration", "attention", *ENGINES, "why it is refused"]
    return "\n".join([HEAD + f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows()]) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != written())
    PAGE.write_text(written(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
