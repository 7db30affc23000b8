"""Every private name of SGLang that this adapter relies on.

The hooked functions are in `plugin.py` and `http.py`, with the parameters that each needs; this table has the rest:
functions that are called, classes that are derived from, attributes that are read. `witcert doctor` and a test read it.
"""

from __future__ import annotations

from witcert_core.serving import Members, Signature
from witcert_sglang.refusals.server import OPTIONS

_SRT = "sglang.srt"
_ATTENTION = f"{_SRT}.layers.attention"
_FORWARD = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")
_POOL = f"{_SRT}.mem_cache.memory_pool"
_GRAPHS = f"{_SRT}.model_executor.runner"
_QUANT = f"{_SRT}.layers.quantization.fp4_kv_cache_quant_method.KVCacheQuantMethodBase"
_OPTIONS = (
    "model_path",
    "host",
    "port",
    "tp_size",
    "device",
    "kv_cache_dtype",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "cuda_graph_config",
    "disable_radix_cache",
    "page_size",
    "speculative_algorithm",
    "speculative_eagle_topk",
)

CONTRACT: tuple[Signature | Members, ...] = (
    Members(
        f"{_SRT}.layers.rotary_embedding.base.RotaryEmbedding",
        ("cos_sin_cache", "rotary_dim", "is_neox_style", "position_start"),
    ),
    Members(f"{_ATTENTION}.attention_registry", ("ATTENTION_BACKENDS",)),
    Signature(f"{_ATTENTION}.torch_native_backend.TorchNativeAttnBackend.forward_decode", _FORWARD),
    Signature(f"{_ATTENTION}.torch_native_backend.TorchNativeAttnBackend.forward_extend", _FORWARD),
    Signature(f"{_ATTENTION}.triton_backend.TritonAttnBackend.forward_decode", _FORWARD),
    Signature(f"{_ATTENTION}.triton_backend.TritonAttnBackend.forward_extend", _FORWARD),
    Signature(f"{_ATTENTION}.flashinfer_backend.FlashInferAttnBackend.forward_decode", _FORWARD),
    Signature(f"{_ATTENTION}.flashinfer_backend.FlashInferAttnBackend.forward_extend", _FORWARD),
    Members(
        f"{_ATTENTION}.flashinfer_backend.FlashInferAttnBackend",
        ("use_paged", "enable_deterministic", "is_multimodal"),
    ),
    Signature(f"{_ATTENTION}.flashattention_backend.FlashAttentionBackend.forward_decode", _FORWARD, in_source=True),
    Signature(f"{_ATTENTION}.flashattention_backend.FlashAttentionBackend.forward_extend", _FORWARD, in_source=True),
    Members(f"{_ATTENTION}.base_attn_backend.AttentionBackend", ("get_fused_kv_write_buffers",)),
    Signature(f"{_ATTENTION}.triton_backend.TritonAttnBackend.init_forward_metadata", ("self", "forward_batch")),
    Signature(
        f"{_ATTENTION}.triton_backend.TritonAttnBackend.init_forward_metadata_out_graph",
        ("self", "forward_batch", "in_capture"),
    ),
    Signature(
        f"{_ATTENTION}.triton_backend.TritonAttnBackend.init_cuda_graph_state", ("self", "max_bs", "max_num_tokens")
    ),
    Members(
        f"{_ATTENTION}.triton_backend.TritonAttnBackend", ("get_cuda_graph_seq_len_fill_value", "sliding_window_size")
    ),
    Signature(f"{_GRAPHS}.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph", ("self", "forward_batch")),
    Signature(f"{_GRAPHS}.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute", ("self", "forward_batch")),
    Members(f"{_SRT}.model_executor.cuda_graph_config.CudaGraphConfig", ("decode", "prefill")),
    Members(f"{_SRT}.model_executor.cuda_graph_config.PhaseConfig", ("backend",)),
    Members(
        f"{_SRT}.layers.radix_attention.RadixAttention",
        (
            "layer_id",
            "scaling",
            "logit_cap",
            "sliding_window_size",
            "is_cross_attention",
            "attn_type",
            "use_irope",
            "xai_temperature_len",
            "pos_encoding_mode",
            "tp_q_head_num",
            "tp_k_head_num",
            "tp_v_head_num",
            "qk_head_dim",
            "v_head_dim",
        ),
    ),
    Members(f"{_SRT}.layers.radix_attention.AttentionType", ("DECODER",)),
    Members(
        f"{_POOL}.MHATokenToKVPool",
        (
            "head_num",
            "head_dim",
            "v_head_dim",
            "start_layer",
            "layer_num",
            "k_buffer",
            "v_buffer",
            "k_scale_buffer",
            "v_scale_buffer",
            "dtype",
            "device",
            "kv_cache_layout",
            "quant_method",
            "size",
            "page_size",
        ),
    ),
    Members(f"{_POOL}.HybridLinearKVPool", ("full_kv_pool", "full_attention_layer_id_mapping")),
    Members(
        f"{_SRT}.mem_cache.swa_memory_pool.SWAKVPool",
        ("full_kv_pool", "swa_kv_pool", "layers_mapping", "full_to_swa_index_mapping", "size", "size_swa"),
    ),
    Signature(f"{_SRT}.mem_cache.swa_memory_pool.SWAKVPool.translate_loc_from_full_to_swa", ("self", "kv_indices")),
    Members(
        f"{_SRT}.model_executor.pool_configurator.HybridSWAPoolConfigurator",
        ("_full_per_token", "_swa_per_token", "_recompute_cell_size"),
    ),
    Signature(f"{_POOL}.MHATokenToKVPool.get_key_buffer", ("self", "layer_id")),
    Signature(f"{_POOL}.MHATokenToKVPool.get_value_buffer", ("self", "layer_id")),
    Signature(f"{_POOL}.MHATokenToKVPool.set_kv_buffer", ("self", "layer", "loc_info", "cache_k", "cache_v")),
    Signature(f"{_POOL}.KVWriteLoc", ("loc", "swa_loc")),
    Members(f"{_POOL}.ReqToTokenPool", ("req_to_token",)),
    Signature(f"{_POOL}.MLATokenToKVPool.set_kv_buffer", ("self", "layer", "loc_info", "cache_k", "cache_v")),
    Signature(f"{_POOL}.MLATokenToKVPool.get_key_buffer", ("self", "layer_id")),
    Signature(f"{_POOL}.MLATokenToKVPool.get_value_buffer", ("self", "layer_id")),
    Members(f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator", ("model_dtype", "is_draft_worker")),
    Members(f"{_SRT}.speculative.eagle_info.EagleVerifyInput", ("topk", "draft_token_num")),
    Signature(f"{_QUANT}.create_buffers", ("self", "size", "head_num", "head_dim", "layer_num", "device")),
    Signature(f"{_QUANT}.compute_cell_size", ("self", "head_num", "head_dim", "num_layers", "kv_size")),
    Members(_QUANT, ("needs_plain_kv_dequant_read", "quantize_and_store", "dequantize_prev_kv")),
    Members(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch",
        (
            "forward_mode",
            "rids",
            "seq_lens",
            "seq_lens_cpu",
            "req_pool_indices",
            "out_cache_loc",
            "positions",
            "extend_seq_lens",
            "extend_prefix_lens",
            "extend_seq_lens_cpu",
            "extend_prefix_lens_cpu",
            "seq_lens_sum",
            "is_prefill_only",
            "spec_info",
        ),
    ),
    Members(
        f"{_SRT}.model_executor.forward_batch_info.ForwardMode",
        ("is_decode", "is_idle", "is_mixed", "is_target_verify", "is_cuda_graph", "is_cpu_graph", "EXTEND", "DECODE"),
    ),
    Members(
        f"{_SRT}.model_executor.model_runner.ModelRunner",
        (
            "token_to_kv_pool",
            "req_to_token_pool",
            "model_config",
            "model",
            "dtype",
            "device",
            "decode_cuda_graph_runner",
            "is_draft_worker",
        ),
    ),
    Members(f"{_SRT}.layers.logits_processor.LogitsProcessorOutput", ("auxiliary_device_output",)),
    Signature(f"{_SRT}.managers.auxiliary_output.append_auxiliary_output", ("current", "output")),
    Signature(f"{_SRT}.managers.auxiliary_output.CompositeDeviceAuxiliaryOutput", ("outputs",)),
    Signature(f"{_SRT}.managers.auxiliary_output.DeviceAuxiliaryOutput.copy_to_host", ("self", "copy_tensor")),
    Members(f"{_SRT}.managers.auxiliary_output.CommittedTokens", ("token_ids",)),
    Signature(f"{_SRT}.managers.auxiliary_output.HostAuxiliaryOutput.consume", ("self", "batch", "commits")),
    Signature(f"{_SRT}.managers.schedule_batch.FINISH_ABORT", ("message",)),
    Members(
        f"{_SRT}.managers.schedule_batch.Req",
        ("rid", "finished", "finished_reason", "to_finish", "is_retracted", "is_prefill_only"),
    ),
    Members(f"{_SRT}.managers.schedule_batch.Req", ("origin_input_ids", "priority", "lora_id")),
    Members(f"{_SRT}.lora.lora_manager.LoRAManager", ("lora_refs",)),
    Members(f"{_SRT}.managers.io_struct.DumperControlReqInput", ("method", "body")),
    Members(f"{_SRT}.managers.io_struct.DumperControlReqOutput", ("success", "response")),
    Signature(f"{_SRT}.managers.tokenizer_manager.TokenizerManager.dumper_control", ("self", "obj")),
    Signature(f"{_SRT}.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop", ("self",)),
    Signature(f"{_SRT}.entrypoints.http_server.get_global_state", ()),
    Members(f"{_SRT}.managers.scheduler_components.ipc_channels.SchedulerIpcChannels", ("send_to_tokenizer",)),
    Signature(
        f"{_SRT}.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
        ".build_additional_customized_info",
        ("self", "reqs"),
    ),
    Members(
        f"{_SRT}.managers.scheduler_components.output_streamer.SchedulerOutputStreamer",
        ("has_additional_customized_info",),
    ),
    Members(f"{_SRT}.runtime_context", ("get_parallel",)),
    Members(f"{_SRT}.distributed.parallel_state", ("get_attn_tp_group",)),
    Members(
        f"{_SRT}.distributed.parallel_state.GroupCoordinator", ("rank_in_group", "world_size", "cpu_group", "ranks")
    ),
    Signature(f"{_SRT}.arg_groups.overrides.resolved_view", ("server_args",)),
    Members(f"{_SRT}.server_args.ServerArgs", (*(option.name for option in OPTIONS), *_OPTIONS)),
    Signature(f"{_SRT}.configs.model_config.ModelConfig.from_server_args", ("server_args",)),
    Signature(f"{_SRT}.configs.model_config.ModelConfig.get_num_kv_heads", ("self", "tensor_parallel_size")),
    Signature(f"{_SRT}.configs.model_config.ModelConfig.get_swa_num_kv_heads", ("self", "tensor_parallel_size")),
    Members(f"{_ATTENTION}.triton_backend.ForwardMetadata", ("custom_mask",)),
    Members(
        f"{_SRT}.configs.model_config.ModelConfig",
        (
            "attention_arch",
            "dtype",
            "head_dim",
            "v_head_dim",
            "swa_head_dim",
            "swa_v_head_dim",
            "hf_config",
            "hf_text_config",
            "is_generation",
            "is_hybrid_swa",
            "num_attention_heads",
            "num_attention_layers",
            "get_total_num_kv_heads",
        ),
    ),
    Signature(f"{_SRT}.configs.hybrid_arch.mambaish_config", ("model_config",)),
    Signature(f"{_SRT}.model_loader.utils.get_model_architecture", ("model_config",)),
    Members(f"{_SRT}.configs.model_config.AttentionArch", ("MLA", "MHA", "SSM")),
    Signature(f"{_SRT}.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")),
    Members(f"{_SRT}.plugins.hook_registry.HookRegistry", ("_patched", "apply_hooks")),
    Members(f"{_SRT}.plugins.hook_registry.HookType", ("BEFORE", "AFTER", "AROUND")),
    Signature(f"{_SRT}.utils.common.kill_process_tree", ("parent_pid", "include_parent")),
    Members(f"{_SRT}.entrypoints.http_server", ("app",)),
    Members(f"{_SRT}.utils.auth", ("AuthLevel", "auth_level")),
    Members(f"{_SRT}.environ", ("envs",)),
    Members(f"{_SRT}.managers.scheduler", ("run_scheduler_process",)),
    Members(f"{_SRT}.managers.detokenizer_manager", ("run_detokenizer_process",)),
    Members(f"{_SRT}.managers.data_parallel_controller", ("run_data_parallel_controller_process",)),
)
