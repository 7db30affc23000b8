"""The policy in force in this process."""

from __future__ import annotations

from dataclasses import dataclass

from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import Policy, load_policy
from witcert_core.quantizers.base import Quantizer


@dataclass(frozen=True)
class Installation:
    """The policy in force in this process."""

    policy: Policy
    quantizer: Quantizer


_current: Installation | None = None


def current() -> Installation:
    """The installation of this process; UnsupportedError if the plugin was never loaded here."""
    if _current is None:
        raise UnsupportedError(
            "the plugin was not loaded in this process (is VLLM_PLUGINS set without 'witcert' in it?), so nothing is "
            "served; add witcert to VLLM_PLUGINS, or unset WITCERT_POLICY"
        )
    return _current


def read_policy(path: str) -> None:
    """Put the policy at `path` in force; a second call reads it again, for engines made afterwards."""
    global _current
    policy = load_policy(path)
    _current = Installation(policy, policy.resolved_quantizer)
