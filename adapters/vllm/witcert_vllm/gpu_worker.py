"""vLLM's GPU worker, metered."""

from vllm.v1.worker.gpu_worker import Worker

from witcert_vllm.worker import MeteredWorker


class MeteredGPUWorker(MeteredWorker, Worker):
    """`parallel_config.worker_cls` on a GPU."""
