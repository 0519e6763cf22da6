"""What a client says of itself reaches logs and terminals, where it must stay what it is: words."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from kvf_devices import Allocation
from kvf_devices.handles import ExportedAllocation, ExportedView, read_handles
from kvframework import errors
from kvframework.api.layout import KVLayout, LayerGroup, MemoryLayoutDesc, canonical_desc
from kvframework.wire import messages as m
from tests.core.cli.command import run
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until

FORGED = "engine\n2026-01-01 00:00:00 ERROR kvframework: all is lost \x1b]0;owned\x07\x9b31m\u202e"


server = server_fixture("server.session_timeout_s=0.5", scope="module")


def assert_harmless(text: str) -> None:
    assert not any(line.startswith("2026-01-01") for line in text.splitlines())
    assert not set(text) & set("\x1b\x07\x9b\u202e")


def test_a_name_forges_no_line_and_moves_no_cursor(server: ServerProcess) -> None:
    with server.client(hello=False) as client:
        reply = client.call("HELLO", m.Hello(FORGED, 1))
        assert reply.session
        shown = [session["name"] for session in client.status()["messaging"]["sessions"]]
        assert any("all is lost" in name for name in shown)
        for name in shown:
            assert_harmless(name)
    # Without a liveness socket it is silent from now on, which is told by its name.
    wait_until(lambda: ", which sent nothing for too long" in server.log)
    assert_harmless(server.log)


def test_a_refused_client_forges_nothing_either(server: ServerProcess) -> None:
    with server.client(hello=False) as client, pytest.raises(errors.VersionMismatch):
        client.call("HELLO", m.Hello(FORGED, 1, hasher=FORGED))
    wait_until(lambda: "was refused" in server.log)
    assert_harmless(server.log)
    shown = run("status", "--endpoint", server.endpoint)
    assert shown.returncode in (0, 1), shown.stderr
    assert_harmless(shown.stdout)


def test_codes_of_clients_forge_nothing_in_the_document_nor_in_a_bug_report(
    server: ServerProcess, tmp_path: Path
) -> None:
    code = FORGED[-20:]
    with server.client() as client:
        client.call("PING", m.Ping((m.Lost(code, lookups=1),)))
        document = client.call("REPORT_STATUS", m.Empty()).document.decode()
        client.call("GOODBYE", m.Goodbye(code, FORGED))
    assert "owned" in document
    assert_harmless(document)
    with server.client(hello=False) as client, pytest.raises(errors.VersionMismatch):
        client.call("HELLO", m.Hello("engine", 1, hasher=FORGED))
    with server.client() as client:
        assert_harmless(client.call("REPORT_STATUS", m.Empty()).document.decode())
    bundle = tmp_path / "report.tar.gz"
    assert run("dump", "--endpoint", server.endpoint, "--out", str(bundle)).returncode == 0
    with tarfile.open(bundle) as archive:
        log = archive.extractfile("kvframework-dump/log.txt")
        text = log.read().decode()
    assert "owned" in text
    assert_harmless(text)


def test_long_names_of_models_do_not_fill_the_document(server: ServerProcess, tmp_path: Path) -> None:
    with server.client() as client:
        before = len(client.call("REPORT_STATUS", m.Empty()).document)
        for number in range(64):
            client.register(number, model_name="\N{SKULL}" * 1000 + str(number))
        assert len(client.call("REPORT_STATUS", m.Empty()).document) - before < 64 * 2048
        bundle = tmp_path / "report.tar.gz"
        assert run("dump", "--endpoint", server.endpoint, "--out", str(bundle)).returncode == 0
        with tarfile.open(bundle) as archive:
            status = archive.extractfile("kvframework-dump/status.json")
            assert "\N{SKULL}" not in status.read().decode()


@pytest.mark.parametrize("name", [FORGED, "a\nb", "a\x1b[2J", "a\x9bm", "a\u2028b", "a\x00"])
def test_a_model_has_a_name_that_can_be_shown(server: ServerProcess, name: str) -> None:
    with server.client() as client:
        with pytest.raises(errors.RequestError, match="cannot be shown"):
            client.register(model_name=name)
        layout = KVLayout("paged", (LayerGroup(1, 16, 1, 8, "float32"),))
        with pytest.raises(errors.RequestError, match="cannot be shown"):
            client.call("REGISTER_KV_CACHE", m.RegisterKvCache(9, name, 1, 0, bytes(16), "cpu_gather", layout))
        client.register(model_name="Modell/größer 2")


@pytest.mark.parametrize("name", ["", "x" * 129, "gpu\n0", "\x1b[2J"])
def test_a_device_has_a_name_that_can_be_shown(name: str) -> None:
    layout = KVLayout("paged", (LayerGroup(1, 16, 1, 8, "float32", planes=1),), num_blocks=1)
    desc: MemoryLayoutDesc = canonical_desc(layout, 16)

    def handles(device: str) -> list[bytes]:
        import msgspec

        view = ExportedView(0, 0, 1, (512, 32, 32, 4))
        return [msgspec.msgpack.encode(each) for each in (ExportedAllocation(Allocation(device, b"h", 512)), view)]

    assert read_handles(handles("GPU-1"), layout, desc).device == "GPU-1"
    with pytest.raises(errors.RequestError, match="the device's name is not valid"):
        read_handles(handles(name), layout, desc)


def test_what_redis_says_is_shown_as_words() -> None:
    from kvf_redis.resp import parse_line

    assert_harmless(parse_line(b"-ERR \x1b]0;owned\x07\n2026-01-01 \x9b\xff").text)
    assert parse_line(b"-MOVED 3999 127.0.0.1:6381").text == "MOVED 3999 127.0.0.1:6381"
