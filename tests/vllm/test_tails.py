"""A prompt's last token computed alone, after chunks or a cached prefix, is a prompt row and no decode row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import prompts
from engine import Answer, Cells, Engine, running_engine
from witcert_vllm.runtime import VllmRuntime

from witcert_core.errors import UnsupportedError

pytestmark = pytest.mark.vllm

POLICY = {
    "quantizer": {"name": "int8_token_group"},
    "prefill_reads": "stored",
    "meter": {"stride": 3, "audit_every": 1, "max_rows": 1},
}
CHUNK, LENGTH = 64, 129


def asked(engine: Engine) -> tuple[Answer, Cells]:
    ids = engine.llm.get_tokenizer().encode(prompts(seed=38, num_tokens=160)[0])[:LENGTH]
    (answer,) = engine.ask([{"prompt_token_ids": ids}], max_tokens=8, ignore_eos=True)
    return answer, {key: bound for key, bound in engine.cells(answer).items() if key[0] >= LENGTH - 1}


def test_alone_it_is_metered_as_in_one_chunk(checkpoint: Path, tmp_path: Path) -> None:
    """With its own stride: the first, fourth and seventh generated tokens are metered, whatever came before them."""
    with running_engine(checkpoint, tmp_path / "whole", POLICY, enable_prefix_caching=False) as engine:
        whole, expected = asked(engine)
    options = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4, "block_size": 32}
    with running_engine(checkpoint, tmp_path / "parts", POLICY, **options) as engine:
        chunked, chunked_cells = asked(engine)
        cached, cached_cells = asked(engine)
    assert (chunked.cached, cached.cached) == (0, LENGTH - 1)
    assert {position for position, _layer, _head in expected} == {LENGTH - 1 + after for after in (0, 1, 4, 7)}
    for answer, cells in ((chunked, chunked_cells), (cached, cached_cells)):
        assert answer.tokens == whole.tokens
        assert cells == pytest.approx(expected, abs=1e-6)


def test_its_own_key_is_read_as_a_chunk_reads_it() -> None:
    """Requests: a chunk of three, a prompt's last token, a generated token, one with two drafts, and a chunk that is
    computed again behind the prompt."""
    new, prefilling, drafts = [3, 1, 1, 3, 3], [True, True, False, False, False], [0, 0, 0, 2, 0]

    def attends_quantized(prefill_reads: str, prefilling: Sequence[bool | None]) -> list[bool]:
        runtime = VllmRuntime.__new__(VllmRuntime)
        runtime.policy = SimpleNamespace(prefill_reads=prefill_reads)  # type: ignore[assignment]
        return runtime._reads_stored(prefilling, new, drafts)

    assert attends_quantized("chunk_exact", prefilling) == [False, False, True, True, False]
    assert attends_quantized("chunk_exact", [True] * 5) == [False] * 5
    assert attends_quantized("stored", prefilling) == [True] * 5
    with pytest.raises(UnsupportedError, match="prefilling"):
        attends_quantized("chunk_exact", [None] * 5)
