"""What a probe may say, and where in its text it is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from witcert_core.errors import ProbeError
from witcert_core.probes.fields import FIELDS
from witcert_core.probes.language import LONGEST, parse_probe
from witcert_core.probes.predicate import OPERATORS, All, Any_, Compared, Condition, Not


def test_everything_a_probe_may_say() -> None:
    probe = parse_probe(
        'top(5, log_a) by layer, request where lora == "fin" and (layer in 4..7 or not form in (needle, tanh)) '
        "every 4 for 500 rows, 30 seconds, 12.5% of passes"
    )
    assert (probe.aggregate.kind, probe.aggregate.measure, probe.aggregate.number) == ("top", "log_a", 5)
    assert probe.by == ("layer", "request")
    assert (probe.every, probe.rows, probe.seconds, probe.share) == (4, 500, 30, 0.125)
    assert probe.names == {"layer", "request", "lora", "form"}


def test_a_probe_ends_though_it_does_not_say_when() -> None:
    probe = parse_probe("count()")
    assert (probe.rows, probe.seconds, probe.share, probe.every) == (1000, 300, 1.0, 1)


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("", "^", "'count', 'max', 'quantize', 'top'"),
        ("max(bond)", "    ^", "did you mean 'bound'?"),
        ("max(bound", "         ^", "the end cannot stand here; expected ')'"),
        ("max(bound) $", "           ^", "'$' cannot stand here; expected 'by', 'every', 'for', 'where'"),
        ("max(bound) where layr == 3", "                 ^", "did you mean 'layer'?"),
        ("max(bound) where form == 3", "                         ^", "one of eform, tanh"),
        ('max(bound) where layer == "x"', "                          ^", "a number"),
        ('max(bound) where lora < "x"', "                      ^", "no order"),
        ("max(bound) where layer startswith 3", "                                  ^", "a text"),
        ('max(bound) where layer startswith "3"', "                 ^", "layer is no text"),
        ("max(bound) by bound", "              ^", "nothing is grouped by 'bound'"),
        ("count() by layer, layer", "        ^", "at most 3 different names"),
        ("count() for 0 rows", "            ^", "rows may be 1 to 1000000, not 0"),
        ("count() for 5 rows, 6 rows", "        ^", "names a limit twice"),
        ("count() for 200% of passes", "            ^", "at most 100 %"),
        ("top(101, bound)", "    ^", "top shows 1 to 100"),
        ('count() where request == "\\x"', "                         ^", "as in JSON"),
        (f"count() where layer == 1{'0' * 20}", "                       ^", "1e+15 at most"),
        (f"count() where {'not ' * 30}layer == 1", f"{' ' * 98}^", "nested more than 20 deep"),
        (f'count() where request == "{"x" * LONGEST}"', "^", "at most 2000 are read"),
    ],
)
def test_a_mistake_is_refused_at_its_place(text: str, place: str, said: str) -> None:
    with pytest.raises(ProbeError) as refused:
        parse_probe(text)
    assert refused.value.column == place.index("^") + 1
    assert said in str(refused.value)


def test_a_fact_that_an_engine_does_not_say_is_refused() -> None:
    parse_probe("count() where priority > 1", facts=("priority",))
    with pytest.raises(ProbeError, match="column 15: priority: this engine does not say it of a request"):
        parse_probe("count() where priority > 1", facts=("lora",))


@given(st.text(max_size=60), st.sampled_from(["", "max(bound) ", "max(bound) where layer == 1 ", "count() for "]))
def test_any_mistake_has_a_place_in_its_text(mistake: str, before: str) -> None:
    with pytest.raises(ProbeError) as refused:
        parse_probe(f"{before}{mistake}]")
    assert 1 <= refused.value.column <= len(before + mistake) + 1


NUMBERS = [name for name, field in FIELDS.items() if field.kind == "number"]
compared = st.builds(Compared, st.sampled_from(NUMBERS[:3]), st.sampled_from(sorted(OPERATORS)), st.integers(0, 2))
conditions: st.SearchStrategy[Condition] = st.recursive(
    compared,
    lambda inner: st.one_of(
        inner.map(Not),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: All(tuple(some))),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: Any_(tuple(some))),
    ),
    max_leaves=8,
)
values = st.lists(st.integers(0, 2), min_size=3, max_size=3)


@given(conditions, values, st.sets(st.sampled_from(NUMBERS[:3])))
def test_what_is_decided_of_some_facts_is_true_of_all(
    condition: Condition, found: list[int], missing: set[str]
) -> None:
    facts = dict(zip(NUMBERS[:3], found, strict=True))
    full = condition.decide(facts)
    assert full.may is not full.may_not
    part = condition.decide({name: value for name, value in facts.items() if name not in missing})
    assert part.may or not full.may
    assert part.may_not or not full.may_not


@given(conditions, st.lists(values, min_size=1, max_size=4))
def test_cells_are_decided_one_by_one_as_together(condition: Condition, rows: list[list[int]]) -> None:
    columns = torch.tensor(rows, dtype=torch.float64).T
    together = condition.decide(dict(zip(NUMBERS[:3], columns, strict=True)))
    alone = [condition.decide(dict(zip(NUMBERS[:3], row, strict=True))).may for row in rows]
    assert torch.as_tensor(together.may).tolist() == alone
