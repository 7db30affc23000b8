"""Figures of others, to stand beside what was measured here: other models, other texts, far more of them."""

from __future__ import annotations

FIGURES_OF_PAPERS = {
    "kivi": "2 bit: almost the same quality, Llama-2, Falcon, Mistral (arXiv:2402.02750)",
    "kvquant": "3 bit: less than 0.1 of perplexity, LLaMA, Llama-2, Llama-3, Mistral (arXiv:2401.18079)",
    "skvq": "2-bit keys, 1.5-bit values: minimal loss, 7B models (arXiv:2405.06219)",
    "rotated": "3.5 bit: quality neutral, 2.5 bit: marginal loss (TurboQuant, arXiv:2504.19874)",
    "nvfp4": "under 1 % of accuracy, code, knowledge and long context (NVIDIA, December 2025)",
}
"""By the quantizer's name: what its authors say of it in their abstracts."""
