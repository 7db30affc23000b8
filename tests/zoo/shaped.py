"""Families whose layers differ in KV heads or channels, or whose keys are wider than their values."""

from __future__ import annotations

from tests.zoo.family import WINDOW, Family, every, sizes

FAMILIES: dict[str, Family] = {
    # As 31B: no layer shares a cache, as some of the E sizes do. Full attention is wider over fewer KV heads, takes
    # its values out of the projection of keys and turns a quarter of the channels.
    "gemma4": Family(
        "gemma4_text",
        sizes(
            4,
            head_dim=256,
            global_head_dim=512,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            sliding_window=WINDOW,
            layer_types=every(2, "sliding_attention"),
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=320,
        ),
        (0, 1, 2, 3),
        windowed=(0, 2),
        engines=("SGLang", "vLLM"),
        small=True,
    ),
    # Without experts. Layers with a window have twice as many KV heads, and sinks; a third of the channels turn.
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        sizes(
            4,
            head_dim=192,
            v_head_dim=128,
            sliding_window=WINDOW,
            layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
            mlp_layer_types=["dense"] * 4,
            # What its own files say beside that, and engines read:
            hybrid_layer_pattern=[0, 1, 1, 0],
            moe_layer_freq=[0] * 4,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_head_dim=192,
            swa_v_head_dim=128,
            swa_rope_theta=10000.0,
            rope_theta=5000000.0,
            partial_rotary_factor=0.334,
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
            sliding_window_size=WINDOW,
            layernorm_epsilon=1e-5,
        ),
        (0, 1, 2, 3),
        windowed=(1, 2),
        engines=(),
    ),
}
