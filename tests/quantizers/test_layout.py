import pytest

from witcert_core.errors import InputError
from witcert_core.meter.sums import NUM_ACC_FIELDS, AccField
from witcert_core.quantizers.layout import KVLayout


@pytest.mark.parametrize(
    ("layout", "size", "ratio"),
    [
        (KVLayout(128), 272, 512 / 272),
        (KVLayout(128, stored_witness=True), 276, 512 / 276),
        (KVLayout(128, bypass_pairs=4), 288, 512 / 288),
        (KVLayout(80), 172, 320 / 172),
        (KVLayout(192, v_head_dim=128), 192 + 12 + 128 + 8, 640 / 340),
        (KVLayout(576, values_in_keys=True), 576 + 36, 1152 / 612),
    ],
    ids=str,
)
def test_bytes_per_token_and_head(layout: KVLayout, size: int, ratio: int) -> None:
    assert layout.bytes_per_token_head == size
    assert layout.capacity_ratio() == pytest.approx(ratio)
    offset = 0
    for start, length in layout.fields().values():
        assert start == offset
        offset += length
    assert offset == size


def test_accumulator_order_is_fixed() -> None:
    names = "ETA Q M P_H C_H ETA_R Q_R M_R MASS_R LOG_A V2 RHO1 RHO2 RHO_MAX RHO_MIN V_RADIUS"
    assert " ".join(f.name for f in AccField) == names
    assert [int(f) for f in AccField] == list(range(NUM_ACC_FIELDS))
    assert NUM_ACC_FIELDS == 16


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(InputError, match="bypass_pairs is 65"):
        KVLayout(128, bypass_pairs=65)
    with pytest.raises(InputError, match="at least 1"):
        KVLayout(0)
    with pytest.raises(InputError, match="no width of their own"):
        KVLayout(576, 512, values_in_keys=True)
