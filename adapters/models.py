"""Writes docs/models.md, what of which family of models is metered: `make docs-models`.

    python adapters/models.py            write it
    python adapters/models.py --check    exit with 1 if the page differs from what would be written

From configurations alone (`tests/data`), and from the rows by which servers and `witcert doctor` refuse a model. Needs
neither engine, nor Transformers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "adapters" / "sglang"), str(ROOT / "adapters" / "vllm")]

from witcert_core import Policy  # noqa: E402
from witcert_core.errors import UnsupportedError  # noqa: E402
from witcert_core.serving.models.declared import DeclaredModel, layers_text  # noqa: E402
from witcert_core.serving.refusals import refuse  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
TESTS = ROOT / "tests"
DATA = TESTS / "data"
ENGINES = {"SGLang": "sglang", "vLLM": "vllm"}
POLICY = Policy(version=1, quantizer={"name": "int8_token_group"})
HEAD = """# Models

What of which family is metered, by its configuration alone: layers as published, or as Transformers' class for the
family has them unless told otherwise. `make docs-models` writes this page from the rows that stop a server and that
`witcert doctor --model` asks, so it says of a family what they say; ask that command of your own model. Whether an
engine has a class for the model at all, and which options go with it, is the engine's to say.

*Tested here*: a checkpoint of the family (random weights; of Llama the demonstration's, which is trained) is served by
the real engine on a CPU, where bounds and the engine's own outputs are audited. The others were never run: what is said
of them follows from their configuration and the rows alone.

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


def tested() -> dict[str, set[str]]:
    """Family, in letters alone -> engines of which a test serves a checkpoint of it: one of the table `FAMILIES` of a
    module of `tests/zoo`, which the test names, or takes all of."""
    found = {"llama": set(ENGINES)}
    for path in TESTS.glob("zoo/*.py"):
        text = path.read_text(encoding="utf-8")
        kinds = dict(re.findall(r"^def (\w+)\(\).*?transformers\.(\w+?)(?:Text)?Config\(", text, flags=re.S | re.M))
        table = re.findall(r'"(\w+)": (?:Family\()?(\w+)', text.partition("\nFAMILIES")[2].partition("\n}")[0])
        for engine, folder in ENGINES.items():
            for source in (file.read_text(encoding="utf-8") for file in TESTS.glob(f"{folder}/*.py")):
                if not re.search(rf"zoo(\.| import ){path.stem}\b", source):
                    continue
                every = re.search(r"(\bin|\",) (\w+\.)?FAMILIES\b", source)
                for name, factory in table:
                    if every or f'"{name}"' in source:
                        found.setdefault(kinds[factory].lower(), set()).add(engine)
    return found


def rows() -> Iterator[str]:
    served = tested()
    for called, config in sorted(configurations().items(), key=lambda item: (item[1]["model_type"], item[0])):
        model = DeclaredModel(config, POLICY, "cuda", DATA / called)
        why = [refused(model, folder) for folder in ENGINES.values()]
        engines = sorted(served.get(model.family.replace("_", ""), ()))
        here = "tested in " + ", ".join(engines) if engines else "by configuration"
        verdicts = ["refused" if words else "metered" for words in why]
        said = "; ".join(dict.fromkeys(filter(None, why))) or here
        yield f"| `{model.family}` | {called} | {attention(model)} | {' | '.join(verdicts)} | {said} |"


def written() -> str:
    titles = ["family", "configuration", "attention", *ENGINES, "why, or how that is known"]
    return "\n".join([HEAD + f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows()]) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != written())
    PAGE.write_text(written(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
