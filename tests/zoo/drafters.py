"""Tiny makers of drafts: what vLLM and SGLang load beside a served model, made of that model's own layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.zoo import grouped
from tests.zoo.family import write

HIDDEN = 128


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 0.08


def make_eagle(target: Path, directory: Path, architecture: str = "LlamaForCausalLM") -> Path:
    """A head in EAGLE's form for the Llama in `target`: its last layer, fed with embeddings and hidden states.

    architecture: as an engine names such a head.
    """
    directory.mkdir(parents=True)
    config = json.loads((target / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": 1, "architectures": [architecture]}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(target / "model.safetensors")
    begin = f"model.layers.{last}."
    made = {f"layers.0.{name.removeprefix(begin)}": w for name, w in weights.items() if name.startswith(begin)}
    del made["layers.0.input_layernorm.weight"]  # EAGLE's first layer has none
    made |= {"fc.weight": _random(HIDDEN, 2 * HIDDEN), "embed_tokens.weight": weights["model.embed_tokens.weight"]}
    save_file(made, directory / "model.safetensors")
    return directory


def make_mtp(directory: Path) -> Path:
    """A GLM-4.5 of four layers, with the layer beyond the last by which it drafts (multi-token prediction)."""
    family = grouped.FAMILIES["glm4_moe"]
    more = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1, "use_qk_norm": False, "attention_bias": False}
    write(replace(family, fields={**family.fields, **more}), directory)
    weights = load_file(directory / "model.safetensors")
    layer = "model.layers.4."
    made = {name.replace("model.layers.3.", layer): w.clone() for name, w in weights.items() if ".layers.3." in name}
    made |= {f"{layer}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    made |= {f"{layer}eh_proj.weight": _random(HIDDEN, 2 * HIDDEN)}
    made |= {f"{layer}shared_head.head.weight": weights["lm_head.weight"].clone()}
    made |= {f"{layer}embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(weights | made, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
