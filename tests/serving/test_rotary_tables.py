"""Rotary embeddings of engines as tables: found right, or refused with the layer's number."""

from __future__ import annotations

import pytest
import torch

from witcert_core.errors import UnsupportedError
from witcert_core.serving.rotary import rotary_tables


class Rope(torch.nn.Module):
    """As much of a rotary embedding as is looked at, turning pairs half-split whatever it says."""

    def __init__(self, neox: bool = True, **changes: object) -> None:
        super().__init__()
        angles = torch.arange(64)[:, None] * torch.logspace(0, -4, 32)[None]
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1)
        self.rotary_dim, self.is_neox_style, self.position_start = 64, neox, 0
        for name, value in changes.items():
            setattr(self, name, value)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.cos_sin_cache[positions].chunk(2, -1)
        a, b = k.chunk(2, -1)
        return q, torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def test_rotary_embeddings_are_checked_or_refused() -> None:
    table = rotary_tables({0: Rope(), 3: Rope()}, {0: 64, 3: 64}, torch.float32, "cpu")(3)
    x = torch.randn(5, 1, 64)
    _, turned = Rope()(torch.arange(5), x[:, 0], x[:, 0])
    assert torch.allclose(table.rotate(x, torch.arange(5))[:, 0], turned, atol=1e-6)
    for rope, message in (
        (None, "layer 0 has no rotary embedding beside it"),
        (Rope(neox=False), "turns keys otherwise than its table says"),
        (Rope(mrope_section=[8, 12, 12]), "no table of plain positions"),
        (Rope(cos_sin_cache=None), "no table of plain positions"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            rotary_tables({0: rope}, {0: 64}, torch.float32, "cpu")
