"""The storage backend in SGLang with a trained model: an answer in words is the same from what another engine has
stored."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.sglang.engine_order import Ask
from tests.sglang.rows import Answer, Bench
from tests.support.server_process import ServerProcess
from tests.support.trained_model import asked, trained_folder

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

PAGE = 64
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def model() -> Path:
    from tests.sglang.standins import vision

    vision.install()
    return trained_folder(Path(os.environ.get("KVF_SGLANG_MODELS", Path(tempfile.gettempdir()) / "kvf-sglang-models")))


def test_an_answer_in_words_comes_from_the_kv_of_another_engine(model: Path, tmp_path: Path) -> None:
    prompt, words = asked(model)
    bench = Bench(model, tmp_path, prompt)
    ask = Ask(prompt, NEW_TOKENS)
    # A page is left to compute, if only for the last token.
    pages = (len(prompt) - 1) // PAGE
    (cold,) = bench.answers(None, ask)
    print(words(cold.tokens))
    with ServerProcess(capacity="256MiB") as server:
        assert bench.answers(server, ask, objects=pages) == [cold]
        assert bench.answers(server, ask) == [Answer(cold.tokens, pages * PAGE, pages * PAGE)]
        (spoiled,) = bench.answers(server, ask, module_path="tests.sglang.faults", class_name="SpoiledPages")
    assert "pledge" in words(cold.tokens)
    assert spoiled.stored == pages * PAGE
    assert spoiled.tokens != cold.tokens
