"""What an engine adapter says about itself: findings for `witcert doctor`.

An adapter joins through the entry-point group `witcert.engines`: the name is the engine's, the value a function
`examine(model, policy) -> list[Finding]` whose module can be imported without the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any, Literal

import torch

from witcert_core.cache.capacity import coded_bytes, side_bytes_per_head
from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import InputError, UnsupportedError
from witcert_core.kernels.host.dispatch import serving_kernels
from witcert_core.policy import entry_points
from witcert_core.policy.model import Policy
from witcert_core.quantizers.layout import KVLayout
from witcert_core.report.text import format_bytes
from witcert_core.serving.build import why_torch
from witcert_core.serving.hub import unreachable_hub
from witcert_core.serving.models.declared import DeclaredModel
from witcert_core.serving.models.files import CONFIG, config_file
from witcert_core.serving.models.served import ServedModel, model_checks
from witcert_core.serving.refusals import Refusal
from witcert_core.serving.startup import Adapter, refuse_on_error

POLICY_VARIABLE = "WITCERT_POLICY"
PLUGIN_NAME = "witcert"
"""The name of an adapter in its engine's entry-point group."""

ADAPTERS = {"sglang": "witcert-sglang", "vllm": "witcert-vllm"}
"""Engine -> the distribution that meters it, installed or not."""


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis. `refused`: a server started like this would not be metered, or would not start."""

    level: Literal["ok", "note", "refused"]
    subject: str
    text: str


def checked(subject: str, check: Callable[..., Any], *args: Any) -> Finding:
    """The finding of one check: what a server at its start would be stopped with, or ok."""
    try:
        refuse_on_error(check, *args)
    except SystemExit as refusal:
        return Finding("refused", subject, str(refusal).removeprefix("witcert: "))
    return Finding("ok", subject, "can be metered")


def refused(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "refused" for finding in findings)


def unreadable(path: str, error: Exception) -> Finding:
    """The finding of a directory or hub id that is no model: what Transformers says, or pydantic around it."""
    said = " ".join(str(error).split()).partition(" [type=")[0]
    return Finding("refused", "model", f"{path} cannot be read: {said}")


# What adapters find alike ----------------------------------------------------------------------------------------


def versions(adapter: Adapter) -> Iterator[Finding]:
    """Whether the engine is installed in the version that the adapter was tested with."""
    yield Finding(
        "ok",
        "adapter",
        f"{adapter.distribution} {version(adapter.distribution)}, tested with {adapter.engine} {adapter.tested}",
    )
    if not adapter.installed:
        yield Finding("refused", "version", f"{adapter.engine} is not installed in this environment")
        return
    found = checked("version", adapter.check_version)
    if found.level == "ok":
        text = f"{adapter.engine} {adapter.installed_version()}, PyTorch {torch.__version__}"
        found = Finding("ok", "version", text)
    yield found


def switched_on(adapter: Adapter, chosen: Sequence[str] | None) -> Iterator[Finding]:
    """Whether the engine would find and run the plugin; chosen: the plugins that its variable names, None for all."""
    if PLUGIN_NAME not in {entry.name for entry in entry_points.found(adapter.plugins)}:
        yield Finding(
            "refused",
            "plugin",
            f"no entry point {PLUGIN_NAME!r} in {adapter.plugins}: reinstall {adapter.distribution}",
        )
    elif chosen is not None and PLUGIN_NAME not in chosen:
        yield Finding(
            "refused", "plugin", f"{adapter.chooser}={os.environ[adapter.chooser]} leaves it out: add {PLUGIN_NAME}"
        )
    else:
        yield Finding("ok", "plugin", f"{adapter.engine} finds it")
    if not os.environ.get(POLICY_VARIABLE):
        yield Finding("note", "switch", f"{POLICY_VARIABLE} is not set here: a server started so is not metered")


def sharing(policy: Policy, flags: str) -> Iterator[Finding]:
    """What the quantizer asks of the server's prefix cache; flags: options that grant it, with a place for a number."""
    unit = QuantizeSchedule.of(policy.resolved_quantizer).sharing_unit
    yield Finding("ok", "quantizer", f"{policy.quantizer.name} can be metered")
    if unit > 1:
        yield Finding("note", "flags", f"it takes {unit} tokens together: start the server with {flags.format(unit)}")


def drafts(policy: Policy, metered: str, from_text: str) -> Finding:
    """What of speculative decoding would be metered. from_text: whose drafts leave the probabilistic tier standing."""
    law = f"; all but {from_text} leave the deterministic tier alone" if policy.tier == "probabilistic" else ""
    return Finding("note", "drafts", f"rows of verified drafts are metered ({metered}){law}")


def private_names(adapter: Adapter, lost: Sequence[str], count: int) -> Iterator[Finding]:
    """lost: lines of `contract.broken` over `count` names."""
    yield from (Finding("refused", "contract", line) for line in lost)
    if not lost:
        yield Finding("ok", "contract", f"{count} private names of {adapter.engine} are as expected")


def verdict(model: ServedModel, rows: Sequence[Refusal[Any]]) -> list[Finding]:
    """The first refusal of a model, alone, see `model_checks`; without one, ok for its kind and its head size."""
    passed = []
    for subject, check in model_checks(model, rows):
        finding = checked(subject, check)
        if finding.level == "refused":
            return [finding]
        passed.append(finding)
    return [finding for finding in passed if finding.subject in ("model", "head size")]


def kernels(policy: Policy, device: str, *channels: int) -> Finding:
    """What would write and read the cache; channels: of the model's heads, where it is known."""
    if why := why_torch(policy, device, *channels):
        return Finding("note", "kernels", f"plain torch serves: {why}")
    return Finding("ok", "kernels", serving_kernels(device))


def of_files(file: Path, policy: Policy, rows: Sequence[Refusal[Any]]) -> list[Finding]:
    """Verdict and coverage of a model by its files alone; InputError where these cannot be read."""
    model = DeclaredModel.read(file, policy)
    with suppress(UnsupportedError):  # which the verdict says
        _ = model.attention
    found = verdict(model, rows)
    return found if refused(found) else [*found, *coverage(model)]


def model_findings(
    adapter: Adapter,
    path: str,
    policy: Policy,
    rows: Sequence[Refusal[Any]],
    asked: Callable[[str, Policy], Iterable[Finding]] | None = None,
) -> Iterator[Finding]:
    """What of a model would be metered: by its files alone, then as its engine reads them.

    path: a directory, a hub id, or a configuration. asked: the findings of the engine for a directory or hub id; None
    where it cannot be asked.
    """
    file = config_file(path)
    alone = file is not None and (asked is None or file.name != CONFIG)
    try:
        found = [] if file is None else of_files(file, policy, rows)
    except InputError as error:
        found = [Finding("refused", "model", f"{file} cannot be read: {error}")] if alone else []
    if refused(found):
        yield from found
    elif alone:
        yield from found
        yield Finding("note", "model", f"by {file} alone; {adapter.engine} itself was not asked")
    elif asked is not None:
        yield from asked(path if file is None else str(file.parent), policy)


def coverage(model: ServedModel) -> Iterator[Finding]:
    """Cells and bytes of what is metered, and a reason for everything that is not."""
    policy, layers = model.policy, model.layers
    metered, quantized = policy.meter.layers_of(layers), policy.quantizer.layers_of(layers)
    yield Finding(
        "ok",
        "metered",
        f"{len(metered)} of {len(layers)} layers x {model.num_qo_heads} query heads: "
        f"{len(metered) * model.num_qo_heads} cells a row, tier {policy.tier}; "
        f"{policy.rows_metered}",
    )
    yield Finding("ok", "memory", memory(model))
    for kept, why in (
        (sorted(set(layers) - set(metered)), "left out by meter.layers"),
        (sorted(set(layers) - set(quantized)), "kept exact by quantizer.layers, so there is nothing to meter"),
    ):
        if kept:
            yield Finding("note", "not metered", f"layers {kept}: {why}")
    if other := model.attention.num_hidden_layers - len(layers):
        yield Finding("note", "not metered", f"{other} layers that keep no keys and values: nothing is claimed of them")
    if policy.stride != 1:
        yield Finding("note", "not metered", "rows between the stride: reported as unknown")
    if policy.prefill_reads == "chunk_exact":
        yield Finding("note", "not metered", "rows of a first prompt chunk: they read no quantized key")


def memory(model: ServedModel) -> str:
    """Bytes of a token in all layers and heads, beside those of keys and values as they are."""
    policy, quantizer, itemsize = model.policy, model.policy.resolved_quantizer, model.dtype.itemsize
    latent = bool(model.attention.latent_dim)  # a row a token, and values are a part of it

    def per_head(k: int, v: int) -> int:
        if policy.quantizer.storage == "packed" and not policy.stores_parts:
            values = None if latent else v
            layout = KVLayout(k, values, quantizer.bypass_pairs, quantizer.stored_witness, values_in_keys=latent)
            return layout.bytes_per_token_head
        rotary = model.attention.rotary(k)
        beside = side_bytes_per_head(quantizer, rotary, v, itemsize, policy.sketch_bits, policy.meter.bands)
        return beside + (sum(coded_bytes(quantizer, k, v)) if policy.stores_parts else 0)

    shapes = model.attention.shapes.items()
    exact = format_bytes(sum(layers * heads * (k if latent else k + v) * itemsize for (heads, k, v), layers in shapes))
    found = format_bytes(sum(layers * heads * per_head(k, v) for (heads, k, v), layers in shapes))
    if policy.quantizer.storage == "packed":
        return f"{found} a token, witnesses included, instead of {exact}"
    return f"{found} of witnesses a token beside {exact} of keys and values"


# The command -------------------------------------------------------------------------------------------------------


Examine = Callable[[str | None, Policy], list[Finding]]


def installed_engines() -> dict[str, EntryPoint]:
    """Engine -> entry point of the adapter installed for it."""
    return {entry.name: entry for entry in entry_points.found(entry_points.ENGINES)}


def examine(engine: str, model: str | None, policy: Policy) -> list[Finding]:
    """What the adapter of `engine` finds; one refused finding if no adapter is installed.

    Raises PluginError when an installed adapter cannot be imported.
    """
    entry = installed_engines().get(engine)
    if entry is None:
        todo = f"pip install ./adapters/{engine} in a checkout, into the environment of the engine"
        return [Finding("refused", "adapter", f"{ADAPTERS[engine]} is not installed, nothing was examined; {todo}")]
    function: Examine = entry_points.load(entry)
    if model is not None and (unreachable := unreachable_hub(model)):
        return [*function(None, policy), Finding("refused", "model", unreachable)]
    return function(model, policy)
