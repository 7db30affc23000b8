"""A tiny LoRA adapter, what it does to the model, and a CPU on which SGLang's LoRA layers can be built."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from witcert_demo.checkpoint import build_model, read_checkpoint
from witcert_demo.model import TinyLlama

RANK, ALPHA = 8, 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

# SGLang's LoRA layers ask for pinned memory, which a PyTorch without an accelerator cannot give.
UNPINNED = """
import importlib.abc, sys
class Unpin(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.lora.layers":
            sys.meta_path.remove(self)
            import torch
            for maker in ("tensor", "empty", "zeros"):
                original = getattr(torch, maker)
                setattr(torch, maker, lambda *a, _original=original, **k: _original(*a, **{**k, "pin_memory": False}))
            torch.Tensor.pin_memory = lambda self, *a: self
sys.meta_path.insert(0, Unpin())
"""


def without_pinned_memory(directory: Path) -> dict[str, str]:
    """Environment variables under which the server's processes ignore `pin_memory`."""
    (directory / "sitecustomize.py").write_text(UNPINNED)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(directory), *([before] if before else [])])}


def deltas(checkpoint: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Module name -> A [RANK, IN] and B [OUT, RANK], random but always the same."""
    weights, _ = read_checkpoint(checkpoint)
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, weight in sorted(weights.items()):
        if name.split(".")[-2] in PROJECTIONS:
            down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.2
            up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.1
            found[name.removesuffix(".weight")] = (down, up)
    return found


def write_adapter(checkpoint: Path, directory: Path) -> Path:
    """The adapter in PEFT's format."""
    directory.mkdir()
    tensors = {}
    for name, (down, up) in deltas(checkpoint).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(PROJECTIONS), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged_model(checkpoint: Path) -> TinyLlama:
    """The model with the adapter added to its weights, `W + (alpha / r) B A`."""
    weights, config = read_checkpoint(checkpoint)
    for name, (down, up) in deltas(checkpoint).items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + ALPHA / RANK * (up @ down)
    return build_model(weights, config)
