"""Weights that change in a running vLLM: from then on that engine neither loads nor stores, and others go on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.vllm import rows
from tests.vllm.engine import Ask
from tests.vllm.model import cached, prompt
from tests.vllm.rows import Answer, Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

STORED = 2 * rows.CHUNK
# One token after the last chunk: it depends on all of the KV.
PROMPTS = [prompt(STORED + 1, seed=seed) for seed in range(30, 33)]
NEW = 8


@dataclass(frozen=True)
class Checkpoints:
    """Two with the same configuration, each with the answers of an engine that starts with it, without a connector."""

    old: Bench
    new: Bench
    cold: dict[str, list[Answer]]


def ask(index: int, **fields: Any) -> Ask:
    return Ask(PROMPTS[index], NEW, logprobs=True, **fields)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    directory = tmp_path_factory.mktemp("updates")
    old, new = (
        Bench(cached("tiny", name=name, seed=seed), directory, [], NEW, rows.PATIENT)
        for name, seed in (("tiny", 1234), ("tiny-4321", 4321))
    )
    cold = {
        name: bench.run(None, *(ask(index) for index in range(len(PROMPTS))))
        for name, bench in (("old", old), ("new", new))
    }
    # If these were alike, nothing here would be a proof.
    for one, other in zip(cold["old"], cold["new"], strict=True):
        assert one.tokens[0] != other.tokens[0]
    return Checkpoints(old, new, cold)


def equal(answer: Answer, cold: Answer) -> bool:
    return answer.tokens == cold.tokens and answer.logprobs == pytest.approx(cold.logprobs, abs=1e-3)


@pytest.mark.parametrize("workers", [1, 2])
def test_after_an_update_nothing_is_loaded_or_stored(checkpoints: Checkpoints, workers: int) -> None:
    engine = {} if workers == 1 else {"tensor_parallel_size": 2}
    cores = checkpoints.old.cores if workers == 1 else "0|1"
    old, new = (replace(each, engine=engine, cores=cores) for each in (checkpoints.old, checkpoints.new))
    cold = checkpoints.cold
    with rows.server_for() as server:
        old.run(server, ask(1))
        found = old.run(
            server,
            ask(0),
            # Another engine has stored it.
            ask(1, update=str(new.model), reset=True),
            ask(2),
            # Back to the files of the start.
            ask(0, update=str(old.model), reset=True),
        )
        for answer, (weights, index) in zip(found, [("old", 0), ("new", 1), ("new", 2), ("old", 0)], strict=True):
            assert equal(answer, cold[weights][index])
        assert [each.cached for each in found] == [0] * 4
        assert found[2].counters["kvframework:miss_requests|reason=weights_changed"] == 1
        # What was stored before the update is of use, and nothing else is there.
        for bench, name, hits in ((old, "old", [STORED, STORED, 0]), (new, "new", [0, 0, 0])):
            answers = bench.run(server, *(ask(index) for index in range(3)))
            assert all(equal(answer, cold[name][index]) for index, answer in enumerate(answers))
            assert [each.cached for each in answers] == hits
