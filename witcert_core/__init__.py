"""WitCert: a sound runtime meter for KV-cache quantization."""
