"""Drafts are masked for the Triton kernels on a CPU too.

SGLang 0.5.23 makes the mask of its AMX kernels there, and hands it to whatever backend attends: Triton's reads another
shape. With this a chain of drafts is verified on a CPU as on a GPU.
"""

from __future__ import annotations


def load() -> None:
    from sglang.srt.speculative import eagle_utils

    eagle_utils.default_tree_mask_mode = lambda: eagle_utils.TreeMaskMode.FULL_MASK
