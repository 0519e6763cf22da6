"""A server's side of its keeper, against a socket of the test's, and in processes that were given descriptors. The
words between a server and its keeper."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.keeper import sd_notify
from kvframework.keeper.sd_notify import Keeper, parse_note

PROGRAM = """
import fcntl, json, os, sys
from kvframework.keeper.sd_notify import Keeper
os.environ["LISTEN_PID"] = str(os.getpid())
keeper = Keeper.from_environment()
left = sorted(name for name in os.environ if name.startswith(("LISTEN", "NOTIFY")))
def is_open(fd):
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
    except OSError:
        return None
kept = keeper.kept({"arena", "journal"}) if keeper else {}
cloexec = [is_open(fd) for fd in map(int, sys.argv[1:])]
kept = {name: os.pread(fd, 9, 0).decode() for name, fd in kept.items()}
print(json.dumps({"keeper": keeper is not None, "kept": kept, "left": left, "cloexec": cloexec}))
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"\0kvf-test-{os.getpid()}-{os.urandom(8).hex()}")
        bound.settimeout(20)
        yield bound


@pytest.fixture
def keeper(listener: socket.socket) -> Iterator[Keeper]:
    with keeper_at("@" + listener.getsockname()[1:].decode()) as made:
        yield made


@contextlib.contextmanager
def keeper_at(address: str, **variables: str) -> Iterator[Keeper]:
    environ = {"NOTIFY_SOCKET": address, "OTHER": "1", **variables}
    keeper = Keeper.from_environment(environ)
    assert environ == {"OTHER": "1"}
    assert keeper is not None
    with contextlib.closing(keeper):
        yield keeper


def memfd(content: bytes) -> int:
    fd = os.memfd_create("kept")
    os.write(fd, content)
    return fd


def started_with(listener: socket.socket | None, names: str, count: int, *contents: bytes) -> dict[str, object]:
    """Start a process that has descriptors of these contents from 3 on, and the variables of a keeper."""
    fds = [memfd(content) for content in contents]
    variables = {"LISTEN_FDS": str(count), "LISTEN_FDNAMES": names, "LISTEN_PIDFDID": "1"}
    if listener is not None:
        variables["NOTIFY_SOCKET"] = "@" + listener.getsockname()[1:].decode()
    numbers = range(3, 3 + len(fds))

    def place() -> None:
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
        for number, fd in zip(numbers, moved, strict=True):
            os.dup2(fd, number)

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, numbers)],
        env={**os.environ, **variables},
        pass_fds=numbers,
        preexec_fn=place,
        capture_output=True,
        check=True,
        timeout=60,
    )
    for fd in fds:
        os.close(fd)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_without_a_keeper_there_is_none() -> None:
    for address in ("", "@", "/", "vsock:2:1", "relative"):
        assert Keeper.from_environment({"NOTIFY_SOCKET": address}) is None


def test_a_descriptor_goes_to_the_keeper(listener: socket.socket, keeper: Keeper) -> None:
    fd = memfd(b"content")
    keeper.store("kvf-arena", fd)
    payload, fds, _, _ = socket.recv_fds(listener, 4096, 4)
    assert payload == b"FDSTORE=1\nFDNAME=kvf-arena\nFDPOLL=0"
    (received,) = fds
    assert os.path.samestat(os.fstat(received), os.fstat(fd))
    os.close(received)
    os.close(fd)


def test_words_go_to_the_keeper(listener: socket.socket, keeper: Keeper) -> None:
    keeper.ready()
    keeper.stopping()
    keeper.remove("a")
    assert [listener.recv(4096) for _ in range(3)] == [b"READY=1", b"STOPPING=1", b"FDSTOREREMOVE=1\nFDNAME=a"]


def test_a_path_is_an_address_too(tmp_path: Path) -> None:
    path = tmp_path / "n"
    with keeper_at(str(path)) as keeper:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
            bound.bind(str(path))
            keeper.ready()
            assert bound.recv(100) == b"READY=1"
        with pytest.raises(ConnectionRefusedError):
            keeper.ready()
        path.unlink()
        with pytest.raises(FileNotFoundError):
            keeper.ready()


def fill(keeper: Keeper) -> None:
    for _ in range(1 << 16):
        keeper.ready()


def test_a_keeper_that_does_not_read_blocks_no_server(keeper: Keeper) -> None:
    with pytest.raises(BlockingIOError):
        fill(keeper)


def test_a_keeper_that_is_busy_for_a_moment_hears_all(
    keeper: Keeper, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd's socket is that of all its services, and the kernel may hold as few as 10 messages for it."""
    with pytest.raises(BlockingIOError):
        fill(keeper)
    monkeypatch.setattr(sd_notify, "SEND_S", 60)
    with keeper_at("@" + listener.getsockname()[1:].decode()) as other, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(other.store, "late", listener.fileno())
        names: set[str] = set()
        while "late" not in names:
            names.add(parse_note(listener.recv(100)).name)
        sending.result()


def test_an_address_that_is_too_long_is_an_error_of_the_send() -> None:
    with keeper_at("/" + "x" * 200) as keeper, pytest.raises(OSError, match="too long"):
        keeper.ready()


def test_what_was_kept_is_found_by_name(listener: socket.socket) -> None:
    found = started_with(listener, "journal:arena", 2, b"j", b"a")
    assert found == {"keeper": True, "kept": {"journal": "j", "arena": "a"}, "left": [], "cloexec": [True, True]}


def test_what_belongs_to_strangers_is_closed_and_removed(listener: socket.socket) -> None:
    found = started_with(listener, "journal:other:arena:arena", 4, b"j", b"o", b"a", b"b")
    assert found["kept"] == {"journal": "j"}
    assert found["cloexec"] == [True, None, None, None]
    removed = sorted(listener.recv(4096) for _ in range(2))
    assert removed == [b"FDSTOREREMOVE=1\nFDNAME=arena", b"FDSTOREREMOVE=1\nFDNAME=other"]


def test_descriptors_without_names_are_closed(listener: socket.socket) -> None:
    found = started_with(listener, "arena", 2, b"a", b"b")
    assert found["kept"] == {}
    assert found["cloexec"] == [None, None]


def test_a_number_without_a_descriptor_is_left_out(listener: socket.socket) -> None:
    found = started_with(listener, "arena:journal", 2, b"a")
    assert found["kept"] == {"arena": "a"}


def test_descriptors_without_a_keeper_are_closed() -> None:
    found = started_with(None, "arena", 1, b"a")
    assert found == {"keeper": False, "kept": {}, "left": [], "cloexec": [None]}


def test_descriptors_for_another_process_are_left_alone() -> None:
    with keeper_at("@x", LISTEN_PID="1", LISTEN_FDS="1", LISTEN_FDNAMES="a") as keeper:
        assert keeper.kept({"a"}) == {}


def test_what_is_not_asked_for_is_closed_with_the_keeper() -> None:
    fd = memfd(b"a")
    keeper = Keeper("@x", [("a", fd)])
    keeper.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    keeper.close()


def test_the_message_carries_one_descriptor(listener: socket.socket, keeper: Keeper) -> None:
    keeper.store("a", 0)
    _, ancillary, flags, _ = listener.recvmsg(4096, socket.CMSG_SPACE(4 * array.array("i").itemsize))
    assert flags == 0
    ((_, kind, data),) = ancillary
    assert kind == socket.SCM_RIGHTS
    assert len(data) == array.array("i").itemsize
    os.close(array.array("i", data)[0])


names = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters=":"), min_size=1, max_size=255)


@given(names)
def test_a_note_is_read_as_it_was_meant(name: str) -> None:
    assert sd_notify.parse_note(sd_notify.store_note(name)) == sd_notify.Note(name, store=True)
    assert sd_notify.parse_note(sd_notify.remove_note(name)) == sd_notify.Note(name, remove=True)
    assert len(sd_notify.store_note(name)) < sd_notify.MAX_NOTE_BYTES


@given(st.binary(max_size=200))
def test_any_bytes_have_a_meaning_or_none(payload: bytes) -> None:
    note = sd_notify.parse_note(payload)
    assert note.name == "" or sd_notify.is_name(note.name)


def test_unknown_words_mean_nothing() -> None:
    assert sd_notify.parse_note(b"STATUS=well\nREADY=1\nMAINPID=1\nX") == sd_notify.Note(ready=True)
    assert sd_notify.parse_note(b"STOPPING=1\nREADY=0") == sd_notify.Note(stopping=True)
    assert sd_notify.parse_note(b"FDSTORE=1\nFDNAME=a:b") == sd_notify.Note(store=True)


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "\u00e4", "x" * 256, "\x7f"])
def test_a_name_that_no_keeper_takes_is_refused(name: str) -> None:
    for note in (sd_notify.store_note, sd_notify.remove_note):
        with pytest.raises(ValueError, match="not a valid name of a descriptor:"):
            note(name)


@given(st.lists(names, max_size=20), st.integers(1, 1 << 22))
def test_a_process_reads_the_names_that_it_was_given(given_names: list[str], pid: int) -> None:
    variables = sd_notify.listen_variables(given_names, pid)
    assert sd_notify.listened_names(variables, pid) == given_names
    assert sd_notify.listened_names(variables, pid + 1) == []


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, []),
        ({"LISTEN_FDS": "1", "LISTEN_FDNAMES": "a"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDNAMES": "a"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "-1"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "x"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "9" * 5000}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "\u0661"}, []),
        ({"LISTEN_PID": " 7", "LISTEN_FDS": "1"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "2"}, ["", ""]),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a"}, ["", ""]),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:"}, ["a", ""]),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "\u00e4"}, [""]),
    ],
)
def test_variables_of_strangers(variables: dict[str, str], found: list[str]) -> None:
    assert sd_notify.listened_names(variables, 7) == found
