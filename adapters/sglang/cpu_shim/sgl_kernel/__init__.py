"""CPU stand-in for `sgl_kernel`, whose wheels on PyPI hold CUDA code only.

SGLang 0.5.23 with SGLANG_USE_CPU_ENGINE=1 imports the names below without a guard. The two that ordinary serving uses
are written in plain torch; the speculative-decoding ones raise when called. `convert_weight_packed` is left out on
purpose: its absence is how SGLang sees that there is no AMX and chooses plain torch layers.
"""

import ctypes


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Write each request's new slots into its row of `req_to_token` [REQUESTS, MAX_CONTEXT]."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[done : done + count].to(req_to_token.dtype)
        done += count


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy the rows `src_loc` of every buffer (base address and row bytes given) onto the rows `tgt_loc`."""
    pairs = list(zip(tgt_loc.tolist(), src_loc.tolist(), strict=True))
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + src * stride, stride) for _, src in pairs]  # read all first: they may overlap
        for (tgt, _), row in zip(pairs, rows, strict=True):
            ctypes.memmove(base + tgt * stride, row, stride)


def _not_provided(name):
    def fail(*_args, **_kwargs):
        raise NotImplementedError(
            f"sgl_kernel CPU stand-in: {name} belongs to speculative decoding and is not provided"
        )

    fail.__name__ = name
    return fail


rotate_input_ids_cpu = _not_provided("rotate_input_ids_cpu")
fill_accept_out_cache_loc_cpu = _not_provided("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _not_provided("fill_bonus_tokens_cpu")
assign_draft_cache_locs_contiguous_cpu = _not_provided("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _not_provided("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _not_provided("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _not_provided("verify_tree_greedy_cpu")

__all__ = [name for name in globals() if name.endswith("_cpu")]
