"""vLLM on this CPU: the same rows, and its own quantized caches beside ours."""
