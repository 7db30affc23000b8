"""Every error a user can cause. The message is one line: what was wrong, the value, what is allowed, what to do."""

from __future__ import annotations


class WitCertError(Exception):
    """Base of all errors raised on purpose by witcert."""


class PolicyError(WitCertError):
    """A policy file that cannot be read, or that asks for something impossible."""


class QuantizerError(WitCertError):
    """An unknown quantizer, one that breaks its contract, or input it was not promised."""


class PluginError(WitCertError):
    """A plugin distribution that cannot be loaded, or that implements a hook which does not exist."""


class UnsupportedError(WitCertError):
    """A shape, dtype, layout or engine feature that is refused rather than served wrongly."""


class BudgetError(WitCertError):
    """A failure budget that is impossible, or overdrawn."""


class ReportError(WitCertError):
    """A report that cannot be written or read."""
