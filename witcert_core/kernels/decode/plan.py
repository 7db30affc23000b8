"""Plan once on the host, run many times on the device: FlashInfer's argument names over this package's INT8
pages.

``run`` copies nothing to the host, allocates nothing and launches a fixed grid, so it can be captured in a
CUDA graph; with ``use_cuda_graph`` the page table lives in buffers given at construction, ``plan`` refills them,
and nothing a graph reads moves. Numbers given to ``plan`` (window, cap, scale) are part of a captured graph: a
change needs another capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.kernels.decode import Workspace, decode_int8
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.pages import PagedKV, PageTable
from witcert_core.kernels.repair.pages import RepairedPages
from witcert_core.meter.sums import NUM_ACC_FIELDS
from witcert_core.quantizers.dither import DitherKey


class BatchDecodeWithInt8PagedKVCacheWrapper:
    """Decode attention of a batch, certified.

    Args:
        layer_head_ids: int32 ``[Hkv]`` global KV head of each local one.
        key: Philox key of the dither.
        kv_layout: ``NHD`` or ``HND``.
        use_cuda_graph: take the page table from the three buffers below, whose addresses a graph keeps.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: int32 device tensors.
        max_kv_len: longest request any replay may see; fixes the grid. Default: the longest at ``plan``.
    """

    def __init__(
        self,
        layer_head_ids: Tensor,
        key: DitherKey,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        max_kv_len: int | None = None,
    ) -> None:
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph and (any(x is None for x in buffers) or max_kv_len is None):
            raise InputError("use_cuda_graph needs the three paged_kv_*_buffer tensors and max_kv_len")
        self._head_ids = layer_head_ids
        self._key = key
        self._layout = kv_layout
        self._buffers = buffers if use_cuda_graph else None
        self._max_kv_len = max_kv_len
        self._table: PageTable | None = None
        self._arguments: dict[str, Any] = {}

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        sm_scale: float | None = None,
        *,
        q_len_per_req: int = 1,
    ) -> None:
        """Take one batch's page table (int32, host or device) and fix everything ``run`` needs.

        ``pos_encoding_mode`` is ``NONE`` or ``ALIBI``; rotary encoding must be in q and K already.

        Raises:
            UnsupportedError: another position encoding.
            InputError: a table that does not fit the buffers, or a request longer than ``max_kv_len``.
        """
        if pos_encoding_mode not in ("NONE", "ALIBI"):
            raise UnsupportedError(
                f"pos_encoding_mode is {pos_encoding_mode!r}; allowed are 'NONE' (rotary already applied) and 'ALIBI'"
            )
        device = self._head_ids.device
        if num_kv_heads != self._head_ids.numel() or num_qo_heads % num_kv_heads:
            raise InputError(
                f"num_qo_heads={num_qo_heads}, num_kv_heads={num_kv_heads}; the latter must be "
                f"{self._head_ids.numel()} and divide the former"
            )
        lengths = PageTable(indptr.cpu(), indices.cpu(), last_page_len.cpu()).lengths(page_size)
        longest = max(lengths, default=0)
        limit = longest if self._max_kv_len is None else self._max_kv_len
        if longest > limit:
            raise InputError(f"a request has {longest} tokens; max_kv_len is {limit}")
        if self._buffers is None:
            self._table = PageTable(indptr.to(device), indices.to(device), last_page_len.to(device))
        else:
            self._table = self._fill(indptr, indices, last_page_len)
        rows = (self._table.batch_size) * q_len_per_req
        shape = (rows, num_qo_heads)
        fresh = self._arguments.get("acc") is None or self._arguments["acc"].shape[:2] != shape
        fresh = fresh or self._arguments["out"].shape[2] != head_dim or self._arguments["out"].dtype != q_data_type
        if fresh and self._arguments and self._buffers is not None:
            raise InputError(
                f"{rows} rows, {num_qo_heads} heads, head_dim {head_dim} and {q_data_type} are not those of the first "
                "plan; a captured graph keeps its tensors, so make another wrapper"
            )
        if fresh:
            acc = torch.full((*shape, NUM_ACC_FIELDS), float("inf"), dtype=torch.float32, device=device)
            self._arguments = {
                "out": torch.empty(*shape, head_dim, dtype=q_data_type, device=device),
                "lse": torch.empty(*shape, dtype=torch.float32, device=device),
                "acc": acc,
                "delta_loc": torch.zeros(rows, dtype=torch.float32, device=device),
                "workspace": Workspace.allocate(rows, num_qo_heads, head_dim, limit, device),
            }
        elif self._arguments["workspace"].capacity < limit:
            self._arguments["workspace"] = Workspace.allocate(rows, num_qo_heads, head_dim, limit, device)
        slopes = self._arguments.get("alibi_slopes")
        if pos_encoding_mode == "ALIBI" and slopes is None:
            slopes = alibi_slopes(num_qo_heads).to(device)
        self._arguments |= {
            "max_kv_len": limit,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap or 0.0,
            "sm_scale": sm_scale,
            "q_len": q_len_per_req,
            "alibi_slopes": slopes if pos_encoding_mode == "ALIBI" else None,
        }

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        k_scales: Tensor,
        v_scales: Tensor,
        pass_ids: Tensor,
        *,
        layer: int,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: Tensor | None = None,
        meter: bool = True,
        delta_loc: Tensor | None = None,
        witness: Tensor | None = None,
        repaired: RepairedPages | None = None,
        bypass: BypassedKeys | None = None,
        flag: Tensor | None = None,
        counters: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend one layer; results are overwritten by the next call. Accumulators are in :attr:`acc`."""
        if self._table is None:
            raise InputError("run before plan; call plan with the batch's page table first")
        arguments = dict(self._arguments)
        if delta_loc is not None:
            arguments["delta_loc"] = delta_loc
        out, lse, _ = decode_int8(
            q,
            paged_kv_cache,
            k_scales,
            v_scales,
            self._table,
            pass_ids,
            layer=layer,
            head_ids=self._head_ids,
            key=self._key,
            kv_layout=self._layout,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            meter=meter,
            witness=witness,
            repaired=repaired,
            bypass=bypass,
            flag=flag,
            counters=counters,
            **arguments,
        )
        return (out, lse) if return_lse else out

    @property
    def acc(self) -> Tensor:
        """fp32 ``[R, Hq, 16]`` of the last metered run; only fresh where the layer's counter advanced."""
        if self._table is None:
            raise InputError("no accumulators before plan and run")
        acc: Tensor = self._arguments["acc"]
        return acc

    def _fill(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> PageTable:
        buffers = [x for x in self._buffers or () if x is not None]
        for name, buffer, new in zip(
            ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
            buffers,
            (indptr, indices, last_page_len),
            strict=True,
        ):
            fits = new.numel() <= buffer.numel() if name == "paged_kv_indices" else new.numel() == buffer.numel()
            if not fits:
                raise InputError(f"{name} has {new.numel()} entries; its buffer has {buffer.numel()}")
            buffer[: new.numel()].copy_(new)
        return PageTable(*buffers)


def alibi_slopes(num_heads: int) -> Tensor:
    """fp32 ``[H]`` slopes of Press et al., ICLR 2022: ``2^(-8 i / n)``, odd steps of ``2 n`` beyond a power
    of two."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)
