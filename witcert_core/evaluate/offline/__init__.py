"""transformers as an engine: the quickest way to meter a model, on the CPU, one request at a time."""
