"""What `witcert doctor --engine vllm` finds: versions, private names, the plugin, and what would be metered.

Importable without vLLM; vLLM is imported only when the function is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from witcert_core import Policy
from witcert_core.serving import (
    Finding,
    Signature,
    broken,
    coverage,
    drafts,
    kernels,
    model_findings,
    private_names,
    refused,
    sharing,
    switched_on,
    unreadable,
    unreadable_errors,
    verdict,
    versions,
)
from witcert_vllm.adapter import ADAPTER
from witcert_vllm.drafts import FROM_TEXT
from witcert_vllm.refusals.model import DECLARED, ROWS, VllmModel, untried_device
from witcert_vllm.refusals.server import SHARING_FLAGS


def examine(model: str | None, policy: Policy) -> list[Finding]:
    """All findings. Without vLLM, or with another version of it, only those that need no look inside it."""
    found = list(versions(ADAPTER))
    if refused(found):
        return [*found, *(() if model is None else model_findings(ADAPTER, model, policy, DECLARED))]
    only = os.environ.get(ADAPTER.chooser)
    found += switched_on(ADAPTER, None if only is None else only.split(","))
    chains = drafts(policy, "--speculative-config", " and ".join(FROM_TEXT))
    found += [*sharing(policy, SHARING_FLAGS), chains, *inside()]
    if model is not None:
        found += of_model(model, policy)
    return found


def inside() -> Iterator[Finding]:
    """vLLM's private names."""
    from witcert_vllm import plugin
    from witcert_vllm.contract import CONTRACT

    names = [*CONTRACT, *(Signature(hook.target, hook.parameters) for hook in plugin.hooks())]
    yield from private_names(ADAPTER, broken(names), len(names))


def of_model(path: str, policy: Policy) -> Iterator[Finding]:
    """What of this model would be metered under the policy: by its files alone, then as vLLM reads it."""
    return model_findings(ADAPTER, path, policy, DECLARED, as_read)


def as_read(path: str, policy: Policy) -> Iterator[Finding]:
    """What of this model, as vLLM reads it, would be metered; nothing more after the first refusal."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    try:
        config = EngineArgs(model=path).create_model_config()
    except unreadable_errors() as error:
        yield unreadable(path, error)
        return
    model = VllmModel(config, policy, current_platform.device_type)
    findings = verdict(model, ROWS)
    yield from findings
    if refused(findings):
        return
    yield from coverage(model)
    yield kernels(policy, model.device, *model.head_dims)
    if untried := untried_device(model.device):
        yield Finding("note", "device", untried)
