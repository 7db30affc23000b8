"""`wc.meter`, the way in; what it needs beyond a policy is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from witcert_core.errors import InputError
from witcert_core.evaluate.settings import base_settings, build_policy, parse_quantizer
from witcert_core.policy.model import Policy, load_policy

if TYPE_CHECKING:
    from witcert_core.evaluate.offline.metered import MeteredModel


def meter(
    model: Any,
    *,
    quantizer: str | None = None,
    policy: Policy | str | Path | None = None,
    max_tokens: int = 4096,
    jsonl: str | Path | None = None,
) -> MeteredModel:
    """Meter whatever a transformers model generates in a `with` block, batches and sampling included.

    Args:
        model: a causal language model of transformers, on the CPU. It attends to what `quantizer` makes of its keys and
            values for the length of the block, and is as it was afterwards.
        quantizer: a name, parameters after a colon (`kivi:bits=4`); every row is metered and audited.
        policy: a policy, or the path of one, in place of `quantizer`.
        max_tokens: room for so many tokens of all requests that run at a time; padding takes none.
        jsonl: a file for a line of JSON for each request, beside `quantizer`.

    Raises:
        InputError: both or neither of `quantizer` and `policy`, or no room.
        UnsupportedError: transformers is not installed, or the model or its generation cannot be followed; also later,
            by the call that asks for it (beam search, assisted generation, static caches, gradients, masks that are not
            padding).

    Example:
        >>> import torch, transformers, witcert_core as wc
        >>> sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
        >>> sizes |= dict(num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
        >>> prompts = torch.tensor([[0, 0, 7, 8], [3, 4, 5, 6]])
        >>> mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
        >>> with wc.meter(model, quantizer="int8_dither") as m:
        ...     out = model.generate(prompts, attention_mask=mask, max_new_tokens=4, do_sample=True, eos_token_id=None)
        >>> [summary["rows_metered"] for summary in m.requests]
        [3, 3]
        >>> m.summary(0)["audit"]["violations"]
        0
        >>> "cells were measured" in m.render(0)
        True
    """
    from witcert_core.evaluate.offline.metered import MeteredModel

    if (quantizer is None) == (policy is None):
        raise InputError("give either quantizer or policy: one of them says what is metered")
    if quantizer is not None:
        if not isinstance(quantizer, str):
            raise InputError(
                f"quantizer is {quantizer!r}; expected a name, such as 'int8_dither' or 'kivi:bits=4'; an object of "
                "your own is named once it is registered (witcert_core.register, witcert_core.quantizer)"
            )
        base = base_settings(None)
        if jsonl is not None:
            base["report"] = {"jsonl": str(jsonl)}
        return MeteredModel(model, build_policy(base, parse_quantizer(quantizer), "raw"), max_tokens)
    if jsonl is not None:
        raise InputError("jsonl goes with quantizer; a policy names its own file, report.jsonl")
    return MeteredModel(model, policy if isinstance(policy, Policy) else load_policy(str(policy)), max_tokens)
