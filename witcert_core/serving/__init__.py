"""What every engine adapter shares: rows of a pass, caches, one runtime; and the adapters' one door to the core.

Adapters import from here, from `witcert_core` and from `witcert_core.errors`, and from nowhere else in the core. Names
are looked up where they live when they are asked for: a process that needs only a few must not load kernels for them.
Engines hand over tensors, never objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from witcert_core.cache import capacity as capacity
    from witcert_core.cache.coded import CodedLayer as CodedLayer
    from witcert_core.cache.packed import PackedLayer as PackedLayer
    from witcert_core.cache.packed import of_latents as of_latents
    from witcert_core.cache.protocols import Pool as Pool
    from witcert_core.cache.schedule import QuantizeSchedule as QuantizeSchedule
    from witcert_core.kernels.host.dispatch import interpreting as interpreting
    from witcert_core.kernels.host.dispatch import prepare_kernels as prepare_kernels
    from witcert_core.meter.audit import output_excess as output_excess
    from witcert_core.meter.kernel_error import KernelArithmetic as KernelArithmetic
    from witcert_core.probes.watches import Command as Command
    from witcert_core.quantizers.layout import KVLayout as KVLayout
    from witcert_core.report.claims import ADAPTIVE_DRAFTS as ADAPTIVE_DRAFTS
    from witcert_core.report.claims import AFTER_ITS_ANSWER as AFTER_ITS_ANSWER
    from witcert_core.report.counts import Observed as Observed
    from witcert_core.report.jsonl import check_writable as check_writable
    from witcert_core.report.ledger import make_ledger as make_ledger
    from witcert_core.report.ledger import without_cache as without_cache
    from witcert_core.report.prometheus import Metrics as Metrics
    from witcert_core.report.sample import BoundedBySketches as BoundedBySketches
    from witcert_core.report.sample import Compared as Compared
    from witcert_core.serving.banner import banner_text as banner_text
    from witcert_core.serving.build import Buffers as Buffers
    from witcert_core.serving.calls import AttentionCall as AttentionCall
    from witcert_core.serving.contract import Members as Members
    from witcert_core.serving.contract import Signature as Signature
    from witcert_core.serving.contract import broken as broken
    from witcert_core.serving.control import Probes as Probes
    from witcert_core.serving.control import add_probe_routes as add_probe_routes
    from witcert_core.serving.device.graphs import CapturedDecode as CapturedDecode
    from witcert_core.serving.doctor import Finding as Finding
    from witcert_core.serving.doctor import checked as checked
    from witcert_core.serving.doctor import coverage as coverage
    from witcert_core.serving.doctor import drafts as drafts
    from witcert_core.serving.doctor import kernels as kernels
    from witcert_core.serving.doctor import model_findings as model_findings
    from witcert_core.serving.doctor import private_names as private_names
    from witcert_core.serving.doctor import refused as refused
    from witcert_core.serving.doctor import sharing as sharing
    from witcert_core.serving.doctor import switched_on as switched_on
    from witcert_core.serving.doctor import unreadable as unreadable
    from witcert_core.serving.doctor import verdict as verdict
    from witcert_core.serving.doctor import versions as versions
    from witcert_core.serving.encoder import Tables as Tables
    from witcert_core.serving.forward import Pass as Pass
    from witcert_core.serving.geometry import Geometry as Geometry
    from witcert_core.serving.groups import GroupSlots as GroupSlots
    from witcert_core.serving.http import META_KEY as META_KEY
    from witcert_core.serving.http import Answer as Answer
    from witcert_core.serving.http import Shared as Shared
    from witcert_core.serving.http import SummaryStore as SummaryStore
    from witcert_core.serving.models.attention import describe as describe
    from witcert_core.serving.models.declared import DeclaredModel as DeclaredModel
    from witcert_core.serving.models.declared import check_declared as check_declared
    from witcert_core.serving.models.files import unreadable_errors as unreadable_errors
    from witcert_core.serving.models.grouped import GROUP_ROWS as GROUP_ROWS
    from witcert_core.serving.models.grouped import QUERY_HEADS as QUERY_HEADS
    from witcert_core.serving.models.grouped import Grouped as Grouped
    from witcert_core.serving.models.grouped import check_query_heads as check_query_heads
    from witcert_core.serving.models.kinds import KINDS as KINDS
    from witcert_core.serving.models.served import DECLARED_ROWS as DECLARED_ROWS
    from witcert_core.serving.models.served import KIND_ROWS as KIND_ROWS
    from witcert_core.serving.models.served import LATENT_ROWS as LATENT_ROWS
    from witcert_core.serving.models.served import OUTLIER_ROWS as OUTLIER_ROWS
    from witcert_core.serving.models.served import QUANTIZED as QUANTIZED
    from witcert_core.serving.models.served import SIZE_ROWS as SIZE_ROWS
    from witcert_core.serving.models.served import ServedModel as ServedModel
    from witcert_core.serving.models.served import check_served as check_served
    from witcert_core.serving.passes import DECOMPRESSED as DECOMPRESSED
    from witcert_core.serving.passes import RequestPass as RequestPass
    from witcert_core.serving.ranks import Ranks as Ranks
    from witcert_core.serving.refusals import CACHE_ROWS as CACHE_ROWS
    from witcert_core.serving.refusals import UNSET as UNSET
    from witcert_core.serving.refusals import Option as Option
    from witcert_core.serving.refusals import Refusal as Refusal
    from witcert_core.serving.refusals import Section as Section
    from witcert_core.serving.refusals import refuse as refuse
    from witcert_core.serving.refusals import split_groups as split_groups
    from witcert_core.serving.rotary import rotary_tables as rotary_tables
    from witcert_core.serving.runtime import Runtime as Runtime
    from witcert_core.serving.startup import Adapter as Adapter
    from witcert_core.serving.startup import in_one_line as in_one_line
    from witcert_core.serving.startup import install_adapter as install_adapter
    from witcert_core.serving.startup import refuse_on_error as refuse_on_error
    from witcert_core.serving.steps import StepCells as StepCells
    from witcert_core.serving.storage.packed import PackedStorage as PackedStorage

_HOMES: dict[str, tuple[str, ...]] = {
    "witcert_core.cache": ("capacity",),
    "witcert_core.cache.coded": ("CodedLayer",),
    "witcert_core.cache.packed": ("PackedLayer", "of_latents"),
    "witcert_core.cache.protocols": ("Pool",),
    "witcert_core.cache.schedule": ("QuantizeSchedule",),
    "witcert_core.kernels.host.dispatch": ("interpreting", "prepare_kernels"),
    "witcert_core.meter.audit": ("output_excess",),
    "witcert_core.meter.kernel_error": ("KernelArithmetic",),
    "witcert_core.probes.watches": ("Command",),
    "witcert_core.quantizers.layout": ("KVLayout",),
    "witcert_core.report.claims": ("ADAPTIVE_DRAFTS", "AFTER_ITS_ANSWER"),
    "witcert_core.report.counts": ("Observed",),
    "witcert_core.report.jsonl": ("check_writable",),
    "witcert_core.report.ledger": ("make_ledger", "without_cache"),
    "witcert_core.report.prometheus": ("Metrics",),
    "witcert_core.report.sample": ("BoundedBySketches", "Compared"),
    "witcert_core.serving.banner": ("banner_text",),
    "witcert_core.serving.build": ("Buffers",),
    "witcert_core.serving.calls": ("AttentionCall",),
    "witcert_core.serving.contract": ("Members", "Signature", "broken"),
    "witcert_core.serving.control": ("Probes", "add_probe_routes"),
    "witcert_core.serving.device.graphs": ("CapturedDecode",),
    "witcert_core.serving.doctor": (
        "Finding",
        "checked",
        "coverage",
        "drafts",
        "kernels",
        "model_findings",
        "private_names",
        "refused",
        "sharing",
        "switched_on",
        "unreadable",
        "verdict",
        "versions",
    ),
    "witcert_core.serving.encoder": ("Tables",),
    "witcert_core.serving.forward": ("Pass",),
    "witcert_core.serving.geometry": ("Geometry",),
    "witcert_core.serving.groups": ("GroupSlots",),
    "witcert_core.serving.http": ("Answer", "META_KEY", "Shared", "SummaryStore"),
    "witcert_core.serving.models.attention": ("describe",),
    "witcert_core.serving.models.declared": ("DeclaredModel", "check_declared"),
    "witcert_core.serving.models.files": ("unreadable_errors",),
    "witcert_core.serving.models.grouped": ("GROUP_ROWS", "Grouped", "QUERY_HEADS", "check_query_heads"),
    "witcert_core.serving.models.kinds": ("KINDS",),
    "witcert_core.serving.models.served": (
        "DECLARED_ROWS",
        "KIND_ROWS",
        "LATENT_ROWS",
        "OUTLIER_ROWS",
        "QUANTIZED",
        "SIZE_ROWS",
        "ServedModel",
        "check_served",
    ),
    "witcert_core.serving.passes": ("DECOMPRESSED", "RequestPass"),
    "witcert_core.serving.ranks": ("Ranks",),
    "witcert_core.serving.refusals": ("CACHE_ROWS", "Option", "Refusal", "Section", "UNSET", "refuse", "split_groups"),
    "witcert_core.serving.rotary": ("rotary_tables",),
    "witcert_core.serving.runtime": ("Runtime",),
    "witcert_core.serving.startup": ("Adapter", "in_one_line", "install_adapter", "refuse_on_error"),
    "witcert_core.serving.steps": ("StepCells",),
    "witcert_core.serving.storage.packed": ("PackedStorage",),
}
"""Module -> the names that adapters may have of it."""
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(__import__(_HOME[name], fromlist=[name]), name)
    return value
