"""Which places of a padded batch hold tokens of which request, and what of transformers' generation is refused.

Shapes: B requests side by side, COLUMNS places of each in a pass, PAST places of each cached before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.evaluate.offline import bridge
from witcert_core.evaluate.offline.passes import BatchPass
from witcert_core.serving.passes import RequestPass

_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "logits_to_keep", "use_cache"}
_INPUTS |= {"return_dict", "output_hidden_states", "cache_position"}


@dataclass
class Batch:
    """Requests that share a cache, by their numbers under the meter.

    slots: of each one's tokens. mask [B, PAST] bool: which places were said to be no padding. ended [B] bool: those
    that are fed padding while others go on. decoded: passes of a single column so far.
    """

    requests: range
    slots: list[Tensor]
    mask: Tensor
    ended: Tensor
    decoded: int = 0

    @classmethod
    def empty(cls, first: int, size: int) -> Batch:
        """`size` requests without a token, numbered from `first`."""
        none = torch.zeros(0, dtype=torch.int64)
        flags = torch.zeros(size, 0, dtype=torch.bool)
        return cls(range(first, first + size), [none] * size, flags, torch.zeros(size, dtype=torch.bool))

    @property
    def past(self) -> int:
        """PAST."""
        return self.mask.shape[1]


class MeteredCache(bridge.CountingCache):
    """What transformers is given in place of its cache; a method that would rearrange the requests refuses."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(0)
        self.batch = batch
        self.closed = False

    def update(self, key: Tensor, value: Tensor, _layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.closed:
            raise UnsupportedError(CLOSED)
        return key, value

    def get_query_offset(self, _layer: int = 0) -> NoReturn:
        raise UnsupportedError(CLOSED)  # asked for a mask, which the metered attention does not take

    def reorder_cache(self, _beam_idx: Tensor) -> NoReturn:
        raise UnsupportedError(BEAMS)

    def crop(self, *_args: Any) -> NoReturn:
        raise UnsupportedError(ASSISTED)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise UnsupportedError(COPIED)

    def batch_repeat_interleave(self, _repeats: int) -> NoReturn:
        raise UnsupportedError(REARRANGED)

    def batch_select_indices(self, _indices: Tensor) -> NoReturn:
        raise UnsupportedError(REARRANGED)


CLOSED = "this cache was filled under a meter that has ended, and holds no keys; begin with the whole prompt"
BEAMS = (
    "beam search exchanges the keys of its beams from token to token, so that no request keeps a text of its own; "
    "metered are greedy decoding and sampling: num_beams=1"
)
ASSISTED = (
    "assisted generation takes tokens back out of the cache, and cells would be counted of tokens that nobody gets; "
    "metered are greedy decoding and sampling: leave out assistant_model and prompt_lookup_num_tokens"
)
COPIED = (
    "the cache of a metered model is copied or stored, but it holds no keys, and two requests would go on from one "
    "text; give each its whole prompt"
)
REARRANGED = (
    "the requests of a cache are repeated or chosen anew between passes, which the meter does not follow; give each "
    "its own prompt"
)


def check_generation(option: Callable[[str], Any]) -> None:
    """UnsupportedError for what `generate` is asked and the meter cannot follow; option: the value of one by name."""
    if (option("num_beams") or 1) > 1:
        raise UnsupportedError(BEAMS)
    if option("assistant_model") is not None or option("prompt_lookup_num_tokens") is not None:
        raise UnsupportedError(ASSISTED)
    if option("use_cache") is False:
        raise UnsupportedError("use_cache is False: nothing would be read from a cache; leave it out")
    kind = option("cache_implementation")
    if kind not in (None, "dynamic"):
        raise UnsupportedError(f"cache_implementation is {kind!r}; under the meter the cache is its own: leave it out")


def ending_tokens(option: Callable[[str], Any]) -> frozenset[int]:
    """Tokens after which `generate` feeds a request padding while others go on."""
    ends = option("eos_token_id")
    if ends is None:
        ends = []
    found = set(torch.as_tensor(ends).flatten().tolist())
    pad = option("pad_token_id")
    if pad is not None and (option("stop_strings") or option("stopping_criteria")):
        found.add(int(pad))  # what ended it otherwise is not among its tokens
    return frozenset(found)


def check_inputs(given: Mapping[str, Any], cache_argument: str, model: str) -> None:
    """UnsupportedError for an input of a forward pass that says what the meter does not follow."""
    known = _INPUTS | {cache_argument}
    odd = sorted(
        name for name, value in given.items() if name not in known and value is not None and value is not False
    )
    if odd:
        raise UnsupportedError(
            f"{model} is given {', '.join(odd)}, which the meter does not follow; metered is text alone"
        )
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "gradients are recorded, and a quantized cache has none; wrap the pass in torch.no_grad()"
        )


def given_mask(given: Mapping[str, Any], batch: Batch, columns: int) -> Tensor:
    """Which of the new places hold tokens [B, COLUMNS] bool; UnsupportedError for a mask over what is cached."""
    mask, past = given.get("attention_mask"), batch.past
    size = len(batch.requests)
    if mask is None:
        mask = torch.ones(size, past + columns, dtype=torch.bool)
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (size, past + columns):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedError(
            f"the attention mask is {shape}; the meter follows padding only, ({size}, {past + columns}) for {size} "
            f"requests with {past} places cached and {columns} new ones"
        )
    mask = mask != 0
    if not torch.equal(mask[:, :past], batch.mask):
        raise UnsupportedError("the attention mask hides other places than when they were cached; keep it as it was")
    return mask[:, past:]


def check_gaps(batch: Batch, mask: Tensor, window: int) -> None:
    """UnsupportedError for padding inside a text that a window reaches over: transformers counts it, the meter cannot.

    mask bool [B, COLUMNS]: which of the new places hold tokens. window: the shortest of a layer, in tokens.
    """
    for number, of_text in enumerate(torch.cat([batch.mask, mask], 1)):
        places = of_text.nonzero()[:, 0]
        span = int(places[-1] - places[0]) + 1 if places.numel() else 0
        if bool(mask[number].any()) and places.numel() < span and span > window:
            raise UnsupportedError(
                f"there is padding between the tokens of a text, and a window of {window} tokens that would count it; "
                "put the padding on the left (padding_side='left')"
            )


def check_positions(given: Mapping[str, Any], real: Tensor, batch: Batch, pre_rope: bool) -> None:
    """UnsupportedError for positions that do not rise (several texts in a row), or are no places where these matter.

    real bool [B, N]: which of the new places hold a token.
    """
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(batch.past, batch.past + real.shape[1])[None]
    if positions.ndim != 2:
        raise UnsupportedError(f"position_ids have {positions.ndim} dimensions; the meter follows one position a token")
    for number, of_text in enumerate(positions.expand(real.shape)):
        own = of_text[real[number]]
        if not bool((own.diff() > 0).all()):
            raise UnsupportedError("position_ids do not rise: several texts in one row; give each a row, with padding")
        first = batch.slots[number].numel()
        if pre_rope and not torch.equal(own, torch.arange(first, first + own.numel())):
            raise UnsupportedError(
                "position_ids are not the tokens' places in their texts, and keys before RoPE cannot be had then; pass "
                "position_ids that count from 0 (generate does), or use a quantizer of post_rope keys"
            )


def batch_pass(batch: Batch, real: Tensor, new_slots: list[Tensor], ids: list[str]) -> BatchPass:
    """The pass over the places of `real` [B, COLUMNS], whose tokens go to new_slots; ids: the requests' names."""
    columns = real.shape[1]
    requests: list[RequestPass] = []
    places = [torch.zeros(0, dtype=torch.int64)]
    behind: dict[int, list[int]] = {}
    for number, (before, new) in enumerate(zip(batch.slots, new_slots, strict=True)):
        own = real[number].nonzero()[:, 0] + number * columns
        if not own.numel():
            continue
        decoding = columns == 1 and before.numel() > 0
        padded = range(int(own[-1]) + 1, (number + 1) * columns)
        if padded:
            behind[len(requests)] = list(padded)
        requests.append(RequestPass(ids[number], torch.cat([before, new]), own.numel(), prefilling=not decoding))
        places.append(own)
    return BatchPass(requests, torch.cat(places), behind)
