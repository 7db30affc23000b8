"""What `make bench-sglang` and `make bench-vllm` share: models, questions, rows, columns and the loop over sections."""
