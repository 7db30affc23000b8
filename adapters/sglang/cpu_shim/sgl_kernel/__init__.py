"""CPU stand-in for `sgl_kernel`, whose wheels on PyPI hold CUDA code only.

SGLang 0.5.23 with SGLANG_USE_CPU_ENGINE=1 imports the names below without a guard. Those that ordinary serving uses and
those that verify a chain of drafts are written in plain torch; the others of speculative decoding raise when called.
`convert_weight_packed` is left out on purpose: its absence is how SGLang sees that there is no AMX and chooses plain
torch layers.
"""

import ctypes

import torch


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


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """The slots from `start_offset` to `end_offset` of each request, one request after the other."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[done : done + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """The slots of the topk * num_steps tokens behind each request."""
    end = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, end, out_cache_loc, pool_len)


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    seq_lens,
    tree_mask,
    positions,
    index,
    next_token,
    next_sibling,
    topk,
    depth,
    count,
    mode,
):
    """What SGLang keeps of a chain of `count` tokens behind each request: mode 0 masks the prefix as well."""
    if topk != 1:
        raise NotImplementedError(f"sgl_kernel CPU stand-in: drafts with topk {topk}; provided is a chain, topk 1")
    index.copy_(torch.arange(index.numel()).view_as(index))
    positions.copy_((seq_lens[:, None] + torch.arange(count)).flatten())
    next_token.copy_(torch.tensor([*range(1, count), -1]).expand_as(next_token))
    behind = torch.ones(count, count, dtype=torch.bool).tril()
    parts = []
    for length in seq_lens.tolist():
        seen = torch.ones(count, length if int(mode) == 0 else 0, dtype=torch.bool)
        parts.append(torch.cat([seen, behind], 1).flatten())
    tree_mask.copy_(torch.cat(parts))


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follow each request's drafts as far as they are what the model would have said."""
    for row in range(len(candidates)):
        index, after, beside, guessed, said = (
            x[row].tolist()
            for x in (retrive_index, retrive_next_token, retrive_next_sibling, candidates, target_predict)
        )
        path = [0]
        while True:
            child = after[path[-1]]
            while child != -1 and guessed[child] != said[path[-1]]:
                child = beside[child]
            predicts[index[path[-1]]] = said[path[-1]]
            if child == -1:
                break
            path.append(child)
        accept_index[row, : len(path)] = torch.tensor([index[place] for place in path], dtype=accept_index.dtype)
        accept_token_num[row] = len(path) - 1


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last of each request's new tokens."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def _not_provided(name):
    def fail(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel CPU stand-in: {name} belongs to trees of drafts and is not provided")

    fail.__name__ = name
    return fail


rotate_input_ids_cpu = _not_provided("rotate_input_ids_cpu")
fill_accept_out_cache_loc_cpu = _not_provided("fill_accept_out_cache_loc_cpu")

__all__ = [name for name in globals() if name.endswith("_cpu")]
