"""A checkpoint as the offline engine needs it, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.evaluate.capacity import ModelShape, shape_of
from witcert_core.evaluate.extras import require
from witcert_core.evaluate.offline import bridge
from witcert_core.hub import unreachable_hub
from witcert_core.rotary import RotarySpec
from witcert_core.serving.geometry import Geometry
from witcert_core.suggest import did_you_mean, listed

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model of transformers with its tokenizer; eos: ids that end an answer."""

    name: str
    model: Any
    tokenizer: Any
    shape: ModelShape
    eos: frozenset[int]

    def geometry(self, num_slots: int) -> Geometry:
        """The cache of `num_slots` tokens."""
        shape = self.shape
        config = self.model.config.get_text_config()
        return Geometry(
            backend="transformers",
            total_qo_heads=config.num_attention_heads,
            layers=tuple(range(shape.num_layers)),
            num_qo_heads=config.num_attention_heads,
            num_kv_heads=shape.num_kv_heads,
            kv_head_ids=tuple(range(shape.num_kv_heads)),
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            num_slots=num_slots,
            pool_dtype=self.model.dtype,
            rotary=RotarySpec(shape.head_dim, rotary_dim=shape.rotary_dim),
            device="cpu",
        )

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """InputError for a prompt longer than the model has positions for."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and lengths and max(lengths) > most:
            raise InputError(f"length {max(lengths)} is beyond the {most} positions that {self.name} has")

    def prompt_ids(self, text: str) -> list[int]:
        """With the special tokens this model puts before a prompt."""
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def answer_ids(self, text: str) -> list[int]:
        """Without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a directory or hub id; InputError if there is none."""
    transformers = require("transformers")
    if unreachable := unreachable_hub(path):
        raise InputError(f"no tokenizer: {unreachable}")
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise InputError(f"no tokenizer in {path!r}: {why(path, error)}") from error


def load_model(path: str, dtype: str = "auto") -> LoadedModel:
    """A checkpoint directory or hub id, on the CPU, with our attention.

    Raises:
        InputError: nothing there to load.
        UnsupportedError: a model whose attention the meter cannot follow.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}{did_you_mean(dtype, DTYPES)}; allowed are {listed(DTYPES)}")
    transformers = require("transformers")
    if unreachable := unreachable_hub(path):
        raise InputError(f"no model: {unreachable}")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise InputError(f"no model in {path!r}: {why(path, error)}") from error
    shape = check_config(config, path)
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError) as error:
        raise InputError(f"no causal language model in {path!r}: {first_line(error)}") from error
    return wrap_model(model.eval(), load_tokenizer(path), shape, Path(path).name)


def wrap_model(model: Any, tokenizer: Any, shape: ModelShape, name: str) -> LoadedModel:
    """A model already in memory; its attention is replaced."""
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(f"{type(model).__name__} does not call its attention through transformers' registry")
    bridge.register()
    model.set_attn_implementation(bridge.ATTENTION)
    eos = model.generation_config.eos_token_id
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return LoadedModel(name, model, tokenizer, shape, frozenset(ids))


def check_config(config: Any, origin: str) -> ModelShape:
    """The shape; UnsupportedError where layers have no ordinary cache of their own."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{origin}: is an encoder-decoder model; only causal language models are metered")
    text = config.get_text_config()
    shape = shape_of(text.to_dict(), origin)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise UnsupportedError(f"{origin}: has layers of type {odd[0]!r}; full and sliding attention are metered")
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedError(f"{origin}: has layers that share a cache; each layer must have its own")
    if torch.get_float32_matmul_precision() != "highest":
        raise UnsupportedError("torch multiplies in reduced precision; set_float32_matmul_precision('highest')")
    return shape


def why(path: str, error: BaseException) -> str:
    """Why nothing was loaded; a name that is no directory here was looked for as a hub id."""
    return first_line(error) if Path(path).is_dir() else f"no such directory, and as a hub id: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Of a message that may have many."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
