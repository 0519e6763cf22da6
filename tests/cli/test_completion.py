"""TAB behind `--set` and `--l2`: options of the plugins that the configuration names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import install_config_plugins, run_process
from tests.cli.test_app import complete
from tests.registry.fake_distributions import install


def test_the_options_of_the_default_plugins() -> None:
    assert complete("kvframework", "serve", "--set", "l1.cap") == ["l1.capacity="]
    assert complete("kvframework", "serve", "--set", "server.chunk") == ["server.chunk_size="]
    assert "log.level=debug" in complete("kvframework", "config", "show", "--set", "log.level=")


def test_the_next_tier_is_named_first() -> None:
    assert complete("kvframework", "serve", "--set", "l2.") == ["l2.0.use="]


def test_a_tier_of_an_earlier_override(site: Path) -> None:
    install_config_plugins(site)
    words = ("kvframework", "serve", "--set", "l2.0.use=store", "--set")
    assert complete(*words, "l2.0.m", site=site) == ["l2.0.mirrors=", "l2.0.mode="]
    assert complete(*words, "l2.0.mode=", site=site) == ["l2.0.mode=fast"]
    assert complete(*words, "l2.1.", site=site) == ["l2.1.use="]


@pytest.mark.parametrize("command", [["serve", "--config"], ["config", "check"], ["doctor", "--config"]])
def test_a_tier_of_the_file(command: list[str], site: Path, tmp_path: Path) -> None:
    install_config_plugins(site)
    file = tmp_path / "kvf.toml"
    file.write_text('[[l2]]\nuse = "store"\n')
    assert complete("kvframework", *command, str(file), "--set", "l2.0.ur", site=site) == ["l2.0.url="]


def test_a_broken_file_or_plugin_leaves_the_rest(site: Path, tmp_path: Path) -> None:
    install(site, "acme", {"tier.broken": "acme_broken"}, {"acme_broken": "raise SystemExit('imported')"})
    file = tmp_path / "kvf.toml"
    file.write_text("[[l2\n")
    words = ("kvframework", "serve", "--config", str(file), "--set")
    assert complete(*words, "l1.cap", site=site) == ["l1.capacity="]
    assert "l2.0.codec=" in complete(*words, "l2.0.use=broken", "--set", "l2.0.c", site=site)


HOOK = """
from kvframework.api.tier import TierProvider, hookimpl
class Meta(type):
    def __getattribute__(self, name):
        raise SystemExit(name)
class Options(metaclass=Meta):
    pass
@hookimpl
def kvf_tiers():
    {}
"""
HOSTILE = {
    "raises": "raise ValueError('x')",
    "ends": "import sys; sys.exit(3)",
    "prints": "import os; print('noise'); os.write(1, b'noise'); os.write(2, b'noise')",
    "raises in its hook": HOOK.format("raise ValueError('x')"),
    "ends in its hook": HOOK.format("raise SystemExit(3)"),
    "ends in its options": HOOK.format("return [TierProvider(name='bad', summary='', create=print, options=Options)]"),
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_plugin_is_no_offer_and_no_error(source: str, site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    install(site, "acme", {"tier.bad": "acme_bad"}, {"acme_bad": source})
    words = ("kvframework", "serve", "--set", "l2.0.use=bad", "--set", "l1.cap")
    assert complete(*words, site=site) == ["l1.capacity="]
    assert complete("kvframework", "demo", "--l2", "bad", "--set", "", site=site) == []
    assert capfd.readouterr() == ("", "")


def test_a_plugin_that_does_not_come_back_does_not_keep_the_shell(site: Path) -> None:
    install(site, "acme", {"tier.bad": "acme_bad"}, {"acme_bad": "import time; time.sleep(3600)"})
    words = "kvframework demo --l2 bad --set "
    done = run_process(site=site, _KVFRAMEWORK_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_tiers_of_the_demo_and_their_options(site: Path) -> None:
    install_config_plugins(site)
    assert {"disk", "redis", "store"} <= set(complete("kvframework", "demo", "--l2", "", site=site))
    assert complete("kvframework", "demo", "blend", "--l2", "st", site=site) == ["store"]
    assert complete("kvframework", "demo", "--l2", "store", "--set", "ur", site=site) == ["url="]


def test_the_options_of_a_checked_plugin(site: Path) -> None:
    install_config_plugins(site)
    assert complete("kvframework", "plugins", "check", "tier.store", "--set", "to", site=site) == ["token="]
