"""A checkpoint as the offline engine needs it, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from witcert_core.errors import InputError, UnsupportedError, did_you_mean, listed
from witcert_core.evaluate.extras import require
from witcert_core.evaluate.offline import bridge, latent
from witcert_core.evaluate.offline.placement import HOST, Placement, device_of
from witcert_core.evaluate.offline.prompts import PromptPasses
from witcert_core.kernels.host.dispatch import prepare_kernels
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.hub import unreachable_hub
from witcert_core.serving.models.attention import ModelAttention, describe

Prompt = str | Sequence[Mapping[str, str]]
"""A text, or the messages of a chat, each with its `role` and `content`."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model of transformers with its tokenizer.

    eos: ids that end an answer. undo: what takes hooks off the model again. chat: a text is what a user says, and put
    into the model's chat template. prompts: those that its engines computed, so that the next need not.
    """

    name: str
    model: Any
    tokenizer: Any
    shape: ModelAttention
    eos: frozenset[int]
    undo: tuple[Callable[[], None], ...] = ()
    chat: bool = False
    prompts: PromptPasses = field(default_factory=PromptPasses)

    @property
    def keeps_logits(self) -> dict[str, int]:
        """What makes the model's pass give the logits after its last token alone, where it can."""
        return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return device_of(self.model.get_input_embeddings())

    def geometries(self, num_slots: int) -> list[Geometry]:
        """The cache of `num_slots` tokens on the host: of the layers of each shape, by their first ones."""
        alike: dict[tuple[int, int, int], list[int]] = {}
        for number, layer in enumerate(self.shape.layers):
            alike.setdefault((layer.num_kv_heads, layer.head_dim, layer.v_head_dim), []).append(number)
        return [
            Geometry(
                backend="transformers",
                total_qo_heads=self.shape.num_qo_heads,
                layers=tuple(layers),
                num_qo_heads=self.shape.num_qo_heads,
                num_kv_heads=heads,
                kv_head_ids=tuple(range(heads)),
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                num_slots=num_slots,
                pool_dtype=self.model.dtype,
                rotary=self.shape.rotary(head_dim),
                device="cpu",
            )
            for (heads, head_dim, v_head_dim), layers in alike.items()
        ]

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """InputError for a prompt longer than the model has positions for."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and lengths and max(lengths) > most:
            raise InputError(f"length {max(lengths)} is beyond the {most} positions that {self.name} has")

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Of a text, with the special tokens this model puts before it; of messages, as its chat template has them.

        Raises:
            InputError: messages for a model without a template, or that its template refuses.
        """
        return prompt_ids(self.tokenizer, prompt, self.name, chat=self.chat)

    def answer_ids(self, text: str) -> list[int]:
        """Without special tokens."""
        return text_ids(self.tokenizer, text)

    def decode(self, ids: list[int]) -> str:
        """Without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def prompt_ids(tokenizer: Any, prompt: Prompt, name: str, *, chat: bool) -> list[int]:
    """See `LoadedModel.prompt_ids`; name: of the model, for what is refused."""
    if isinstance(prompt, str) and not chat:
        ids: list[int] = tokenizer.encode(prompt)
        return ids
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(f"{name} has no chat template; give it texts, without --chat")
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise InputError(f"the chat template of {name} refuses the messages: {first_line(error)}") from error
    return text_ids(tokenizer, text)  # a template writes the special tokens itself


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a directory or hub id; InputError if there is none."""
    transformers = require("transformers")
    if unreachable := unreachable_hub(path):
        raise InputError(f"no tokenizer: {unreachable}")
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise InputError(f"no tokenizer in {path!r}: {why(path, error)}") from error


def load_model(path: str, dtype: str = "auto", *, chat: bool = False, placement: Placement = HOST) -> LoadedModel:
    """A checkpoint directory or hub id, its weights as in `placement`, with our attention; chat: see `LoadedModel`.

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
    prepare_kernels("cpu")
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", **placement.options
        )
    except (OSError, ValueError) as error:
        raise InputError(f"no causal language model in {path!r}: {first_line(error)}") from error
    if placement.device_map is None:
        model = model.to(placement.device)
    return replace(wrap_model(model.eval(), load_tokenizer(path), shape, Path(path).name), chat=chat)


def wrap_model(model: Any, tokenizer: Any, shape: ModelAttention, name: str) -> LoadedModel:
    """A model already in memory; its attention is replaced."""
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(f"{type(model).__name__} does not call its attention through transformers' registry")
    if shape.latent_dim and any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise UnsupportedError(
            f"{name} keeps latents, and weights of it wait elsewhere until a layer runs, which are needed beside it: "
            "choose a device_map that leaves every layer on a device"
        )
    bridge.register()
    model.set_attn_implementation(bridge.ATTENTION)
    eos = model.generation_config.eos_token_id
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    undo = latent.follow(model, len(shape.layers)) if shape.latent_dim else []
    return LoadedModel(name, model, tokenizer, shape, frozenset(ids), tuple(undo))


def check_config(config: Any, origin: str) -> ModelAttention:
    """The shape; UnsupportedError where layers have no ordinary cache of their own."""
    shape = describe(config, origin)
    shape.refuse("none", "state", "shared", "chunked", "diffusion", "bidirectional", "alibi")
    if torch.get_float32_matmul_precision() != "highest":
        raise UnsupportedError("torch multiplies in reduced precision; set_float32_matmul_precision('highest')")
    return shape


def why(path: str, error: BaseException) -> str:
    """Why nothing was loaded; a name that is no directory here was looked for as a hub id."""
    return first_line(error) if Path(path).is_dir() else f"no such directory, and as a hub id: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Of a message that may have many."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
