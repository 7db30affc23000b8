"""What a model's attention is, as its configuration has it, whatever the engine."""
