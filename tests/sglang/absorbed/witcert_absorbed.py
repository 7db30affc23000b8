"""First chunks over latents attend to the latents themselves, under `torch_native` too.

SGLang 0.5.23 multiplies them out there, and its torch_native backend then reads rows of latents with queries of heads:
without this it serves no latent attention on a CPU. Registered as SGLang registers the ways of its other backends.
"""

from __future__ import annotations

from typing import Any


def load() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    def absorbed(_attention: Any, _forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register("torch_native", absorbed)
