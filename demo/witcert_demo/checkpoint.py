"""Checkpoint directories in Hugging Face Llama layout, written with safetensors and plain JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from witcert_demo import vocabulary as vocab
from witcert_demo.model import ModelConfig, TinyLlama

StateDict = dict[str, Tensor]


def write_checkpoint(directory: Path, state_dict: StateDict, config: ModelConfig) -> None:
    """Write the two JSON configurations, ``model.safetensors`` (float32) and the tokenizer files."""
    directory.mkdir(parents=True, exist_ok=True)
    token_ids = {"pad_token_id": vocab.PAD, "bos_token_id": vocab.BOS, "eos_token_id": vocab.END}
    sizes = asdict(config)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        # transformers 4 and vLLM read rope_theta beside the sizes, transformers 5 reads rope_parameters
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
        "use_cache": True,
        **token_ids,
    }
    (directory / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, **token_ids}, indent=1) + "\n")
    tensors = {name: tensor.detach().float().contiguous().clone() for name, tensor in state_dict.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    vocab.write_tokenizer(directory)


def read_checkpoint(directory: Path) -> tuple[StateDict, ModelConfig]:
    """State dict and sizes of a directory of that layout.

    Raises ``FileNotFoundError`` where a file is missing and ``ValueError`` for another architecture.
    """
    settings = json.loads((directory / "config.json").read_text())
    if settings.get("model_type") != "llama" or not settings.get("tie_word_embeddings"):
        raise ValueError(
            f"{directory} holds model_type {settings.get('model_type')!r} with tie_word_embeddings "
            f"{settings.get('tie_word_embeddings')!r}; only a Llama with tied embeddings is read here"
        )
    settings.setdefault("rope_theta", settings.get("rope_parameters", {}).get("rope_theta"))
    config = ModelConfig(**{field.name: settings[field.name] for field in fields(ModelConfig)})
    return load_file(directory / "model.safetensors"), config


def build_model(state_dict: StateDict, config: ModelConfig) -> TinyLlama:
    """Model in evaluation mode with the weights of ``state_dict``; every name must match."""
    model = TinyLlama(config)
    model.load_state_dict(state_dict)
    return model.eval().requires_grad_(False)


def load_model(directory: Path) -> TinyLlama:
    """Model of a checkpoint directory, in evaluation mode."""
    return build_model(*read_checkpoint(directory))
