"""The policy in force in this process."""

from __future__ import annotations

from witcert_core import Policy, load_policy
from witcert_core.errors import UnsupportedError

_current: Policy | None = None


def current() -> Policy:
    """The policy; UnsupportedError if the plugin was never loaded in this process."""
    if _current is None:
        raise UnsupportedError(
            "the plugin was not loaded in this process (is VLLM_PLUGINS set without 'witcert' in it?), so nothing is "
            "served; add witcert to VLLM_PLUGINS, or unset WITCERT_POLICY"
        )
    return _current


def read_policy(path: str) -> None:
    """Put the policy at `path` in force; a second call reads it again, for engines made afterwards."""
    global _current
    _current = load_policy(path)
