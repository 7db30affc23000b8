"""Every private name of vLLM that this adapter relies on.

The hooked functions are in `plugin.py`, with the parameters that each needs; this table has the rest: functions that
are called, classes that are derived from, attributes that are read. `witcert doctor` and a test read it.
"""

from __future__ import annotations

from witcert_core.serving import Members, Signature
from witcert_vllm.backend import BUILD, FORWARD, WRITE
from witcert_vllm.latent import FORWARD_MHA, FORWARD_MQA, LATENT_WRITE
from witcert_vllm.refusals.server import OPTIONS

_V1 = "vllm.v1"
_KV = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CONNECTOR = f"{_KV}.KVConnectorBase_V1"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_FORWARD = (*FORWARD, "output_scale")

CONTRACT: tuple[Signature | Members, ...] = (
    Signature(f"{_V1}.worker.gpu_model_runner.GPUModelRunner._prepare_inputs", ("self", "scheduler_output")),
    *(
        Signature(f"{_V1}.worker.{runner}.GPUModelRunner.get_model", ("self",))
        for runner in ("gpu_model_runner", "gpu.model_runner")
    ),
    Signature(f"{_V1}.worker.gpu.model_runner.GPUModelRunner.prepare_attn", ("self", "input_batch")),
    Signature(f"{_V1}.attention.backends.registry.register_backend", ("backend", "class_path")),
    Signature(f"{_V1}.attention.backends.registry.AttentionBackendEnum.get_path", ("self", "include_classname")),
    Signature(f"{_V1}.attention.backend.AttentionBackend.customize_spec", ("spec",)),
    Signature(f"{_V1}.attention.backend.AttentionBackend.supported_kv_cache_layouts", ()),
    Signature(
        f"{_V1}.attention.backends.cpu_attn.CPUAttentionMetadataBuilder._set_isa_to_layers", ("self", "layer_names")
    ),
    Signature(f"{_V1}.attention.backend.AttentionMetadataBuilder.build", (*BUILD, "fast_build")),
    Signature(f"{_V1}.attention.backends.cpu_attn.CPUAttentionBackendImpl.forward", _FORWARD),
    Signature(f"{_V1}.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update", WRITE),
    Signature(f"{_V1}.attention.backends.triton_attn.TritonAttentionImpl.forward", _FORWARD),
    Signature(f"{_MLA}.MLACommonImpl.forward_mha", FORWARD_MHA),
    Signature(f"{_MLA}.MLACommonMetadataBuilder.build", BUILD),
    Members(f"{_MLA}.MLACommonMetadata", ("num_decodes", "num_decode_tokens")),
    *(
        Signature(f"{_V1}.attention.backends.mla.{impl}.forward_mqa", FORWARD_MQA)
        for impl in ("cpu_mla.CPUMLAImpl", "triton_mla.TritonMLAImpl")
    ),
    Signature(f"{_V1}.attention.backends.mla.cpu_mla.CPUMLAImpl.do_kv_cache_update", LATENT_WRITE),
    Signature(f"{_V1}.attention.backend.MLAAttentionImpl.do_kv_cache_update", LATENT_WRITE),
    Signature(f"{_V1}.attention.backend.AttentionBackend.is_mla", ()),
    Members(
        "vllm.model_executor.layers.attention.MLAAttention",
        (
            "num_heads",
            "num_kv_heads",
            "head_size",
            "kv_lora_rank",
            "attn_backend",
            "impl",
            "kv_cache",
            "kv_cache_dtype",
            "use_sparse",
            "non_causal_multi_token_decode",
            "q_pad_num_heads",
            "sliding_window",
        ),
    ),
    Members(f"{_V1}.kv_cache_interface.MLAAttentionSpec", ("head_size", "num_kv_heads", "block_size")),
    Members(f"{_V1}.kv_cache_interface.SlidingWindowSpec", ("sliding_window", "block_size")),
    Members(f"{_V1}.kv_cache_interface.UniformTypeKVCacheSpecs", ("kv_cache_specs",)),
    Members(f"{_V1}.kv_cache_interface", ("MambaSpec",)),
    Members("vllm.model_executor.layers.mamba.abstract", ("MambaBase",)),
    Signature(f"{_V1}.core.kv_cache_utils.get_kv_cache_groups", ("vllm_config", "kv_cache_spec")),
    Signature(f"{_KV}.SupportsHMA.request_finished_all_groups", ("self", "request", "block_ids")),
    Members("vllm.config.compilation.PassConfig", ("fuse_rope_kvcache_cat_mla",)),
    Members("vllm.config.compilation.CompilationConfig", ("pass_config", "splitting_ops")),
    *(
        Signature(f"{_V1}.attention.backend.AttentionImpl.{name}", parameters)
        for name, parameters in (
            ("fused_rope_kvcache_supported", ("self",)),
            ("fused_qk_norm_rope_kvcache_supported", ("self",)),
            ("fused_qk_norm_mrope_kvcache_supported", ("self",)),
            ("fused_output_quant_supported", ("self", "quant_key")),
        )
    ),
    Signature(
        f"{_V1}.core.sched.scheduler.Scheduler.update_from_output", ("self", "scheduler_output", "model_runner_output")
    ),
    Signature(
        f"{_V1}.core.sched.scheduler.Scheduler._update_request_with_output",
        ("self", "request", "new_token_ids", "is_stale"),
    ),
    Members(f"{_V1}.engine.core.EngineCore", ("scheduler",)),
    Members(f"{_V1}.worker.gpu_model_runner.GPUModelRunner", ("requests",)),
    Members(f"{_V1}.worker.gpu_input_batch.CachedRequestState", ("num_prompt_tokens", "lora_request")),
    Members(f"{_V1}.worker.gpu.model_runner.GPUModelRunner", ("req_states", "lora_state")),
    Members(f"{_V1}.worker.gpu.states.RequestState", ("prompt_len", "req_id_to_index")),
    Members(f"{_V1}.worker.gpu.lora_utils.LoraState", ("lora_requests",)),
    Members(f"{_V1}.core.sched.output.SchedulerOutput", ("scheduled_spec_decode_tokens",)),
    Members(f"{_V1}.worker.gpu.input_batch.InputBatch", ("req_ids", "num_draft_tokens_per_req")),
    Members(
        "vllm.config.speculative.SpeculativeConfig",
        ("method", "rejection_sample_method", "enable_adaptive_verification"),
    ),
    Signature("vllm.config.model.ModelConfig.get_total_num_hidden_layers", ("self",)),
    Signature(f"{_V1}.core.sched.scheduler.Scheduler.finish_requests", ("self", "request_ids", "finished_status")),
    Signature(f"{_V1}.worker.gpu_worker.Worker.initialize_from_config", ("self", "kv_cache_config")),
    Signature(f"{_V1}.worker.gpu_worker.Worker.determine_available_memory", ("self",)),
    Signature(f"{_CONNECTOR}.handle_preemptions", ("self", "kv_connector_metadata")),
    Signature(f"{_CONNECTOR}.get_finished", ("self", "finished_req_ids")),
    Signature(f"{_CONNECTOR}.build_connector_worker_meta", ("self",)),
    Signature(f"{_CONNECTOR}.get_num_new_matched_tokens", ("self", "request", "num_computed_tokens")),
    Signature(f"{_CONNECTOR}.update_state_after_alloc", ("self", "request", "blocks", "num_external_tokens")),
    Signature(f"{_CONNECTOR}.request_finished", ("self", "request", "block_ids")),
    Signature("vllm.model_executor.models.utils.extract_layer_index", ("layer_name",)),
    Members("vllm.engine.arg_utils.EngineArgs", (*(option.name for option in OPTIONS), "kv_transfer_config")),
    Members(
        f"{_V1}.attention.backend.CommonAttentionMetadata",
        (
            "query_start_loc_cpu",
            "seq_lens",
            "block_table_tensor",
            "slot_mapping",
            "causal",
            "is_prefilling",
            "mm_req_doc_ranges",
        ),
    ),
    Members(f"{_V1}.outputs.KVConnectorOutput", ("kv_connector_worker_meta",)),
    Members(f"{_V1}.attention.backend.AttentionType", ("DECODER",)),
    Members(f"{_V1}.kv_cache_interface.KVCacheLayout", ("LBNHC",)),
    Members(f"{_V1}.worker.worker_base", ("WorkerBase",)),
    Members(f"{_V1}.worker.cpu_worker", ("CPUWorker",)),
    Members(f"{_V1}.core.sched.async_scheduler", ("AsyncScheduler",)),
    Members(f"{_V1}.core.sched.interface.SchedulerInterface", ("update_from_output", "finish_requests")),
    Members(
        f"{_V1}.request.Request",
        (
            "request_id",
            "client_index",
            "resumable",
            "num_stale_output_tokens",
            "drop_stale_output",
            "is_finished",
            "get_finished_reason",
        ),
    ),
    Members(f"{_V1}.request.RequestStatus", ("FINISHED_ABORTED",)),
    Members(f"{_V1}.engine.FinishReason", ("ABORT",)),
    Members(
        f"{_V1}.engine.EngineCoreOutput",
        ("request_id", "new_token_ids", "finish_reason", "stop_reason", "kv_transfer_params"),
    ),
    Members(f"{_V1}.engine.EngineCoreOutputs", ("outputs",)),
    Members(_KV, ("KVConnectorMetadata", "KVConnectorRole", "KVConnectorWorkerMetadata")),
    Members(
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorStats",
        ("data", "aggregate", "reduce", "reset", "is_empty"),
    ),
    Signature(
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorPromMetrics.observe",
        ("self", "transfer_stats_data", "engine_idx"),
    ),
    Members(
        "vllm.config.kv_transfer.KVTransferConfig",
        (
            "kv_connector",
            "kv_connector_module_path",
            "kv_role",
            "kv_connector_extra_config",
            "engine_id",
            "kv_load_failure_policy",
            "has_connector",
            "get_from_extra_config",
        ),
    ),
    Members("vllm.distributed.parallel_state", ("get_tp_group",)),
    Members("vllm.distributed.parallel_state.GroupCoordinator", ("rank_in_group", "world_size", "cpu_group", "ranks")),
    Signature(
        "vllm.entrypoints.serve.middleware.authenticate.AuthenticationMiddleware.verify_token", ("self", "headers")
    ),
    Members("vllm.model_executor.layers.attention_layer_base", ("AttentionLayerBase",)),
    Members(
        "vllm.model_executor.layers.attention.Attention",
        (
            "num_heads",
            "num_kv_heads",
            "head_size",
            "head_size_v",
            "attn_type",
            "attn_backend",
            "impl",
            "kv_cache",
            "kv_cache_dtype",
            "kv_sharing_target_layer_name",
            "sliding_window",
            "query_quant",
        ),
    ),
    Members("vllm.platforms", ("current_platform",)),
    Signature("vllm.utils.import_utils.resolve_obj_by_qualname", ("qualname",)),
    Members(
        f"{_V1}.kv_cache_interface.FullAttentionSpec",
        ("state_content_bytes", "head_size", "head_size_v", "num_kv_heads", "block_size"),
    ),
)
