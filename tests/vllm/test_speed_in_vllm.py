"""What a real vLLM engine says of its speed, and a server that cuts by it: the same tokens."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.vllm import rows
from tests.vllm.engine import Ask
from tests.vllm.model import make, prompt
from tests.vllm.rows import Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 8 * rows.CHUNK + 52


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    cache = Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models"))
    return Bench(make(cache / "tiny", "tiny"), tmp_path_factory.mktemp("speed"), prompt(TOKENS, seed=3), 4)


def test_an_engine_learns_its_speed_and_tells_it(bench: Bench, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    told: list[dict[str, float]] = []
    asks = [Ask(prompt(TOKENS, seed=100 + number), tokens=4) for number in range(8)]
    with rows.server_for() as server:

        def waiting() -> None:
            told.extend(server.status()["price"]["engines"])
            go_on.touch()

        answers = bench.run(server, *asks, bench.ask(wait_file=str(go_on)), on_wait=waiting)
        assert all(answer.computed == TOKENS for answer in answers)
    (engine,) = told
    measured = sorted(TOKENS / answer.wall for answer in answers)[len(answers) // 2]
    # The wall also holds four tokens that were generated, and what is around a step.
    assert 0.5 * measured < engine["tokens_per_s"] < 20 * measured
    assert engine["requests_per_s"] > 0
    print(engine, measured)
