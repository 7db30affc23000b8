"""A vLLM plugin with an attention backend of its own, as a user would install it."""

from custom_backends import choose
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def load() -> None:
    register_backend(AttentionBackendEnum.CUSTOM, "custom_backends.Counting")
    CpuPlatform.get_attn_backend_cls = classmethod(choose)
