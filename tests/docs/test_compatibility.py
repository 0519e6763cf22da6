"""What docs/plugins/compatibility.md promises the author of a plugin holds."""

from __future__ import annotations

import re
from pathlib import Path
from runpy import run_path

import pytest

from kvframework.api import plugin
from kvframework.api.tier import Tier, TierProvider
from kvframework.config.load import load_config
from kvframework.errors import PluginWrongApi
from kvframework.registry import plugin_check
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from tests.core.registry.fake_distributions import info, install
from tests.docs.shown import blocks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plugins" / "compatibility.md").read_text()
MODULE = """
    from kvframework.api.tier import TierProvider, hookimpl
    @hookimpl
    def kvf_tiers():
        return [TierProvider(name="mystore", summary="", create=print{needs})]
"""


def my_store(site: Path, needs: str = "") -> None:
    install(
        site, "kvf-mystore", {"tier.mystore": "kvf_mystore"}, {"kvf_mystore": MODULE.format(needs=needs)}, version="2.0"
    )


def test_a_plugin_of_1_0_under_a_server_of_1_1_loads(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_check, "API_VERSION", (1, 1))
    my_store(site)
    assert isinstance(PluginRegistry().resolve("tier", "mystore"), TierProvider)


def test_a_plugin_of_1_1_under_a_server_of_1_0_is_refused_as_it_says(site: Path, tmp_path: Path) -> None:
    my_store(site, ', requires_api="1.1"')
    (tmp_path / "kvf.toml").write_text('[[l2]]\nuse = "mystore"\n')
    registry = PluginRegistry()
    with pytest.raises(PluginWrongApi) as caught:
        complete_config(load_config(tmp_path / "kvf.toml"), registry)
    assert str(caught.value).replace(f"{tmp_path / 'kvf.toml'}: ", "") == blocks(PAGE, "text")[0].strip()
    assert info(registry, "tier", "mystore").status == "wrong-api"


def test_what_1_1_adds_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that asks for it finds out which API it runs on."""
    shown = tmp_path / "shown.py"
    shown.write_text(blocks(PAGE, "python")[0])
    for version, expected in (((1, 0), False), ((1, 1), True), ((1, 10), True)):
        monkeypatch.setattr(plugin, "API_VERSION", version)
        assert run_path(str(shown))["HAS_IT"] is expected


def test_a_distribution_may_serve_two_majors(site: Path) -> None:
    for group, named, value in re.findall(r'entry-points."(kvframework\.v\d)"\]\n"([\w.]+)" = "([\w.]+)"', PAGE):
        install(site, "kvf-mystore", {named: value.replace(".", "_")}, group=group)
    source = MODULE.format(needs="")
    install(site, "kvf-mystore", {}, {"kvf_mystore_v1": source}, group="others")
    assert PluginRegistry().resolve("tier", "mystore").name == "mystore"


def test_contracts_demand_no_more_than_they_did() -> None:
    """The methods without a default are those of API 1.0."""
    assert Tier.__abstractmethods__ == {"contains", "get_into", "put", "delete", "close"}
