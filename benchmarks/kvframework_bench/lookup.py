"""`kvframework bench lookup`: how long a scheduler waits for an answer, next to an echo of the same size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from kvframework.api.keys import TOKEN_BYTES
from kvframework.client import KVClient, RequestHashes
from kvframework.wire import messages as m
from kvframework.wire.frames import join
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.document import HashFigures, LookupFigures, RequestFigures
from kvframework_bench.prefix import Prefixes, lookup_case, token_ids
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Case, Latency, interleave, ratio, timed
from kvframework_bench.server import running_server
from kvframework_bench.zmq_reference import ZmqPeer, running_zmq_peer

# Tokens of a lookup, and the ratio to the bare echo that is aimed at.
_LENGTHS = {1024: 2.0, 8192: 3.0, 32768: 4.0}
_ARENA_BYTES = 64 << 20


def bench_lookup(*, quick: bool, stage: Stage = no_progress) -> LookupFigures:
    """Takes a quarter of a minute (`quick`: about two seconds). Raises `BenchFailed`, also when an answer is wrong."""
    rounds, calls = (2, 5) if quick else (50, 20)
    with (
        scratch() as directory,
        running_zmq_peer(directory) as peer,
        running_server(directory, _ARENA_BYTES) as server,
        server.client() as client,
    ):
        requests = _requests(client, peer, rounds, calls, stage)
        hashing = _hashing(client, 2 if quick else 30, stage)
    return LookupFigures(requests, hashing)


def _requests(client: KVClient, peer: ZmqPeer, rounds: int, calls: int, stage: Stage) -> list[RequestFigures]:
    prefixes = Prefixes(client)
    scheduler = prefixes.scheduler()
    longest = max(_LENGTHS)
    prefixes.store(prefixes.request(token_ids(longest, known=True)))
    rows: list[tuple[str, int, int, float]] = [("NOOP", 0, _noop_bytes(), 0.0)]
    cases: dict[str, Case] = {"NOOP": lambda: timed(lambda: client.request("NOOP", m.Empty(), m.Empty))}
    for tokens, target_ratio in _LENGTHS.items():
        for word, known in (("hit", True), ("miss", False)):
            request = prefixes.request(token_ids(tokens, known=known))
            name = f"LOOKUP {tokens // 1024}k, {word}"
            rows.append((name, tokens, prefixes.lookup_bytes(request), target_ratio))
            cases[name] = lookup_case(scheduler, request, tokens if known else 0)
    for _, _, nbytes, _ in rows:
        cases.setdefault(_echo_name(nbytes), _echo(peer, nbytes))
    for case in cases.values():
        case()
    with stage("looking up", rounds) as advance:
        measured = interleave(cases, rounds=rounds, calls=calls, advance=advance)
    return [
        RequestFigures(
            name,
            tokens,
            nbytes,
            Latency.of(measured[name]),
            Latency.of(measured[_echo_name(nbytes)]),
            ratio(measured[name], measured[_echo_name(nbytes)]),
            target_ratio,
        )
        for name, tokens, nbytes, target_ratio in rows
    ]


def _hashing(client: KVClient, rounds: int, stage: Stage) -> list[HashFigures]:
    figures = []
    with stage("hashing", rounds * len(_LENGTHS)) as advance:
        for length in _LENGTHS:
            cases = _hash_cases(client, token_ids(length, known=True))
            measured = interleave(cases, rounds=rounds, calls=3, advance=advance)
            bare = measured.get("bare")
            figures.append(
                HashFigures(
                    length,
                    client.hasher.fingerprint,
                    Latency.of(measured["request"]),
                    ratio(measured["request"], bare) if bare else None,
                    Latency.of(measured["packed"]),
                    ratio(measured["packed"], bare) if bare else None,
                )
            )
    return figures


def _hash_cases(client: KVClient, tokens: list[int]) -> dict[str, Case]:
    hasher, chunk_tokens = client.hasher, client.chunk_size
    data = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in tokens)
    cases: dict[str, Case] = {
        "request": lambda: timed(lambda: RequestHashes(hasher, chunk_tokens, request_id="bench").extend(tokens)),
        "packed": lambda: timed(lambda: hasher.chunk_digests(data, chunk_tokens)),
    }
    bare = _bare_hash(hasher.name)
    if bare is not None:
        cases["bare"] = lambda: timed(lambda: bare(data))
    return cases


def _bare_hash(name: str) -> Callable[[bytes], object] | None:
    """One pass of the hash that a hasher is named after, if the standard library has it."""
    if name not in hashlib.algorithms_available:
        return None
    return lambda data: hashlib.new(name, data).digest()


def _noop_bytes() -> int:
    return sum(len(frame) for frame in join(1, "NOOP", m.Empty()))


def _echo(peer: ZmqPeer, nbytes: int) -> Case:
    payload = bytes(nbytes)
    return lambda: peer.echo(payload)


def _echo_name(nbytes: int) -> str:
    return f"echo of {nbytes} bytes"
