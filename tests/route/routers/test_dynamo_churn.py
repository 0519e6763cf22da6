"""After chance Dynamo's index equals L1, block by block: two engines, evictions, clears, stops, kills, lost batches."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from random import Random

import pytest

from kvf_events.publisher import BATCH_S
from kvframework.wire import messages as m
from tests.events.node import Engine, beginnings, found, prompt
from tests.events.test_announced import TellingServer
from tests.events.test_restart import HeldTellingServer
from tests.route.routers.dynamo import Dynamo, blocks_of
from tests.route.routers.stream import Between, Frames, sockets
from tests.support.held_server import HeldServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

# Of both tests together.
SECONDS = float(os.environ.get("KVF_ROUTERS_CHURN_S", "60"))
SEED = int(os.environ.get("KVFRAMEWORK_TEST_SEED", "0")) or Random().getrandbits(32)
OBJECTS = 48
STEPS = 48

PROMPTS = [prompt(number, 1 + number % 4) for number in range(100, 180)]


class Loss:
    """Loses a part of the messages, and now and then a row of them."""

    def __init__(self, dice: Random) -> None:
        self.on = False
        self._dice = dice
        self._left = 0

    def __call__(self, frames: Frames) -> Frames | None:
        if not self.on:
            self._left = 0
        elif not self._left and self._dice.random() < 0.3:
            self._left = self._dice.choice((1, 1, 2, 10))
        if self._left:
            self._left -= 1
            return None
        return frames


def churn(server: ServerProcess, dice: Random, steps: int, done: Counter[str]) -> None:
    """Two engines store more than L1 holds, load, and clear now and then; what they do makes some batches."""
    with server.client() as one, server.client() as other:
        engines = [Engine(one, 1), Engine(other, 2)]
        for step in range(steps):
            if not step % 8:
                time.sleep(BATCH_S)
            engine, tokens, chance = dice.choice(engines), dice.choice(PROMPTS), dice.random()
            if chance < 0.6:
                engine.store(tokens)
                done["stores"] += 1
            elif chance < 0.99:
                done["loads"] += engine.load(tokens)
            else:
                one.call("CLEAR", m.Clear())
                done["clears"] += 1


def stop(server: ServerProcess) -> None:
    """End the server in an orderly way; it starts again."""
    server.stop()
    server.start()


def kill(server: ServerProcess) -> None:
    """Kill the server; it starts again, with its L1 if a keeper has that."""
    if isinstance(server, HeldServer):
        # Starts that end sooner count as failed: after three in a row nothing is kept.
        wait_until(lambda: server.status()["server"]["uptime_s"] > 2, 30, "a server that has served")
        pid = server.pid
        server.kill9()
        server.serving(pid)
    else:
        server.kill9()
        server.start()


@pytest.mark.parametrize("make", [TellingServer, HeldTellingServer])
@pytest.mark.timeout(300 + 2 * SECONDS)
def test_dynamos_index_is_what_l1_holds(dynamo: Dynamo, make: Callable[..., ServerProcess]) -> None:
    """Worker 1 hears all, worker 2 loses messages, each further one comes late; all are told by one server."""
    dice = Random(SEED)
    done: Counter[str] = Counter()
    loss = Loss(Random(SEED))
    until = time.monotonic() + SECONDS / 2
    late = 2
    with ExitStack() as stack:
        server = stack.enter_context(make(objects=OBJECTS))
        told, again = sockets(server)
        between = stack.enter_context(Between(told, loss))
        dynamo.register(told, again)
        dynamo.register(between.endpoint, again, instance=2)
        try:
            while time.monotonic() < until:
                loss.on = True
                churn(server, dice, STEPS, done)
                if dice.random() < 0.3:
                    stop(server)
                    churn(server, dice, STEPS, done)
                    done["stops"] += 1
                loss.on = False
                late += 1
                # Its subscription makes the server send a message: by its number the others see what they lack.
                dynamo.register(told, again, instance=late)
                with server.client() as client:
                    engine = Engine(client)
                    held = found(engine, PROMPTS)
                    for instance in (1, 2, late):
                        dynamo.until(lambda: dynamo.blocks(instance=instance) == blocks_of(held))  # noqa: B023
                    for tokens in dice.sample(PROMPTS, 5):
                        # At least what a lookup finds: blocks of a chunk may be held as those of another one.
                        hit = max((len(each) for each in beginnings(tokens) & held), default=0)
                        assert [dynamo.matched(tokens, instance=each) for each in (1, 2, late)] == [hit] * 3
                    counters = client.status()["events"]["counters"]
                    assert counters["dropped"] == counters["mismatched"] == 0
                dynamo.unregister(instance=late)
                done["comparisons"] += 1
                done["blocks"] += len(held)
                if dice.random() < 0.3:
                    kill(server)
                    done["kills"] += 1
        finally:
            print(f"KVFRAMEWORK_TEST_SEED={SEED}", dict(done), f"lost={between.lost} passed={between.passed}")
    assert done["comparisons"]
    assert between.lost
