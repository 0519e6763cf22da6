"""`kvframework trace`: what a real server was asked is in the file, and nothing of what it was asked with."""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest

from kvf_hashers import Sha256
from kvf_plan.cli.amounts import parsed_duration
from kvf_plan.cli.trace.recording import Recorder
from kvf_plan.trace.reading import open_trace
from kvframework.api.keys import tenant_digest
from kvframework.service import recent_requests as ring
from kvframework.wire import messages as m
from tests.core.cli.command import COMMAND, environment, run
from tests.core.server.in_process import serving, serving_without
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

CHUNK = 256
SALT, TENANT, MODEL, ASKED_BY = "salt-7f3a9c-of-acme", "acme-7f3a9c", "acme/unreleased-7f3a9c", "chatcmpl-7f3a9c"
TOKENS = [123_454_321] * 4 * CHUNK
OTHERS = [987_656_789] * 3 * CHUNK
BEGUN = "recording a trace of lookups for"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(f"tenants.{TENANT}.salts=[{tenant_digest(SALT)!r}]") as server:
        yield server


@contextlib.contextmanager
def recording(
    server: ServerProcess, *files: Path, ended_by: signal.Signals = signal.SIGINT
) -> Iterator[list[subprocess.Popen[str]]]:
    """Recorders of their own, one a file; they are asked to end behind the block."""
    already = server.log.count(BEGUN)
    started = [
        subprocess.Popen(
            [*COMMAND, "trace", "record", "-o", str(file), "--endpoint", server.endpoint, "--timeout", "60"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for file in files
    ]
    try:
        # A file is made once the server records.
        wait_until(lambda: all(file.exists() for file in files), 60, "the recorders")
        wait_until(lambda: server.log.count(BEGUN) == already + 1, what="the line of the log")
        yield started
        for process in started:
            process.send_signal(ended_by)
            out, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (0, ""), out
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ended(server: ServerProcess) -> bool:
    return server.log.count("recording the trace has ended") == server.log.count(BEGUN)


Asked = tuple[Sequence[int], int, str, str]


def ask_all(client: WireClient, asked: Sequence[Asked]) -> list[tuple[int, int, int]]:
    """Look up all of `asked`: tokens, start, salt and model; every second prompt that has no start as token ids, the
    others as digests. Return the end, the start and the hit of each."""
    registered = {model: client.register(number, model_name=model) for number, model in enumerate(("tiny", MODEL), 1)}
    client.store(key_for(registered["tiny"], TOKENS[: 2 * CHUNK]), b"x")
    answers = []
    for number, (tokens, start, salt, model) in enumerate(asked):
        fields: dict[str, Any] = {"start": start, "cache_salt": salt, "model_name": model, "request_id": ASKED_BY}
        key = key_for(registered[model], tokens, **fields)
        if start or number % 2:
            key = msgspec.structs.replace(key, tokens=b"", digests=digests(tokens))
        answers.append((len(tokens), start, client.lookup(key).hit_tokens))
    return answers


def digests(tokens: Sequence[int]) -> bytes:
    return Sha256().chunk_digests(array.array("I", tokens).tobytes(), CHUNK)


ASKED: list[Asked] = [
    (TOKENS, 0, "", "tiny"),
    (TOKENS[: 2 * CHUNK], 0, "", "tiny"),
    (TOKENS, 0, "", "tiny"),
    (OTHERS, 0, "", "tiny"),
    ([*TOKENS[:CHUNK], *OTHERS], 0, "", "tiny"),
    (TOKENS, CHUNK, "", "tiny"),
    (TOKENS, 0, SALT, "tiny"),
    (TOKENS, 0, "another", "tiny"),
    (TOKENS, 0, "", MODEL),
    (TOKENS, 0, SALT, "tiny"),
]


class Recordings(NamedTuple):
    """Two recordings of the same lookups at once, and what these were answered."""

    files: tuple[Path, Path]
    answers: list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def recordings(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    folder = tmp_path_factory.mktemp("traces")
    files = folder / "first.jsonl", folder / "second.jsonl"
    with recording(server, *files), server.client() as client:
        answers = ask_all(client, ASKED)
    wait_until(lambda: ended(server), what="the end of the recording")
    return Recordings(files, answers)


def test_what_was_asked_is_read_back_and_two_traces_share_no_id(recordings: Recordings) -> None:
    traces = [list(open_trace(file)) for file in recordings.files]
    for trace in traces:
        assert [(each.tokens, each.start, each.hit_tokens) for each in trace] == recordings.answers
        assert [each.tenant for each in trace] == [0, 0, 0, 0, 0, 0, 1, 0, 0, 1]
        assert [each.model for each in trace] == [0, 0, 0, 0, 0, 0, 0, 0, 1, 0]
        assert [each.at for each in trace] == sorted(each.at for each in trace)
        assert trace[0].at == 0
        assert not any(each.lost for each in trace)
        # An id stands for one prefix of one salt and model, and the other way round.
        names: dict[object, int] = {}
        for (tokens, _, salt, model), each in zip(ASKED, trace, strict=True):
            for chunk, number in enumerate(each.chunks, 1):
                prefix = (salt, model, tuple(tokens[: chunk * CHUNK]))
                assert names.setdefault(prefix, number) == number
        assert len(set(names.values())) == len(names)
    ids = [{chunk for each in trace for chunk in each.chunks} for trace in traces]
    assert not ids[0] & ids[1]
    assert {hit for *_, hit in recordings.answers} == {0, CHUNK, 2 * CHUNK}


def test_nothing_in_the_file_names_a_token_a_text_or_somebody(recordings: Recordings) -> None:
    file = recordings.files[0]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    # As Mooncake's readers need them.
    assert [row["input_length"] - len(row["hash_ids"]) * CHUNK for row in rows] == [0] * len(rows)
    assert rows[0].keys() == {
        "kvframework_trace", "chunk_tokens", "recorded_at", "timestamp", "input_length", "output_length", "hash_ids"
    }  # fmt: skip
    assert {name for row in rows[1:] for name in row} == {
        "timestamp", "input_length", "output_length", "hash_ids", "start", "hit_length", "tenant", "model"
    }  # fmt: skip
    for secret in (SALT, TENANT, MODEL, ASKED_BY, "7f3a9c", str(TOKENS[0]), str(OTHERS[0]), "tiny"):
        assert secret not in text
    ids = {chunk for row in rows for chunk in row["hash_ids"]}
    for tokens in (TOKENS, OTHERS):
        packed = digests(tokens)
        for at in range(0, len(packed), 32):
            digest = packed[at : at + 32]
            assert digest.hex()[:12] not in text
            for order in ("little", "big"):
                for part in (digest[:8], digest[-8:]):
                    number = int.from_bytes(part, order)  # type: ignore[arg-type]
                    assert not ids & {number, number >> 1, number & ((1 << 63) - 1)}


def test_a_recorder_that_is_killed_leaves_whole_lines_and_nothing_running(
    server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "node.jsonl"
    with contextlib.suppress(AssertionError), recording(server, file) as (process,):
        with server.client() as client:
            answers = ask_all(client, ASKED)
            wait_until(lambda: file.read_text().count("\n") > len(ASKED), what="the lines")
        process.kill()
    wait_until(lambda: ended(server), what="the end of the recording")
    assert len(list(open_trace(file))) == len(answers)


def test_it_ends_by_itself_and_an_empty_trace_is_one(tmp_path: Path) -> None:
    with serving() as server:
        done = run("trace", "record", "--for", "0.1", "-o", str(tmp_path / "t.jsonl"), "--endpoint", server.endpoint)
        assert (done.returncode, done.stderr) == (0, "")
        assert (
            f"t.jsonl: no request was recorded: no engine looked up a prompt at {server.endpoint} meanwhile\n"
            in done.stdout
        )
        assert not server.service.lookups.recording.on
    assert list(open_trace(tmp_path / "t.jsonl")) == []
    assert open_trace(tmp_path / "t.jsonl").header.chunk_tokens == CHUNK


def crowd(client: WireClient, lookups: int) -> contextlib.AbstractContextManager[object]:
    """So many lookups between two questions of the recorder."""
    key = key_for(client.register(), TOKENS)
    return mock.patch.object(Recorder, "_pause", lambda *_: [client.lookup(key) for _ in range(lookups)])


def test_a_full_ring_is_said_in_the_trace_and_by_the_command(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    with serving("server.trace_memory=4KiB") as server, WireClient(server.endpoint) as client, crowd(client, 100):
        done = run("trace", "record", "--for", "0.05", "-o", str(file), "--endpoint", server.endpoint)
    requests = list(open_trace(file))
    assert requests[0].lost > 90
    lost = sum(each.lost for each in requests)
    assert (lost + len(requests)) % 100 == 0
    assert f"{lost} more could not be recorded" in done.stdout
    assert f"missing  {lost}" in " ".join(run("trace", "info", str(file)).stdout.split()).replace(
        "missing ", "missing  "
    )


def test_a_reader_that_has_stopped_ends_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "READER_S", 0.05)
    with serving() as server, WireClient(server.endpoint) as client:
        recording = server.service.lookups.recording
        client.call("TRACE", m.Trace())
        wait_until(lambda: not recording.on, what="the end of the recording")
        monkeypatch.setattr(ring, "READER_S", 1000.0)
        with WireClient(server.endpoint) as gone:
            gone.call("TRACE", m.Trace())
            assert recording.on
        wait_until(lambda: not recording.on, what="the end of the recording")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: serving("server.trace_memory=0"), "trace_memory is 0"),
        (lambda: serving_without("TRACE"), "the server is of an older release that records no traces"),
    ],
)
def test_a_server_that_records_none(tmp_path: Path, made: Any, said: str) -> None:
    with made() as server:
        done = run("trace", "record", "--for", "1", "-o", str(tmp_path / "t.jsonl"), "--endpoint", server.endpoint)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "t.jsonl").exists()


def test_a_file_that_exists_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("mine")
    with serving() as server:
        done = run("trace", "record", "--for", "0.1", "-o", str(file), "--endpoint", server.endpoint)
        wait_until(lambda: not server.service.lookups.recording.on, what="the end of the recording")
    assert done.returncode == 2
    assert "the file exists" in done.stderr
    assert file.read_text() == "mine"


def test_a_server_that_ends_leaves_what_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    with serving() as server, WireClient(server.endpoint) as client:
        key = key_for(client.register(), TOKENS)
        turns = iter([lambda: client.lookup(key), server.stop])

        def turn(_recorder: Recorder, _seconds: float) -> None:
            next(turns, time.monotonic)()

        with mock.patch.object(Recorder, "_pause", turn):
            done = run("trace", "record", "-o", str(file), "--endpoint", server.endpoint, "--timeout", "1")
    assert done.returncode == 2
    assert "error: [run." in done.stderr
    assert "t.jsonl: 1 requests in 0 s for 1024 tokens" in done.stdout
    assert len(list(open_trace(file))) == 1


@contextlib.contextmanager
def full_disk(at: int = 4096) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_recording_that_fills_the_disk_says_what_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with serving() as server, WireClient(server.endpoint) as client, crowd(client, 10), full_disk():
        done = run("trace", "record", "-o", str(path), "--endpoint", server.endpoint)
    assert done.returncode == 2
    assert "File too large" in done.stderr
    requests = len(list(open_trace(path)))
    assert requests > 0
    assert f"t.jsonl: {requests} requests in " in done.stdout
    assert "; 10 more could not be recorded" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_lookup_leaves_an_empty_trace(
    server: ServerProcess, tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "t.jsonl"
    with recording(server, file, ended_by=number) as (process,):
        pass
    assert process.returncode == 0
    assert list(open_trace(file)) == []
    wait_until(lambda: ended(server), what="the end of the recording")


def test_info_of_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    prompts = [(0, [1, 2]), (1000, [3]), (2000, [1, 2]), (3000, [1, 4])]
    file.write_text("".join(json.dumps(
        {"timestamp": at, "input_length": len(ids) * 512, "output_length": 7, "hash_ids": ids}
    ) + "\n" for at, ids in prompts))  # fmt: skip
    lines = [" ".join(line.split()) for line in run("trace", "info", str(file)).stdout.splitlines()]
    assert lines == [
        "form mooncake 512 tokens per chunk",
        "requests 4 in 3 s, 1.33 per second",
        "tokens 3584 of prompts, and 28 of answers",
        "chunks 7 4 different chunks",
        "again 42.9% of the chunks came before: the highest hit rate of any cache",
        "live set 2 chunks, 1024 tokens: the smallest L1 with the highest hit rate",
    ]
    document = json.loads(run("trace", "info", str(file), "--json").stdout)
    assert (document["live_chunks"], document["hit_tokens"], document["chunk_tokens"]) == (2, -1, 512)


def test_a_trace_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("timestamp,length\n")
    done = run("trace", "info", str(tmp_path / "t.csv"))
    assert done.returncode == 2
    assert "the trace file has an unknown format" in done.stderr


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("10m", 600),
        ("5min", 300),
        ("1.5h", 5400),
        (" 2 d", 172_800),
        ("0.5ms", 0.0005),
        ("20us", 0.00002),
    ],
)
def test_times_that_a_user_gives(text: str, seconds: float) -> None:
    assert parsed_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "0s", "-1s", "1y", "10 M", "1e3", "400d", "ten", "1.s"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time such as"):
        parsed_duration(text)
    assert run("trace", "record", "-o", os.devnull, "--for", text).returncode == 2
