"""vLLM's pages read by kernels: whole blocks of tokens, in either order in memory, beside a pool of single slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from witcert_vllm.pool import PagePool, PerTokenHeadPool, cpu_views, plain_views

from witcert_core.serving.device.certify import KernelSums
from witcert_core.serving.storage.acts import TorchSums

from .test_simulated import HKV, LAYER, SLOTS, D, PlainPool, Served
from .two_requests import Pass

BLOCK = 10  # SLOTS is a multiple of it
PASSES: list[Pass] = [
    [(9, False), (14, False)],
    [(1, True), (1, True)],
    [(3, False), (1, True)],
    [(1, True), (1, True)],
]


def vllm_pool(order: str, dtype: torch.dtype) -> PagePool:
    """vLLM's logical [BLOCKS, Hkv, N, 2 * D], with heads or tokens of a block outermost in memory."""
    blocks = SLOTS // BLOCK
    if order == "HND":
        cache = torch.full((blocks, HKV, BLOCK, 2 * D), float("nan"), dtype=dtype)
    else:
        cache = torch.full((blocks, BLOCK, HKV, 2 * D), float("nan"), dtype=dtype).transpose(1, 2)
    return PagePool({LAYER: plain_views(cache, D)})


def in_whole_blocks(served: Served) -> None:
    """Slots as vLLM hands them out: 70 tokens of each request in seven blocks that lie anywhere."""
    blocks = torch.randperm(SLOTS // BLOCK, generator=torch.Generator().manual_seed(9))[:14].view(2, 7, 1)
    served.requests.slots = (blocks * BLOCK + torch.arange(BLOCK)).view(2, 70)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("name", ["int4_token_group", "int8_dither"])
def test_certify_over_blocks_says_what_it_says_over_slots(order: str, name: str) -> None:
    dtype = torch.float16
    pools: list[PlainPool | PagePool] = [vllm_pool(order, dtype), PlainPool(dtype)]
    blocks, slots = (Served("kernels", name, dtype, pool) for pool in pools)
    for served in (blocks, slots):
        assert served.who is KernelSums
        in_whole_blocks(served)
    for new in PASSES:
        (mine, out), (other, expected) = blocks.step(new), slots.step(new)
        assert torch.equal(out, expected)
        for layers, wanted in ((mine.layers, other.layers), (mine.deterministic_layers, other.deterministic_layers)):
            assert layers.keys() == wanted.keys()
            for layer, cells in layers.items():
                for field in ("meter", "out_bound", "num_visible", "num_quantized", "delta_loc"):
                    assert torch.equal(getattr(cells, field), getattr(wanted[layer], field)), field
    assert (cells.meter < 1).any()


def test_what_kernels_cannot_read_is_left_to_the_reference() -> None:
    """The CPU's pages, keys transposed; codes with a scale a token and head."""
    memory = torch.zeros(SLOTS // BLOCK, HKV, BLOCK, 2 * D)
    pool = PagePool({LAYER: cpu_views(memory, D, "vec")})
    assert Served("kernels", "int4_token_group", torch.float32, pool).who is TorchSums
    views: dict[int, tuple[Tensor, Tensor]] = {LAYER: plain_views(memory.view(torch.int8), D + 4)}
    assert PerTokenHeadPool(views, torch.int8).pages(LAYER) is None  # type: ignore[func-returns-value]
