"""Weights that change in a running vLLM: nobody loads what other weights have computed, in the updated engine, in
another one of the same server, and after an update back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import ServerProcess
from tests.vllm import rows
from tests.vllm.engine import Ask
from tests.vllm.model import cached, prompt
from tests.vllm.rows import Answer, Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

STORED = 2 * rows.CHUNK
# One token after the last chunk: it depends on all of the KV.
PROMPTS = [prompt(STORED + 1, seed=seed) for seed in range(30, 36)]
NEW = 8
# The module registers the second's name, too.
ENGINE = {
    "worker_extension_cls": "tests.vllm.updates.Updating",
    "weight_transfer_config": {"backend": "kvf-test-folder"},
}


@dataclass(frozen=True)
class Checkpoints:
    """Two with the same configuration; `old` and `new` are engines that start with them, `cold` their answers by prompt
    without a connector."""

    old: Bench
    new: Bench
    cold: dict[str, list[Answer]]


def ask(index: int, **fields: Any) -> Ask:
    return Ask(PROMPTS[index], NEW, logprobs=True, **fields)


@pytest.fixture(scope="module", params=rows.CONNECTORS)
def checkpoints(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Checkpoints:
    directory = tmp_path_factory.mktemp("updates")
    old, new = (
        Bench(cached("tiny", name=name, seed=seed), directory, [], NEW, rows.PATIENT, ENGINE, connectors=request.param)
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


@pytest.mark.parametrize("how", ["reload", "load_weights", "session"])
def test_without_a_reset_nothing_is_loaded_or_stored(checkpoints: Checkpoints, how: str) -> None:
    """vLLM's own prefix cache still holds KV of the old weights: these prompts are not in it."""
    cold, found = checkpoints.cold, []

    def updated() -> None:
        found.extend(
            checkpoints.old.run(
                server,
                ask(0),
                # The other engine has stored it.
                ask(1, update=[how, str(checkpoints.new.model)]),
                ask(2),
                ask(3, update=["reload", str(checkpoints.old.model)]),
            )
        )
        go.touch()

    with rows.server_for() as server:
        go = checkpoints.old.directory / f"go-{how}"
        other = checkpoints.old.run(
            server, ask(1), ask(3), ask(2, wait_file=str(go)), ask(0, forget=False), on_wait=updated
        )
    first, promised, stored, back = found
    assert equal(first, cold["old"][0])
    assert equal(promised, cold["new"][1])
    assert equal(stored, cold["new"][2])
    assert equal(back, cold["old"][3])
    assert [each.cached for each in found] == [0] * 4
    for answer, index in zip(other, (1, 3, 2, 0), strict=True):
        assert equal(answer, cold["old"][index])
    # What was stored before the update is of use.
    assert [each.cached for each in other] == [0, 0, 0, STORED]


@pytest.mark.parametrize("reset", ["reset", "forget"])
def test_after_a_reset_files_have_their_name_and_tensors_one_of_their_own(checkpoints: Checkpoints, reset: str) -> None:
    cold, found = checkpoints.cold, []
    old, new = str(checkpoints.old.model), str(checkpoints.new.model)

    def asks() -> list[Ask]:
        def updated(index: int, *how: str, **fields: Any) -> Ask:
            return ask(index, update=list(how), **{reset: True}, **fields)

        return [
            ask(0),
            updated(1, "reload", new),
            updated(0, "reload", new, settle=True),
            ask(2),
            updated(1, "reload", old, settle=True),
            updated(1, "load_weights", new, settle=True),
            ask(3),
            updated(1, "session", old, settle=True),
            ask(4),
            updated(1, "reload", old, settle=True),
        ]

    def update() -> None:
        found.extend(checkpoints.old.run(server, *asks()))
        go.touch()

    with rows.server_for() as server:
        go = checkpoints.old.directory / f"go-{reset}"
        other = checkpoints.old.run(server, ask(1), ask(2, wait_file=str(go)), ask(3), ask(4), ask(0), on_wait=update)
        started_with_new = checkpoints.new.run(server, ask(2), ask(3), ask(0))
    wanted = [("old", 0), ("new", 1), ("new", 0), ("new", 2), ("old", 1)]
    wanted += [("new", 1), ("new", 3), ("old", 1), ("old", 4), ("old", 1)]
    for answer, (weights, index) in zip(found, wanted, strict=True):
        assert equal(answer, cold[weights][index])
    # The updates back to the files of the start find what is stored under their name, tensors alike do not.
    assert [each.cached for each in found] == [0, 0, 0, 0, STORED, 0, 0, 0, 0, STORED]
    for answer, index in zip(other, (1, 2, 3, 4, 0), strict=True):
        assert equal(answer, cold["old"][index])
    assert [each.cached for each in other] == [0, 0, 0, 0, STORED]
    for answer, index in zip(started_with_new, (2, 3, 0), strict=True):
        assert equal(answer, cold["new"][index])
    assert [each.cached for each in started_with_new] == [STORED, 0, STORED]


def test_every_worker_of_an_engine_is_updated(checkpoints: Checkpoints) -> None:
    split = replace(checkpoints.old, engine={**ENGINE, "tensor_parallel_size": 2}, cores="0|1")
    with rows.server_for() as server:
        stored, updated, named, back = split.run(
            server,
            ask(1),
            ask(1, update=["reload", str(checkpoints.new.model)], reset=True),
            ask(2, settle=True),
            ask(1, update=["session", str(checkpoints.old.model)], reset=True, settle=True),
        )
        assert equal(stored, checkpoints.cold["old"][1])
        assert equal(updated, checkpoints.cold["new"][1])
        assert equal(named, checkpoints.cold["new"][2])
        assert (equal(back, checkpoints.cold["old"][1]), back.cached) == (True, 0)
        other = replace(split, model=checkpoints.new.model).run(server, ask(2))[0]
        assert (equal(other, checkpoints.cold["new"][2]), other.cached) == (True, STORED)


def test_replicas_of_one_run_share_each_version_of_the_weights(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Two engines at the same time through 20 updates, then one that finds all that they have stored."""
    secret = tmp_path / "run.secret"
    secret.write_text("a secret of one training run")
    secret.chmod(0o600)
    options = {**rows.PATIENT, "kvframework.weights_secret": str(secret)}
    bench = replace(checkpoints.old, options=options)
    folders = {"old": str(checkpoints.old.model), "new": str(checkpoints.new.model)}
    weights = [("new", "old")[number % 2] for number in range(20)]

    def replica(server: ServerProcess, *, version: str = "v{}", prompts: int = 2) -> list[Answer]:
        asks = [
            ask((number + at) % len(PROMPTS), forget=not at, update=[] if at else update)
            for number, each in enumerate(weights)
            for update in [["session", folders[each], *([version.format(number)] if version else [])]]
            for at in range(prompts)
        ]
        answers = bench.run(server, *asks)
        for number, answer in enumerate(answers):
            place, at = divmod(number, prompts)
            assert equal(answer, checkpoints.cold[weights[place]][(place + at) % len(PROMPTS)]), number
        return answers

    with rows.server_for() as server:
        with ThreadPoolExecutor() as pool:
            for each in [pool.submit(replica, server) for _ in range(2)]:
                each.result()
        assert [each.cached for each in replica(server)] == [STORED] * 40
        assert [each.cached for each in replica(server, version="", prompts=1)] == [0] * 20
        assert [each.cached for each in replica(server, version="w{}", prompts=1)] == [0] * 20
