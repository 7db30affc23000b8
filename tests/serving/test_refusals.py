"""Rows of what is refused: the message of a server, and the page that is made of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from witcert_core.errors import UnsupportedError
from witcert_core.quantizers import REGISTRY
from witcert_core.serving.refusals import UNSET, Option, Refusal, Section, markdown, refuse, split_groups
from witcert_core.serving.startup import Adapter

OPTIONS = (
    Option("pp_size", 1, "pipeline parallelism", "layers would be missing"),
    Option("enable_mis", False, "multi-item scoring", "items do not see each other"),
    Option("mode", "null", "disaggregation", "keys move"),
    Option("_count", None, "several servers", "each knows a part", flag="--server-count"),
)
FINE = {option.name: option.allowed for option in OPTIONS}
ROWS = [option.row(lambda args: args) for option in OPTIONS]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"pp_size": 2}, "--pp-size 2 (pipeline parallelism): layers would be missing; use 1"),
        ({"enable_mis": True}, "--enable-mis (multi-item scoring): items do not see each other; leave it out"),
        ({"mode": "prefill"}, "--mode prefill (disaggregation): keys move; use null"),
        ({"_count": 3}, "--server-count 3 (several servers): each knows a part; leave it out"),
    ],
)
def test_an_option_is_refused_with_its_value_and_the_one_that_helps(option: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        refuse(ROWS, SimpleNamespace(**FINE | option), UNSET)
    assert str(raised.value) == message + UNSET


def test_options_that_are_not_set_pass() -> None:
    refuse(ROWS, SimpleNamespace(**FINE))
    refuse(ROWS, SimpleNamespace(pp_size=1, enable_mis=None, mode="null", _count=0))


def test_the_first_row_that_finds_something_is_named() -> None:
    rows: list[Refusal[int]] = [
        Refusal("a", "why", "instead", lambda x: x > 3 and f"{x} is large"),
        Refusal("b", "no", "`y`"),
    ]
    refuse(rows, 3)
    with pytest.raises(UnsupportedError, match=r"^4 is large: why; instead$"):
        refuse(rows, 4)
    assert str(rows[1].error("it")) == "it: no; y"  # raised where it is met, and without Markdown


def test_rows_with_one_reason_share_one_of_the_page() -> None:
    rows: list[Refusal[None]] = [Refusal(what, "why", "instead") for what in ("a", "b", "a")]
    rows.append(Refusal("c", "why", "else"))
    again: Refusal[None] = Refusal("c", "why", "else")
    assert markdown([Section("One", rows), Section("Two", [again, ROWS[2], again])]).splitlines() == [
        "### One",
        "",
        "| what | why | instead |",
        "|---|---|---|",
        "| a; b | why | instead |",
        "| c | why | else |",
        "",
        "### Two",
        "",
        "| what | why | instead |",
        "|---|---|---|",
        "| c | why | else |",
        "| `--mode` other than `null` (disaggregation) | keys move | use `null` |",
    ]


def test_a_quantizer_that_takes_tokens_together_needs_whole_groups() -> None:
    assert not split_groups(REGISTRY.get("int4_token_group"), 1)


def test_a_build_of_the_tested_version_is_that_version() -> None:
    (row,) = [Adapter("E", "e", "1.2.3", "we", "w-e", "e.plugins", "E_PLUGINS").version_row()]
    for version, fine in (("1.2.3", True), ("1.2.3+cpu", True), ("1.2.3.post1", False), ("1.2.4", False)):
        assert bool(row.found and row.found(version)) is not fine
