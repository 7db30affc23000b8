"""WitCert: a sound runtime meter for KV-cache quantization.

This page is the public surface; everything it does not name may change between minor versions.

Write a quantizer    quantizer (decorator), Quantizer, QuantContext, RotarySpec, CodedQuantizer, Part,
                     CalibratedQuantizer, DitheredQuantizer, Encoded, check_quantizer
Plug in              hookimpl, CellEvent
Configure            Policy, load_policy
Measure              measure, CellBatch
Report               RequestLedger, render_sentence, render_table
Errors               WitCertError (base), PolicyError, QuantizerError, PluginError, UnsupportedError
"""

from witcert_core import _torch  # noqa: F401
from witcert_core.errors import PluginError, PolicyError, QuantizerError, UnsupportedError, WitCertError
from witcert_core.hooks import hookimpl
from witcert_core.meter import CellBatch, measure
from witcert_core.policy import Policy, load_policy
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
from witcert_core.report.record import CellEvent
from witcert_core.report.summary import RequestLedger
from witcert_core.report.text import render_sentence, render_table
from witcert_core.rotary import RotarySpec

__all__ = [
    "CalibratedQuantizer",
    "CellBatch",
    "CellEvent",
    "CodedQuantizer",
    "DitheredQuantizer",
    "Encoded",
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
    "check_quantizer",
    "hookimpl",
    "load_policy",
    "measure",
    "quantizer",
    "render_sentence",
    "render_table",
]
