"""Every custom op obeys torch.library: declared mutations are the real ones, and the fake agrees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import witcert_core.kernels.certify as certify_package
import witcert_core.kernels.decode as decode_package
import witcert_core.kernels.extend as extend_package
import witcert_core.kernels.repair as repair_package
import witcert_core.kernels.witness as witness_package
from witcert_core.cache.bands import band_map
from witcert_core.kernels.repair import RepairedPages
from witcert_core.quantizers.rotary import RotarySpec

from .int8_case import KEY, LAYER, Int8Case, make_case, queries


def recorded(monkeypatch: pytest.MonkeyPatch, package: Any, name: str, call: Any) -> tuple[Any, tuple[Any, ...]]:
    """The op ``package.name`` and the arguments that ``call`` hands it; the op itself is not run."""
    op, seen = getattr(package, name), []
    monkeypatch.setattr(package, name, lambda *arguments: seen.append(arguments))
    call()
    assert len(seen) == 1
    # A NaN is unequal to itself, which the check would take for a mutation.
    clean = [x.nan_to_num() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in seen[0]]
    return op, tuple(clean)


def int8_arguments(data: Int8Case) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    pool = (data.cache("NHD"), data.k_scales, data.v_scales)
    return pool, {"layer": LAYER, "head_ids": data.head_ids, "key": KEY, "witness": data.witness}


@pytest.mark.parametrize("name", ["decode", "extend", "extend meter", "certify", "witness", "record", "repair"])
def test_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_case((20,), 16, 64, 2)
    pool, common = int8_arguments(data)
    q = queries(data, 1, torch.float32)
    bands = band_map(RotarySpec(64))
    shape = data.k.shape[:3]
    norms = torch.zeros(*shape, bands.num_bands, dtype=torch.uint8)
    one = torch.zeros(1, dtype=torch.int32)
    exact = (torch.zeros(data.k.shape), torch.zeros(data.k.shape))

    def extend(rows: torch.Tensor | None) -> Any:
        new = torch.ones(1, 1, 64)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        return extend_package.extend_int8(
            q,
            new,
            new,
            *pool,
            starts,
            data.table,
            data.pass_ids,
            max_q_len=1,
            max_kv_len=20,
            meter_rows=rows,
            **common,
        )

    def write() -> None:
        token = torch.ones(1, 1, 64)
        witness_package.write_with_witness(
            token,
            token,
            token,
            token,
            exact,
            norms,
            torch.zeros(*shape, 1, dtype=torch.uint8),
            one.long(),
            bands,
        )

    def record() -> None:
        token, sides = torch.ones(1, 1, 64), (norms.flatten(0, 1), torch.zeros(norms.shape[:3]).flatten(0, 1).byte())
        witness_package.record_witness(token, token, token, token, *sides, one.long(), bands)

    def repair() -> None:
        side = RepairedPages.allocate(4, 1, 2, 16, 64, 64, torch.float32, q.device)
        page = torch.ones(1, 16, 64)
        repair_package.repair_pages(side, one, one, one, page, page)

    package, op_name, call = {
        "decode": (
            decode_package,
            "decode_int8_op",
            lambda: decode_package.decode_int8(q, *pool, data.table, data.pass_ids, max_kv_len=20, **common),
        ),
        "extend": (extend_package, "extend_int8_op", lambda: extend(None)),
        "extend meter": (extend_package, "extend_meter_op", lambda: extend(one)),
        "certify": (
            certify_package,
            "certify_op",
            lambda: certify_package.certify(q, exact, norms, data.table, bands, max_kv_len=20),
        ),
        "witness": (witness_package, "write_witness_op", write),
        "record": (witness_package, "record_witness_op", record),
        "repair": (repair_package, "repair_pages_op", repair),
    }[name]
    op, arguments = recorded(monkeypatch, package, op_name, call)
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
