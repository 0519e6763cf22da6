"""How a server ends: SIGINT and SIGTERM with work in flight, twice, too early, and against what does not end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvframework import errors
from kvframework.cli.signals import ServerSignals
from kvframework.wire import messages as m
from tests.core.cli.command import COMMAND, environment, run
from tests.core.registry.fake_distributions import install
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

SIGNALS = [signal.SIGINT, signal.SIGTERM]
LIMIT_S = 20.0
OBJECTS = 40


def with_redis(redis: RedisServer) -> ServerProcess:
    """Its timeout is far beyond the time that a server has for its end."""
    return ServerProcess("l2.0.use=redis", f"l2.0.url={redis.url}", "l2.0.timeout_s=60")


def fill(client: WireClient, instance_id: int = 1) -> None:
    tokens = range(instance_id, instance_id + 256 * OBJECTS)
    client.store(key_for(client.register(instance_id), tokens), b"x", instance_id)


def objects(server: ServerProcess) -> int:
    with server.client() as client:
        return int(client.status()["l1"]["objects"])


def files(server: ServerProcess) -> list[str]:
    return sorted(path.name for path in server.log_file.parent.iterdir() if path != server.log_file)


def ends(server: ServerProcess, number: int) -> tuple[int, float]:
    """Sends a signal: the exit status, and the seconds until it was there."""
    assert server.process is not None
    started = time.monotonic()
    server.process.send_signal(number)
    status = server.process.wait(60)
    server.process = None
    return status, time.monotonic() - started


@pytest.mark.parametrize("number", SIGNALS)
def test_an_idle_server_ends_at_once_and_leaves_nothing(number: int) -> None:
    with ServerProcess() as server, server.client():
        assert files(server) == ["s.sock", "s.sock.live", "s.sock.lock"]
        status, seconds = ends(server, number)
        assert status == 0
        assert seconds < LIMIT_S
        assert files(server) == []
        assert "Traceback" not in server.log
        server.start()


@pytest.mark.redis
@pytest.mark.parametrize("number", SIGNALS)
def test_a_call_that_a_stalled_l2_holds_is_answered_and_the_server_ends(redis: RedisServer, number: int) -> None:
    with with_redis(redis) as server, server.client() as client:
        redis.sigstop()
        fill(client)
        call = client.send("CLEAR", m.Clear(l2=True))
        wait_until(lambda: objects(server) < OBJECTS, what="the call to come as far as L2")
        fill(client, 2)
        status, seconds = ends(server, number)
        assert status == 0
        assert seconds < LIMIT_S
        with pytest.raises(errors.ShuttingDown):
            client.answer(call, "CLEAR")
        assert files(server) == []
        assert "objects were not written to redis" in server.log
        assert "Traceback" not in server.log


@pytest.mark.redis
def test_what_waits_for_l2_is_written_before_the_end(redis: RedisServer) -> None:
    with with_redis(redis) as server:
        redis.sigstop()
        with server.client() as client:
            fill(client)
        server.process.terminate()
        wait_until(lambda: not files(server), what="the end of serving")
        assert server.process.poll() is None, "it waits for Redis"
        redis.sigcont()
        assert server.process.wait(LIMIT_S) == 0
        with redis.client() as look:
            assert look.dbsize() == OBJECTS + 1, "the objects and the namespace's record"
        assert "were not written" not in server.log


@pytest.mark.redis
@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_at_once_and_leaves_nothing_either(redis: RedisServer, number: int) -> None:
    with with_redis(redis) as server, server.client() as client:
        redis.sigstop()
        fill(client)
        client.send("CLEAR", m.Clear(l2=True))
        client.call("NOOP", m.Empty())
        server.process.send_signal(number)
        wait_until(lambda: "stopping: 1 requests in progress" in server.log, what="the first signal's effect")
        assert "s.sock.lock" in files(server), "requests in flight are still waited for"
        status, _ = ends(server, number)
        assert status == 128 + number
        assert files(server) == []


STUCK = """
    import pathlib, threading, time
    from kvf_pinned.memory import MemfdArena
    from kvf_pinned.nodes import PinnedOptions
    from kvframework.api.eviction import EvictionProvider
    from kvframework.api.memory import MemoryProvider
    from kvframework.api.requests import Handler, Message, RequestSpec, RequestsProvider, hookimpl
    from kvframework.api.transport import ServerTransport
    from kvframework.api.tier import Outcome, Tier, TierProvider
    from kvframework.api.transport import TransportProvider
    def mark(): pathlib.Path(MARKER).touch()
    class Stuck(Message, frozen=True):
        pass
    def stick(_client, _payload, _buffers):
        mark()
        time.sleep(60)
    def create_requests(options, services):
        return [Handler(RequestSpec("stuck.REQUEST", Stuck, Stuck), stick, pooled=True)]
    @hookimpl
    def kvf_request_handlers():
        return [RequestsProvider(name="stuck", summary="", create=create_requests)]
    def slow(options):
        mark()
        time.sleep(60)
    def deaf(options):
        mark()
        try:
            time.sleep(60)
        except BaseException:
            pass
        from kvf_eviction import Lru
        return Lru()
    class HangsAtItsEnd(Tier):
        name = "hangs"
        def __init__(self, options, context): pass
        def contains(self, keys, *, deadline): return [Outcome.MISSING] * len(keys)
        def get_into(self, keys, parts, *, deadline): return [Outcome.MISSING] * len(keys)
        def put(self, keys, parts, *, deadline):
            mark()
            while True:
                time.sleep(60)
        def delete(self, keys, *, deadline): return [Outcome.MISSING] * len(keys)
        def ping(self, *, deadline): pass
        def close(self): pass
    class NeverCloses(HangsAtItsEnd):
        name = "open"
        def put(self, keys, parts, *, deadline): return [Outcome.STORED] * len(keys)
        def close(self): time.sleep(60)
    class NeverClosed(ServerTransport):
        def open(self, client, layout, desc, handles): raise NotImplementedError
        def close(self): time.sleep(60)
    class LargeArena(MemfdArena):
        def close(self): time.sleep(60)
        def leave(self): self.close()
    def create_server(options, arena_fd): return NeverClosed()
    def create_arena(options, context): return LargeArena(options.capacity)
    @hookimpl
    def kvf_transports():
        return [TransportProvider(name="open", summary="", create=create_server, create_server=create_server)]
    @hookimpl
    def kvf_eviction_policies():
        return [EvictionProvider(name=f.__name__, summary="", create=f) for f in (slow, deaf)]
    @hookimpl
    def kvf_tiers():
        return [TierProvider(name=t.name, summary="", create=t) for t in (HangsAtItsEnd, NeverCloses)]
    @hookimpl
    def kvf_memories():
        return [MemoryProvider(name="large", summary="", options=PinnedOptions, create=create_arena)]
"""


@pytest.fixture
def marker(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs plugins that touch this file and then do not end."""
    path = tmp_path / "stuck"
    names = (
        "requests.stuck",
        "eviction.slow",
        "eviction.deaf",
        "tier.hangs",
        "tier.open",
        "memory.large",
        "transport.open",
    )
    install(
        site, "acme-stuck", dict.fromkeys(names, "acme_stuck"), {"acme_stuck": STUCK.replace("MARKER", repr(str(path)))}
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    return path


def test_a_handler_that_never_ends_does_not_keep_the_server(marker: Path) -> None:
    with ServerProcess("requests.0.use=stuck") as server, server.client() as client:
        client.send("stuck.REQUEST", m.Empty())
        wait_until(marker.exists)
        status, seconds = ends(server, signal.SIGTERM)
        assert status == 0
        assert seconds < LIMIT_S
        _, kind, error = client.receive()
        assert kind == "ERROR"
        assert isinstance(error, errors.ShuttingDown)
        assert "ended without waiting for these threads: kvf-worker" in server.log
        assert files(server) == []


def test_a_tier_that_never_ends_does_not_keep_the_server(marker: Path) -> None:
    with ServerProcess("l2.0.use=hangs") as server, server.client() as client:
        fill(client)
        wait_until(marker.exists)
        status, seconds = ends(server, signal.SIGINT)
        assert status == 0
        assert seconds < LIMIT_S
        assert "the arena stays mapped, because a call of a tier still runs after its deadline" in server.log
        assert files(server) == []


ENDLESS = {
    "tier": ("l2.0.use=open",),
    "transport": ("transport.0.use=cpu_gather", "transport.1.use=open"),
    "arena": ("l1.use=large",),
}


@pytest.mark.parametrize("settings", [*ENDLESS.values(), sum(ENDLESS.values(), ())], ids=[*ENDLESS, "all"])
def test_what_never_closes_does_not_keep_the_server(marker: Path, settings: tuple[str, ...]) -> None:
    with ServerProcess(*settings) as server, server.client() as client:
        fill(client)
        status, seconds = ends(server, signal.SIGTERM)
        assert status == 0
        assert seconds < LIMIT_S
        assert files(server) == []


@contextmanager
def starting(tmp_path: Path, policy: str) -> Iterator[subprocess.Popen[str]]:
    """A server whose start does not get beyond its eviction policy."""
    settings = (f"server.endpoint=ipc://{tmp_path}/s.sock", "l1.capacity=16MiB", f"l1.eviction.use={policy}")
    flags = [part for setting in settings for part in ("--set", setting)]
    variables = environment(Path(os.environ["PYTHONPATH"]))
    process = subprocess.Popen([*COMMAND, "serve", *flags], env=variables, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("policy", ["slow", "deaf"])
def test_a_signal_before_the_server_is_bound_ends_it_cleanly(
    marker: Path, tmp_path: Path, number: int, policy: str
) -> None:
    with starting(tmp_path, policy) as process:
        wait_until(marker.exists)
        process.send_signal(number)
        _, log = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, log
        assert "Traceback" not in log
        assert "error" not in log.lower()
    assert not list(tmp_path.glob("s.sock*"))


@contextmanager
def hanging(deadline_s: float) -> Iterator[subprocess.Popen[str]]:
    """A main thread that takes no notice of signals; `abandon` says that it was called."""
    # Not print: a signal that comes in mid-print may not print itself.
    script = (
        "import os, time\n"
        "from kvframework.cli.signals import ServerSignals\n"
        f"with ServerSignals(deadline_s={deadline_s}) as signals:\n"
        "    signals.serve(lambda since: os.write(1, b'asked\\n'), lambda: os.write(1, b'abandoned\\n'))\n"
        "    os.write(1, b'ready\\n')\n"
        "    while True: time.sleep(60)\n"
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **streams) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_main_thread_that_hangs_is_ended_by_the_deadline() -> None:
    with hanging(deadline_s=0.2) as process:
        process.terminate()
        out, err = process.communicate(timeout=240)
        assert (process.returncode, out) == (1, "asked\nabandoned\n"), err
        assert "did not stop in time" in err


def test_the_end_counts_from_the_signal_even_if_the_main_thread_is_busy() -> None:
    script = (
        "import hashlib, os, threading, time\n"
        "from kvframework.cli.signals import ServerSignals\n"
        "with ServerSignals(deadline_s=240) as signals:\n"
        "    signals.serve(lambda since: os.write(1, b'%d' % (time.monotonic() - since > 0.2)), lambda: None)\n"
        "    threading.Timer(0.1, os.write, (1, b'ready\\n')).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 3_000_000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.communicate(timeout=240)[0] == "1"


def test_a_main_thread_that_hangs_is_ended_by_a_second_signal() -> None:
    with hanging(deadline_s=60) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked\n"
        process.terminate()
        assert process.communicate(timeout=240) == ("abandoned\n", "")
        assert process.returncode == 128 + signal.SIGTERM


def failing(*, after_a_signal: bool) -> None:
    """Passes through `ServerSignals` with an error, as `serve` does with a configuration that it refuses."""
    with ServerSignals(deadline_s=60) as signals:
        assert watchers()
        signals.serve(lambda _since: None, lambda: None)
        if after_a_signal:
            signal.raise_signal(signal.SIGTERM)
            assert signals.requested
        raise ValueError("an error of serve")


@pytest.mark.parametrize("after_a_signal", [False, True])
def test_an_error_leaves_nothing_armed(after_a_signal: bool) -> None:
    """Neither a thread that would end this process at its next signal, nor a handler, nor a descriptor."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.raises(ValueError, match="of serve"):
        failing(after_a_signal=after_a_signal)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not watchers()


def test_a_serve_that_is_refused_in_this_process_does_not_end_it_later(tmp_path: Path) -> None:
    assert run("serve", "--config", str(tmp_path / "missing.toml")).returncode != 0
    assert not watchers()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvf-signals"]
