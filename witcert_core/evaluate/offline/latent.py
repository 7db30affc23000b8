"""Multi-head latent attention of transformers' models, with queries multiplied into latent space.

These modules multiply latents out to keys and values of heads (`kv_b_proj`) before they attend. Attention over the
latents themselves is the same in real arithmetic: q_h = [W_UK,h^T q_nope,h | q_rope,h] against rows [c | k_rope], and
W_UV,h of what comes out. What goes into `kv_b_proj` is the latents, which a hook keeps until the module attends.

Shapes: B requests, N tokens, H heads, P channels of a head without RoPE, R of RoPE, L of the latent, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError

_LATENTS = "witcert_latents"
_SIZES = ("num_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")


def follow(model: Any, num_layers: int) -> list[Callable[[], None]]:
    """Keep the latents of every latent attention module of `model`; what is returned ends that.

    Raises:
        UnsupportedError: not `num_layers` modules of a form that is known.
    """
    found = [module for module in model.modules() if _is_known(module)]
    if len(found) != num_layers:
        raise UnsupportedError(
            f"{type(model).__name__} has {num_layers} layers over latents, {len(found)} of them with a kv_b_proj of "
            "the form that transformers' DeepSeek models have; others are not followed offline"
        )

    def kept(module: Any) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def hook(_projection: Any, inputs: tuple[Tensor, ...]) -> None:
            setattr(module, _LATENTS, inputs[0])

        return hook

    return [module.kv_b_proj.register_forward_pre_hook(kept(module)).remove for module in found]


def _is_known(module: Any) -> bool:
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    if not isinstance(weight, Tensor) or not all(hasattr(module, name) for name in _SIZES):
        return False
    heads, nope, values, latent = (getattr(module, name) for name in _SIZES)
    plain = weight.is_floating_point() and getattr(module.kv_b_proj, "bias", None) is None
    return plain and tuple(weight.shape) == (heads * (nope + values), latent)


class Absorbed:
    """One attention call of a module over latents.

    q [B, N, H, L + R], rows [B, N, 1, L + R]; values are rows[..., :L].
    """

    def __init__(self, module: Any, query: Tensor, key: Tensor) -> None:
        """query, key [B, N, H, P + R], as the module attends with them."""
        nope, latent = module.qk_nope_head_dim, module.kv_lora_rank
        latents: Tensor = getattr(module, _LATENTS)
        delattr(module, _LATENTS)
        weight = module.kv_b_proj.weight.view(module.num_heads, -1, latent)
        self._up_values = weight[:, nope:]
        absorbed = torch.einsum("bnhp,hpl->bnhl", query[..., :nope], weight[:, :nope])
        self.q = torch.cat([absorbed, query[..., nope:]], -1)
        rotated = key[:, :, :1, nope:]  # the same for all heads
        self.rows = torch.cat([latents.reshape(*rotated.shape[:3], latent), rotated], -1)
        self.values = self.rows[..., :latent]

    @staticmethod
    def is_of(module: Any) -> bool:
        """Whether latents of the module were kept for the call at hand."""
        return hasattr(module, _LATENTS)

    def heads(self, out: Tensor) -> Tensor:
        """[B, N, H, V] of outputs [B, N, H, L] in latent space."""
        return torch.einsum("bnhl,hvl->bnhv", out, self._up_values)
