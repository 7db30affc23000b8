"""vLLM's CPU worker, metered."""

from vllm.v1.worker.cpu_worker import CPUWorker

from witcert_vllm.worker import MeteredWorker


class MeteredCPUWorker(MeteredWorker, CPUWorker):
    """`parallel_config.worker_cls` on a CPU."""
