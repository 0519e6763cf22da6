"""The run of the comparison, in alternating cases. In the process that plays the engine for both; a server and a peer
are its children.

Every round measures every case once, every other round backwards (`kvframework_bench.rounds`); ratios are taken within
a round. Both contenders store from and load into the same tensors and the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from kvframework.client import RequestHashes
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.copy_reference import fastest_copy
from kvframework_bench.engine import PagedMemory, Transfers
from kvframework_bench.lmcache.figures import ECHO, OURS, PEER, LookupRow, TransferRow
from kvframework_bench.lmcache_server import LmcacheServer
from kvframework_bench.prefix import Prefixes, lookup_case, token_ids
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Case, Latency, interleave, rate_gb_s, ratio, timed
from kvframework_bench.server import RunningServer, running_server
from kvframework_bench.workload import Shape, TransferPath, transport_options
from kvframework_bench.zmq_reference import running_zmq_peer

LENGTHS = (1024, 8192, 32768)
_ARENA_BYTES = 512 << 20
_LOOKED_UP = Shape("lookup", layers=2, heads=1, head_dim=16, tokens=max(LENGTHS), target_ratio=0, rounds=0)
# Its pickles take seconds a round for big shapes.
_WIRE_ROUNDS = 3


class Contender(Protocol):
    """The interface of LMCache's side for a run; `peer.Peer` implements it."""

    @property
    def way(self) -> str: ...
    def store(self, blocks: Sequence[int]) -> float: ...
    def retrieve(self, blocks: Sequence[int]) -> float: ...
    def lookup(self, tokens: int) -> float: ...


class Setting(msgspec.Struct, frozen=True):
    """`serve` starts LMCache's server in a directory, with memory to share or without, and gives it;
    `connect` makes an instance there from the endpoint, the tensors, the model's name and the token ids."""

    serve: Callable[[Path, bool], AbstractContextManager[LmcacheServer]]
    connect: Callable[[str, dict[str, torch.Tensor], str, Sequence[int]], AbstractContextManager[Contender]]
    shapes: tuple[Shape, ...]
    rounds: int
    lookup_rounds: int
    lookup_calls: int


def compare(setting: Setting, stage: Stage) -> tuple[list[TransferRow], list[LookupRow]]:
    """Run the comparison; takes two to three minutes. Raises `BenchFailed`; `WrongBytes` if a retrieved byte, on either
    side, differs from the stored one."""
    transfers: list[TransferRow] = []
    lookups: list[LookupRow] = []
    for path in TransferPath:
        with ExitStack() as stack:
            directory = stack.enter_context(scratch())
            with stage(f"starting servers, {path.value}", 1) as advance:
                endpoint = stack.enter_context(setting.serve(directory, path is TransferPath.arena)).endpoint
                server = stack.enter_context(running_server(directory, _ARENA_BYTES))
                advance()
            for shape in setting.shapes:
                transfers += _transfers(setting, shape, path, endpoint, server, stage)
            if path is TransferPath.arena:
                lookups = _lookups(setting, endpoint, server, directory, stage)
    return transfers, lookups


def _transfers(
    setting: Setting, shape: Shape, path: TransferPath, endpoint: str, server: RunningServer, stage: Stage
) -> list[TransferRow]:
    rounds = setting.rounds if path is TransferPath.arena else min(setting.rounds, _WIRE_ROUNDS)
    with ExitStack() as stack:
        advance = stack.enter_context(stage(f"storing and retrieving, {shape.name}, {path.value}", rounds + 3))
        memory = PagedMemory(shape, shuffled=True)
        client = stack.enter_context(server.client())
        ours = stack.enter_context(Transfers(client, shape, memory, transport_options(path, PluginRegistry())))
        peer = stack.enter_context(setting.connect(endpoint, memory.kv, shape.name, range(shape.tokens)))
        advance()
        ways: dict[str, tuple[Case, Case]] = {
            OURS: (ours.store, ours.retrieve),
            PEER: (lambda: peer.store(memory.source), lambda: peer.retrieve(memory.target)),
        }

        def verify(*, store: bool) -> None:
            for stored, retrieved in ways.values():
                if store:
                    stored()
                memory.poison()
                retrieved()
                memory.verify()

        verify(store=True)
        advance()
        copy = stack.enter_context(fastest_copy(shape.nbytes))
        cases: dict[str, Case] = {"copy": copy.run}
        for name, (stored, retrieved) in ways.items():
            cases |= {f"{name} store": stored, f"{name} retrieve": retrieved}
        measured = interleave(cases, rounds=rounds, advance=advance)
        verify(store=False)
        advance()
        peer_way = peer.way
    return [
        TransferRow(
            shape=shape.name,
            nbytes=shape.nbytes,
            path=path.value,
            contender=name,
            way=peer_way if name == PEER else f"cpu_gather, {path.value}",
            rounds=rounds,
            copy_gb_s=rate_gb_s(shape.nbytes, measured["copy"]),
            store_gb_s=rate_gb_s(shape.nbytes, measured[f"{name} store"]),
            retrieve_gb_s=rate_gb_s(shape.nbytes, measured[f"{name} retrieve"]),
            store=ratio(measured["copy"], measured[f"{name} store"]),
            retrieve=ratio(measured["copy"], measured[f"{name} retrieve"]),
            verified=True,
        )
        for name in ways
    ]


def _lookups(setting: Setting, endpoint: str, server: RunningServer, directory: Path, stage: Stage) -> list[LookupRow]:
    tokens = token_ids(max(LENGTHS), known=True)
    memory = PagedMemory(_LOOKED_UP, shuffled=False)
    with ExitStack() as stack:
        echo = stack.enter_context(running_zmq_peer(directory))
        client = stack.enter_context(server.client())
        prefixes = Prefixes(client)
        prefixes.store(prefixes.request(tokens))
        scheduler = prefixes.scheduler()
        peer = stack.enter_context(setting.connect(endpoint, memory.kv, "lookup", tokens))
        peer.store(memory.source)

        def hashed(length: int) -> RequestHashes:
            return prefixes.request(tokens[:length])

        cases: dict[str, Case] = {}
        for length in LENGTHS:
            request = hashed(length)
            payload = bytes(prefixes.lookup_bytes(request))
            whole = lookup_case(scheduler, request, length)
            cases[f"{length} {ECHO}"] = lambda payload=payload: echo.echo(payload)  # type: ignore[misc]
            cases[f"{length} {OURS}"] = whole
            cases[f"{length} {OURS}, hashing included"] = (
                lambda length=length, whole=whole: timed(lambda: hashed(length)) + whole()  # type: ignore[misc]
            )
            cases[f"{length} {PEER}"] = lambda length=length: peer.lookup(length)  # type: ignore[misc]
        for case in cases.values():
            case()
        with stage("looking up", setting.lookup_rounds) as advance:
            measured = interleave(cases, rounds=setting.lookup_rounds, calls=setting.lookup_calls, advance=advance)
    rows = []
    for name, samples in measured.items():
        number, _, what = name.partition(" ")
        ratio_to_echo = ratio(samples, measured[f"{number} {ECHO}"])
        rows.append(LookupRow(int(number), what, Latency.of(samples), ratio_to_echo))
    return rows
