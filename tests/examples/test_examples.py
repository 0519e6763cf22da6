"""The examples work: every TOML is accepted, and the third-party distribution is found and used by a real server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.config.load import load_config
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from kvframework.wire import messages as m
from tests.core.registry.fake_distributions import install
from tests.core.server.in_process import serving
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_every_toml_is_accepted(file: Path) -> None:
    complete_config(load_config(file), PluginRegistry())


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_what_a_toml_leaves_out_is_accepted_too(file: Path, tmp_path: Path) -> None:
    """The settings in its comments, all together."""
    full = tmp_path / file.name
    full.write_text(re.sub(r"^# (\w+ = )", r"\1", file.read_text(), flags=re.MULTILINE))
    if "zstd" in full.read_text():
        pytest.importorskip("zstandard")
    complete_config(load_config(full), PluginRegistry())


def test_the_node_with_a_disk_outlives_a_restart(tmp_path: Path) -> None:
    example, folder = EXAMPLES / "one_node_with_disk.toml", f"l2.0.path={tmp_path / 'l2'}"
    with serving(folder, config=example) as server, WireClient(server.endpoint) as client:
        key = key_for(client.register(), [7] * 256)
        client.store(key, b"x")
        wait_until(lambda: not client.status()["l2"][0]["write_pending"], what="the disk")
    with serving(folder, config=example) as server, WireClient(server.endpoint) as client:
        client.register()
        assert client.retrieve(key) is None
        ticket = client.lookup(key).ticket
        wait_until(lambda: not client.call("QUERY_PREFETCH_STATUS", m.TicketRef(ticket)).pending, what="the load")
        restored = client.retrieve(key)
        assert restored
        assert set(restored) == {ord("x")}


@pytest.fixture
def s3fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The distribution as pip would install it: its module, and metadata with its own entry points."""
    project = EXAMPLES / "kvf-s3fifo"
    entry_points = dict(re.findall(r'^"([\w.]+)" = "(\w+)"$', (project / "pyproject.toml").read_text(), re.MULTILINE))
    install(tmp_path, "kvf-s3fifo", entry_points, {"kvf_s3fifo": (project / "kvf_s3fifo.py").read_text()})
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("kvf_s3fifo", None)


@pytest.mark.usefixtures("s3fifo")
def test_the_s3fifo_distribution_decides_what_a_server_evicts() -> None:
    settings = ("l1.eviction.use=s3fifo", "l1.eviction.ghost=3")
    with serving(*settings, capacity="1MiB") as server, WireClient(server.endpoint) as client:
        registered = client.register(hidden_dim_size=128)
        old, new, newest = (key_for(registered, [token] * 256) for token in range(3))
        client.store(old, b"x")
        for _ in range(2):
            assert client.retrieve(old) is not None
        client.store(new, b"x")
        client.store(newest, b"x")
        assert client.retrieve(new) is None, "used least, though not longest ago"
        assert client.retrieve(old) is not None
