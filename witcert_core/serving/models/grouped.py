"""What is refused where a model's layers are in several cache groups, or tokens leave the cache behind a window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.policy.model import Policy
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.refusals import Refusal, refuse


@dataclass(frozen=True)
class Grouped:
    """Cache groups under a policy: how many, of how many shapes, and the tokens before its own that a row finds in the
    one that keeps fewest, None where every token stays."""

    policy: Policy
    count: int
    shapes: int
    window: int | None

    @property
    def said(self) -> str:
        """'' for one group in which every token stays."""
        if self.window is not None:
            return "layers whose tokens leave the cache behind a window"
        if self.shapes > 1:
            return f"layers of {self.shapes} shapes"
        return f"layers in {self.count} cache groups" if self.count > 1 else ""

    @property
    def rule(self) -> QuantizeSchedule:
        return QuantizeSchedule.of(self.policy.resolved_quantizer)


def _early(found: Grouped) -> str | bool:
    rule, window = found.rule, found.window
    waiting = rule.token_group + rule.recent_tokens
    said = f"quantizer.name: {found.policy.quantizer.name} waits for {waiting} tokens"
    return window is not None and waiting > window + 1 and f"{said} over a window of {window + 1}"


_ONE_TABLE = "what it keeps of a token is found by one slot, and has one shape, in all layers"
_SEVERAL = "several cache groups (as layers of several shapes are) or tokens that leave the cache behind a window"
_EVERY_TOKEN = (
    "let the engine keep every token in one group, where it can and layers are alike (vLLM: "
    "`--disable-hybrid-kv-cache-manager`, SGLang: `--disable-hybrid-swa-memory`)"
)
GROUP_ROWS: tuple[Refusal[Grouped], ...] = (
    Refusal(
        f"a gate that repairs, with {_SEVERAL}",
        _ONE_TABLE,
        f"set `gate.kind` to 'observe', or {_EVERY_TOKEN}",
        lambda found: found.policy.repairs and found.said and f"gate.kind: {found.policy.gate.kind} with {found.said}",
    ),
    Refusal(
        f"`meter.audit_share` or `meter.sketch_share`, with {_SEVERAL}",
        _ONE_TABLE,
        f"set them to 0 (`meter.audit_every` audits here), or {_EVERY_TOKEN}",
        lambda found: (
            found.policy.meter.audit_share + found.policy.meter.sketch_share > 0
            and found.said
            and f"meter.audit_share or meter.sketch_share with {found.said}"
        ),
    ),
    Refusal(
        f"`quantizer.storage: packed`, with {_SEVERAL}",
        "codes are laid out over one pool of layers that are alike, in which every token stays",
        f"set `quantizer.storage` to 'simulated', or {_EVERY_TOKEN}",
        lambda found: (
            found.policy.quantizer.storage == "packed" and found.said and f"quantizer.storage: packed with {found.said}"
        ),
    ),
    Refusal(
        "a quantizer that calibrates on the first tokens, where tokens leave the cache behind a window",
        "the tokens that it calibrates on would be gone",
        f"name another quantizer, or {_EVERY_TOKEN}",
        lambda found: (
            found.window is not None
            and found.rule.calibration_tokens > 0
            and f"quantizer.name: {found.policy.quantizer.name} calibrates with {found.said}"
        ),
    ),
    Refusal(
        "a quantizer that waits for more tokens than a window has (`token_group` and `recent_tokens` together), where "
        "tokens leave the cache behind it",
        "they would be gone before they are quantized",
        f"name a quantizer of smaller groups, or {_EVERY_TOKEN}",
        _early,
    ),
)
QUERY_HEADS: Refusal[None] = Refusal(
    "layers with different numbers of query heads",
    "a row has as many cells in every layer",
    "metered are models with one number",
)


def check_query_heads(counts: Iterable[int]) -> None:
    """UnsupportedError for layers with different numbers of query heads."""
    found = sorted(set(counts))
    if len(found) > 1:
        raise QUERY_HEADS.error(f"the model's layers have {' or '.join(map(str, found))} query heads")


def check_groups(policy: Policy, groups: Sequence[Geometry]) -> None:
    """Raise UnsupportedError for what the policy asks of these groups and they cannot give."""
    windows = [group.window for group in groups if group.window is not None]
    shapes = {(group.num_kv_heads, group.head_dim, group.v_head_dim) for group in groups}
    refuse(GROUP_ROWS, Grouped(policy, len(groups), len(shapes), min(windows, default=None)))
