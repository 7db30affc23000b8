"""Drift at a running server, against itself: what it wrote is scored again where it reads exact keys.

Under `prefill_reads: chunk_exact` the tokens of a first prompt chunk read their own exact keys. A prompt in one chunk,
kept apart from every cached prefix (SGLang's `extra_key`, vLLM's `cache_salt`), is therefore scored by the law of the
exact cache; that it was so, the server's own meter says: it saw no row that read the cache.
Of a law a server gives the likeliest tokens only. T: tokens of an answer.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from witcert_core.errors import UnsupportedError, listed
from witcert_core.evaluate.askers import UrlAsker, summary_of
from witcert_core.evaluate.drift import SCHEMA, check_some, totals
from witcert_core.evaluate.records import meter_of
from witcert_core.evaluate.stats import mean_interval

TOP = 20
"""Likeliest tokens that are asked for; vLLM gives no more by default."""
_ROUNDED = 1e-6
"""Probability below which what is left is taken for rounding of float32 logarithms."""
Law = Mapping[int, float]


@dataclass(frozen=True)
class Scored:
    """Tokens [T] with the log probabilities of the law before each: of the likeliest tokens, by id, and its own."""

    ids: Sequence[int]
    laws: Sequence[Law]
    summary: Mapping[str, Any]

    @property
    def nll(self) -> float:
        """Mean over all tokens but the first, nats."""
        own = [-law[token] for law, token in zip(self.laws[1:], self.ids[1:], strict=True)]
        return sum(own) / len(own)


class Sglang:
    """SGLang's `/generate`; ids: what the ids of its requests begin with, the server's own choice where it is empty."""

    cache_keys = ("cache_salt", "extra_key")
    """What may say whose cached prefixes a request reads."""

    def __init__(self, server: UrlAsker, ids: str = "") -> None:
        self._server = server
        self._ids = ids

    def write(self, prompt: Sequence[int], tokens: int, name: str, **cache: str) -> Scored:
        """Greedy decoding; cache: whose cached prefixes are read (`extra_key`, `cache_salt`), everybody's without."""
        meta = self._ask(prompt, tokens, name, logprob_start_len=-1, **cache)
        return _scored_by_sglang(meta, "output")

    def score(self, prompt: Sequence[int], answer: Sequence[int], name: str) -> Scored:
        """The same tokens as a prompt of their own."""
        apart = {"extra_key": uuid.uuid4().hex, "logprob_start_len": len(prompt) - 1}
        return _scored_by_sglang(self._ask([*prompt, *answer], 1, name, **apart), "input", len(answer))

    def _ask(self, ids: Sequence[int], tokens: int, name: str, **options: Any) -> dict[str, Any]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
            "return_logprob": True,
            "top_logprobs_num": TOP,
            **options,
        }
        if self._ids:
            body["rid"] = own_id(self._ids)
        meta: dict[str, Any] = self._server.post("/generate", body, name)["meta_info"]
        if "witcert" not in meta:
            raise _without_summary(self._server.url, name)
        return meta


def _scored_by_sglang(meta: Mapping[str, Any], side: str, last: int = 0) -> Scored:
    """side: `output`, or `input`, of which the `last` tokens are meant."""
    own, likeliest = (meta[f"{side}_{kind}_logprobs"][-last:] for kind in ("token", "top"))
    laws = [
        {**{token: value for value, token, _ in top}, token: value}
        for (value, token, _), top in zip(own, likeliest, strict=True)
    ]
    return Scored([token for _, token, _ in own], laws, meta["witcert"])


class Vllm:
    """vLLM's `/v1/completions`; ids: see `Sglang`."""

    cache_keys = ("cache_salt",)

    def __init__(self, server: UrlAsker, ids: str = "") -> None:
        self._server = server
        self._ids = ids

    def write(self, prompt: Sequence[int], tokens: int, name: str, **cache: str) -> Scored:
        """Greedy decoding; cache: see `Sglang.write`, of which vLLM knows `cache_salt`."""
        choice, summary = self._ask(prompt, tokens, name, logprobs=TOP, return_tokens_as_token_ids=True, **cache)
        found = choice["logprobs"]
        laws = [
            {int(key.removeprefix("token_id:")): value for key, value in top.items()} for top in found["top_logprobs"]
        ]
        return Scored(choice["token_ids"], laws, summary)

    def score(self, prompt: Sequence[int], answer: Sequence[int], name: str) -> Scored:
        """The same tokens as a prompt of their own."""
        apart = {"cache_salt": uuid.uuid4().hex, "prompt_logprobs": TOP}
        choice, summary = self._ask([*prompt, *answer], 1, name, **apart)
        tops = choice["prompt_logprobs"][-len(answer) :]
        laws = [{int(token): entry["logprob"] for token, entry in top.items()} for top in tops]
        return Scored(answer, laws, summary)

    def _ask(self, ids: Sequence[int], tokens: int, name: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        body = {"model": self._server.model, "prompt": list(ids), "max_tokens": tokens, "temperature": 0}
        if self._ids:
            body["request_id"] = own_id(self._ids)
        data = self._server.post("/v1/completions", {**body, "return_token_ids": True, **options}, name)
        summary = summary_of(data)
        if summary is None:
            raise _without_summary(self._server.url, name)
        return data["choices"][0], summary


def own_id(begins: str) -> str:
    """A new id of a request that begins so."""
    return f"{begins}{uuid.uuid4().hex}"


def _without_summary(url: str, name: str) -> UnsupportedError:
    return UnsupportedError(f"{url}: {name} has no summary; set report.per_request to true in its policy")


ENGINES: Mapping[str, type[Sglang] | type[Vllm]] = {"sglang": Sglang, "vllm": Vllm}
"""By what a server calls itself as the owner of its model."""


def served_drift(
    server: UrlAsker,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    about: Mapping[str, Any],
    options: Mapping[str, int],
    done: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Drift of what a server writes after each prompt (schema witcert.drift/1); `done` is called after every prompt.

    Raises:
        UnsupportedError: a server whose prompts are not known to read exact keys, or that scored one otherwise.
    """
    engine = engine_of(server)
    rows, exact_nll, left_out = [], [], 0
    for number, prompt in enumerate(prompts, 1):
        written = engine.write(prompt, tokens, f"prompt {number}")
        if len(written.ids) > 1:
            exact = engine.score(prompt, written.ids, f"the answer to prompt {number}")
            check_exact(exact.summary, server.url, len(prompt) + len(written.ids))
            rows.append({**compare_likeliest(exact, written), "meter": meter_of(written.summary)})
            exact_nll.append(exact.nll)
        else:
            left_out += 1
        done()
    check_some(rows, server.url)
    told = {"url": server.url, "tokens": tokens, "samples": len(rows), "left_out": left_out, "likeliest": TOP}
    return {
        "schema": SCHEMA,
        "about": {"model": server.model, **about, **told, "seed": options["seed"]},
        "generated": True,
        "exact": {"nll": mean_interval(exact_nll, **options).as_dict()},
        "quantizers": {server.quantizer: totals(rows, exact_nll, True, options)},
    }


def compare_likeliest(exact: Scored, found: Scored) -> dict[str, Any]:
    """As `drift.compare_laws`, of the tokens that were written from the quantized cache; kl is at most the true one.

    Behind a cached prefix the first token of an answer is read from the cache too, and may be the first change.
    """
    pairs = list(zip(exact.laws, found.laws, strict=True))
    kl = [coarse_kl(p, q) for p, q in pairs[1:]]
    same = [max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in pairs]
    return {
        "tokens": len(found.ids),
        "kl": sum(kl) / len(kl),
        "kl_max": max(kl),
        "top1": sum(same[1:]) / len(kl),
        "first_change": same.index(False) if False in same else None,
        "nll": found.nll,
    }


def coarse_kl(exact: Law, found: Law) -> float:
    """KL(exact || found), nats, with all tokens that one of the two does not name taken as one: never more than the
    KL of the whole laws (data processing inequality)."""
    both = exact.keys() & found.keys()
    named = sum(math.exp(exact[token]) * (exact[token] - found[token]) for token in both)
    rest, other = (1 - sum(math.exp(law[token]) for token in both) for law in (exact, found))
    if rest > _ROUNDED:
        named += rest * math.log(rest / max(other, _ROUNDED))
    return max(named, 0.0)


def engine_of(server: UrlAsker, ids: str = "") -> Sglang | Vllm:
    """Who speaks to this server, in requests whose ids begin with `ids`.

    Raises:
        UnsupportedError: its prompts are not known to read exact keys.
    """
    if server.status is None:
        raise UnsupportedError(f"{server.url} is not metered: whether its prompts read exact keys, nobody says")
    reads = server.status.get("prefill_reads")
    if reads != "chunk_exact":
        raise UnsupportedError(
            f"{server.url} runs with prefill_reads {reads!r}: its prompts read the quantized cache, and nothing there "
            "reads exact keys; set chunk_exact, or compare offline with --model"
        )
    if server.owner not in ENGINES:
        raise UnsupportedError(f"{server.url} is a server of {server.owner!r}; drift is asked of {listed(ENGINES)}")
    return ENGINES[server.owner](server, ids)


def check_exact(summary: Mapping[str, Any], url: str, tokens: int) -> None:
    """UnsupportedError where some of the tokens were scored from the quantized cache."""
    if summary["rows_seen"]:
        raise UnsupportedError(
            f"{url}: of {tokens} tokens that were to be scored by exact keys {summary['rows_seen']} read the quantized "
            "cache: the prompt was cut into chunks, or shares a prefix; raise --chunked-prefill-size (SGLang) or "
            "--max-num-batched-tokens (vLLM), or take shorter texts"
        )
