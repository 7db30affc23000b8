"""Chat models: messages and questions are put into the template that comes with the model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from witcert_demo.tasks import make_samples

from witcert_core.cli import main
from witcert_core.errors import InputError
from witcert_core.evaluate.analyses import open_inputs
from witcert_core.evaluate.meter_run import read_prompts
from witcert_core.evaluate.offline.model import LoadedModel, load_model

SAMPLE = make_samples("multi_key", 64, 1, 3)[0]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<end>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_path(twin_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin with a template: what is said, then `<end>`."""
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(twin_path, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def chatting(chat_path: Path) -> LoadedModel:
    return load_model(str(chat_path), chat=True)


def test_messages_are_what_the_template_makes_of_them(chatting: LoadedModel) -> None:
    expected = chatting.answer_ids(f"{SAMPLE.prompt} <end>")
    assert chatting.prompt_ids(SAMPLE.prompt) == expected
    assert chatting.prompt_ids([{"role": "user", "content": SAMPLE.prompt}]) == expected
    assert replace(chatting, chat=False).prompt_ids(SAMPLE.prompt) == list(SAMPLE.prompt_ids)
    words = SAMPLE.prompt.split()
    said = [{"role": "user", "content": words[0]}, {"role": "assistant", "content": " ".join(words[1:])}]
    assert chatting.prompt_ids(said) == expected


def test_what_no_template_takes_is_refused(chatting: LoadedModel, original: LoadedModel) -> None:
    with pytest.raises(InputError, match="refuses the messages: unknown role"):
        chatting.prompt_ids([{"role": "nobody", "content": "x"}])
    with pytest.raises(InputError, match="has no chat template"):
        original.prompt_ids([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "line", ["{}", '{"messages": []}', '{"messages": ["hello"]}', '{"messages": [{"role": "user", "content": [1]}]}']
)
def test_lines_without_prompt_or_messages_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, match="line 1: has neither a text"):
        read_prompts(path)


def test_meter_answers_messages_as_it_answers_the_text_they_become(
    chat_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"role": "user", "content": SAMPLE.prompt}]
    (tmp_path / "said.jsonl").write_text(json.dumps({"messages": said}))
    (tmp_path / "texts.txt").write_text(SAMPLE.prompt)
    (tmp_path / "whole.txt").write_text(f"{SAMPLE.prompt} <end>")
    command = ["meter", "--model", str(chat_path), "--quantizer", "int8_token_group", "--max-new-tokens", "4", "--json"]
    found = []
    for options in (["said.jsonl"], ["texts.txt", "--chat"], ["whole.txt"]):
        assert main([*command, "--prompts", str(tmp_path / options[0]), *options[1:]]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [one.get("messages") for one in found] == [said, None, None]
    assert found[0]["answer"] == found[1]["answer"] == found[2]["answer"]
    assert found[0]["summary"]["cells_measured"] == found[2]["summary"]["cells_measured"] > 0


def test_prompts_side_by_side_are_answered_as_one_by_one(
    twin_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [make_samples("multi_key", length, 1, 7)[0].prompt for length in (64, 96, 80)]
    (tmp_path / "texts.txt").write_text("\n".join(samples))
    command = ["meter", "--model", str(twin_path), "--quantizer", "int8_token_group", "--max-new-tokens", "8", "--json"]
    found = []
    for batch in ("1", "2"):
        assert main([*command, "--prompts", str(tmp_path / "texts.txt"), "--batch", batch]) == 0
        found.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    one, two = found
    assert [a["answer"] for a in one] == [b["answer"] for b in two]
    for a, b in zip(one, two, strict=True):
        for kind in ("rows_seen", "cells_measured", "tv_certified_cells", "finish_reason"):
            assert a["summary"][kind] == b["summary"][kind]
        assert b["summary"]["audit"]["violations"] == 0


def test_analyses_ask_through_the_template_and_say_so(chat_path: Path) -> None:
    asked = {"dtype": "auto", "source": "needles", "tasks": ["multi_key"], "lengths": [64], "count": 1, "seed": 3}
    plain, chat = (open_inputs(str(chat_path), **asked, chat=chat) for chat in (False, True))  # type: ignore[arg-type]
    end = chat.loaded.answer_ids("<end>")
    assert [s.prompt for s in chat.samples] == [s.prompt + end for s in plain.samples]
    assert (chat.about.get("chat"), plain.about.get("chat")) == (True, None)
