"""Names that are looked up: the nearest one is suggested whatever its case, everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from witcert_core.errors import WitCertError, did_you_mean
from witcert_core.evaluate.ruler import NATURAL
from witcert_core.evaluate.settings import parse_mode
from witcert_core.evaluate.task_registry import choose_source, choose_tasks
from witcert_core.meter.measure import _check_options
from witcert_core.policy.model import parse_policy
from witcert_core.policy.plugins import gate_registry, quantizer_registry
from witcert_core.policy.presets import preset_text


@pytest.mark.parametrize(
    ("given", "meant"), [("KIVI", "kivi"), ("Int8_Dither", "int8_dither"), ("kivy", "kivi"), ("GPTQ", ""), (3, "")]
)
def test_suggestions_do_not_mind_the_case(given: object, meant: str) -> None:
    assert did_you_mean(given, ["kivi", "int8_dither", "Tau"]) == (f" (did you mean {meant!r}?)" if meant else "")
    assert did_you_mean("tau", ["kivi", "Tau"]) == " (did you mean 'Tau'?)"


def policy(**sections: object) -> object:
    return parse_policy({"version": 1, "quantizer": {"name": "none"}, **sections})


@pytest.mark.parametrize(
    ("look_up", "meant"),
    [
        (lambda: quantizer_registry().get("FP8_E4M3_CAST"), "fp8_e4m3_cast"),
        (lambda: gate_registry().cls("Combined"), "combined"),
        (lambda: policy(gate={"target": "TV"}), "tv"),
        (lambda: preset_text("Observe"), "observe"),
        (lambda: policy(meter={"form": "JENSEN"}), "jensen"),
        (lambda: policy(gate={"kind": "Risk_Ranked"}), "risk_ranked"),
        (lambda: policy(Meter={}), "meter"),
        (lambda: _check_options("Needle", None, None), "needle"),
        (lambda: parse_mode("Raw"), "raw"),
        (lambda: choose_tasks(NATURAL, ["Multi_Key"]), "multi_key"),
        (lambda: choose_source("Natural", None), "natural"),  # type: ignore[arg-type]
    ],
)
def test_every_name_that_is_looked_up_is_suggested_in_another_case(look_up: Callable[[], object], meant: str) -> None:
    with pytest.raises(WitCertError, match=rf"did you mean '{meant}'\?"):
        look_up()
