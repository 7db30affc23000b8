"""What was really stored in an engine's pool, read back and compared with what was handed over.

Its copies for repairs follow the same slots. Shapes: N tokens, Hkv KV heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from witcert_core.cache.bands import BandMap, band_map
from witcert_core.cache.capacity import choose_bands
from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.cache.protocols import Pool
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall, Quantized
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.forward import Pass
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.storage.attended import RowTokens


class Accounts:
    """The side tensors of every slot and, beside a gate that repairs, exact copies of its token."""

    def __init__(
        self, policy: Policy, geometry: Geometry, pool: Pool, encoder: Encoder, copies: ExactCopies | None = None
    ) -> None:
        self.pool = pool
        self.store = WitnessStore(
            quantizer=encoder.quantizer,
            layers=geometry.layers,
            num_slots=geometry.num_slots,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            v_head_dim=geometry.v_head_dim,
            bands=bands_of(policy, geometry),
            storage_dtype=geometry.pool_dtype,
            keep_exact=policy.meter.audit_every > 0,
            sketch_bits=policy.sketch_bits,
            device=geometry.device,
        )
        self.copies: Sequence[ExactCopies] = [] if copies is None else [copies]

    def begin_pass(self, slots: Tensor) -> None:
        """A pass is about to write into `slots` [N]: their exact copies for repairs are void."""
        for copies in self.copies:
            copies.claim(slots)

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied `source` [N] onto `target` [N]: side tensors follow, exact copies for repairs do not."""
        self.store.move(target, source)
        for copies in self.copies:
            copies.drop(target)

    def overwritten(self, slots: Tensor) -> None:
        """The engine wrote `slots` [N] from elsewhere: nothing is known about them any more."""
        for layer in self.store.layers:
            self.store.mark_unknown(layer, slots)
        for copies in self.copies:
            copies.drop(slots)

    def write(self, call: AttentionCall, k: Quantized, v: Quantized) -> None:
        """The tokens of `call` were written into the pool, as k and v."""
        for copies in self.copies:
            copies.put(call.layer, call.slots, call.exact_k, call.exact_v)
        stored_k, stored_v = self.pool.read(call.layer, call.slots)
        self.store.write(
            call.layer,
            call.slots,
            exact_k=call.exact_k,
            exact_v=call.exact_v,
            stored_k=stored_k,
            stored_v=stored_v,
            encoded_k=k.codes,
            encoded_v=v.codes,
        )

    def rows(self, layer: int, now: Pass) -> RowTokens:
        """What the metered rows of a pass read in the pool, by slot."""
        plan, numbers = now.plan, range(len(now.plan.rows))
        return RowTokens(
            seen=[plan.slots_of(number) for number in numbers],
            read=functools.partial(self.pool.read, layer),
            radii=self.store[layer],
            exact_k=self.store.exact_k.get(layer),
            known=[True for _ in numbers],
        )

    def status(self) -> dict[str, int]:
        """Memory of the exact copies for repairs, for the banner."""
        return copies_status(self.copies)


def copies_status(kept: Sequence[ExactCopies]) -> dict[str, int]:
    """Memory of exact copies for repairs, for the banner."""
    return {
        "bytes_copies": sum(copies.nbytes for copies in kept),
        "copy_slots": sum(copies.num_copies for copies in kept),
    }


def unquantized(call: AttentionCall) -> tuple[Quantized, Quantized]:
    """The keys and values of a call as they are."""
    return Quantized(call.exact_k, None), Quantized(call.exact_v, None)


def bands_of(policy: Policy, geometry: Geometry) -> BandMap:
    """The bands of K's channels whose errors' norms are kept."""
    rotary, quantizer = geometry.rotary, policy.resolved_quantizer
    return band_map(
        rotary, choose_bands(quantizer, rotary, geometry.v_head_dim, policy.sketch_bits, policy.meter.bands)
    )


def exact_copies(policy: Policy, geometry: Geometry) -> ExactCopies:
    """Exact copies for repairs, as many slots as `gate.copy_bytes` allows (null: every slot of the pool)."""
    width = geometry.head_dim + geometry.v_head_dim
    per_slot = len(geometry.layers) * geometry.num_kv_heads * width * geometry.pool_dtype.itemsize
    limit = policy.gate.copy_bytes
    if limit is not None and limit < per_slot:
        raise UnsupportedError(
            f"gate.copy_bytes is {limit}; one slot of this model takes {per_slot} bytes: allow that, or null for all"
        )
    return ExactCopies(
        layers=geometry.layers,
        num_slots=geometry.num_slots,
        num_copies=geometry.num_slots if limit is None else limit // per_slot,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.v_head_dim,
        dtype=geometry.pool_dtype,
        pinned=geometry.device != "cpu",
    )
