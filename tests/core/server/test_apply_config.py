"""APPLY_CONFIG: the column "changes" of docs/reference/configuration.md is what a real server does."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from kvframework.api.keys import tenant_digest
from kvframework.config.load import read_layers
from kvframework.errors import ConfigFieldError, EndpointError, KVFrameworkError, PluginNotFound, RequestError
from kvframework.messaging.curve import write_curve_pair
from kvframework.server import Server
from kvframework.service import contexts
from kvframework.wire import messages as m
from tests.core.server.in_process import serving
from tests.docs.configuration_tables import TABLES, changes
from tests.support.certificates import make_certificate
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

# The column of each key, as `--set` names it.
COLUMN = {
    f"{table}.{key}".replace("l2.", "l2.0."): when
    for struct, (table, _) in TABLES.items()
    for key, when in changes(struct).items()
}
DIGEST = tenant_digest("a salt")
EVENTS = "events.endpoint=ipc://{folder}/announced.sock"
# Another value for each key, with what it needs beside it.
OTHER = {
    "server.endpoint": ["server.endpoint=ipc://{folder}/other.sock"],
    "server.chunk_size": ["server.chunk_size=512"],
    "server.store_lease_s": ["server.store_lease_s=7"],
    "server.retrieve_lease_s": ["server.retrieve_lease_s=8"],
    "server.store_share": ["server.store_share=0.25"],
    "server.pin_share": ["server.pin_share=0.25"],
    "server.ticket_s": ["server.ticket_s=9"],
    "server.session_timeout_s": ["server.session_timeout_s=0.2"],
    "server.idle_stop_s": ["server.idle_stop_s=900"],
    "server.drain_s": ["server.drain_s=9"],
    "server.workers": ["server.workers=3"],
    "server.trace_memory": ["server.trace_memory=1MiB"],
    "server.price": ["server.price=true"],
    "server.tcp": ["server.tcp=tcp://127.0.0.1:{port}", "server.insecure=true"],
    "server.insecure": ["server.insecure=true"],
    "server.tp_lcm": ["server.tp_lcm=8"],
    "server.pp_lcm": ["server.pp_lcm=4"],
    "server.admit_uids": ["server.admit_uids=[12345]"],
    "server.curve": ["server.curve.secret_key={folder}/keys/server.secret", "server.curve.clients={folder}/keys"],
    "log.level": ["log.level=debug"],
    "log.format": ["log.format=json"],
    "observe.listen": ["observe.listen=127.0.0.1:0"],
    "observe.tls_cert": ["observe.tls_cert={folder}/keys/cert.pem", "observe.tls_key={folder}/keys/key.pem"],
    "observe.tls_key": ["observe.tls_cert={folder}/keys/cert.pem", "observe.tls_key={folder}/keys/key.pem"],
    "observe.token_file": ["observe.token_file={folder}/keys/token"],
    "observe.traces": ["observe.traces=http://127.0.0.1:4318"],
    "l1.high_watermark": ["l1.high_watermark=0.95"],
    "l1.low_watermark": ["l1.low_watermark=0.4"],
    "l1.ghosts": ["l1.ghosts=0"],
    "l1.keep": ["l1.keep=off"],
    "tenants.acme.salts": ['tenants.acme.salts=["{digest}"]'],
    "tenants.acme.min": ['tenants.acme.salts=["{digest}"]', "tenants.acme.min=10%"],
    "tenants.acme.load_bandwidth": ['tenants.acme.salts=["{digest}"]', "tenants.acme.load_bandwidth=1GB/s"],
    "tenants.acme.l2_max": ['tenants.acme.salts=["{digest}"]', "tenants.acme.l2_max=1GiB"],
    "tenants.acme.max": ['tenants.acme.salts=["{digest}"]', "tenants.acme.max=50%"],
    "l2.0.codec": ["l2.0.codec=zstd"],
    "l2.0.timeout_s": ["l2.0.timeout_s=3"],
    "l2.0.loads": ["l2.0.loads=5"],
    "l2.0.writes": ["l2.0.writes=6"],
    "l2.0.write_queue": ["l2.0.write_queue=77"],
    "l2.0.write_policy": ["l2.0.write_policy=write_through_selective"],
    "l2.0.promote": ["l2.0.promote=false"],
    "l2.0.high_watermark": ["l2.0.high_watermark=0.9"],
    "l2.0.low_watermark": ["l2.0.low_watermark=0.5"],
}
if importlib.util.find_spec("zstandard") is None:
    del OTHER["l2.0.codec"], COLUMN["l2.0.codec"]
ALSO = {"server.curve.secret_key": "server.curve", "server.curve.clients": "server.curve"}


class Node:
    """A server, a client of it, and the settings that it started with."""

    def __init__(self, server: Server, client: WireClient, settings: list[str], folder: Path) -> None:
        self.server, self.client, self.settings, self.folder = server, client, settings, folder

    def apply(self, *overrides: str, dry_run: bool = False) -> m.ConfigApplied:
        filled = [each.format(folder=self.folder, port=free_port(), digest=DIGEST) for each in overrides]
        layers = read_layers(None, (*self.settings, *filled), {})
        asked = m.ApplyConfig(msgspec.json.encode(layers.raw), "test.toml", dry_run)
        applied: m.ConfigApplied = self.client.call("APPLY_CONFIG", asked)
        return applied

    def differs(self) -> dict[str, bool]:
        """What differs from the start."""
        return {each.key: each.now for each in self.apply(dry_run=True).changes}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("config")
    tier = ["l2.0.use=filesystem", f"l2.0.path={folder / 'l2'}", "l2.0.capacity=1GiB"]
    with serving(*tier) as server, WireClient(server.endpoint, timeout=60.0) as client:
        settings = [f"server.endpoint={server.endpoint}", "l1.capacity=16MiB", *tier]
        yield Node(server, client, settings, folder)


@pytest.fixture
def keys(node: Node) -> None:
    folder = node.folder / "keys"
    if not folder.exists():
        folder.mkdir(mode=0o700)
        write_curve_pair(folder / "server.secret", folder / "engine.public")
        make_certificate(folder)
        (folder / "token").write_text("a-token-for-tests-0123456789\n")
        (folder / "token").chmod(0o600)


def test_the_reference_and_the_values_here_have_the_same_keys() -> None:
    assert {*OTHER, *ALSO} == set(COLUMN), "another value of each new key belongs into OTHER"


def test_the_column_of_each_key_is_what_the_server_says(node: Node, keys: None) -> None:
    for key, overrides in OTHER.items():
        said = {each.key: each.now for each in node.apply(*overrides, dry_run=True).changes}
        for each, now in said.items():
            assert now == (COLUMN.get(each) == "now"), each
        assert any(each == key or ALSO.get(each) == key for each in said), (key, said)
    assert node.differs() == {}, "a dry run changes nothing"


def test_the_table_of_a_listener_needs_a_restart(node: Node) -> None:
    said = {each.key: each.now for each in node.apply(EVENTS, dry_run=True).changes}
    assert said["events.endpoint"] is False
    assert not any(said.values())


def test_keys_that_need_a_restart_change_nothing_at_all(node: Node, keys: None) -> None:
    for key in (key for key, when in COLUMN.items() if when == "restart" and key in OTHER):
        applied = node.apply(*OTHER[key], "server.ticket_s=3")
        assert not applied.applied
        assert {each.key for each in applied.changes if each.now} == {"server.ticket_s"}
    assert node.differs() == {}


TOKENS = itertools.count()


def lease_s(node: Node) -> tuple[float, float]:
    """The lifetimes of a store's and of a load's lease."""
    client = node.client
    key = key_for(client.register(), [next(TOKENS)] * 256)
    plan = client.prepare_store(key)
    client.call("COMMIT_STORE", m.LeaseRef(plan.lease))
    load = client.prepare_retrieve(key)
    client.call("COMMIT_RETRIEVE", m.LeaseRef(load.lease))
    client.call("UNREGISTER_KV_CACHE", m.Unregister(1))
    return plan.lease_s, load.lease_s


def of_the_tier(node: Node) -> Any:
    return node.server.service.storage.tiers.writers[0]


# The value at the object that works by it.
IN_FORCE: dict[str, tuple[Callable[[Node], object], object]] = {
    "server.store_lease_s": (lambda node: lease_s(node)[0], 7.0),
    "server.retrieve_lease_s": (lambda node: lease_s(node)[1], 8.0),
    "server.store_share": (lambda node: node.server.service._engine_driven.config.store_share, 0.25),
    "server.pin_share": (
        lambda node: node.server.service.storage.table.shares.most / node.server.service.storage.table.capacity,
        0.25,
    ),
    "server.ticket_s": (lambda node: node.server.service.lookups.tickets.ticket_s, 9.0),
    "server.trace_memory": (lambda node: node.server.service.lookups.recording._most_bytes, 1 << 20),
    "server.price": (lambda node: node.client.status()["price"]["on"], True),
    "server.session_timeout_s": (lambda node: node.server._messages._table.timeout_s, 0.2),
    "l1.high_watermark": (lambda node: node.server.service.storage.table._high, 0.95),
    "l1.low_watermark": (lambda node: node.server.service.storage.table._low, 0.4),
    "l2.0.timeout_s": (lambda node: of_the_tier(node).store.timeout_s, 3.0),
    "l2.0.write_queue": (lambda node: of_the_tier(node)._queue.bound, 77),
    "l2.0.promote": (lambda node: node.client.status()["l2"][0]["promote"], False),
    "l2.0.high_watermark": (lambda node: of_the_tier(node).store.watermarks.high, 0.9),
    "l2.0.low_watermark": (lambda node: of_the_tier(node).store.watermarks.low, 0.5),
}


def test_keys_that_change_now_are_in_force_at_once_and_back(node: Node) -> None:
    # Those of the log are proven at a process of its own, in tests/core/cli/test_config_show.py.
    assert {*IN_FORCE, "log.level", "log.format"} == {key for key, when in COLUMN.items() if when == "now"}
    before = {key: look(node) for key, (look, _) in IN_FORCE.items()}
    for key, (look, value) in IN_FORCE.items():
        applied = node.apply(*OTHER[key])
        assert applied.applied
        assert look(node) == value, key
        assert before[key] != value, key
        assert node.apply().applied
        assert look(node) == before[key], key


def test_a_shorter_silence_ends_a_silent_client(node: Node) -> None:
    with WireClient(node.server.endpoint, hello=False) as silent:
        silent.say_hello(liveness=False)
        assert any(not each["local"] for each in node.client.status()["messaging"]["sessions"])
        node.apply(*OTHER["server.session_timeout_s"])
        wait_until(lambda: all(each["local"] for each in node.client.status()["messaging"]["sessions"]))
    assert node.apply().applied


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["server.ticket_s=-1"], ConfigFieldError),
        (["server.ticket_s=5", "l1.use=nothing"], PluginNotFound),
        (["server.tcp=tcp://127.0.0.1:1"], EndpointError),
        (["l1.low_watermark=0.5", "l1.high_watermark=0.4"], ConfigFieldError),
        (["server.ticket_s=5", "l2.0.write_policy=write_back"], ConfigFieldError),
        (["server.ticket_s=5", "unknown.key=1"], ConfigFieldError),
    ],
)
def test_what_serve_would_refuse_is_refused_whole(
    node: Node, overrides: list[str], error: type[KVFrameworkError]
) -> None:
    with pytest.raises(error):
        node.apply(*overrides)
    assert node.differs() == {}


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b'{"l1": 3}', b"{}" * 9, b'{"l2": ' + b"[" * 9000])
def test_bytes_that_are_no_configuration_are_refused(node: Node, payload: bytes) -> None:
    with pytest.raises((RequestError, ConfigFieldError)):
        node.client.call("APPLY_CONFIG", m.ApplyConfig(payload, "x"))
    assert node.differs() == {}


@pytest.mark.parametrize(
    "request_", [("APPLY_CONFIG", m.ApplyConfig(b"{}", "x")), ("DUMP", m.Empty()), ("TRACE", m.Trace())]
)
def test_only_the_server_s_own_user_may(node: Node, request_: tuple[str, Any]) -> None:
    with WireClient(node.server.endpoint, hello=False) as unknown:
        unknown.say_hello(liveness=False)
        with pytest.raises(RequestError, match="own user"):
            unknown.call(*request_)
    with mock.patch.object(contexts, "_uid", return_value=12345), pytest.raises(RequestError, match="own user"):
        node.client.call(*request_)


def test_a_secret_is_never_shown(node: Node) -> None:
    redis = ["l2.1.use=redis", "l2.1.url=redis://me:hunter2hunter2@127.0.0.1:1"]
    applied = node.apply(*redis, dry_run=True)
    assert "hunter2" not in repr(applied)
    assert "l2.1.url" in {each.key for each in applied.changes}
