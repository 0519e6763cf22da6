"""The storage backend in SGLang with a trained model: an answer in words is the same from what another engine has
stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.rows import Answer, Bench
from tests.sglang.test_engine import FAULTS, MODELS, PAGE
from tests.support.server_process import ServerProcess
from tests.support.trained_model import asked, trained_folder

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


def test_an_answer_in_words_comes_from_the_kv_of_another_engine(tmp_path: Path) -> None:
    model = trained_folder(MODELS)
    prompt, words = asked(model)
    # SGLang leaves the last token to compute.
    pages = (len(prompt) - 1) // PAGE
    bench = Bench(model, tmp_path, prompt)
    cold = bench.answers(None)[0]
    print(words(cold.tokens))
    with ServerProcess(capacity="1GiB") as server:
        assert bench.answers(server, objects=pages) == [cold]
        assert bench.answers(server) == [Answer(cold.tokens, pages * PAGE, pages * PAGE)]
        assert "pledge" in words(cold.tokens)
        (spoiled,) = bench.answers(server, **FAULTS, class_name="SpoiledPages")
        assert spoiled.tokens != cold.tokens
