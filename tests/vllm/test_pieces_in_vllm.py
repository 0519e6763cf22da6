"""A long load beside a request that is answered, in a real vLLM engine: in pieces, with the same tokens, whatever
happens in the middle."""

from __future__ import annotations

import pytest

from kvf_dev.testing.transport.node import held_by
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.vllm import rows
from tests.vllm.engine import SERVER_PID, Ask, Order, kvframework_transfer
from tests.vllm.model import cached, prompt
from tests.vllm.rows import Answer, Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 16 * rows.CHUNK
LONG, SHORT = Ask(prompt(TOKENS + 1, seed=3), tokens=16), Ask(prompt(64, seed=4), tokens=100)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(cached("small"), tmp_path_factory.mktemp("pieces"), [], 4)


@pytest.fixture(scope="module")
def cold(bench: Bench) -> list[list[int]]:
    return [answer.tokens for answer in bench.run(None, LONG, SHORT)]


def both(
    bench: Bench, server: ServerProcess, long: Ask = LONG, connector: str = "InPieces"
) -> tuple[list[Answer], int]:
    """The answers of a new engine, and the steps in which something was left of the load. Another one has stored it."""
    bench.run(server, LONG)
    transfer = kvframework_transfer(server.endpoint, {}, f"tests.vllm.faults:{connector}")
    answers = rows.run_engine(
        Order(str(bench.model), [long, SHORT], transfer),
        bench.directory,
        cores=bench.cores,
        environment={SERVER_PID: str(server.pid)},
        program="tests.vllm.beside_engine",
    )
    latest = max(bench.directory.glob("steps-*.loading"), key=lambda path: path.stat().st_mtime_ns)
    return answers, len(latest.read_text().split())


def test_a_load_beside_an_answer_is_in_pieces_and_both_have_their_tokens(bench: Bench, cold: list[list[int]]) -> None:
    with rows.server_for() as server:
        answers, steps = both(bench, server)
    assert [answer.tokens for answer in answers] == cold
    assert steps >= 2
    assert answers[0].counters["kvframework:loaded_tokens"] == TOKENS
    assert not answers[0].counters.get("kvframework:failed_loads")


def test_a_server_killed_between_two_pieces_costs_computing(bench: Bench, cold: list[list[int]]) -> None:
    with rows.server_for() as server:
        answers, _ = both(bench, server, connector="ServerDiesBetweenPieces")
    assert [answer.tokens for answer in answers] == cold
    assert answers[0].counters["kvframework:failed_loads"] == 1


def test_an_abort_between_two_pieces_leaves_nothing_pinned(bench: Bench, cold: list[list[int]]) -> None:
    with rows.server_for() as server:
        (aborted, other), steps = both(bench, server, Ask(LONG.prompt, tokens=0), "InSmallestPieces")
        assert steps < TOKENS // rows.CHUNK - 1, "the load went on after its request"
        assert other.tokens == cold[1]
        assert not aborted.tokens
        assert not other.counters.get("kvframework:loaded_tokens")
        assert not other.counters.get("kvframework:failed_loads")
        wait_until(lambda: held_by(server.status()) == (0, 0))
