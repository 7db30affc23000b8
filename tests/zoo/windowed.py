"""Families some or all of whose layers attend a sliding window."""

from __future__ import annotations

from tests.zoo.family import WINDOW, Family, every, sizes

FAMILIES: dict[str, Family] = {
    "exaone4": Family(
        "exaone4",
        sizes(
            4, head_dim=64, sliding_window=WINDOW, layer_types=every(4, "sliding_attention"), sliding_window_pattern=4
        ),
        (0, 1, 2, 3),
        windowed=(0, 1, 2),
        engines=("vLLM",),  # SGLang asks for a backend with windows of its own: triton, fa3
    ),
    "gemma2": Family(
        "gemma2",
        sizes(
            4,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=WINDOW,
            layer_types=every(2, "sliding_attention"),
            tie_word_embeddings=True,
        ),
        (0, 1, 2, 3),
        windowed=(0, 2),
        engines=("vLLM",),  # SGLang's torch_native has no caps of logits
    ),
    "gemma3": Family(  # here every third layer without a window, instead of every sixth
        "gemma3_text",
        sizes(
            6,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=WINDOW,
            layer_types=every(3, "sliding_attention", 6),
        ),
        (0, 1, 2, 3, 4, 5),
        windowed=(0, 1, 3, 4),
        small=True,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        sizes(
            4,
            head_dim=64,
            sliding_window=WINDOW,
            layer_types=every(2, "sliding_attention"),
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        ),
        (0, 1, 2, 3),
        windowed=(0, 2),
        small=True,
    ),
    "mistral": Family(
        "mistral", sizes(4, head_dim=64, sliding_window=WINDOW), (0, 1, 2, 3), windowed=(0, 1, 2, 3), small=True
    ),
    "olmo3": Family(
        "olmo3",
        sizes(4, hidden_size=256, sliding_window=WINDOW, layer_types=every(4, "sliding_attention")),
        (0, 1, 2, 3),
        windowed=(0, 1, 2),
    ),
    "phi3_windowed": Family("phi3", sizes(hidden_size=256, sliding_window=WINDOW), (0, 1), windowed=(0, 1)),
}
