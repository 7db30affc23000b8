"""Outlier channels kept in 16 bit: what they buy, and that the core's own radii hold for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from witcert_core.cache.radii import radius_dither, radius_group_witness
from witcert_core.errors import InputError
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.decode.reference import dequantize
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.pages import gather
from witcert_core.meter.bounds import meter
from witcert_core.meter.tv import attention_logits
from witcert_core.quantizers.dither import dither_vectors
from witcert_core.quantizers.layout import KVLayout

from .int8_case import KEY, LAYER, make_case, queries


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_radii_of_a_query_without_the_bypassed_channels_hold(delta: float) -> None:
    data = make_case((200,), 16, 80, 3, kv_heads=2, bypass_pairs=3)
    assert data.bypass is not None
    slots = data.table.slots(0, 200, 16)
    ids = data.pass_ids[slots].long() & 0xFFFFFFFF
    scales = gather(data.k_scales, slots)
    u = dither_vectors(KEY, ids, LAYER, data.head_ids.tolist(), 80)
    stored = data.bypass.put(dequantize(gather(data.k, slots), scales, u), gather(data.bypass.k, slots))
    q = queries(data, 1, torch.float32)[0].double()
    spared = data.bypass.spare(q)
    off = attention_logits(q, stored, 0.1, 0.0) - attention_logits(q, gather(data.exact_k, slots).double(), 0.1, 0.0)
    for radius in (
        radius_dither(spared, scales, 0.1, delta, 200),
        radius_group_witness(spared, scales, gather(data.witness, slots), 0.1),
    ):
        assert bool((off.abs() <= radius).all())
    # The whole query would pay for channels that have no error.
    assert bool((radius_dither(q, scales, 0.1, 0.0, 200) > radius_dither(spared, scales, 0.1, 0.0, 200)).all())


def test_outliers_kept_beside_the_codes_tighten_the_meter() -> None:
    found = {}
    for pairs in (0, 4):
        data = make_case((90,), 16, 128, 3, bypass_pairs=4)
        if pairs == 0:
            # The same keys, outliers and all, written without a bypass.
            plain = make_case((90,), 16, 128, 3)
            plain.exact_k.copy_(data.exact_k)
            plain.rewrite()
            data = plain
        q = queries(data, 1, torch.float32) * 0.2
        pool = (data.cache("NHD"), data.k_scales, data.v_scales, data.table, data.pass_ids)
        arguments: dict[str, Any] = dict(
            layer=LAYER, head_ids=data.head_ids, key=KEY, max_kv_len=90, bypass=data.bypass
        )
        found[pairs] = meter(decode_int8(q, *pool, **arguments)[2])[0]
    assert bool((found[4] < 0.7 * found[0]).all())


def test_bytes_as_laid_out_and_refusals() -> None:
    channels = torch.tensor([[1, 33, 7, 39], [0, 32, 31, 63]])
    side = BypassedKeys.allocate(channels, 64, 3, 16, torch.float16, torch.device("cpu"))
    assert torch.equal(side.index, channels)
    assert side.keep.sum(dim=1).tolist() == [60, 60]
    layout = KVLayout(64, bypass_pairs=2)
    assert side.k[0, 0, 0].numel() * side.k.element_size() == layout.fields()["k_bypass"][1]
    codes = torch.zeros(3, 16, 2, 64, dtype=torch.int8)
    with pytest.raises(InputError, match="would not be exact"):
        side.check(codes, torch.float32)
    with pytest.raises(InputError, match="k_bypass is"):
        side.check(codes[:2], torch.float16)
    for wrong in (torch.tensor([[1, 1]]), torch.tensor([[64, 0]]), torch.zeros(2, 0)):
        with pytest.raises(InputError, match="channels"):
            BypassedKeys.allocate(wrong, 64, 3, 16, torch.float16, torch.device("cpu"))
