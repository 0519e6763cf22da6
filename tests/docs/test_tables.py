"""Tables and quoted lines of the pages against the code: each name that the code has stands in a table, and each name
in that table is in the code. Tables are found by their first column (`rows_of`), so a page may move or rename them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

import kvframework
from kvf_dev.testing.accelerator import node
from kvf_observe.explain import ANSWERS
from kvf_plan.trace import lines
from kvframework.api.plugin import API_VERSION, ByteSize
from kvframework.api.tier import OPTIONAL_METHODS
from kvframework.config.schema import ServerConfig
from kvframework.errors import KVFrameworkError
from kvframework.pricing import EngineSpeed
from kvframework.registry.discovery import KINDS as PLUGIN_KINDS
from kvframework.status import COLD_REASONS, COUNTERS, REASONS, Status, places
from kvframework.storage.l1.journal import SCHEMA
from kvframework.storage.namespaces import FORMAT_VERSION
from kvframework.wire import messages as m
from kvframework.wire.protocol import KINDS, LOCAL, REQUESTS, TCP
from tests.core.cli.command import run
from tests.docs.prose import PAGES, ROOT
from tests.support.doc_tables import rows_of, tables
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.whole_cli import whole_cli
from tests.support.wire_client import key_for

TEXTS = {page: page.read_text() for page in PAGES if page.suffix == ".md" and page.name != "CHANGELOG.md"}
CELLS = [row for text in TEXTS.values() for table in tables(text) for row in table]

DEADLINES = [each.name for each in dataclasses.fields(LOCAL) if re.search("(?<!_per)_s$", each.name)]


def documented(*known: str) -> dict[str, list[str]]:
    return rows_of(known, *TEXTS.values())


def commands() -> set[str]:
    found = set()
    command: Any = whole_cli(without=("bench",))
    for name, inner in command.commands.items():
        found |= {f"{name} {each}" for each in inner.commands} if hasattr(inner, "commands") else {name}
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(REASONS, id="reasons of misses"),
        pytest.param(ANSWERS, id="reasons that explain knows"),
        pytest.param(COLD_REASONS, id="reasons of an empty L1"),
        pytest.param(DEADLINES, id="deadlines"),
        pytest.param(m.Finished.__struct_fields__, id="fields of a finished request"),
        pytest.param(lines.Line.__struct_fields__, id="fields of a trace"),
        pytest.param(PLUGIN_KINDS, id="kinds of plugins"),
        pytest.param(OPTIONAL_METHODS, id="optional methods of a tier"),
    ],
)
def test_a_table_has_these_names(names: Any) -> None:
    assert documented(*names).keys() == set(names)


def test_a_page_names_the_mistakes_and_faults_of_a_simulated_node() -> None:
    named = {word for text in TEXTS.values() for word in re.findall(r"`(\w+)`", text)}
    assert {*get_args(node.Mistake), *get_args(node.Fault)} - named == set()


def test_exit_statuses(tmp_path: Any) -> None:
    """Every command has a row with its statuses, and exits with 2 for a wrong argument or an absent server."""
    told = {name.removeprefix("kvframework ") for row in CELLS for name in re.findall(r"`([^`]+)`", row[0])}
    assert commands() - told == set()
    toml, nobody = tmp_path / "kvf.toml", f"ipc://{tmp_path}/n.sock"
    toml.write_text("[l1]\ncapacty = 1\n")
    for arguments in (
        ("serve", "--config", str(toml)),
        ("status", "--endpoint", nobody, "--timeout", "0.1"),
        ("explain", "--endpoint", nobody, "--timeout", "0.1"),
        ("config", "check", str(toml)),
        ("plugins", "info", "tier.none"),
        ("keys", "add", str(tmp_path), "x"),
    ):
        assert run(*arguments).returncode == 2, arguments


# numbers


def test_deadlines_and_their_requests() -> None:
    told = documented(*DEADLINES)
    for name, row in told.items():
        numbers = {float(cell) for cell in row if re.fullmatch(r"[\d.]+", cell)}
        assert numbers == {getattr(LOCAL, name), getattr(TCP, name)}, name
    of = {word: name for name, row in told.items() for word in re.findall(r"\w+", " ".join(row)) if word in REQUESTS}
    assert {name: kind for name, kind in of.items() if name not in ("HELLO", "PING", "GATHER_BLOCK")} == KINDS
    assert all(LOCAL.of(name) == LOCAL.setup_s for name, kind in of.items() if kind == "setup_s")


def test_bounds() -> None:
    """A row whose last cell is `module:NAME` or `[server] key` has its value in the cell before."""
    bounds = [row for row in CELLS if re.fullmatch(r"`(?:\[server\] \w+|kv\w+[\w.]*:\w+)`", row[-1])]
    assert len(bounds) > 10
    for *_, told, place in bounds:
        module, _, name = place.strip("`").partition(":")
        there: Any = importlib.import_module(module) if name else ServerConfig()
        number = float(told) if "." in told else ByteSize.parse(told)
        assert getattr(there, name or module.split()[1]) == number, place


def test_versions() -> None:
    versions = {row[0]: row[1] for row in CELLS if len(row) > 1}
    assert versions["wire protocol"] == str(m.PROTOCOL_VERSION)
    assert versions["plugin API"] == ".".join(map(str, API_VERSION))
    assert versions["journal of L1"] == str(SCHEMA)
    assert versions["envelope of L2 values"] == str(FORMAT_VERSION)


# the status document

# Maps whose keys are not names of this project.
OPEN_MAPS = {
    *("l2[].details.counters", "l2[].latency_ms", "l2[].seconds", "listeners", "losses.recent[].codes"),
    *("lookups.by_model", "lookups.misses", "requests", "transports"),
    *("use.engines", "use.models", "use.namespaces", "use.tenants"),
}
# Rows about a part as a whole, and of maps that a plugin fills.
PARTS = {"events", "observe", "l2[].usage", "transports.*", "messaging.counters.errors.CODE"}
PARTS |= {"events.blocks.CPU", "events.blocks.STORAGE"}


def fields(value: Any, path: str = "") -> Iterator[str]:
    """All paths of a document's leaves; `[]` for the items of a list, `*` for the keys of an open map."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            step = "*" if path in OPEN_MAPS else name
            yield from fields(inner, f"{path}.{step}" if path else step)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from fields(inner, f"{path}[]")
    else:
        yield path


def test_fields_of_the_status_document_that_have_a_row_exist() -> None:
    typed = {place for place, _ in places()}
    told = {name for name in documented(*typed) if not name.startswith("l2[].details.")}
    assert COUNTERS.keys() < told
    assert told - typed - PARTS == set()


def test_a_servers_document_has_the_fields_of_its_types(tmp_path: Any) -> None:
    """One with an instance, a tier, a lookup whose load is priced, a loss, and a client that was refused."""
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'tier'}", "l2.0.capacity=1GiB")
    with ServerProcess(*tier, "server.price=true") as server, server.client() as client:
        asked = msgspec.structs.replace(key_for(client.register(), range(256)), worker_id=None)
        query = m.TicketRef(client.call("LOOKUP", m.Lookup(asked, speed=EngineSpeed(1000.0))).ticket)
        wait_until(lambda: not client.call("QUERY_PREFETCH_STATUS", query).pending, what="the end of the lookup")
        with server.client(hello=False) as stranger, pytest.raises(KVFrameworkError):
            stranger.call("HELLO", m.Hello("new", 7, min_version=98, max_version=99))
        client.call("PING", m.Ping((m.Lost("run.deadline", stores=1),)))
        wait_until(lambda: client.status()["l2"][0]["usage"], what="the tier's usage")
        document = client.status()
    found = {each for each in fields(document) if not each.startswith("messaging.counters.errors.")}
    assert found - {place for place, _ in places()} - PARTS - OPEN_MAPS == set()
    assert msgspec.convert(document, Status).l2[0].name == "filesystem"


# log lines and codes

LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def log_patterns() -> Iterator[re.Pattern[str]]:
    """What the calls of a logger in the sources can say. Lines that are all placeholder say nothing of themselves."""
    for file in (file for top in ("kvframework", "plugins") for file in (ROOT / top).rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LOG_METHODS:
                text = call.args[1 if call.func.attr == "log" or "quiet" in ast.unparse(call.func) else 0 :]
                if ast.unparse(call.func.value).lower().strip("_").endswith(("log", "logger", "quiet")) and text:
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


@pytest.fixture(scope="module")
def log() -> str:
    """Of a server that refused somebody and something, and was refused by somebody: lines that no pattern shows."""
    with ServerProcess() as server:
        with server.client(hello=False) as client, pytest.raises(KVFrameworkError):
            client.call("HELLO", m.Hello("new", 7, min_version=98, max_version=99))

        def misunderstood() -> bool:
            with server.client() as client, pytest.raises(KVFrameworkError):
                client.answer(client.send("LOOKUP", m.Empty()), "LOOKUP")
            return "LOOKUP" in server.log and "protocol.payload" in server.log

        def leave() -> bool:
            with server.client(liveness=False) as client:
                client.answer(client.send("GOODBYE", m.Goodbye("protocol.version", "another chunk size")), "GOODBYE")
            return "another chunk size" in server.log

        # Of different things one line a second is written.
        wait_until(misunderstood, what="the refusal in the log")
        wait_until(leave, what="the client's reason in the log")
        return server.log


def test_every_quoted_log_line_can_be_said(log: str) -> None:
    """Quoted behind `S:` or `E:`, the server's log or the engine's."""
    patterns = list(log_patterns())
    quoted = {line: page.name for page, text in TEXTS.items() for line in re.findall(r"\b[SE]: `([^`]+)`", text)}
    assert len(quoted) > 25
    assert not any(pattern.fullmatch("the moon is full: nothing works") for pattern in patterns)
    said = {
        line
        for line in quoted
        if any(pattern.fullmatch(line) for pattern in patterns)
        or re.search(".+".join(map(re.escape, line.strip("…").split("…"))), log)
    }
    assert {line: page for line, page in quoted.items() if line not in said} == {}


def test_every_error_code_is_one() -> None:
    for module in pkgutil.walk_packages(kvframework.__path__, "kvframework."):
        if module.name != "kvframework.testing":  # the kits' former name, which warns
            importlib.import_module(module.name)
    named = re.compile(r"\[((?:config|plugin|protocol|request|run|storage|device)\.[a-z_]+)\](?!\()")
    codes = {code for text in TEXTS.values() for code in named.findall(text)}
    assert len(codes) > 8
    assert codes - KVFrameworkError._by_code.keys() == set()
