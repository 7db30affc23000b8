"""What a tiny checkpoint of a family of models is, and how it is made.

Kinds of layers, and how they attend, are the family's; sizes are the least that engines serve. Random weights suffice
to audit bounds and outputs; they say nothing about how tight a bound is. The vocabulary is the demonstration's.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from witcert_demo.run import CHECKPOINT

WINDOW = 32
"""Tokens of a sliding window, the row's own included."""


@dataclass(frozen=True)
class Family:
    """One family of models.

    model_type: as a configuration has it. fields: of the configuration. attending: ids of the layers that keep keys and
    values, of `num_layers`; windowed: those of them with a window. dtype: in which the engines here serve it.
    engines: those of which a test serves it. small: whether vLLM's test is in every run.
    architecture: where Transformers has no class; such a checkpoint has a configuration and no weights.
    options: of vLLM, which it asks for here. remote: a class that its configuration brings along, in a module of
    this folder: "module.Class".
    """

    model_type: str
    fields: dict[str, Any]
    attending: tuple[int, ...]
    num_layers: int = 0
    windowed: tuple[int, ...] = ()
    dtype: str = "float32"
    engines: tuple[str, ...] = ("SGLang", "vLLM")
    small: bool = False
    architecture: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    remote: str = ""

    @property
    def without_cache(self) -> list[int]:
        return sorted(set(range(self.num_layers)) - set(self.attending))


def sizes(num_layers: int = 2, **others: Any) -> dict[str, Any]:
    """The fields that most configurations share."""
    return {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **others,
    }


def every(period: int, other: str, count: int = 4) -> list[str]:
    """Every `period`-th layer attends everything, the others are `other`."""
    return [other if (layer + 1) % period else "full_attention" for layer in range(count)]


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}


def draw(values: torch.Tensor, name: str = "") -> None:
    """Fill a parameter: weights large enough for weights of attention to differ. Others than matrices stay."""
    with torch.no_grad():
        if "sinks" in name:
            values.normal_(0, 1)
        elif values.dim() >= 2 and "conv" not in name:
            values.normal_(0, 0.08)


@torch.no_grad()
def fill(values: torch.Tensor) -> None:
    """Fill what a checkpoint without weights leaves to the engine, whose own values are next to nothing."""
    if values.dim() >= 2:
        draw(values)
    elif values.is_floating_point():  # norms and biases
        values.normal_(1, 0.1)


def random_model(family: Family, **how: Any) -> Any:
    """Transformers' model of `family` with random weights, the same for every call. how: as for `from_config`."""
    import transformers

    auto = transformers.models.auto.modeling_auto
    pictures = family.model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    made = transformers.AutoModelForImageTextToText if pictures else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.model_type, **family.fields)
    model = made.from_config(config, dtype=torch.float32, **how)
    for name, values in model.named_parameters():
        draw(values, name)
    return model


def write(family: Family, directory: Path) -> Path:
    """A checkpoint of `family` in `directory`, the same for every call."""
    if family.architecture:
        directory.mkdir(parents=True)
        config = {"model_type": family.model_type, "architectures": [family.architecture], **family.fields}
        if family.remote:
            config["auto_map"] = {"AutoConfig": family.remote}
            shutil.copy(Path(__file__).with_name(f"{family.remote.partition('.')[0]}.py"), directory)
        (directory / "config.json").write_text(json.dumps({**config, "dtype": family.dtype}))
    else:
        random_model(family).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / file, directory)
    return directory
