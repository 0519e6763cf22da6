"""`kvframework plugins info`: what a plugin is, takes and lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.cli.command import install_config_plugins, run
from tests.core.registry.fake_distributions import HOOKS, codec_module, install


def test_a_plugin_is_described_with_its_options(site: Path) -> None:
    install_config_plugins(site)
    done = run("plugins", "info", "tier.store", "--json", site=site)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "name": "tier.store",
        "kind": "tier",
        "distribution": "acme-kvf",
        "version": "1.0",
        "status": "available",
        "reason": "",
        "rivals": [],
        "table": "[[l2]]",
        "summary": "keeps [red]things",
        "requires_api": "1.0",
        "shared": True,
        "calls_at_once": {"loads": 4, "writes": 3},
        "options": [
            option("url", "string", required=True),
            option("token", "string", default="", secret=True),
            option("pin", "string", description="of the door", secret=True),
            option("mirrors", "array of string", default=[]),
            option("mode", '"fast"', default="fast"),
            option("depth", "integer 1 to 9"),
        ],
    }
    memory = json.loads(run("plugins", "info", "memory.memory", "--json", site=site).stdout)
    assert memory["table"] == "[l1]"
    assert memory["calls_at_once"] == {}
    assert memory["options"] == [option("size", "size", default=1, description="how big")]


def option(name: str, kind: str, **fields: object) -> dict[str, object]:
    rest = {"required": False, "default": None, "description": "", "secret": False}
    return {"name": name, "type": kind, **rest, **fields}


def test_for_people_it_is_a_table(site: Path) -> None:
    install_config_plugins(site)
    done = run("plugins", "info", "tier.store", site=site)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tier.store: keeps [red]things\n")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert rows["distribution:"] == ["acme-kvf", "1.0"]
    assert "  shared:          several nodes may use one store\n" in done.stdout
    assert "  calls at once:   loads = 4, writes = 3\n" in done.stdout
    assert rows["url"] == ["string", "required"]
    assert rows["token"] == ["string", '""', "(shown", "masked)"]
    assert rows["pin"] == ["string", "not", "set", "of", "the", "door", "(shown", "masked)"]
    assert rows["mode"] == ['"fast"', '"fast"']
    assert rows["depth"] == ["integer", "1", "to", "9", "not", "set"]


@pytest.mark.parametrize("name", ["tier.redis", "memory.pinned"])
def test_the_options_of_our_own_plugins_are_documented(name: str) -> None:
    done = run("plugins", "info", name, "--json")
    options = json.loads(done.stdout)["options"]
    assert options
    assert all(option["description"] for option in options)


def test_what_cannot_be_used_says_why(site: Path) -> None:
    provider = "CodecProvider(name='heavy', summary='big', create=print, probe=lambda: 'pip install [it]')"
    source = f"{HOOKS}@hookimpl\ndef kvf_codecs():\n    return [{provider}]"
    install(site, "dare", {"codec.heavy": "dare_heavy"}, {"dare_heavy": source})
    install(site, "core", {"codec.bad": "core_bad"}, {"core_bad": "import nowhere_to_be_found"})
    install(site, "ace", {"codec.both": "ace_both"}, {"ace_both": codec_module("both")})
    install(site, "bolt", {"codec.both": "bolt_both"}, {"bolt_both": codec_module("both")})
    heavy = run("plugins", "info", "codec.heavy", site=site)
    assert heavy.returncode == 0
    assert "unavailable" in heavy.stdout
    assert "pip install [it]" in heavy.stdout
    assert "codec.heavy: big" in heavy.stdout
    bad = json.loads(run("plugins", "info", "codec.bad", "--json", site=site).stdout)
    assert bad["status"] == "broken"
    assert "nowhere_to_be_found" in bad["reason"]
    assert bad["summary"] is None
    both = json.loads(run("plugins", "info", "codec.both", "--json", site=site).stdout)
    assert (both["status"], both["distribution"], both["rivals"]) == ("conflict", "ace", ["bolt 1.0"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("redis", "hint: did you mean tier.redis?"),
        ("tier.reddis", "hint: did you mean 'redis'?"),
        ("nothing", "plugins list"),
        ("tyre.redis", "[plugin.wrong_kind]"),
        ("codec.redis", "[plugin.wrong_kind]"),
    ],
)
def test_a_wrong_name_is_one_clean_error(name: str, text: str) -> None:
    done = run("plugins", "info", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
