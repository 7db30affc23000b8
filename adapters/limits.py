"""Writes the tables of docs/limits.md from the adapters' refusals: `make docs-limits`.

    python adapters/limits.py            write them
    python adapters/limits.py --check    exit with 1 if the page differs from them

Needs neither engine.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "limits.md"
ADAPTERS = {"witcert_sglang": ROOT / "adapters" / "sglang", "witcert_vllm": ROOT / "adapters" / "vllm"}


def written(page: str) -> str:
    """`page` with the tables of every adapter between its two marks."""
    sys.path[:0] = map(str, (ROOT, *ADAPTERS.values()))
    from witcert_core.serving.refusals import markdown

    for package in ADAPTERS:
        tables = markdown(import_module(f"{package}.refusals").SECTIONS)
        begin, end = f"<!-- {package}.refusals, by `make docs-limits` -->\n", f"<!-- end of {package}.refusals -->\n"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise SystemExit(f"{PAGE}: expected {begin.strip()} and {end.strip()}, once each")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{tables}\n{end}{rest.split(end)[1]}"
    return page


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = written(page)
    if "--check" in sys.argv[1:]:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
