"""docs/operations.md, docs/commands.md and docs/status.md quote what exists: log lines, codes, statuses, fields."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvframework
from kvf_devices.messages import Start
from kvf_devices.supervisor import CopierSupervisor
from kvf_observe.explain import ANSWERS
from kvf_observe.explain import PAGE as PAGE_OF_REASONS
from kvframework.api.counter import Counter, Counts
from kvframework.config import ObserveConfig
from kvframework.errors import KVFrameworkError
from kvframework.pricing import EngineSpeed
from kvframework.server import ObserveSupervisor
from kvframework.status import COLD_REASONS, REASONS, Status, places
from kvframework.wire import messages as m
from tests.core.cli.command import run
from tests.support import doc_tables
from tests.support.peer_nodes import Lender, peers_tier, token_file
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.whole_cli import whole_cli
from tests.support.wire_client import key_for

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
RESTART = (ROOT / "docs" / "restart.md").read_text()
STATUS = (ROOT / "docs" / "status.md").read_text()
COMMANDS = (ROOT / "docs" / "commands.md").read_text()
SOURCES = [file for top in ("kvframework", "plugins") for file in (ROOT / top).rglob("*.py")]
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
# Maps whose keys are not names of this project.
OPEN_MAPS = {
    "l2[].details.counters",
    "l2[].latency_ms",
    "l2[].seconds",
    "listeners",
    "losses.recent[].codes",
    "lookups.by_model",
    "lookups.misses",
    "requests",
    "transports",
    "use.engines",
    "use.models",
    "use.namespaces",
    "use.tenants",
}


def rows(title: str) -> list[list[str]]:
    return doc_tables.rows(STATUS if f"# {title}\n" in STATUS else PAGE, title)


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# log lines


def log_patterns() -> Iterator[re.Pattern[str]]:
    """What the calls of a logger in the sources can say. Lines that are all placeholder say nothing of themselves."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                named = ast.unparse(node.func.value).lower().strip("_").endswith(("log", "logger", "quiet"))
                text = node.args[1 if node.func.attr == "log" or "quiet" in ast.unparse(node.func) else 0 :]
                if named and node.func.attr in {*LOG_METHODS, "log"} and text:
                    yield from _pattern(text[0])


def _pattern(node: ast.expr) -> Iterator[re.Pattern[str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        pieces = re.split(r"%[-.\d]*[sdrf]", node.value)
    elif isinstance(node, ast.JoinedStr):
        pieces = "".join(each.value if isinstance(each, ast.Constant) else "\0" for each in node.values).split("\0")
    else:
        return
    if len(re.findall("[a-z]", "".join(pieces))) > 7:
        yield re.compile(".+".join(map(re.escape, pieces)), re.DOTALL)


PATTERNS = list(log_patterns())


def log_lines() -> list[str]:
    """Quoted behind `S:` or `E:`, the server's log or the engine's."""
    return re.findall(r"\b[SE]: `([^`]+)`", PAGE)


@pytest.fixture(scope="module")
def log() -> str:
    """Of a server that refused somebody and something, and was refused by somebody."""
    with ServerProcess() as server:
        with server.client(hello=False) as client, pytest.raises(KVFrameworkError):
            client.call("HELLO", m.Hello("new", 7, min_version=98, max_version=99))

        def misunderstood() -> bool:
            with server.client() as client, pytest.raises(KVFrameworkError):
                client.answer(client.send("LOOKUP", m.Empty()), "LOOKUP")
            return "was refused 'LOOKUP'" in server.log

        def leave() -> bool:
            with server.client(liveness=False) as client:
                client.answer(client.send("GOODBYE", m.Goodbye("protocol.version", "another chunk size")), "GOODBYE")
            return "refuses this server" in server.log

        # Of different things one line a second is written.
        wait_until(misunderstood, what="the refusal in the log")
        wait_until(leave, what="the client's reason in the log")
        return server.log


@pytest.mark.parametrize("line", log_lines())
def test_every_log_line_can_be_said(line: str, log: str) -> None:
    in_the_source = any(pattern.fullmatch(line) for pattern in PATTERNS)
    assert in_the_source or re.search(".+".join(map(re.escape, line.strip("…").split("…"))), log), line


def test_there_are_log_lines_and_not_everything_is_one() -> None:
    assert len(log_lines()) > 25
    assert not any(pattern.fullmatch("the moon is full: nothing works") for pattern in PATTERNS)


def test_every_error_code_is_one() -> None:
    for module in pkgutil.walk_packages(kvframework.__path__, "kvframework."):
        if module.name != "kvframework.testing":  # the kits' former name, which warns
            importlib.import_module(module.name)
    codes = set(re.findall(r"\[((?:config|plugin|protocol|request|run|storage|device)\.[a-z_]+)\]", PAGE))
    assert len(codes) > 8
    assert codes <= KVFrameworkError._by_code.keys()


def test_every_reason_of_a_miss_has_its_row() -> None:
    told = [quoted(row[0])[0] for row in rows("Why a lookup missed")]
    assert told == list(REASONS) == list(ANSWERS)
    assert PAGE_OF_REASONS == "docs/operations.md#why-a-lookup-missed"


# the status document


def test_every_reason_of_an_empty_l1_has_its_row() -> None:
    told = [reason.strip("`") for reason, *_ in doc_tables.rows(RESTART, "Why L1 began empty")]
    assert told == list(COLD_REASONS)


def fields(value: Any, path: str = "") -> Iterator[str]:
    """All paths of a document's leaves; `[]` for the items of a list, `*` for the keys of an open map."""
    if isinstance(value, dict) and (value or path):
        for name, inner in value.items():
            step = "*" if path in OPEN_MAPS else name
            yield from fields(inner, f"{path}.{step}" if path else step)
        if not value:
            yield path
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from fields(inner, f"{path}[]")
    else:
        yield path


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Of a server with an instance, a tier, a lookup whose load is priced, and a client that was refused."""
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path_factory.mktemp('tier')}", "l2.0.capacity=1GiB")
    with ServerProcess(*tier, "server.price=true") as server, server.client() as client:
        asked = msgspec.structs.replace(key_for(client.register(), range(256)), worker_id=None)
        ticket = client.call("LOOKUP", m.Lookup(asked, speed=EngineSpeed(1000.0))).ticket
        query = m.TicketRef(ticket)
        wait_until(lambda: not client.call("QUERY_PREFETCH_STATUS", query).pending, what="the end of the lookup")
        with server.client(hello=False) as stranger, pytest.raises(KVFrameworkError):
            stranger.call("HELLO", m.Hello("new", 7, min_version=98, max_version=99))
        client.call("PING", m.Ping((m.Lost("run.deadline", stores=1),)))
        wait_until(lambda: client.status()["l2"][0]["usage"], what="the tier's usage")
        yield client.status()


def documented() -> set[str]:
    return {name for row in rows("Fields of the status document") for name in quoted(row[0])}


def counters() -> set[str]:
    return {name for row in rows("Counters") for name in quoted(row[0])}


def test_every_field_is_documented_and_every_documented_field_is_there(document: dict[str, Any]) -> None:
    found = {field for field in fields(document) if not field.startswith("messaging.counters.errors.")}
    assert sorted(found - documented() - counters()) == []
    elsewhere = {name for name in documented() | counters() if name.startswith(NOT_HERE)}
    assert sorted((documented() | counters()) - found - elsewhere) == []


def test_every_field_of_a_finished_request_is_documented() -> None:
    told = [name for row in rows("Finished requests") for name in quoted(row[0])]
    assert sorted(told) == sorted(m.Finished.__struct_fields__)


# What this server has none of.
NOT_HERE = (
    "transports.*.devices",
    "transports.*.counters",
    "messaging.counters.errors.CODE",
    "l2[].usage",
    "l2[].details.",
    "l2[].latency_ms",
    "observe.",
    "events.",
)


def test_every_field_of_a_device_is_documented() -> None:
    copier = CopierSupervisor(Start("module:create", "module:Options", b"", "device"), arena_fd=-1, stall_s=1.0)
    try:
        found = {f"transports.*.devices[].{name}" for name in copier.status()}
    finally:
        copier.stop()
        assert copier.join(10)
    assert found == {name for name in documented() if name.startswith("transports.*.devices")}


def test_every_field_of_the_observing_process_is_documented() -> None:
    found = {f"observe.{name}" for name in ObserveSupervisor("ipc:///none", ObserveConfig()).status()}
    assert found == {name for name in documented() if name.startswith("observe.")}


def test_every_field_of_other_nodes_is_documented(tmp_path: Path) -> None:
    with Lender(token_file(tmp_path)) as other:
        tier = peers_tier(token_file(tmp_path), peers=[other.address])
        assert other.tier._holder is not None
        other.tier._holder._connections.refuse("10.0.0.9", "another token")
        details = {
            "nodes": tier.status()["nodes"],
            "lending": other.tier.status()["lending"],
            "hints": dict.fromkeys(("written", "waiting", "dropped"), 0),  # of `Teller.status`
            "counters": Counts(any=Counter("calls")).status(),
        }
        told = {name for name in documented() if name.startswith("l2[].details.")}
    assert set(fields({"details": details}, "l2[]")) == told


def test_the_types_of_the_document_are_what_is_documented() -> None:
    typed = {place for place, _ in places()}
    told = {name for name in documented() | counters() if not name.startswith("l2[].details.")}
    parts = {"events", "observe", "l2[].usage", "transports.*", "messaging.counters.errors.CODE"}
    assert told - typed - parts == {"events.blocks.CPU", "events.blocks.STORAGE"}
    assert typed - told == {"events.blocks.*"}


def test_a_document_is_one_of_these_types(document: dict[str, Any]) -> None:
    read = msgspec.convert(document, Status)
    assert read.l2[0].name == "filesystem"
    assert msgspec.json.decode(msgspec.json.encode(read.l1)) == document["l1"]


# commands


def test_every_command_has_its_exit_statuses() -> None:
    words = set()
    command: Any = whole_cli(without=("bench",))
    for name, inner in command.commands.items():
        words |= {f"{name} {each}" for each in inner.commands} if hasattr(inner, "commands") else {name}
    told = {name for row in doc_tables.rows(COMMANDS, "Exit statuses") for name in quoted(row[0])}
    assert {name.removeprefix("kvframework ") for name in told} >= words


def test_exit_statuses_are_as_told(tmp_path: Path) -> None:
    toml = tmp_path / "kvf.toml"
    toml.write_text("[l1]\ncapacty = 1\n")
    nobody = f"ipc://{tmp_path}/n.sock"
    cases = [
        (("serve", "--config", str(toml)), 2),
        (("status", "--endpoint", nobody, "--timeout", "0.1"), 2),
        (("config", "check", str(toml)), 2),
        (("plugins", "info", "tier.none"), 2),
        (("keys", "add", str(tmp_path), "x"), 2),
    ]
    for arguments, status in cases:
        assert run(*arguments).returncode == status, arguments
