"""LOOKUPs of a server that lends at the same time, beside those of the same server while a bare socket moves as many
bytes between two other processes: what lending costs besides the machine."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from kvframework.api.keys import DIGEST_BYTES, SALT_BYTES, ObjectKey
from kvframework_bench.peers.reader import Loaded, Start
from kvframework_bench.peers.transfer import free_address, sending_process
from kvframework_bench.prefix import Prefixes, lookup_case, shape_of, token_ids
from kvframework_bench.process import LineChannel, running
from kvframework_bench.rounds import Case, Latency, Rounds, interleave
from kvframework_bench.server import running_server

OBJECT_BYTES, OBJECTS = 4 << 20, 32
# Of a load, so that it goes on all the time at the rates that are measured.
_AT_ONCE = 4
_LOOKUPS = (1024, 8192)
_CALLS = 400


def lending_rows(gb_s: float, rounds: int) -> Iterator[tuple[str, ...]]:
    """Measure LOOKUPs alone, beside the bare socket and beside lending, both at `gb_s`; a row for each length. Raises
    `BenchFailed`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-")))
        token, address = folder / "token", free_address()
        token.write_text(os.urandom(16).hex())
        token.chmod(0o600)
        settings = ["l2.0.use=peers", f"l2.0.token_file={token}", f"l2.0.listen={address}"]
        server = stack.enter_context(running_server(folder, 2 * OBJECT_BYTES * OBJECTS, settings))
        prefixes = Prefixes(stack.enter_context(server.client()), shape_of(OBJECT_BYTES))
        request = prefixes.request(token_ids(OBJECTS * prefixes.chunk_tokens, known=True))
        prefixes.store(request)
        digests = request.digests(request.hashed_tokens)
        keys = [
            ObjectKey(prefixes.namespace, bytes(SALT_BYTES), 0, 0, digests[at : at + DIGEST_BYTES]).pack()
            for at in range(0, len(digests), DIGEST_BYTES)
        ][:_AT_ONCE]
        cases = {
            f"{tokens // 1024}k tokens": lookup_case(
                prefixes.scheduler(), prefixes.request(token_ids(tokens, known=True)), tokens
            )
            for tokens in _LOOKUPS
        }
        bare = stack.enter_context(sending_process(folder, OBJECT_BYTES, _AT_ONCE))
        lent = _Reader(stack, folder, "reader", Start(address, str(token), keys, OBJECT_BYTES, gb_s * 1e9))
        beside = _Reader(stack, folder, "bare", Start(bare, "", keys, OBJECT_BYTES, gb_s * 1e9))
        measured = _measured(cases, {"alone": (), "bare": (beside,), "lent": (lent,)}, (lent, beside), rounds)
        for name in cases:
            yield _row(name, {state: measured[f"{name} {state}"] for state in ("alone", "bare", "lent")}, beside, lent)


def _measured(
    cases: Mapping[str, Case],
    states: Mapping[str, tuple[_Reader, ...]],
    readers: tuple[_Reader, ...],
    rounds: int,
) -> Mapping[str, Rounds]:
    def in_state(case: Case, active: tuple[_Reader, ...]) -> float:
        for reader in readers:
            if reader not in active:
                reader.end()
        for reader in active:
            reader.begin()
        return case()

    all_cases = {
        f"{name} {state}": partial(in_state, case, active)
        for state, active in states.items()
        for name, case in cases.items()
    }
    measured = interleave(all_cases, rounds=rounds, calls=_CALLS)
    for reader in readers:
        reader.end()
    return measured


def _row(name: str, rounds: Mapping[str, Rounds], bare: _Reader, lent: _Reader) -> tuple[str, ...]:
    alone, beside, lending = (Latency.of(rounds[state]) for state in ("alone", "bare", "lent"))
    return (
        name,
        _us(alone),
        f"{_us(beside)} ({bare.gb_s():.2f} GB/s)",
        f"{_us(lending)} ({lent.gb_s():.2f} GB/s)",
        f"{lending.p99_us / alone.p99_us:.1f}",
        f"{lending.p99_us / beside.p99_us:.1f}",
    )


def _us(latency: Latency) -> str:
    return f"{latency.p50_us:,.0f}, {latency.p99_us:,.0f}"


class _Reader:
    """The other process. Loads between `begin` and `end`, both of which do nothing twice."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, start: Start) -> None:
        own = folder / name
        own.mkdir()
        command = [sys.executable, "-m", "kvframework_bench.peers.reader"]
        child = stack.enter_context(running(name, command, own, piped=True))
        self._channel = LineChannel(child)
        self._loads: list[Loaded] = []
        self._loading = False
        self._channel.send(msgspec.json.encode(start))
        self._receive()

    def begin(self) -> None:
        if not self._loading:
            self._channel.send(b"go")
            self._receive()
            self._loading = True

    def end(self) -> None:
        if self._loading:
            self._loading = False
            self._channel.send(b"stop")
            self._loads.append(self._receive())

    def gb_s(self) -> float:
        return sum(each.nbytes for each in self._loads) / sum(each.seconds for each in self._loads) / 1e9

    def _receive(self) -> Loaded:
        return msgspec.json.decode(self._channel.receive(), type=Loaded)
