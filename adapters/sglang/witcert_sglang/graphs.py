"""SGLang's captured decode graphs: when a pass is replayed, and what its static inputs are filled with.

SGLang's graph runner tells the attention backend of a capture and of every replay (`init_forward_metadata_out_graph`).
Between the two Python runs in no layer, so all that depends on the batch is put into tensors beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.serving import CapturedDecode, Pass, RequestPass


class DecodeGraphs:
    """The graphs of one scheduler process, between SGLang's runner and the launches of the core."""

    def __init__(self, captured: CapturedDecode) -> None:
        self.captured = captured
        self.expected = False  # the pass that has begun is a replay
        self.padding: int | None = None  # rows beside the batch of the replay; None: it was not prepared

    def begin(self) -> None:
        """A pass has begun that SGLang is going to replay."""
        self.expected, self.padding = True, None

    def prepare(self, batch: Any, req_to_token: Tensor, now: Pass | None) -> None:
        """SGLang is about to replay; `batch` is its view of the padded batch."""
        if not self.expected or now is None:
            raise UnsupportedError(
                "SGLang replays a graph that was not announced, so the pass cannot be metered; add --disable-cuda-graph"
            )
        lengths = [slots.numel() for slots in now.plan.requests]
        table = token_slots(req_to_token, batch.req_pool_indices[: len(lengths)], lengths)
        self.captured.load(batch.batch_size, table, lengths, now)
        self.padding = batch.batch_size - len(lengths)

    def finish(self) -> int:
        """Rows beside the batch of the pass that was replayed."""
        padding, self.padding, self.expected = self.padding, None, False
        if padding is None:
            raise UnsupportedError("SGLang did not replay the graph it said it would; add --disable-cuda-graph")
        return padding


def will_replay(runner: Any, batch: Any) -> bool:
    """Whether `ModelRunner.forward` replays a decode graph for this batch: the question it asks itself."""
    graphs = runner.decode_cuda_graph_runner
    mode = batch.forward_mode
    captured = mode.is_cpu_graph() if runner.device == "cpu" else mode.is_cuda_graph()
    return bool(captured and graphs and graphs.can_run_graph(batch))


def requests_on_device(batch: Any) -> list[RequestPass]:
    """The requests of a decode batch by their lengths alone: their slots stay in the engine's table."""
    lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
    return [
        RequestPass(rid, torch.empty(length, dtype=torch.int64, device="meta"), 1)
        for rid, length in zip(batch.rids, lengths.tolist(), strict=True)
    ]


def token_slots(req_to_token: Tensor, rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """The slots [sum of lengths] of all tokens, request after request, without waiting for the device.

    req_to_token [REQUESTS, MAX_CONTEXT]; rows [N]: which of them the requests have.
    """
    total = sum(lengths)
    device = req_to_token.device
    counts = torch.tensor(list(lengths)).to(device)
    which = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts, output_size=total)
    first = counts.cumsum(0) - counts
    return req_to_token[rows[which], torch.arange(total, device=device) - first[which]]
