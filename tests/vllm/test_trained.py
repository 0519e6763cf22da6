"""The connector in vLLM with a trained model: an answer in words is the same from what another engine has stored."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.support.trained_model import asked, trained_folder
from tests.vllm import rows
from tests.vllm.rows import Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CHUNK = rows.CHUNK


@pytest.fixture(scope="module")
def model() -> Path:
    return trained_folder(Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models")))


def test_an_answer_in_words_comes_from_the_kv_of_another_engine(model: Path, tmp_path: Path) -> None:
    prompt, words = asked(model)
    bench = Bench(model, tmp_path, prompt, engine={"max_model_len": 4096})
    cold = rows.cold(bench)
    stored, loaded = rows.store_and_load(bench)
    print(words(cold.tokens))
    assert stored.tokens == loaded.tokens == cold.tokens
    whole = len(prompt) // CHUNK * CHUNK
    assert (stored.cached, loaded.cached, loaded.computed) == (0, whole, len(prompt) - whole)
    assert "pledge" in words(loaded.tokens)
    assert rows.wrong_kv(bench).tokens != cold.tokens
