"""The examples work: every TOML is accepted, and the third-party distribution is found and used by a real server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.config import load_config
from kvframework.plugins import PluginRegistry, check_config
from tests.plugins.fake_distributions import install
from tests.server.in_process import serving
from tests.wire_client import WireClient, key_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_every_toml_is_accepted(file: Path) -> None:
    check_config(load_config(file), PluginRegistry())


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The distribution as pip would install it: its module, and metadata with its own entry points."""
    project = EXAMPLES / "kvf-fifo"
    entry_points = dict(re.findall(r'^"([\w.]+)" = "(\w+)"$', (project / "pyproject.toml").read_text(), re.MULTILINE))
    install(tmp_path, "kvf-fifo", entry_points, {"kvf_fifo": (project / "kvf_fifo.py").read_text()})
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("kvf_fifo", None)


@pytest.mark.usefixtures("fifo")
def test_the_fifo_distribution_decides_what_a_server_evicts() -> None:
    with serving("l1.eviction.use=fifo", capacity="1MiB") as server, WireClient(server.endpoint) as client:
        registered = client.register(hidden_dim_size=128)
        keys = [key_for(registered, [token] * 256) for token in range(2)]
        for key in keys:
            client.store(key, b"x")
        assert client.retrieve(keys[0]) is not None, "used last, and yet the first to go"
        client.store(key_for(registered, [9] * 256), b"x")
        assert client.retrieve(keys[0]) is None
        assert client.retrieve(keys[1]) is not None
