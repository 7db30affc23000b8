"""Packed pools of coded quantizers on SGLang's own objects: a simulated cache's bounds, at the bytes of codes."""

from __future__ import annotations

import pytest
import torch
from audits import audit_of
from engine import HKV, HQ, LAYERS, SLOTS, D, Engine, gated
from layer_pool import attention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from witcert_core.errors import QuantizerError
from witcert_core.serving import build
from witcert_core.serving.storage import tiles
from witcert_core.serving.storage.coded import CodedStorage

pytestmark = pytest.mark.sglang

PLUGINS: tuple[tuple[str, dict[str, int]], ...] = (("nvfp4", {}), ("rotated", {"bits": 3}))
CASES: tuple[tuple[str, dict[str, int]], ...] = (
    ("int4_token_group", {}),
    ("int2_token_group", {"group_size": 16}),
    ("fp8_e4m3_cast", {}),
    ("k=int8_token_group,v=int4_token_group", {}),
    *PLUGINS,
)


def coded(engine: Engine) -> CodedStorage:
    assert isinstance(engine.storage, CodedStorage)
    return engine.storage


@pytest.mark.parametrize(("name", "params"), CASES)
@pytest.mark.parametrize("reads", ["chunk_exact", "stored"])
def test_packed_and_simulated_say_the_same(
    name: str, params: dict[str, int], reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same keys stored, the same bounds, the same outputs; attended in tiles that cut requests and chunks."""
    monkeypatch.setattr(tiles, "TILE", 16)
    monkeypatch.setattr(tiles, "ROWS", 3)
    monkeypatch.setattr(build, "why_torch", lambda *_: "both in one arithmetic")
    both = {}
    for storage in ("simulated", "packed"):
        engine = Engine(name, storage=storage, prefill_reads=reads, params=params)
        steps = [engine.step([7, 31], ForwardMode.EXTEND), engine.step([5, 2], ForwardMode.EXTEND)]
        both[storage] = [*steps, engine.step([1, 1], ForwardMode.DECODE)], engine
    (simulated, _), (packed, engine) = both["simulated"], both["packed"]
    for (step, _, outputs), (other, _, same) in zip(simulated, packed, strict=True):
        assert set(step.layers) == set(other.layers)
        for layer in step.layers:
            torch.testing.assert_close(outputs[layer], same[layer], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(step.layers[layer].meter, other.layers[layer].meter, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                step.layers[layer].out_bound, other.layers[layer].out_bound, atol=1e-4, rtol=1e-4
            )
    quantizer = engine.runtime.policy.resolved_quantizer
    size = quantizer.bytes_per_token_head(D)
    assert size is not None
    assert coded(engine).pool.nbytes == LAYERS * HKV * (SLOTS + 1) * size
    assert sum(engine.pool.get_kv_size_bytes()) == coded(engine).pool.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sketch_bits", [0, 4])
def test_the_bounds_hold_over_what_is_read(dtype: torch.dtype, sketch_bits: int) -> None:
    engine = Engine("int4_token_group", dtype, storage="packed", meter={"sketch_bits": sketch_bits})
    engine.step([7, 31], ForwardMode.EXTEND)
    engine.step([5, 2], ForwardMode.EXTEND)
    step, queries, outputs = engine.step([1, 1], ForwardMode.DECODE)
    for layer in range(LAYERS):
        cells = step.layers[layer]
        for i, count in enumerate(engine.lens):
            q = queries[layer][i].to(dtype).float()
            out, compressed = attention(q, *engine.stored(layer, i, count))
            exact_out, exact = attention(q, *(engine.exact[layer][kind][i, :count] for kind in "kv"))
            assert torch.allclose(outputs[layer][i].double(), out, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
            assert ((exact - compressed).abs().sum(-1) / 2 <= cells.meter[i]).all()
            assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[i]).all()
            assert (audit_of(cells)[i] <= cells.meter[i]).all()
    assert coded(engine).bytes_side == coded(engine).store.nbytes > 0


def test_what_the_engine_moves_or_overwrites_is_followed() -> None:
    """Bytes go with a slot, and so does what is known of them; what came from elsewhere is unknown."""
    engine = Engine("int4_token_group", storage="packed")
    engine.step([7, 31], ForwardMode.EXTEND)
    source = engine.requests.req_to_token[engine.rows[1], :6].long()
    free = torch.tensor(sorted(set(range(1, SLOTS)) - set(engine.requests.req_to_token[:, :60].flatten().tolist()))[:6])
    before = engine.storage.stored(1, source)
    radius = coded(engine).store[1].value_radius(source)
    for buffers in (engine.pool.k_buffer, engine.pool.v_buffer):
        for buffer in buffers:
            buffer[free] = buffer[source]
    engine.runtime.moved(free, source)
    assert all(torch.equal(a, b) for a, b in zip(engine.storage.stored(1, free), before, strict=True))
    assert torch.equal(coded(engine).store[1].value_radius(free), radius)
    engine.runtime.overwritten(free)
    assert coded(engine).store[1].value_radius(free).isinf().all()


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_a_quantizer_that_fails_leaves_its_slots_unknown(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a key may be new by then: what was known of the slot before is not said of them."""
    engine = Engine("k=int8_token_group,v=int4_token_group", storage="packed", prefill_reads="stored")
    engine.step([7, 31], ForwardMode.EXTEND)
    slots = engine.requests.req_to_token[engine.rows[1], :31].long()
    assert coded(engine).store[0].value_radius(slots).isfinite().all()

    def fails(*_: object, **__: object) -> None:
        raise ValueError("out of luck")

    engine.lens = [0, 0]
    monkeypatch.setattr(type(coded(engine).pool.coders["v"]), method, fails)
    with pytest.raises(QuantizerError, match=r"'int4_token_group' failed on v .* in layer 0: ValueError: out of luck"):
        engine.step([7, 31], ForwardMode.EXTEND)
    assert coded(engine).store[0].value_radius(slots).isinf().all()


def test_what_is_no_number_spoils_the_rows_that_see_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 8)
    q, k, v = torch.randn(12, HQ, D), torch.randn(20, HKV, D), torch.randn(20, HKV, D)
    out = torch.zeros(12, HQ, D)
    v[15, 1], k[17, 0] = float("nan"), float("inf")

    def read(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k[slots], v[slots]

    tiles.attend_tiles(q, [torch.arange(20)], [12], read, D**-0.5, out)
    finite = out.isfinite().all(-1)
    assert finite[:7].all()  # token 15 is row 7's own
    assert not finite[7:, HQ // 2 :].any()
    for row in range(7):
        expected, _ = attention(q[row], k[: 9 + row], v[: 9 + row])
        torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sketch_bits", [0, 4])
def test_a_gate_repairs_from_copies_until_the_slot_is_used_again(sketch_bits: int) -> None:
    engine = gated("int4_token_group", storage="packed", tau=0.02, target="tv", meter={"sketch_bits": sketch_bits})
    engine.step([17, 31], ForwardMode.EXTEND)
    step, _, _ = engine.step([1, 1], ForwardMode.DECODE)
    assert sum(verdict.repaired_bytes for verdict in step.verdicts) > 0
    assert all((cells.meter <= 0.02).all() and (audit_of(cells) <= cells.meter).all() for cells in step.layers.values())
    slots = engine.requests.req_to_token[engine.rows[0], :17].long()
    repaired = coded(engine).repaired
    assert repaired is not None
    assert repaired.exact(0, slots).any()
    engine.lens = [0, 0]
    engine.step([17, 31], ForwardMode.EXTEND)
    assert not repaired.exact(0, slots).any()
    engine.step([1, 1], ForwardMode.DECODE)
    engine.runtime.overwritten(slots)  # by the engine, from elsewhere: the copies are of other tokens
    assert not repaired.exact(0, slots).any()
