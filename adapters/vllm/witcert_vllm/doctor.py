"""What `witcert doctor --engine vllm` finds: versions, private names, the plugin, and what would be metered.

Importable without vLLM; vLLM is imported only when the function is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from importlib.util import find_spec

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import WitCertError
from witcert_core.policy.model import Policy
from witcert_core.serving.doctor import Finding, unreadable, verdict
from witcert_vllm import POLICY_VARIABLE

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "witcert"


def examine(model: str | None, policy: Policy) -> list[Finding]:
    """All findings. Without vLLM, or with another version of it, only those that need no look inside it."""
    if find_spec("vllm") is None:
        return [Finding("refused", "version", "vLLM is not installed in this environment")]
    found = list(versions())
    if any(finding.level == "refused" for finding in found):
        return found
    found += [*switched_on(), *names(), *sharing(policy)]
    if model is not None:
        found += of_model(model, policy)
    return found


def versions() -> Iterator[Finding]:
    import vllm

    from witcert_vllm import refusals

    yield Finding("ok", "adapter", f"witcert-vllm {version('witcert-vllm')}, tested with vLLM {refusals.VLLM_RANGE}")
    try:
        refusals.check_version()
    except WitCertError as error:
        yield Finding("refused", "version", str(error))
    else:
        yield Finding("ok", "version", f"vLLM {vllm.__version__}")


def switched_on() -> Iterator[Finding]:
    """Whether vLLM would find and run the plugin."""
    if PLUGIN_NAME not in {entry.name for entry in entry_points(group=PLUGIN_GROUP)}:
        yield Finding("refused", "plugin", f"no entry point {PLUGIN_NAME!r} in {PLUGIN_GROUP}: reinstall witcert-vllm")
    elif (only := os.environ.get("VLLM_PLUGINS")) is not None and PLUGIN_NAME not in only.split(","):
        yield Finding("refused", "plugin", f"VLLM_PLUGINS={only} leaves it out: add {PLUGIN_NAME}")
    else:
        yield Finding("ok", "plugin", "vLLM finds it")
    if not os.environ.get(POLICY_VARIABLE):
        yield Finding("note", "switch", f"{POLICY_VARIABLE} is not set here: a server started so is not metered")


def names() -> Iterator[Finding]:
    from witcert_vllm import contract

    lost = contract.broken()
    yield from (Finding("refused", "contract", line) for line in lost)
    if not lost:
        count = len(contract.SIGNATURES) + sum(map(len, contract.FIELDS.values()))
        yield Finding("ok", "contract", f"{count} private names of vLLM are as expected")


def sharing(policy: Policy) -> Iterator[Finding]:
    """What the quantizer asks of vLLM's prefix cache."""
    rule = QuantizeSchedule.of(policy.resolved_quantizer)
    yield Finding("ok", "quantizer", f"{policy.quantizer.name} can be metered")
    if rule.sharing_unit > 1:
        text = f"it takes {rule.sharing_unit} tokens together: --block-size must be a multiple of that"
        yield Finding("note", "flags", f"{text}, or add --no-enable-prefix-caching")


def of_model(path: str, policy: Policy) -> Iterator[Finding]:
    """What of this model would be metered under the policy; nothing more after the first refusal."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from witcert_vllm import refusals

    try:
        config = EngineArgs(model=path).create_model_config()
    except refusals.unreadable_errors() as error:
        yield unreadable(path, error)
        return
    device = current_platform.device_type
    findings = verdict(refusals.model_checks(config, policy, policy.resolved_quantizer, device), ("model", "head size"))
    yield from findings
    if any(finding.level == "refused" for finding in findings):
        return
    layers = range(config.get_total_num_hidden_layers())
    metered = policy.meter.layers_of(layers)
    heads = config.hf_text_config.num_attention_heads
    yield Finding(
        "ok",
        "metered",
        f"{len(metered)} of {len(layers)} layers x {heads} query heads: {len(metered) * heads} cells a row, tier "
        f"{policy.tier}; {'every row' if policy.stride == 1 else f'one decode row in {policy.stride}'}",
    )
    if untried := refusals.untried_device(device):
        yield Finding("note", "device", untried)
