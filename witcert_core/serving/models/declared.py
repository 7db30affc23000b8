"""A model as its files declare it, before an engine has read them and where no weights are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from witcert_core.errors import InputError, WitCertError
from witcert_core.policy.model import Policy
from witcert_core.serving.models.attention import CacheLayer, ModelAttention, describe
from witcert_core.serving.models.fields import Fields, text_part
from witcert_core.serving.models.files import config_file, declared_cache, read_config
from witcert_core.serving.models.served import ServedModel
from witcert_core.serving.refusals import Refusal, refuse

_ANY = Policy(version=1, quantizer={"name": "none"})


@dataclass(frozen=True)
class DeclaredModel(ServedModel):
    """config: of Transformers, or the mapping in the file. file: its `config.json`."""

    file: Path

    @classmethod
    def read(cls, file: Path, policy: Policy, device: str = "cuda", kv_cache_dtype: str = "auto") -> DeclaredModel:
        """Raises InputError for a file that is no model's configuration."""
        return cls(read_config(file), policy, device, file, kv_cache_dtype=kv_cache_dtype)

    @property
    def family(self) -> str:
        """Its kind, as Transformers calls it."""
        return str(Fields(self.config, str(self.file))("model_type") or "unknown")

    @property
    def name(self) -> str:
        names = Fields(self.config, str(self.file)).words("architectures")
        return names[0] if names else f"this {self.family} model"

    @property
    def folder(self) -> Path:
        return self.file.parent

    @property
    def dtype(self) -> torch.dtype:
        """As engines load it: float32 in 16 bit."""
        fields = [Fields(part, self.name) for part in (self.config, text_part(self.config))]
        found = next((own(key) for own in fields for key in ("dtype", "torch_dtype") if own(key)), torch.bfloat16)
        found = getattr(torch, str(found).removeprefix("torch."), None)
        return found if found in (torch.bfloat16, torch.float16) else torch.float16

    @property
    def num_qo_heads(self) -> int:
        return self.attention.num_qo_heads

    @cached_property
    def attention(self) -> ModelAttention:
        return describe(self.config, self.name)

    @property
    def declared_cache(self) -> str:
        return declared_cache(self.config, self.folder)


def check_declared(path: str, policy: Policy, kv_cache_dtype: str, rows: Sequence[Refusal[Any]]) -> None:
    """Raise what refuses a model by its files alone; what is not here, or cannot be read, is left to the engine."""
    file = config_file(path)
    if file is None:
        return
    try:
        refuse(rows, DeclaredModel.read(file, policy, kv_cache_dtype=kv_cache_dtype))
    except InputError:
        return


def described(path: str) -> str:
    """Name, family and layers of the model whose files `path` is or holds; '' where none can be read."""
    file = config_file(path)
    if file is None:
        return ""
    try:
        model = DeclaredModel.read(file, _ANY)
    except InputError:
        return ""
    try:
        return f"{model.name} ({model.family}): {layers_text(model.attention)}"
    except WitCertError:
        return f"{model.name} ({model.family})"


def layers_text(shape: ModelAttention) -> str:
    """Which layers attend what, and the shapes of what they cache: "30 x full attention, ..."."""
    counted = Counter(_of_layer(layer, "chunked" in shape.kinds) for layer in shape.layers)
    if others := shape.num_hidden_layers - len(shape.layers):
        counted["with the cache of others" if "shared" in shape.kinds else "without a cache of tokens"] = others
    said = ", ".join(f"{count} x {what}" for what, count in counted.items())
    if shape.latent_dim:
        return f"{said}: latents of {shape.latent_dim} + {shape.layers[0].head_dim - shape.latent_dim} channels (MLA)"
    sizes = (f"{heads} KV head{'s' * (heads > 1)} of {k if k == v else f'{k} and {v}'}" for heads, k, v in shape.shapes)
    beside = "; a recurrent state beside the cache" if "state" in shape.kinds and not others else ""
    return f"{said}: {' or '.join(sizes)} channels{beside}"


def _of_layer(layer: CacheLayer, chunked: bool) -> str:
    if layer.window is None:
        return "full attention"
    return f"{'chunks' if chunked else 'window'} of {layer.window}"
