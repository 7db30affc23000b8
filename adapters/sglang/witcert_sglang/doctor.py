"""What `witcert doctor --engine sglang` finds: versions, private names, hooks, and what would be metered.

Importable without SGLang; SGLang is imported, and hooked, only when the function is called. The hooks stay in the
calling process, which serves nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from witcert_core import Policy
from witcert_core.errors import WitCertError
from witcert_core.serving import (
    Finding,
    Signature,
    broken,
    checked,
    coverage,
    drafts,
    kernels,
    model_findings,
    private_names,
    refuse,
    refused,
    sharing,
    switched_on,
    unreadable,
    unreadable_errors,
    verdict,
    versions,
)
from witcert_sglang.adapter import ADAPTER
from witcert_sglang.refusals.model import DECLARED, ROWS, SglangModel
from witcert_sglang.refusals.server import CHAINS, SHARING_FLAGS, check_model_path

if TYPE_CHECKING:
    from witcert_sglang.hooks import Hook


def examine(model: str | None, policy: Policy) -> list[Finding]:
    """All findings. Without SGLang, or with another version of it, only those that need no look inside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang warns about every accelerator it does not find
        found = list(versions(ADAPTER))
        if refused(found):
            return [*found, *(() if model is None else model_findings(ADAPTER, model, policy, DECLARED))]
        only = os.environ.get(ADAPTER.chooser)
        found += switched_on(ADAPTER, [name.strip() for name in only.split(",")] if only else None)
        chains = drafts(policy, f"{', '.join(CHAINS)} with --speculative-eagle-topk 1", "STANDALONE")
        found += [*sharing(policy, SHARING_FLAGS), chains, *inside(policy)]
        if model is not None:
            found += of_model(model, policy)
    return found


def inside(policy: Policy) -> Iterator[Finding]:
    """SGLang's private names, and the hooks applied to them in this process."""
    from witcert_sglang import plugin
    from witcert_sglang.contract import CONTRACT
    from witcert_sglang.worker import SchedulerProcess

    hooks = plugin.hooks(policy, SchedulerProcess(policy))
    hooked = [Signature(hook.target, hook.parameters) for hook in hooks]
    yield from private_names(ADAPTER, broken([*CONTRACT, *hooked]), len(CONTRACT) + len(hooks))
    yield from live_hooks(hooks)


def live_hooks(hooks: list[Hook]) -> Iterator[Finding]:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from witcert_sglang.hooks import missing

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    HookRegistry.apply_hooks()
    dead = missing(hooks)
    for hook in hooks:
        state = "NOT LIVE" if hook.target in dead else "live"
        where = "main process" if hook.process == "main" else "every process"
        yield Finding(
            "refused" if hook.target in dead else "ok", "hook", f"{state}: {hook.target} ({hook.kind}, {where})"
        )


def of_model(path: str, policy: Policy) -> Iterator[Finding]:
    """What of this model would be metered under the policy: by its files alone, then as SGLang reads it."""
    return model_findings(ADAPTER, path, policy, DECLARED, as_read)


def as_read(path: str, policy: Policy) -> Iterator[Finding]:
    """What of this model, as SGLang reads it, would be metered; nothing more after the first refusal."""
    from sglang.srt.configs.model_config import ModelConfig

    missing = checked("model", check_model_path, path)
    if missing.level == "refused":
        yield missing
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = ModelConfig(path)
    except unreadable_errors() as error:
        yield unreadable(path, error)
        return
    model = SglangModel(config, policy, device, "triton")
    findings = verdict(model, ROWS)
    yield from findings
    if refused(findings):
        return
    asked = attention(config, policy, device)
    if asked.level == "refused":
        yield asked
        return
    yield from coverage(model)
    yield kernels(policy, device, *model.head_dims)
    yield asked
    if device != "cpu":
        yield Finding("note", "flags", "start the server with --attention-backend triton --disable-cuda-graph")
        return
    on_cpu = checked("flags", refuse, ROWS, SglangModel(config, policy, device, "torch_native"))
    if on_cpu.level == "refused":
        yield Finding("note", "flags", f"a server on a CPU is refused: {on_cpu.text}")


def attention(config: Any, policy: Policy, device: str) -> Finding:
    """Whether the attention that will serve attends as it is metered, of random keys; what cannot be asked here."""
    from witcert_sglang.selfcheck import check_shapes

    if policy.quantizer.storage == "packed" or policy.meters_engine:
        return Finding("note", "attention", "not compared at start: let meter.audit_every compare what is served")
    if device != "cpu":
        return Finding("note", "attention", "compared with float64 when a server starts with triton or torch_native")
    try:
        said = check_shapes(config)
    except WitCertError as error:
        return Finding("refused", "attention", str(error))
    return Finding("ok", "attention", f"{'; '.join(said)}: attention over what the cache holds, to rounding")
