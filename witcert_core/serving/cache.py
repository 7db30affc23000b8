"""What the runtime asks of a cache: where tokens live, and who looks at the metered rows, in one."""

from __future__ import annotations

from torch import Tensor

from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.forward import Pass
from witcert_core.serving.storage.acts import Acts
from witcert_core.serving.storage.attended import Storage


class Cache:
    """storage: where tokens are written and attended to. acts: what is done about rows of the `metered_layers`.
    kernels: which ones do it, or why plain torch does, for people."""

    def __init__(self, storage: Storage, acts: Acts, metered_layers: frozenset[int], kernels: str) -> None:
        self.storage = storage
        self.acts = acts
        self.metered_layers = metered_layers
        self.kernels = kernels

    def begin_pass(self, now: Pass) -> None:
        self.storage.begin_pass(now)
        self.acts.begin_pass()

    def attend(self, call: AttentionCall, now: Pass) -> Tensor:
        """Attention of one layer on quantized keys and values, with the planned rows looked at."""
        with self.storage.attending(call, now) as attended:
            if now.plan.rows and call.layer in self.metered_layers:
                self.acts.look(attended, now)
        return attended.out

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self.acts.forget(request_id)
