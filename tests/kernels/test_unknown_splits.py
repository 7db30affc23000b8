"""A split whose visible tokens all are no numbers: no maximum remembers them, and yet they make the cell unknown."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from witcert_core.cache.bands import band_map
from witcert_core.kernels.certify import certify
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.extend import extend_int8
from witcert_core.kernels.host.slack import SPLIT_TOKENS
from witcert_core.kernels.witness import record_witness
from witcert_core.meter.bounds import meter
from witcert_core.quantizers.rotary import RotarySpec

from .compare import engine_meter
from .int8_case import KEY, LAYER, make_case
from .paged import page_table, rows_of

D, G = 32, 2
BANDS = band_map(RotarySpec(D))
SINKS = {"plain": None, "sinks": torch.zeros(G)}
OPTIONS = [(20, -1, "sinks"), (20, 0, "plain"), (SPLIT_TOKENS + 1, -1, "plain"), (SPLIT_TOKENS + 1, -1, "sinks")]


@pytest.mark.parametrize(("length", "window", "sinks"), OPTIONS)
@pytest.mark.parametrize("spoilt", ["nan", "-inf", "query"])
def test_certify(length: int, window: int, sinks: str, spoilt: str) -> None:
    gen = torch.Generator().manual_seed(1)
    table, pages = page_table((length,), 1, gen)
    exact = torch.randn(length, 1, D, generator=gen)
    pool = torch.zeros(pages, 1, 1, D), torch.zeros(pages, 1, 1, D)
    witness = torch.full((pages, 1, 1, BANDS.num_bands), 255, dtype=torch.uint8)
    value_witness = torch.full((pages, 1, 1, 1), 255, dtype=torch.uint8)
    q = torch.randn(1, G, D, generator=gen)
    q[0, 1, 0] = math.nan if spoilt == "query" else -1.0
    fake = exact.clone()
    if spoilt != "query":  # the newest token, which is alone in its split or in its window
        fake[-1, 0, 0] = math.nan if spoilt == "nan" else math.inf
    slots = table.slots(0, length, 1)
    pool[0][slots, 0], pool[1][slots, 0] = fake, exact
    sides = witness.flatten(0, 1), value_witness.flatten(0, 1)[..., 0]
    record_witness(exact, exact, fake, exact, *sides, slots, BANDS)
    options: dict[str, Any] = {"window_left": window, "sinks": SINKS[sinks], "value_witness": value_witness}
    found = certify(q, pool, witness, table, BANDS, max_kv_len=length, **rows_of(length), **options)
    assert engine_meter(found)[0, 1] == 1.0
    assert bool(found.acc[0, 1].isinf().all()) or bool(found.acc[0, 1, 2].isinf())
    if spoilt == "query":
        assert engine_meter(found)[0, 0] < 0.1


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spoilt", ["outlier", "query"])
def test_decode(sinks: str, dtype: torch.dtype, spoilt: str) -> None:
    length = SPLIT_TOKENS + 1
    data = make_case((length,), 16, D, G, bypass_pairs=1, dtype=dtype)
    assert data.bypass is not None
    q = torch.randn(1, G, D, generator=torch.Generator().manual_seed(2)).to(dtype)
    if spoilt == "query":
        q[0, 1, 3] = math.nan
    else:
        slot = int(data.table.slots(0, length, 16)[-1])
        data.bypass.k[slot // 16, slot % 16] = math.nan
    arguments: dict[str, Any] = dict(layer=LAYER, head_ids=data.head_ids, key=KEY, max_kv_len=length)
    arguments |= {"bypass": data.bypass, "sinks": SINKS[sinks]}
    pool = (data.cache("NHD"), data.k_scales, data.v_scales, data.table, data.pass_ids)
    out, _, acc = decode_int8(q, *pool, **arguments)
    assert meter(acc)[0][0, 1] == 1.0
    assert bool(out[0, 1].isnan().all()), "a token that was left out"
    assert (spoilt == "query") == bool(out[0, 0].isfinite().all())


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("new", [7, SPLIT_TOKENS + 1])
def test_a_chunks_own_tokens(sinks: str, new: int) -> None:
    """Metered rows over a stored prefix: the last token of the chunk is spoilt and the last row sees it."""
    data = make_case((20,), 16, D, G)
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(new, heads, D, generator=gen) for heads in (G, 1, 1))
    k[-1, 0, 0] = math.nan
    _, _, acc = extend_int8(
        q,
        k,
        v,
        data.cache("NHD"),
        data.k_scales,
        data.v_scales,
        torch.tensor([0, new], dtype=torch.int32),
        data.table,
        data.pass_ids,
        layer=LAYER,
        head_ids=data.head_ids,
        key=KEY,
        max_q_len=new,
        max_kv_len=20,
        meter_rows=torch.tensor([new - 2, new - 1], dtype=torch.int32),
        delta_loc=torch.zeros(2),
        sinks=SINKS[sinks],
    )
    found = meter(acc)[0]
    assert bool((found[1] == 1.0).all())
    assert bool((found[0] < 1.0).all())
