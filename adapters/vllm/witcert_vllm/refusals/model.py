"""What a model is refused for before it is loaded, by its configuration.

`worker.py` beside this looks at the layers themselves, but in a worker, long after the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from witcert_core.serving import (
    DECLARED_ROWS,
    KIND_ROWS,
    KINDS,
    LATENT_ROWS,
    QUANTIZED,
    SIZE_ROWS,
    Refusal,
    ServedModel,
)


@dataclass(frozen=True)
class VllmModel(ServedModel):
    """config: vLLM's `ModelConfig`."""

    @property
    def folder(self) -> Path:
        return Path(self.config.model)

    @property
    def num_qo_heads(self) -> int:
        return int(self.config.hf_text_config.num_attention_heads)


ROWS: tuple[Refusal[VllmModel], ...] = (
    Refusal(
        "models that do not generate",
        "they give no answer that could carry a summary",
        "metered are generating models",
        lambda model: model.config.runner_type != "generate" and f"{model.name} does not generate text",
    ),
    *KIND_ROWS,
    QUANTIZED,
    KINDS["widths"],
    *LATENT_ROWS,
    Refusal(
        "multi-head latent attention (MLA) under `prefill_reads: stored`",
        "vLLM multiplies a prompt's own latents out before they are stored, and attends to what comes out",
        "set `prefill_reads` to 'chunk_exact'",
        lambda model: (
            model.config.use_mla
            and model.policy.prefill_reads == "stored"
            and f"{model.name} uses multi-head latent attention (MLA), under prefill_reads: stored"
        ),
    ),
    # What vLLM knows of a model beside its configuration.
    KINDS["mla"].where(
        lambda model: (
            model.config.use_mla != ("mla" in model.kinds)
            and f"{model.name} uses multi-head latent attention (MLA) by its configuration or in vLLM, not by both"
        ),
    ),
    KINDS["encoder-decoder"].where(
        lambda model: model.config.is_encoder_decoder and f"{model.name} is an encoder-decoder model",
    ),
    KINDS["diffusion"].where(
        lambda model: model.config.is_diffusion and f"{model.name} generates by diffusion",
    ),
    KINDS["state-space"].where(lambda model: model.config.is_attention_free and f"{model.name} has no attention"),
    *SIZE_ROWS,
)

DECLARED: tuple[Refusal[ServedModel], ...] = (*DECLARED_ROWS, KINDS["widths"])
"""What is refused by a model's files alone, before vLLM reads them."""


def untried_device(device: str) -> str:
    """What is said of a device on which nothing here has run; '' where nothing is to be said."""
    if device == "cpu":
        return ""
    return (
        f"the kernels that serve and meter under vLLM on {device!r} were compiled and interpreted, and never run on a "
        "GPU; set meter.audit_every to have their outputs and bounds compared while you try them"
    )
