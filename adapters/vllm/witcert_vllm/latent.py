"""Multi-head latent attention (MLA): what is added to vLLM's classes for it.

vLLM writes the rows of all new tokens ([latent | RoPE], one a token), then lets prompts attend to keys and values of
heads that it multiplies out of them (`forward_mha`), then lets the other tokens attend to the latents themselves, with
queries multiplied into latent space (`forward_mqa`). The meter follows the latter only. Their tokens come first.

Shapes: N new tokens of a pass, M of them in `forward_mqa`, H query heads, L channels of the latent, P of RoPE,
D = L + P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder, MLAAttentionImpl

from witcert_core.errors import UnsupportedError
from witcert_vllm import process

LATENT_WRITE = ("self", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "k_scale")
FORWARD_MHA = ("self", "q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata", "k_scale", "output")
FORWARD_MQA = ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")


class MeteredLatentBuilder(AttentionMetadataBuilder):
    """What is added to a metadata builder: it begins the pass, once it is known whose latents are multiplied out."""

    supports_update_block_table = False  # see `backend.MeteredBuilder`

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, *args, **kwargs)
        self.layer_names = layer_names  # which vLLM's own builders for latents do not keep

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        process.metadata_built(self.layer_names, common_attn_metadata, metadata.num_decodes)
        return metadata


@dataclass(frozen=True)
class Written:
    """A write of vLLM's: latents [>= N, L], rotated channels [>= N, 1, P], and the rest of its arguments."""

    latents: Tensor
    rotated: Tensor
    kv_cache: Tensor
    kv_cache_dtype: str
    k_scale: Tensor

    @property
    def rows(self) -> Tensor:
        """[>= N, D]."""
        return torch.cat((self.latents, self.rotated.flatten(1)), -1)


class MeteredLatentImpl(MLAAttentionImpl):
    """What is added to an implementation. layer_id: global id of its layer, given when the runtime is built; layers
    that only make drafts get none, and are left alone. own_pages:
    the cache is packed, so the stock implementation can neither read nor write it, and attends to nothing in it.

    Whatever a pass writes is written exactly at first: prompts whose prefix is computed in the same pass read it so.
    """

    witcert_metered = True
    own_pages: bool
    layer_id: int = -1
    num_heads: int
    written: Written | None = None

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        if not self.own_pages:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
        if self._metered():
            self.written = Written(kv_c_normed, k_pe, kv_cache, kv_cache_dtype, k_scale)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        **outputs: Any,
    ) -> None:
        if self.own_pages and attn_metadata.prefill.chunked_context is not None:
            raise UnsupportedError(
                f"layer {self.layer_id} multiplies a prefix out of packed latents, which only the meter's attention "
                "reads; set quantizer.storage to 'simulated'"
            )
        super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, **outputs)
        if self._metered() and not attn_metadata.num_decode_tokens:  # else `forward_mqa` comes after this
            runtime, written = process.runtime(), self._taken()
            nobody = q.new_zeros(1, self.num_heads, runtime.geometry.head_dim)

            def run(own: Tensor | None, _part_of_it: Tensor | None) -> Tensor:
                self._rewrite(written, own)
                return nobody[..., : runtime.geometry.v_head_dim].contiguous()

            runtime.attend_latent(self, self.layer_id, nobody, written.rows, run)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        attend = super().forward_mqa
        if not self._metered():
            if self.own_pages:
                rotated = q[1] if isinstance(q, tuple) else q
                return rotated.new_zeros(*rotated.shape[:2], layer.kv_lora_rank), None
            own: tuple[Tensor, Tensor | None] = attend(q, kv_c_and_k_pe_cache, attn_metadata, layer)
            return own
        written = self._taken()
        lse: Tensor | None = None

        def run(own: Tensor | None, _part_of_it: Tensor | None) -> Tensor:
            nonlocal lse
            self._rewrite(written, own)
            out: Tensor
            out, lse = attend(q, kv_c_and_k_pe_cache, attn_metadata, layer)
            return out

        queries = torch.cat(q, -1) if isinstance(q, tuple) else q
        out = process.runtime().attend_latent(self, self.layer_id, queries, written.rows, run)
        return out.view(*queries.shape[:2], -1), lse

    def _metered(self) -> bool:
        return self.layer_id >= 0 and process.in_pass()

    def _taken(self) -> Written:
        """What was written of this layer in this pass."""
        written, self.written = self.written, None
        if written is None:
            raise UnsupportedError(
                f"layer {self.layer_id} attends to latents without having written its own: what is stored cannot be "
                "metered; unset WITCERT_POLICY for this model"
            )
        return written

    def _rewrite(self, written: Written, rows: Tensor | None) -> None:
        """Put rows [N, 1, D] in the place of what was written; None leaves that."""
        if rows is not None:
            latents, rotated = rows.split([written.latents.shape[-1], written.rotated.shape[-1]], -1)
            slots = process.runtime().written_of(self.layer_id)
            super().do_kv_cache_update(
                latents[:, 0], rotated, written.kv_cache, slots, written.kv_cache_dtype, written.k_scale
            )
