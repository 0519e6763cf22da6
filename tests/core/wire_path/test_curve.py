"""Who comes in over TCP, and who does not: real servers, real handshakes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvframework.client import CurveKeys, KVClient
from kvframework.config.load import load_config
from kvframework.errors import CurveKeyError, ServerGone
from kvframework.messaging import curve
from kvframework.server import Server
from kvframework.wire import messages as m
from tests.core.cli.command import run, run_process
from tests.core.wire_path.remote import Keys, RemoteServer, remote_server
from tests.support.ports import free_port
from tests.support.server_process import fixture_of
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

server = fixture_of(remote_server, scope="module")


def refused(server: RemoteServer) -> int:
    with server.local() as watcher:
        return int(watcher.status()["messaging"]["counters"].get("curve_refused", 0))


def sessions(server: RemoteServer) -> int:
    with server.local() as watcher:
        return len(watcher.status()["messaging"]["sessions"])


def test_a_client_with_admitted_keys_is_served(server: RemoteServer) -> None:
    with server.connect() as client:
        assert client.wait_up(20)
        assert client.request("PING", m.Empty(), m.Pong).boot_id == client.boot_id
        with server.local() as watcher:
            local = [session["local"] for session in watcher.status()["messaging"]["sessions"]]
        assert sorted(local) == [False, True]


def test_without_keys_nothing_is_ever_answered(server: RemoteServer) -> None:
    before = sessions(server)
    with pytest.raises(TimeoutError):
        WireClient(server.tcp, timeout=1.0).close()
    with KVClient(server.tcp, connect_timeout_s=0.1) as client:
        wait_until(lambda: client._connection.last_error is not None)
        with pytest.raises(ServerGone, match="the server did not answer HELLO") as caught:
            _ = client.hello
        assert "kvframework keys" in caught.value.hint
    assert sessions(server) == before
    with server.connect() as admitted:
        assert admitted.wait_up(20)


def test_a_client_that_is_not_admitted_is_counted_and_never_answered(server: RemoteServer) -> None:
    assert server.keys is not None
    before = refused(server)
    stranger = server.keys.add("stranger", admitted=False)
    with server.connect() as admitted, KVClient(server.tcp, curve=stranger, connect_timeout_s=0.1) as client:
        assert admitted.wait_up(20)
        wait_until(lambda: client._connection.last_error is not None)
        with pytest.raises(ServerGone) as caught:
            _ = client.hello
        assert "that the server admits" in caught.value.hint
        assert admitted.request("PING", m.Empty(), m.Pong)
    wait_until(lambda: refused(server) > before)


def test_a_client_does_not_talk_to_another_server(server: RemoteServer, tmp_path: Path) -> None:
    assert server.keys is not None
    other = Keys(tmp_path / "other")
    wrong = CurveKeys(other.directory / "server.public", server.keys.of("client").client_secret)
    with KVClient(server.tcp, curve=wrong, deadline_scale=0.1) as client:
        wait_until(lambda: "the server did not answer HELLO" in str(client._connection.last_error))
    with server.connect() as admitted:
        assert admitted.wait_up(20)


def test_clients_are_added_and_removed_while_the_server_runs(server: RemoteServer) -> None:
    keys = server.keys.add("late")
    with server.connect("late") as client:
        assert client.wait_up(20)
    (server.keys.clients / "late.public").unlink()
    before = refused(server)
    with KVClient(server.tcp, curve=keys) as client:
        wait_until(lambda: refused(server) > before)
        assert not client.usable
    (server.keys.clients / "broken.public").write_text("nonsense")
    with server.connect() as client:
        assert client.wait_up(20), "one bad file keeps out only its owner"
    (server.keys.clients / "broken.public").unlink()


def test_the_environment_names_the_keys(server: RemoteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = server.keys.of("client")
    monkeypatch.setenv(curve.SERVER_VARIABLE, str(keys.server_public))
    monkeypatch.setenv(curve.SECRET_VARIABLE, str(keys.client_secret))
    with KVClient(server.tcp) as client:
        assert client.wait_up(20)
    with KVClient(server.process.endpoint) as client:
        assert client.wait_up(20), "keys are for tcp:// only"
    shown = run("status", "--endpoint", server.tcp)
    assert shown.returncode == 0, shown.stderr
    monkeypatch.delenv(curve.SECRET_VARIABLE)
    with pytest.raises(CurveKeyError, match=curve.SECRET_VARIABLE):
        KVClient(server.tcp)


def test_a_server_that_listens_on_tcp_alone() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    server = Server(load_config(None, [f"server.endpoint={endpoint}", "server.insecure=true", "l1.capacity=1MiB"]))
    server.bind()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with KVClient(endpoint) as client:
            assert client.wait_up(20)
            assert client.hello.liveness == ""
    finally:
        server.stop()
        thread.join(60)


def test_plain_tcp_has_to_be_asked_for(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    plain = ("serve", "--set", "server.tcp=tcp://127.0.0.1:1", "--set", f"server.endpoint=ipc://{tmp_path}/s")
    done = run_process(*plain)
    assert done.returncode == 2
    for word in ("[config.endpoint]", "[server.curve]", "insecure = true", "kvframework keys new"):
        assert word in done.stderr
    both = [argument for setting in keys.settings for argument in ("--set", setting)]
    done = run_process(*plain, *both, "--set", "server.insecure=true")
    assert (done.returncode, "contradicts" in done.stderr) == (2, True)
    done = run_process(*plain, *both, "--set", f"server.curve.secret_key={tmp_path}/none")
    assert (done.returncode, "[config.curve_key]" in done.stderr) == (2, True)


def test_config_show_names_the_key_files(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    settings = [argument for setting in keys.settings for argument in ("--set", setting)]
    shown = run("config", "show", "--set", "server.tcp=tcp://0.0.0.0:5555", *settings)
    assert shown.returncode == 0, shown.stderr
    assert "[server.curve]" in shown.stdout
    assert f'clients = "{keys.clients}"' in shown.stdout


def test_keys_new_makes_what_server_and_client_need(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    done = run("keys", "new", str(directory))
    assert done.returncode == 0, done.stderr
    for secret in ("server.secret", "client.secret"):
        assert (directory / secret).stat().st_mode & 0o777 == 0o600
        assert curve.read_secret(directory / secret)
        assert curve.read_secret(directory / secret).decode() not in done.stdout
    assert f'secret_key = "{directory}/server.secret"' in done.stdout
    assert curve.AdmittedClients(directory / "clients")
    before = (directory / "server.secret").read_bytes()
    again = run("keys", "new", str(directory))
    assert again.returncode == 2
    assert "the file exists" in again.stderr
    assert (directory / "server.secret").read_bytes() == before
    assert run("keys", "add", str(directory), "gpu-7").returncode == 0
    assert curve.read_public(directory / "clients" / "gpu-7.public")
    assert run("keys", "add", str(directory), "gpu-7").returncode == 2
    for name in ("../x", "server", "", "a/b"):
        assert run("keys", "add", str(directory), name).returncode == 2
    assert run("keys", "add", str(tmp_path / "none"), "x").returncode == 2


def test_key_files_that_cannot_be_meant(tmp_path: Path) -> None:
    curve.write_curve_pair(tmp_path / "a.secret", tmp_path / "a.public")
    with pytest.raises(CurveKeyError, match="a curve-secret file"):
        curve.read_public(tmp_path / "a.secret")
    os.chmod(tmp_path / "a.public", 0o600)
    with pytest.raises(CurveKeyError, match="a curve-public file"):
        curve.read_secret(tmp_path / "a.public")
    for mode in (0o640, 0o604, 0o660):
        os.chmod(tmp_path / "a.secret", mode)
        with pytest.raises(CurveKeyError, match="other users may use the secret key:") as caught:
            curve.read_secret(tmp_path / "a.secret")
        assert "chmod 600" in caught.value.hint
    bad = tmp_path / "bad"
    for content in (b"", b"curve-public", b"curve-public short", b"curve-public " + b"\xff" * 40, b"x" * 10_000):
        bad.write_bytes(content)
        with pytest.raises(CurveKeyError, match="no CURVE key"):
            curve.read_public(bad)
    with pytest.raises(CurveKeyError, match="cannot be read"):
        curve.read_public(tmp_path / "none")
    with pytest.raises(CurveKeyError):
        curve.read_public(tmp_path)
    with pytest.raises(CurveKeyError, match="cannot be read"):
        curve.AdmittedClients(tmp_path / "none")


def test_no_secret_is_ever_shown(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    loaded = keys.of("client").load()
    assert loaded.secret.decode() not in repr(loaded)
    assert curve.keys_for("ipc:///x", keys.of("client")) is None
