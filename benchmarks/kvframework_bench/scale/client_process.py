"""The process of one client of `bench scale`: it reads a command a line, carries it out, answers with a line.

Every request is timed, from the request to its answer, and its answer is checked.
`python -m kvframework_bench.scale.client_process`; it ends with its standard input, so it never outlives a benchmark.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import zmq

from kvframework.api.transport import Registration
from kvframework.client import KVClient
from kvframework.client.kv_client import bare_transfer
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from kvframework.wire.frames import join
from kvframework.wire.protocol import non_gpu_layout
from kvframework_bench.errors import BenchFailed, WrongBytes
from kvframework_bench.scale.client import Clear, Command, Fill, Report, Run, Start
from kvframework_bench.scale.workload import Prompts, contents, shape
from kvframework_bench.server import PATIENT
from kvframework_bench.zmq_reference import ECHO


class Requests:
    """An instance's requests; the constructor registers. For one thread. Raises `BenchFailed` if an answer is not the
    expected one."""

    def __init__(
        self, client: KVClient, dealer: zmq.Socket[bytes], *, instance_id: int, seed: int, chunks: int
    ) -> None:
        self._client = client
        self._dealer = dealer
        described = shape(instance_id)
        registered = client.request("REGISTER_KV_CACHE_NON_GPU_CONTEXT", described, m.Registered)
        if not client.maps_arena:
            raise BenchFailed("the bench client has not mapped the server's arena")
        layout = non_gpu_layout(described)
        self._registration = Registration(instance_id, 0, registered.namespace, layout, registered.desc)
        self._prompts = Prompts(seed, chunks, registered.namespace)
        self.object_bytes = registered.desc.nbytes
        lookup = m.Lookup(self._prompts.key(self._prompts.digests(0), rank=None))
        self._payload = bytes(sum(len(frame) for frame in join(1, "LOOKUP", lookup)))

    @property
    def request_bytes(self) -> int:
        """The size of the frames of a LOOKUP, and of the echo."""
        return len(self._payload)

    def echo(self, _number: int) -> float:
        """Send a bare message to the bare peer and wait for it."""
        started = time.perf_counter()
        self._dealer.send_multipart([ECHO, self._payload])
        try:
            answer = self._dealer.recv_multipart()[-1]
        except zmq.Again:
            raise BenchFailed("the bare peer does not answer") from None
        seconds = time.perf_counter() - started
        if len(answer) != len(self._payload):
            raise BenchFailed(f"echoed {len(answer)} bytes of {len(self._payload)}")
        return seconds

    def lookup(self, number: int) -> float:
        """LOOKUP of a prompt that is all in L1. Its pins are freed afterwards, outside the time."""
        payload = m.Lookup(self._prompts.key(self._prompts.digests(number), rank=None))
        started = time.perf_counter()
        reply = self._client.request("LOOKUP", payload, m.LookupReply)
        seconds = time.perf_counter() - started
        if reply.ticket:
            self._client.request("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket), m.Freed)
        if (reply.hit_tokens, reply.pending) != (self._prompts.tokens, False):
            raise BenchFailed(f"a lookup found {reply.hit_tokens} tokens", available=f"{self._prompts.tokens} tokens")
        return seconds

    def store(self, number: int, *, may_be_there: bool = False) -> float:
        """PREPARE_STORE, the bytes, COMMIT_STORE."""
        digests = self._prompts.digests(number)
        objects = contents(digests, self.object_bytes)
        transfer = bare_transfer(self._registration, self._prompts.key(digests, rank=0))
        started = time.perf_counter()
        with self._client.prepare_store(transfer).result() as plan:
            for place, data in zip(plan.ranges, objects, strict=False):
                plan.arena[place.offset : place.offset + place.length] = data
            outcome = plan.commit().result()
        seconds = time.perf_counter() - started
        if may_be_there and outcome.present == self._prompts.chunks:
            return seconds
        if outcome.stored != self._prompts.chunks:
            raise BenchFailed(f"the server stored {outcome.stored} of {self._prompts.chunks} chunks")
        return seconds

    def retrieve(self, number: int) -> float:
        """PREPARE_RETRIEVE, all bytes read and compared, COMMIT_RETRIEVE. Raises `WrongBytes`."""
        digests = self._prompts.digests(number)
        objects = contents(digests, self.object_bytes)
        transfer = bare_transfer(self._registration, self._prompts.key(digests, rank=0))
        started = time.perf_counter()
        with self._client.prepare_load(transfer).result() as plan:
            same = len(plan.ranges) == len(objects) and all(
                bytes(plan.arena[place.offset : place.offset + place.length]) == data
                for place, data in zip(plan.ranges, objects, strict=True)
            )
            loaded = plan.commit().result()
        seconds = time.perf_counter() - started
        if not loaded.ok:
            raise BenchFailed("a retrieve of stored chunks is a miss")
        if not same:
            raise WrongBytes("a retrieved object differs from the stored object", hint="no figures are reported")
        return seconds

    def clear(self) -> None:
        self._client.request("CLEAR", m.Clear(), m.Cleared)


# A late answer shows in the figures and does not end the benchmark: behind 63 others it may take a while.
_TIMEOUT_S = 10.0


def main() -> None:
    """Run the client; blocks until the standard input ends."""
    decoder = msgspec.json.Decoder(Command)
    requests: Requests | None = None
    with ExitStack() as stack:
        for line in sys.stdin.buffer:
            command = decoder.decode(line)
            try:
                if isinstance(command, Start):
                    requests = _connect(command, stack)
                    chance = random.Random(command.seed * 1000 + command.instance_id)
                    report = Report(request_bytes=requests.request_bytes, object_bytes=requests.object_bytes)
                elif requests is None:
                    report = Report(error="the bench client was not started")
                else:
                    report = _carry_out(command, requests, chance)
            except KVFrameworkError as error:
                report = Report(error=str(error))
            sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
            sys.stdout.buffer.flush()


def _connect(command: Start, stack: ExitStack) -> Requests:
    client = stack.enter_context(KVClient(command.server, name="bench", deadline_scale=PATIENT))
    _ = client.hello
    context = zmq.Context()
    stack.callback(context.destroy, 0)
    dealer = context.socket(zmq.DEALER)
    for limit in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        dealer.setsockopt(limit, round(_TIMEOUT_S * 1000))
    dealer.connect(command.echo)
    return Requests(client, dealer, instance_id=command.instance_id, seed=command.seed, chunks=command.chunks)


def _carry_out(command: Fill | Clear | Run, requests: Requests, chance: random.Random) -> Report:
    if isinstance(command, Run):
        return _run(command, getattr(requests, command.operation), chance)
    if isinstance(command, Clear):
        requests.clear()
    else:
        for number in range(command.first, command.first + command.count):
            requests.store(number, may_be_there=True)
    return Report()


def _run(command: Run, request: Callable[[int], float], chance: random.Random) -> Report:
    in_turn = command.operation == "store"
    latencies: list[float] = []
    time.sleep(max(command.at - time.monotonic(), 0.0))
    started = now = time.monotonic()
    # At least one, however slow the machine is.
    while not latencies or now < command.at + command.seconds:
        number = command.first + (len(latencies) if in_turn else chance.randrange(command.count))
        latencies.append(request(number))
        now = time.monotonic()
    return Report(latencies=latencies, took=now - started)


if __name__ == "__main__":
    main()
