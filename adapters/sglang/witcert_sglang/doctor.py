"""What `witcert doctor --engine sglang` finds: versions, private names, hooks, and what would be metered.

Importable without SGLang; SGLang is imported, and hooked, only when the function is called. The hooks stay in the
calling process, which serves nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Any

import torch

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import WitCertError
from witcert_core.policy.model import Policy
from witcert_core.report.text import format_bytes
from witcert_core.serving.doctor import Finding, checked, unreadable, verdict
from witcert_sglang import POLICY_VARIABLE, refusals

if TYPE_CHECKING:
    from witcert_sglang.hooks import Hook

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "witcert"


def examine(model: str | None, policy: Policy) -> list[Finding]:
    """All findings. Without SGLang, or with another version of it, only those that need no look inside it."""
    found = list(versions())
    if any(finding.level == "refused" for finding in found):
        return found
    found += [*switched_on(), *sharing(policy)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang warns about every accelerator it does not find
        found += inside(policy)
        if model is not None:
            found += of_model(model, policy)
    return found


def versions() -> Iterator[Finding]:
    own = version("witcert-sglang")
    yield Finding("ok", "adapter", f"witcert-sglang {own}, tested with SGLang {refusals.SGLANG_RANGE}")
    try:
        installed = version("sglang")
        refusals.check_version()
    except PackageNotFoundError:
        yield Finding("refused", "version", "SGLang is not installed in this environment")
    except WitCertError as error:
        yield Finding("refused", "version", str(error))
    else:
        yield Finding("ok", "version", f"SGLang {installed}, PyTorch {torch.__version__}")


def switched_on() -> Iterator[Finding]:
    """Whether SGLang would find and run the plugin."""
    if PLUGIN_NAME not in {entry.name for entry in entry_points(group=PLUGIN_GROUP)}:
        yield Finding(
            "refused", "plugin", f"no entry point {PLUGIN_NAME!r} in {PLUGIN_GROUP}: reinstall witcert-sglang"
        )
    elif (only := os.environ.get("SGLANG_PLUGINS")) and PLUGIN_NAME not in [x.strip() for x in only.split(",")]:
        yield Finding("refused", "plugin", f"SGLANG_PLUGINS={only} leaves it out: add {PLUGIN_NAME}")
    else:
        yield Finding("ok", "plugin", "SGLang finds it")
    if not os.environ.get(POLICY_VARIABLE):
        yield Finding("note", "switch", f"{POLICY_VARIABLE} is not set here: a server started so is not metered")


def sharing(policy: Policy) -> Iterator[Finding]:
    """What the quantizer asks of the server's prefix cache."""
    rule = QuantizeSchedule.of(policy.resolved_quantizer)
    yield Finding("ok", "quantizer", f"{policy.quantizer.name} can be metered")
    if rule.sharing_unit > 1:
        flags = refusals.sharing_flags(rule)
        yield Finding("note", "flags", f"it takes {rule.sharing_unit} tokens together: start the server with {flags}")


def inside(policy: Policy) -> Iterator[Finding]:
    """SGLang's private names, and the hooks applied to them in this process."""
    from witcert_sglang import contract, plugin
    from witcert_sglang.worker import SchedulerProcess

    hooks = plugin.hooks(policy, SchedulerProcess(policy))
    lost = [*contract.broken(), *contract.broken_hooks(hooks)]
    yield from (Finding("refused", "contract", line) for line in lost)
    if not lost:
        yield Finding(
            "ok", "contract", f"{len(contract.CONTRACT) + len(hooks)} private names of SGLang are as expected"
        )
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
    """What of this model would be metered under the policy; nothing more after the first refusal."""
    from sglang.srt.configs.model_config import ModelConfig

    missing = checked("model", refusals.check_model_path, path)
    if missing.level == "refused":
        yield missing
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = ModelConfig(path)
    except refusals.unreadable_errors() as error:
        yield unreadable(path, error)
        return
    findings = verdict(
        refusals.model_checks(config, policy, policy.resolved_quantizer, "triton", "auto", device),
        ("model", "head size"),
    )
    yield from findings
    if any(finding.level == "refused" for finding in findings):
        return
    asked = attention(config, policy, device)
    if asked.level == "refused":
        yield asked
        return
    yield from coverage(config, policy)
    yield asked
    if device != "cpu":
        yield Finding("note", "flags", "start the server with --attention-backend triton --disable-cuda-graph")
        return
    on_cpu = checked("flags", refusals.check_model, config, "torch_native")
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


def coverage(config: Any, policy: Policy) -> Iterator[Finding]:
    """Cells and bytes of what is metered, and a reason for everything that is not."""
    from witcert_sglang.memory import packed_layout, side_bytes_per_head

    layers = range(config.num_attention_layers)
    metered, quantized = policy.meter.layers_of(layers), policy.quantizer.layers_of(layers)
    heads, kv_heads = config.num_attention_heads, config.get_total_num_kv_heads()
    yield Finding(
        "ok",
        "metered",
        f"{len(metered)} of {len(layers)} layers x {heads} query heads: {len(metered) * heads} cells a row, tier "
        f"{policy.tier}; {'every row' if policy.stride == 1 else f'one decode row in {policy.stride}'}",
    )
    all_heads, quantizer = kv_heads * len(layers), policy.resolved_quantizer
    exact = format_bytes(2 * config.head_dim * config.dtype.itemsize * all_heads)
    if policy.quantizer.storage == "packed":
        packed = format_bytes(packed_layout(quantizer, config.head_dim).bytes_per_token_head * all_heads)
        yield Finding("ok", "memory", f"{packed} a token, witnesses included, instead of {exact}")
    else:
        side = format_bytes(side_bytes_per_head(policy, config, config.dtype.itemsize) * all_heads)
        yield Finding("ok", "memory", f"{side} of witnesses a token beside {exact} of keys and values")
    for kept, why in (
        (sorted(set(layers) - set(metered)), "left out by meter.layers"),
        (sorted(set(layers) - set(quantized)), "kept exact by quantizer.layers, so there is nothing to meter"),
    ):
        if kept:
            yield Finding("note", "not metered", f"layers {kept}: {why}")
    if policy.stride > 1:
        yield Finding("note", "not metered", "rows between the stride: reported as unknown")
    if policy.prefill_reads == "chunk_exact":
        yield Finding("note", "not metered", "rows of a first prompt chunk: they read no quantized key")
