"""How many loads and writes call a tier at once: by its `[[l2]]` table, else by its provider."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from kvframework.api.tier import TierProvider
from kvframework.config import load_config
from kvframework.errors import ConfigError, PluginBroken
from tests.core.server.in_process import serving


def threads(kind: str) -> int:
    return sum(bool(re.fullmatch(rf"kvf-{kind}-filesystem-\d+", thread.name)) for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("settings", "loads", "writes"),
    [((), 4, 2), (("l2.0.loads=1", "l2.0.writes=3"), 1, 3), (("l2.0.writes=1",), 4, 1)],
)
def test_as_many_as_the_table_or_the_provider_says(
    tmp_path: Path, settings: tuple[str, ...], loads: int, writes: int
) -> None:
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    with serving(*disk, *settings) as server:
        (tier,) = server.service.storage.status()["l2"]  # type: ignore[misc]
        assert (tier["loads"], tier["writes"]) == (loads, writes)
        assert (threads("prefetch"), threads("writer")) == (loads + 1, writes), "one more asks"
    assert (threads("prefetch"), threads("writer")) == (0, 0)


@pytest.mark.parametrize("value", [0, -1, 65])
def test_another_number_is_refused(value: int) -> None:
    for name in ("loads", "writes"):
        with pytest.raises(ConfigError, match=name):
            load_config(None, ("l2.0.use=filesystem", "l2.0.path=/tmp/none", f"l2.0.{name}={value}"))
        with pytest.raises(PluginBroken, match=f"{name} is {value}"):
            TierProvider(name="t", summary="s", create=lambda _options, _context: None, **{name: value})  # type: ignore[arg-type,return-value]
