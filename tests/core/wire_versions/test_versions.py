"""The row "an older or newer client" of what the server survives, with real processes on both sides."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvframework.errors import InvalidPayload, VersionMismatch
from kvframework.wire import messages as m
from tests.core.wire_versions.other_release import Release
from tests.core.wire_versions.peers import OtherEngine, OtherServer
from tests.support.waiting import wait_until

TODAY = Release()
NEWER = Release(versions=(1, 3), adds_fields=True)
NEWER_ONLY = Release(versions=(2, 3), adds_fields=True)


def refusals(server: OtherServer, pid: int, what: str) -> list[dict[str, Any]]:
    return [each for each in server.status()["messaging"]["refused"] if (each["pid"], each["what"]) == (pid, what)]


@pytest.mark.parametrize(("server_is", "engine_is"), [(TODAY, NEWER), (NEWER, TODAY), (NEWER, NEWER)])
def test_those_who_share_a_version_work_together(server_is: Release, engine_is: Release) -> None:
    with OtherServer(server_is) as server, OtherEngine(server.endpoint, engine_is) as engine:
        engine.wait_hit()
        status = server.status()
        session = next(each for each in status["messaging"]["sessions"] if each["pid"] == engine.pid)
        assert session["version"] == min(server_is.versions[1], engine_is.versions[1])
        assert session["client_version"]
        assert not status["messaging"]["refused"]
        assert "WARNING" not in engine.log
        assert "ERROR" not in engine.log


@pytest.mark.parametrize(("server_is", "engine_is"), [(TODAY, NEWER_ONLY), (NEWER_ONLY, TODAY)])
@pytest.mark.timeout(300)
def test_those_who_share_none_are_refused_everywhere_until_one_is_replaced(
    server_is: Release, engine_is: Release
) -> None:
    spoken = "{} to {}".format(*engine_is.versions)
    fact = f"the client speaks protocol versions {spoken}"
    with OtherServer(server_is) as server, OtherEngine(server.endpoint, engine_is) as engine:
        engine.wait_log("cannot be used: [protocol.version] " + fact)
        engine.wait_log("expected: {} to {}".format(*server_is.versions))
        engine.wait_log(fact, times=2)  # a log is read long after it began
        assert engine.seen["hit"] == 0
        assert engine.seen["error"] == "protocol.version"

        told = [line for line in server.log.splitlines() if fact in line]
        assert told
        assert f"'engine of another release' (process {engine.pid}" in told[0]
        if server_is is TODAY:  # else the command is refused as well
            [refused] = refusals(server, engine.pid, "HELLO")
            assert (refused["client"], refused["versions"], refused["code"]) == (
                "engine of another release",
                spoken,
                "protocol.version",
            )
            assert refused["count"] > len(told), "not a line each time that it comes again"
            assert refused["ago_s"] < 10
            assert server.status()["messaging"]["counters"]["hello_refused"] == refused["count"]
            assert fact in " ".join(server.status_command().split())
        else:
            assert "[protocol.version]" in server.status_command()
        server.stop()
        server.release = engine_is
        server.start()
        engine.wait_hit()


@pytest.mark.parametrize(
    ("release", "code", "fact"),
    [
        (Release(omits=("transports",)), "protocol.payload", "missing required field `transports`"),
        (Release(fingerprint="sha256/2"), "protocol.version", "the server uses the hasher sha256/2"),
    ],
)
def test_an_engine_that_cannot_use_a_server_tells_the_server_why(release: Release, code: str, fact: str) -> None:
    with OtherServer(release) as server, OtherEngine(server.endpoint, TODAY) as engine:
        engine.wait_log(f"cannot be used: [{code}]")
        wait_until(lambda: f"refuses this server: [{code}]" in server.log, what="a word in the server's log")
        assert fact in engine.log
        assert fact in server.log
        assert engine.seen.get("hit", 0) == 0
        status = server.status()
        [refused] = [each for each in status["messaging"]["refused"] if each["pid"] == engine.pid]
        assert (refused["what"], refused["code"]) == ("server", code)
        assert fact in refused["reason"]
        assert status["messaging"]["counters"]["server_refused"] >= refused["count"]


def test_a_request_that_the_server_does_not_know_is_told_on_both_sides() -> None:
    with OtherServer(Release(lacks=("LOOKUP",))) as server, OtherEngine(server.endpoint, NEWER) as engine:
        engine.wait_log("LOOKUP failed and counts as a miss: [protocol.unknown_request]")
        wait_until(lambda: engine.seen.get("failures", 0) > 2, what="failures are counted")
        assert "was refused 'LOOKUP': [protocol.unknown_request]" in server.log
        [refused] = refusals(server, engine.pid, "LOOKUP")
        assert refused["count"] > 2
        assert server.status()["messaging"]["counters"]["errors.protocol.unknown_request"] > 2


def test_an_error_that_nobody_knows_yet_is_a_miss_with_its_text() -> None:
    strange = Release(versions=(1, 2), lacks=("LOOKUP",), error_code="tomorrow.strange")
    with OtherServer(strange) as server, OtherEngine(server.endpoint, TODAY) as engine:
        engine.wait_log("LOOKUP failed and counts as a miss: [remote]")
        engine.wait_log("(tomorrow.strange)")
        wait_until(lambda: engine.seen.get("failures", 0) > 2, what="failures are counted")
        assert engine.seen["usable"]


def test_a_hello_that_cannot_be_read_is_told_with_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange(m.Message, frozen=True):
        client: str
        session: int  # once, it was bytes

    with OtherServer(TODAY) as server, server.client(hello=False) as client:
        with pytest.raises(InvalidPayload):
            client.call("HELLO", Strange("from far away", 7))
        client.say_hello()
        status = client.status()
        assert status["messaging"]["counters"]["hello_refused"] == 1
        [refused] = status["messaging"]["refused"]
        assert (refused["client"], refused["what"], refused["code"]) == ("from far away", "HELLO", "protocol.payload")
        assert "'from far away' (process 0) was refused: [protocol.payload]" in server.log


def test_who_does_not_tell_its_versions_speaks_the_first() -> None:
    """Defaults are not sent, so they must never follow the version."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(m.Hello("c", 1))) == {"client": "c", "pid": 1}
    with OtherServer(NEWER) as server, server.client() as client:
        assert client.hello.version == 1


def test_a_client_that_does_not_tell_is_refused_by_a_server_without_the_first() -> None:
    with (
        OtherServer(NEWER_ONLY) as server,
        server.client(hello=False) as client,
        pytest.raises(VersionMismatch, match="versions 1 to 1"),
    ):
        client.say_hello()
