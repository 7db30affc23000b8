"""The cache of a policy on the device at hand: the only place that knows what kernels can do, and what they cannot.

| tokens live in | rows are summed up by kernels, where they run, unless | and beside a gate that repairs |
|---|---|---|
| `simulated`: the engine's own pool | the policy asks for sketches, the extremal form or a stored witness, or the pool has no pages that they read | the gate's own sums, in torch |
| `packed`: codes in the engine's pool | they are a coded quantizer's; on a CPU, a dithered one's of its own, or the extremal form | kernels write, and attend rows of which the gate looks at none |
| `engine`: the engine's own quantized pool | as simulated, or the pass has rows that read themselves exactly | refused by the policy |

On a CPU nothing is refused for the kernels' sake: what they cannot do, or where they cannot be compiled, plain torch does,
and the banner says why. A pool without pages that they read is gathered there, for the requests of metered rows.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping, Sequence

from witcert_core.cache.coded import CodedLayer, CodedPool
from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.cache.packed import PackedKV, PackedLayer
from witcert_core.cache.protocols import Pool, StoredErrors
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.errors import UnsupportedError
from witcert_core.kernels.host.dispatch import interpreting, serving_kernels, without_kernels
from witcert_core.policy.model import Policy
from witcert_core.quantizers.base import Quantizer
from witcert_core.quantizers.int8_dither import Int8Dither
from witcert_core.serving.cache import Cache
from witcert_core.serving.device.certify import KernelSums, PagedPool
from witcert_core.serving.device.packed import PackedKernels
from witcert_core.serving.device.sums import Sums
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.forward import Pass
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.storage.accounts import exact_copies
from witcert_core.serving.storage.acts import Acts, Gating, Observing, Summer, TorchSums
from witcert_core.serving.storage.attended import Attended, Rewritten, Storage, nothing_rewritten
from witcert_core.serving.storage.coded import CodedStorage
from witcert_core.serving.storage.engine import EngineStorage
from witcert_core.serving.storage.exact_blocks import RepairedCache
from witcert_core.serving.storage.packed import PackedStorage
from witcert_core.serving.storage.repair import BlockRepairer
from witcert_core.serving.storage.simulated import SimulatedStorage

Buffers = Mapping[int, PackedLayer | CodedLayer]
"""A packed pool, by global layer id: all of one kind."""


def build_cache(
    policy: Policy,
    geometry: Geometry,
    pool: Pool | Buffers,
    encoder: Encoder,
    rewritten: Rewritten = nothing_rewritten,
) -> Cache:
    """The cache that `policy` asks for over an engine's `pool`; rewritten: told of every later rewrite of tokens.

    Raises:
        UnsupportedError: a policy that this pool, or the kernels on its device, cannot serve.
    """
    metered = frozenset(policy.meter.layers_of(geometry.layers))
    by_torch = why_torch(policy, geometry.device, geometry.head_dim, geometry.v_head_dim)
    if by_torch is None and geometry.latent:
        by_torch = "kernels do not read values out of latent keys"
    if by_torch is None and not isinstance(pool, Mapping) and by_triton(geometry.device):
        by_torch = None if has_pages(policy, geometry, pool) else "the pool has no pages that kernels read"
    storage: Storage
    acts: Acts
    if isinstance(pool, Mapping):
        if policy.quantizer.storage != "packed":
            raise UnsupportedError(
                f"quantizer.storage is {policy.quantizer.storage!r} over a pool of codes; set it to 'packed'"
            )
        made = _coded if policy.stores_parts else _packed
        storage, acts = made(policy, geometry, pool, encoder, len(metered), by_torch)
    elif policy.quantizer.storage == "packed":
        raise UnsupportedError(
            f"quantizer.storage is 'packed', and the pool of {geometry.backend} does not hold codes; set 'simulated'"
        )
    elif policy.meters_engine:
        storage = EngineStorage(policy, geometry, pool, encoder)
        summer = _summer(policy, geometry, pool, storage.store, by_torch)
        acts = Observing(ByTorchWhereExact(summer, TorchSums(policy.meter.form)))
    else:
        copies = exact_copies(policy, geometry) if policy.repairs else None
        storage = SimulatedStorage(policy, geometry, pool, encoder, copies, rewritten)
        if copies is None:
            acts = Observing(_summer(policy, geometry, pool, storage.store, by_torch))
        else:
            gated = metered & set(policy.quantizer.layers_of(geometry.layers))
            acts = Gating(_repairer(policy, storage.store, copies, len(gated)), pool)
    kernels = f"plain torch: {by_torch}" if by_torch else serving_kernels(geometry.device)
    return Cache(storage, acts, metered, kernels)


def why_torch(policy: Policy, device: str, *channels: int) -> str | None:
    """Why plain torch serves such caches of heads with these channels; None where kernels do, or refuse.

    On a CPU the kernels are compiled by this call, where nobody did that before.
    """
    if why := without_kernels(device, *channels):
        return why
    packed, quantizer = policy.quantizer.storage == "packed", policy.resolved_quantizer
    if policy.stores_parts:
        return f"quantizer {quantizer.name!r} brings its own codes"
    if packed and not policy.repairs and by_triton(device):
        return None
    if packed and not isinstance(quantizer, Int8Dither):
        return f"quantizer {quantizer.name!r} brings its own codes"
    if policy.meter.form == "extremal" and not policy.repairs:
        return "meter.form 'extremal' needs every token of a cell, not sums"
    if packed:
        return None
    if policy.repairs:
        return "a gate that repairs sums over tokens itself"
    if policy.sketch_bits:
        return "kernels read no sketches (meter.sketch_bits)"
    if quantizer.stored_witness:
        return f"quantizer {quantizer.name!r} stores a witness, which kernels read in a packed pool alone"
    return None


def by_triton(device: str) -> bool:
    """Whether the kernels are Triton's, which refuse what they cannot do."""
    return device != "cpu" or interpreting()


def has_pages(policy: Policy, geometry: Geometry, pool: Pool) -> bool:
    """Whether kernels can read a pool where it lies."""
    layers = policy.meter.layers_of(geometry.layers)
    return isinstance(pool, PagedPool) and all(pool.pages(layer) is not None for layer in layers)


class ByTorchWhereExact:
    """`Summer` of an engine's own cache: passes with rows that read themselves exactly are left to torch, which knows
    them token by token; the kernel reads what is stored."""

    def __init__(self, summer: Summer, in_torch: TorchSums) -> None:
        self.summer = summer
        self.in_torch = in_torch

    def sums(self, attended: Attended, now: Pass, deltas: Sequence[float]) -> Sums:
        chosen = self.summer if now.attends_quantized.all else self.in_torch
        return chosen.sums(attended, now, deltas)


def _coded(
    policy: Policy, geometry: Geometry, layers: Buffers, encoder: Encoder, num_metered: int, _by_torch: str | None
) -> tuple[Storage, Acts]:
    quantizer = encoder.quantizer
    own = {number: layer for number, layer in layers.items() if isinstance(layer, CodedLayer)}
    if len(own) < len(layers) or geometry.latent:
        raise UnsupportedError(
            f"the pool of {geometry.backend} has no room for the codes of quantizer {quantizer.name!r}; set "
            "quantizer.storage to 'simulated'"
        )
    copies = exact_copies(policy, geometry) if policy.repairs else None
    storage = CodedStorage(policy, geometry, CodedPool(own, quantizer, encoder.contexts), encoder, copies)
    if copies is None or storage.repaired is None:
        return storage, Observing(TorchSums(policy.meter.form))
    return storage, Gating(_repairer(policy, storage.repaired, copies, num_metered), storage.repaired)


def _packed(
    policy: Policy, geometry: Geometry, layers: Buffers, encoder: Encoder, num_metered: int, by_torch: str | None
) -> tuple[Storage, Acts]:
    own = {number: layer for number, layer in layers.items() if isinstance(layer, PackedLayer)}
    cache = PackedKV(own, encoder.pass_ids, encoder.dither_key, geometry.kv_head_ids, geometry.rotary)
    kernels = None
    if by_torch is None:
        _check_kernels_can(policy, encoder.quantizer)
        kernels = PackedKernels(cache, geometry, encoder, policy.meter.form)
    if not policy.repairs:
        # Where kernels attend, their sums come with the outputs.
        return PackedStorage(policy, geometry, cache, encoder, kernels), Observing(TorchSums(policy.meter.form))
    copies = exact_copies(policy, geometry)
    repaired = RepairedCache(cache, copies, geometry)
    gate = Gating(_repairer(policy, repaired, copies, num_metered), repaired)
    return PackedStorage(policy, geometry, cache, encoder, kernels, repaired), gate


def _check_kernels_can(policy: Policy, quantizer: Quantizer) -> None:
    """Raise UnsupportedError for a packed cache that the kernels cannot write, or not meter."""
    if not isinstance(quantizer, Int8Dither):
        raise UnsupportedError(
            f"quantizer {quantizer.name!r} brings its own codes; the kernels write those of int8_dither, "
            "int8_dither_w and int8_dither_bypass: name one of these, or set quantizer.storage to 'simulated'"
        )
    if policy.meter.form == "extremal" and not policy.repairs:
        raise UnsupportedError(
            "meter.form is 'extremal', which needs every token of a cell, not sums over them as kernels give; "
            "set meter.form to 'auto'"
        )


def _summer(policy: Policy, geometry: Geometry, pool: Pool, store: WitnessStore, by_torch: str | None) -> Summer:
    """By `certify` where kernels know all that the policy asks for; else in torch."""
    layers, form = policy.meter.layers_of(geometry.layers), policy.meter.form
    if by_torch is not None:
        return TorchSums(form)
    gathers = not has_pages(policy, geometry, pool)
    return KernelSums(geometry, pool, store, layers, form, gathers=gathers)


def _repairer(policy: Policy, store: StoredErrors, copies: ExactCopies, num_layers: int) -> BlockRepairer:
    """The gate of a policy at work over `num_layers` layers.

    Under the dither law each layer gets an equal share of `gate.max_pagein_bytes`, fixed in advance (see
    `BlockRepairer`).
    """
    limit, apart = policy.gate.max_pagein_bytes, policy.tier == "probabilistic"
    return BlockRepairer(
        policy.resolved_gate,
        store,
        copies,
        block_size=policy.gate.block_size,
        max_pagein_bytes=limit // max(num_layers, 1) if apart and limit is not None else limit,
        layers_apart=apart,
        form=policy.meter.form,
    )
