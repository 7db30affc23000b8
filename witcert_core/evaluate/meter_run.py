"""`witcert meter`: prompts through a model, offline, and the same summaries as from a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.metered import MeteredModel
from witcert_core.evaluate.offline.model import LoadedModel, Prompt, load_model
from witcert_core.evaluate.offline.placement import HOST, Placement
from witcert_core.evaluate.settings import QuantizerSpec, base_settings, build_policy
from witcert_core.policy.model import Policy, load_policy
from witcert_core.probes.board import ProbeBoard
from witcert_core.probes.language import parse_probe
from witcert_core.serving.runtime import Runtime


def choose_policy(quantizer: QuantizerSpec | None, policy: Path | None) -> Policy:
    """The policy file with its own quantizer, or with the one named; without a file every row is metered and audited.

    Raises:
        InputError: neither is given.
    """
    if quantizer is None:
        if policy is None:
            raise InputError("neither --quantizer nor --policy is given; one of them says what is metered")
        return load_policy(policy)
    base = base_settings(policy)
    repairs = base.get("gate", {}).get("kind", "observe") != "observe"
    return build_policy(base, quantizer, "gated" if repairs else "raw")


def read_prompts(path: Path) -> list[Prompt]:
    """A prompt a line; of a file that ends in `.jsonl`, the `prompt` or the `messages` of each object.

    Raises:
        InputError: an unreadable file, a line without a prompt, or no prompt at all.
    """
    try:
        # Not splitlines: a form feed or U+2028 within a prompt ends no line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}") from error
    written = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    prompts = [_prompt(line, f"{path}, line {i}", path.suffix == ".jsonl") for i, line in written]
    if not prompts:
        raise InputError(f"{path}: holds no prompt; write one a line")
    return prompts


def _prompt(line: str, where: str, is_json: bool) -> Prompt:
    if not is_json:
        return line
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: is not JSON: {error}") from error
    prompt = prompt_of(data)
    if prompt is None:
        raise InputError(
            f'{where}: has neither a text under "prompt" nor, under "messages", a list of objects with texts under '
            '"role" and "content"'
        )
    return prompt


def prompt_of(data: object) -> Prompt | None:
    """The text under `prompt` of an object, or its `messages`; None where it has neither."""
    if not isinstance(data, dict):
        return None
    if isinstance(data.get("prompt"), str):
        return str(data["prompt"])
    messages = data.get("messages")
    return messages if isinstance(messages, list) and messages and all(map(_is_message, messages)) else None


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def meter(
    model: str,
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    dtype: str,
    chat: bool = False,
    batch: int = 1,
    placement: Placement = HOST,
    probes: Sequence[str] = (),
    tell: Callable[[dict[str, Any]], None] = lambda _answer: None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Answer (greedy decoding) and summary (schema witcert.request/1) of each prompt, as they come.

    batch: prompts that are answered side by side, by the model's own `generate()`. probes: what is asked beside, in the
    language of probes; `tell` gets the answer to each (schema witcert.probe/1) after the last prompt.

    Raises:
        InputError: a prompt without tokens.
        ProbeError: a probe that cannot be asked here.
    """
    for probe in probes:
        parse_probe(probe, facts=("prompt",) if batch == 1 else ())
    if batch > 1 and placement.about:
        raise UnsupportedError("prompts are answered side by side on the CPU alone; leave --batch or the device out")
    loaded = load_model(model, dtype, chat=chat, placement=placement)
    ids = [loaded.prompt_ids(prompt) for prompt in prompts]
    for number, one in enumerate(ids, 1):
        if not one:
            raise InputError(f"prompt {number}, {prompts[number - 1]!r}, has no tokens; write a prompt or leave it out")
    loaded.check_lengths([len(one) + max_new_tokens for one in ids])
    if batch > 1:
        board = yield from _in_batches(loaded, policy, ids, max_new_tokens, batch, probes)
    else:
        board = yield from _one_by_one(loaded, policy, ids, max_new_tokens, probes)
    for shown in board.shown():
        tell(shown)


Answered = Generator[tuple[str, dict[str, Any]], None, ProbeBoard]
"""Answer and summary of each prompt, and in the end where probes were answered."""


def _enable(runtime: Runtime, probes: Sequence[str]) -> ProbeBoard:
    for number, probe in enumerate(probes, 1):
        runtime.command({"do": "enable", "id": f"probe-{number}", "text": probe})
    return runtime.ledger.probes


def _one_by_one(
    loaded: LoadedModel, policy: Policy, ids: Sequence[list[int]], max_new_tokens: int, probes: Sequence[str]
) -> Answered:
    engine = OfflineEngine(loaded, policy, max(map(len, ids)) + max_new_tokens)
    board = _enable(engine.runtime, probes)
    for number, one in enumerate(ids):
        answer = engine.generate(f"prompt-{number}", one, max_new_tokens)
        yield answer.text, answer.summary
    return board


def _in_batches(
    loaded: LoadedModel,
    policy: Policy,
    ids: Sequence[list[int]],
    max_new_tokens: int,
    batch: int,
    probes: Sequence[str],
) -> Answered:
    """The same, `batch` prompts at a time, the shorter ones padded before their text."""
    parts = [ids[first : first + batch] for first in range(0, len(ids), batch)]
    room = max(sum(len(one) + max_new_tokens for one in part) for part in parts)
    pad = min(loaded.eos, default=0)
    with MeteredModel(loaded.model, policy, room) as metered:
        board = _enable(metered.runtime, probes)
        for part in parts:
            longest, first = max(map(len, part)), len(metered.requests)
            rows = torch.tensor([[pad] * (longest - len(one)) + one for one in part])
            mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in part])
            # Penalties are some models' default, and are none of greedy decoding.
            out = loaded.model.generate(
                rows,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                repetition_penalty=1.0,
                pad_token_id=pad,
            )
            for answer, summary in zip(out[:, longest:].tolist(), metered.requests[first:], strict=True):
                ends = [place for place, token in enumerate(answer) if token in loaded.eos]
                yield loaded.decode(answer[: ends[0]] if ends else answer), summary
    return board
