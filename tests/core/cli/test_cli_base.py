"""The `kvframework` command as a process: listing plugins, checking a configuration, errors and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.cli.command import install_config_plugins, run
from tests.core.registry.fake_distributions import HOOKS, codec_module, install

CONFIG = """
transport = []
layout = []
[l1]
use = "memory"
size = "1MiB"
[[l2]]
use = "store"
url = "store://[red]here"
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "kvf.toml"
    path.write_text(CONFIG)
    return path


def test_plugins_list_as_json(site: Path) -> None:
    install(site, "acme", {"codec.squeeze": "acme_a"}, {"acme_a": "print('noise')\n" + codec_module("squeeze", "both")})
    install(site, "bolt", {"codec.both": "bolt_b"}, {"bolt_b": codec_module("both")})
    install(site, "bolt", {"codec.next": "bolt_c"}, group="kvframework.v2")
    install(site, "core", {"codec.both": "acme_a", "codec.bad": "core_bad", "tier.odd": "core_odd"})
    (site / "core_bad.py").write_text("import nowhere_to_be_found")
    (site / "core_odd.py").write_text(codec_module("odd"))
    probe = f"{HOOKS}@hookimpl\ndef kvf_codecs():\n    return [CodecProvider(name='heavy', summary='', create=print, "
    install(site, "dare", {"codec.heavy": "dare_heavy"}, {"dare_heavy": probe + "probe=lambda: 'pip install [it]')]"})
    done = run("plugins", "list", "--json", site=site)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert set(rows[0]) == {"name", "kind", "distribution", "version", "status", "reason"}
    found = {(row["name"], row["distribution"]): row for row in rows}
    assert found["codec.squeeze", "acme"] == {
        "name": "codec.squeeze",
        "kind": "codec",
        "distribution": "acme",
        "version": "1.0",
        "status": "available",
        "reason": "",
    }
    assert found["codec.both", "bolt"]["status"] == found["codec.both", "core"]["status"] == "conflict"
    assert found["codec.next", "bolt"]["status"] == "wrong-api"
    assert found["tier.odd", "core"]["status"] == "wrong-kind"
    assert found["codec.bad", "core"]["status"] == "broken"
    assert "No module named 'nowhere_to_be_found'" in found["codec.bad", "core"]["reason"]
    assert found["codec.heavy", "dare"]["status"] == "unavailable"
    assert found["codec.heavy", "dare"]["reason"] == "pip install [it]"
    assert found["hasher.sha256", "kvframework"]["status"] == "available"
    assert "noise" in done.stderr


def test_plugins_list_has_one_line_for_each_plugin(site: Path) -> None:
    install(site, "acme", {"codec.bad": "acme_bad"}, {"acme_bad": f"raise OSError('[bold]{'long ' * 40}')"})
    done = run("plugins", "list", site=site)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["NAME", "KIND", "DISTRIBUTION", "VERSION", "STATUS", "REASON"]
    names = [line.split()[0] for line in lines]
    assert {"eviction.lru", "hasher.sha256", "codec.bad"} <= set(names)
    (bad,) = (line for line in lines if line.startswith("codec.bad"))
    assert "[bold]" + "long " * 39 in bad


def test_a_right_configuration_is_ok(site: Path, toml: Path) -> None:
    install_config_plugins(site)
    done = run("config", "check", str(toml), site=site)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"ok: {toml}: l1 memory, eviction two_queues, l2 store, hasher sha256",
        "not checked before the server starts: `create` of memory.memory (acme-kvf 1.0) and tier.store (acme-kvf 1.0)",
    ]
    by_environment = run("config", "check", site=site, config=str(toml))
    assert by_environment.stdout == done.stdout
