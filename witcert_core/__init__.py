"""WitCert: a sound runtime meter for KV-cache quantization.

This page is the public surface; everything it does not name may change between minor versions.

Write a quantizer    quantizer (decorator), Quantizer, QuantContext, RotarySpec, CodedQuantizer, Part,
                     CalibratedQuantizer, DitheredQuantizer, Encoded, check_quantizer
Write a gate         Gate, GateState, GateDecision, CellStatus, check_gate
Observe              hookimpl, CellEvent, CellBatch
Plug in              register
Configure            Policy, load_policy
Measure              meter, measure, AttentionSpec
Report               RequestLedger, render_sentence, render_table
Errors               WitCertError (base), PolicyError, QuantizerError, PluginError, UnsupportedError
"""

from witcert_core import _torch  # noqa: F401
from witcert_core.errors import PluginError, PolicyError, QuantizerError, UnsupportedError, WitCertError
from witcert_core.evaluate.metering import meter
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.cells import CellBatch
from witcert_core.meter.measure import measure
from witcert_core.policy.gate_conformance import check_gate
from witcert_core.policy.gates import CellStatus, Gate, GateDecision, GateState
from witcert_core.policy.model import Policy, load_policy
from witcert_core.policy.plugins import CellEvent, hookimpl, register
from witcert_core.quantizers import (
    CalibratedQuantizer,
    CodedQuantizer,
    DitheredQuantizer,
    Encoded,
    Part,
    QuantContext,
    Quantizer,
    quantizer,
)
from witcert_core.quantizers.conformance import check_quantizer
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.report.ledger import RequestLedger
from witcert_core.report.text import render_sentence, render_table

__all__ = [
    "AttentionSpec",
    "CalibratedQuantizer",
    "CellBatch",
    "CellEvent",
    "CellStatus",
    "CodedQuantizer",
    "DitheredQuantizer",
    "Encoded",
    "Gate",
    "GateDecision",
    "GateState",
    "Part",
    "PluginError",
    "Policy",
    "PolicyError",
    "QuantContext",
    "Quantizer",
    "QuantizerError",
    "RequestLedger",
    "RotarySpec",
    "UnsupportedError",
    "WitCertError",
    "check_gate",
    "check_quantizer",
    "hookimpl",
    "load_policy",
    "measure",
    "meter",
    "quantizer",
    "register",
    "render_sentence",
    "render_table",
]
