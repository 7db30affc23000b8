"""Every error this package raises on purpose, each with a one-line message.

A message says what was wrong, the offending value, what is allowed, and what to do.
"""

from __future__ import annotations


class WitCertError(Exception):
    """Base of all deliberate errors; catch this to catch them all."""


class InputError(WitCertError, ValueError):
    """A tensor or number handed to the core has an impossible shape, dtype or value."""


class PolicyError(WitCertError, ValueError):
    """A policy file is malformed or asks for a combination that has no meaning."""


class UnsupportedError(WitCertError):
    """The engine, model or cache cannot be metered soundly, so it is refused."""


class QuantizerError(WitCertError, ValueError):
    """A quantizer is unknown, has bad parameters, or returned something unusable."""


class BudgetError(WitCertError, ValueError):
    """A failure-probability budget is outside the range in which its claim has a meaning."""


class VectorFileError(WitCertError, ValueError):
    """A file of test vectors cannot be read as such."""


class PluginError(WitCertError):
    """A plugin distribution cannot be loaded, or implements a hook that does not exist."""


class ReportError(WitCertError):
    """A report cannot be written, or was handed numbers of another model."""
