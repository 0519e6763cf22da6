"""What docs/plugins/requests.md ("requests.md") tells the author of requests works as it stands there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from kvframework.errors import NotRegistered, UnknownRequest
from tests.core.registry.fake_distributions import install
from tests.core.server.in_process import serving
from tests.docs.shown import blocks, entry_points
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "plugins" / "requests.md").read_text()


@pytest.fixture
def warm_up(site: Path, tmp_path: Path) -> Callable[..., Any]:
    """The plugin, installed, and the function of its client."""
    plugin, client = blocks(GUIDE, "python")[:2]
    package, _ = blocks(GUIDE, "toml")
    install(site, "kvf-warm", entry_points(package), {"kvf_warm": plugin})
    (tmp_path / "shown.py").write_text(client)
    return run_path(str(tmp_path / "shown.py"))["warm_up"]  # type: ignore[no-any-return]


def test_its_plugin_loads_a_prompt_ahead(warm_up: Callable[..., Any], tmp_path: Path) -> None:
    disk = f'[[l2]]\nuse = "filesystem"\npath = "{tmp_path / "l2"}"\ncapacity = "1GiB"\n\n'
    (tmp_path / "kvf.toml").write_text(disk + blocks(GUIDE, "toml")[1])
    with serving(config=tmp_path / "kvf.toml") as server, WireClient(server.endpoint) as client:
        key = key_for(client.register(), [7] * 256)
        client.store(key, b"x")
        wait_until(lambda: not client.status()["l2"][0]["write_pending"], what="the disk")
    with serving(config=tmp_path / "kvf.toml") as server, WireClient(server.endpoint) as client:
        with pytest.raises(NotRegistered):
            warm_up(server.endpoint, key)
        client.register()
        assert client.retrieve(key) is None
        answer = warm_up(server.endpoint, key)
        assert (answer.objects, answer.loading) == (1, True)
        wait_until(lambda: client.retrieve(key) is not None, what="the load")


def test_a_server_without_it_says_so(warm_up: Callable[..., Any]) -> None:
    with serving() as server, WireClient(server.endpoint) as client:
        key = key_for(client.register(), [7] * 256)
        with pytest.raises(UnknownRequest):
            warm_up(server.endpoint, key)
