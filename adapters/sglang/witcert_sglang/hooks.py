"""Every place of SGLang this adapter hooks, in one table, and the check that each hook is live.

SGLang logs a hook that cannot be applied and goes on. So after SGLang has applied its hooks, `verify_after_apply`
looks at each target again and stops the process with the name of the one that is missing.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


@dataclass(frozen=True)
class Hook:
    """One hook: the dotted target in SGLang, how it is wrapped, by what, and in which processes it is needed.

    parameters: the leading parameter names the wrapped function had when this adapter was written; the version
    contract compares them.
    """

    target: str
    kind: Literal["before", "after", "around"]
    function: Callable[..., Any]
    process: Literal["main", "every"]
    parameters: tuple[str, ...]


def register(hooks: list[Hook]) -> None:
    """Register `hooks` with SGLang and arrange for their verification."""
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    verify_after_apply(hooks)


def missing(hooks: list[Hook]) -> list[str]:
    """The targets among `hooks` that SGLang has not wrapped."""
    lost = []
    for hook in hooks:
        owner, _, name = hook.target.rpartition(".")
        wrapped = hook.target in HookRegistry._patched
        if not wrapped or not hasattr(getattr(pkgutil.resolve_name(owner), name, None), "__wrapped__"):
            lost.append(hook.target)
    return lost


def verify_after_apply(hooks: list[Hook]) -> None:
    """Wrap `HookRegistry.apply_hooks` once: after it has run, every hook must be live, else SystemExit."""
    original = HookRegistry.apply_hooks

    def apply_and_verify() -> None:
        HookRegistry.apply_hooks = original
        original()
        lost = missing(hooks)
        if lost:
            raise SystemExit(
                f"witcert: SGLang could not hook {', '.join(lost)}: this SGLang differs from the tested one; "
                "install the SGLang version that docs/limits.md names, or unset WITCERT_POLICY to serve without a meter"
            )

    HookRegistry.apply_hooks = apply_and_verify
