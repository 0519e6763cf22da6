"""Whoever dies of a prefiller, a decoder, a server and a router: answers have the tokens of a living pair, nothing
waits for the dead longer than vLLM's lease, and no block stays held."""

from __future__ import annotations

import http.client
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pair import CHUNK, Answer, Pair, answered, counted, pair, prefilled

from kvf_vllm.registration import CONNECTORS
from tests.support.waiting import wait_until
from tests.vllm.model import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

TOKENS = 3 * CHUNK + 1


@pytest.fixture(scope="module", params=CONNECTORS)
def both(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Over TCP, so that a stopped prefiller sends nothing: by shared memory its blocks are read without it."""
    with pair(tmp_path_factory.mktemp("deaths"), str(request.param), UCX_TLS="tcp") as running:
        yield running


@pytest.fixture
def living(both: Pair) -> Pair:
    """The pair with both engines up, whatever an earlier test has killed."""
    for engine in (both.prefill, both.decode):
        if engine.process is None:
            engine.start()
    for engine in (both.prefill, both.decode):
        engine.wait()
    return both


def cold(both: Pair, tokens: list[int]) -> list[int]:
    """The tokens that an engine computes alone: nothing else has this salt."""
    return both.decode.ask(tokens, cache_salt=os.urandom(8).hex()).tokens


class Asking:
    """A request under way in a thread."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self.answer: Answer | None = None
        self.error: Exception | None = None

        def run() -> None:
            try:
                self.answer = ask()
            except (OSError, http.client.HTTPException, AssertionError, ValueError) as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end(self) -> Answer | None:
        self._thread.join(300)
        assert not self._thread.is_alive(), "the request does not end"
        return self.answer


def connections_to(port: int) -> int:
    """Established connections to a port of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


def test_the_prefiller_is_killed_while_it_computes(living: Pair) -> None:
    tokens = prompt(TOKENS, seed=21)
    wanted = cold(living, tokens)
    with living.proxy() as front:
        living.prefill.signal(signal.SIGSTOP)
        asking = Asking(lambda: answered(front, tokens))
        wait_until(lambda: connections_to(living.prefill.port), 60, "the request to the prefiller")
        living.prefill.kill()
        answer = asking.end()
        assert answer is not None, asking.error
        assert (answer.tokens, answer.hit) == (wanted, 0)
        # Nor does the next one need it: the decoder has stored the prompt.
        living.decode.post("/reset_prefix_cache")
        assert answered(front, tokens) == Answer(wanted, 3 * CHUNK)


def test_the_prefiller_dies_before_the_decoder_has_fetched_anything(living: Pair) -> None:
    tokens = prompt(TOKENS, seed=22)
    wanted = cold(living, tokens)
    place = prefilled(living.prefill, tokens)
    living.prefill.kill()
    before = counted(living.decode).nixl
    answer = living.decode.ask(tokens, kv_transfer_params=place)
    assert answer.tokens == wanted
    assert counted(living.decode).nixl == before


def test_the_prefiller_dies_while_the_decoder_fetches(living: Pair) -> None:
    tokens = prompt(TOKENS, seed=23)
    wanted = cold(living, tokens)
    # They know each other: no handshake is in the way.
    other = prompt(TOKENS, seed=24)
    living.decode.ask(other, kv_transfer_params=prefilled(living.prefill, other))
    place = prefilled(living.prefill, tokens)
    living.prefill.signal(signal.SIGSTOP)
    asking = Asking(lambda: living.decode.ask(tokens, kv_transfer_params=place))
    wait_until(lambda: waiting(living) == 1, 60, "the fetch")
    living.prefill.kill()
    answer = asking.end()
    assert answer is not None, asking.error
    assert answer.tokens == wanted


def waiting(both: Pair) -> float:
    return both.decode.metrics().get("vllm:num_requests_waiting", 0)


def test_the_decoder_is_killed_while_it_answers(living: Pair) -> None:
    tokens = prompt(TOKENS, seed=25)
    wanted = cold(living, tokens)
    with living.proxy() as front:
        living.prefill.ask(tokens, max_tokens=1)
        asking = Asking(lambda: answered(front, tokens, max_tokens=2000))
        wait_until(lambda: living.decode.metrics().get("vllm:num_requests_running"), 60, "the decoding")
        living.decode.kill()
        assert asking.end() is None
        living.decode.start()
        living.decode.wait()
        answer = answered(front, tokens)
        assert (answer.tokens, answer.hit >= 3 * CHUNK) == (wanted, True)
    # Blocks that the dead one has not fetched are free when their lease ends.
    wait_until(lambda: living.prefill.metrics()["vllm:kv_cache_usage_perc"] == 0, 120, "the end of the lease")


def test_the_server_is_killed(living: Pair) -> None:
    tokens, other = prompt(TOKENS, seed=26), prompt(TOKENS, seed=27)
    wanted = cold(living, tokens), cold(living, other)
    with living.router() as front:
        assert answered(front, tokens).tokens == wanted[0]
        living.server.kill9()
        assert answered(front, other).tokens == wanted[1]
        living.server.start()
        for engine in (living.prefill, living.decode):
            engine.post("/reset_prefix_cache")
        # Engines register again by themselves; until then they store nothing.
        third = prompt(TOKENS, seed=28)

        def found() -> bool:
            living.prefill.ask(third)
            return living.decode.ask(third, max_tokens=1).hit == 3 * CHUNK

        wait_until(found, 120, "the new server in both engines")
        assert answered(front, tokens).tokens == wanted[0]


def test_the_router_is_restarted(living: Pair) -> None:
    tokens = prompt(TOKENS, seed=29)
    wanted = cold(living, tokens)
    for _ in range(2):
        with living.router() as front:
            assert answered(front, tokens).tokens == wanted


def test_vllms_router_names_a_dead_prefiller_and_serves_again_with_it(living: Pair) -> None:
    tokens = prompt(TOKENS, seed=30)
    wanted = cold(living, tokens)
    with living.router("--retry-max-retries", "1", "--health-check-interval-secs", "1") as front:
        assert answered(front, tokens).tokens == wanted
        living.prefill.kill()
        # It does not let the decoder compute, as the proxy of examples/vllm does.
        with pytest.raises((AssertionError, ValueError)):
            answered(front, tokens)
        living.prefill.start()
        living.prefill.wait()
        wait_until(lambda: serves(front, tokens, wanted), 120, "the router with the new prefiller")


def serves(front: object, tokens: list[int], wanted: list[int]) -> bool:
    try:
        return answered(front, tokens).tokens == wanted  # type: ignore[arg-type]
    except (AssertionError, ValueError, OSError):
        return False
