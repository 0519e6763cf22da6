"""Owns the process of one client of `bench scale`: it reads an order a line, carries it out, answers with a line.

`python -m kvframework.bench.scale.client_process`; it ends when its standard input does, so it never outlives a bench.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import zmq

from kvframework.bench.scale.messages import Clear, Fill, Order, Report, Run, Start
from kvframework.bench.scale.requests import Requests
from kvframework.bench.server import PATIENT
from kvframework.client import KVClient
from kvframework.errors import KVFrameworkError

# A late answer is to be seen in the figures, not to end the bench: behind 63 others it may take a while.
_TIMEOUT_S = 10.0


def main() -> None:
    """Blocks until the standard input ends."""
    decoder = msgspec.json.Decoder(Order)
    requests: Requests | None = None
    with ExitStack() as stack:
        for line in sys.stdin.buffer:
            order = decoder.decode(line)
            try:
                if isinstance(order, Start):
                    requests = _connect(order, stack)
                    chance = random.Random(order.seed * 1000 + order.instance_id)  # noqa: S311
                    report = Report(request_bytes=requests.request_bytes, object_bytes=requests.object_bytes)
                elif requests is None:
                    report = Report(error="it was not started")
                else:
                    report = _carry_out(order, requests, chance)
            except KVFrameworkError as error:
                report = Report(error=str(error))
            sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
            sys.stdout.buffer.flush()


def _connect(order: Start, stack: ExitStack) -> Requests:
    client = stack.enter_context(KVClient(order.server, name="bench", deadline_scale=PATIENT))
    _ = client.hello
    context = zmq.Context()
    stack.callback(context.destroy, 0)
    dealer = context.socket(zmq.DEALER)
    for limit in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        dealer.setsockopt(limit, round(_TIMEOUT_S * 1000))
    dealer.connect(order.echo)
    return Requests(client, dealer, instance_id=order.instance_id, seed=order.seed, chunks=order.chunks)


def _carry_out(order: Fill | Clear | Run, requests: Requests, chance: random.Random) -> Report:
    if isinstance(order, Run):
        return _run(order, getattr(requests, order.operation), chance)
    if isinstance(order, Clear):
        requests.clear()
    else:
        for number in range(order.first, order.first + order.count):
            requests.store(number, may_be_there=True)
    return Report()


def _run(order: Run, request: Callable[[int], float], chance: random.Random) -> Report:
    in_turn = order.operation == "store"
    latencies: list[float] = []
    time.sleep(max(order.at - time.monotonic(), 0.0))
    started = now = time.monotonic()
    # At least one, however slow the machine is.
    while not latencies or now < order.at + order.seconds:
        number = order.first + (len(latencies) if in_turn else chance.randrange(order.count))
        latencies.append(request(number))
        now = time.monotonic()
    return Report(latencies=latencies, took=now - started)


if __name__ == "__main__":
    main()
