"""The configuration of a setting: the one that is simulated is the one that is written, and a server takes it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from kvf_plan.planning.goal import Setting, config_of, toml_of
from kvf_plan.planning.offers import KINDS, TierOffer
from kvf_plan.planning.plan import EVICTIONS, WRITE_POLICIES
from kvframework.config.load import load_config
from kvframework.errors import PluginUnavailable
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config

GIB = 1 << 30
SETTINGS = [
    *(Setting(512, 3 * GIB, eviction) for eviction in EVICTIONS),
    *(
        Setting(1024, 3 * GIB, eviction, TierOffer(name, 3e9), 5 * GIB, policy)
        for eviction, name, policy in product(EVICTIONS, KINDS, WRITE_POLICIES)
    ),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: f"{each.eviction}-{each.tier and each.tier.name}")
def test_what_is_written_is_what_is_simulated(setting: Setting, tmp_path: Path) -> None:
    file = tmp_path / "kvf.toml"
    file.write_text(toml_of(setting, ["why", "and what for"]))
    loaded, simulated = load_config(file, environ={}), config_of(setting)
    assert loaded.server == simulated.server
    assert loaded.l1.memory.options == simulated.l1.memory.options == {"capacity": f"{setting.l1_bytes // GIB}GiB"}
    assert loaded.l1.eviction.use == setting.eviction
    assert [tier.keys for tier in loaded.l2] == [tier.keys for tier in simulated.l2]
    assert loaded.server.chunk_size == setting.chunk_tokens
    assert loaded.server.price == (setting.tier is not None)
    if setting.tier is not None:
        assert loaded.l2[0].tier.use == setting.tier.kind.plugin
        assert loaded.l2[0].keys.write_policy == setting.write_policy
    try:
        complete_config(loaded, PluginRegistry())
    except PluginUnavailable:
        pytest.skip("the tier's client is not installed")


def test_its_comments_come_first() -> None:
    text = toml_of(SETTINGS[0], ["one line", ""])
    assert text.startswith("# one line\n#\n\n[server]\n")
    assert all(line.startswith("#") or "#" not in line for line in text.splitlines())
