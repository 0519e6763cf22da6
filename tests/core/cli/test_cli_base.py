"""The `kvframework` command as a process: listing plugins, checking a configuration, errors and exit statuses, its
release, and what help and completion import."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvf_dev.new import KINDS
from kvframework import __version__
from kvframework.registry.discovery import KINDS as REGISTERED
from tests.core.cli.command import environment, install_config_plugins, run
from tests.core.registry.fake_distributions import HOOKS, codec_module, install
from tests.support.processes import ran

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


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]


def test_the_command_says_its_release() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"kvframework {__version__}\n"


def test_the_benchmarks_have_the_release_of_the_core() -> None:
    bench = pytest.importorskip("kvframework_bench")
    assert bench.__version__ == __version__


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="no checkout")
def test_ranges_of_the_examples_begin_where_pip_takes_a_development_version() -> None:
    """pip refuses 0.3.0.dev0 for >=0.3."""
    begin = f">={'.'.join(__version__.split('.')[:2])}.0.dev0"
    files = sorted((ROOT / "examples").glob("*/pyproject.toml"))
    assert len(files) >= 7
    for file in files:
        needed = map(Requirement, tomllib.loads(file.read_text())["project"]["dependencies"])
        (core,) = (each for each in needed if each.name == "kvframework")
        assert str(core.specifier) == begin, file
        assert core.specifier.contains(__version__, prereleases=True), file


HEAVY = {"rich", "pydantic", "msgspec", "zmq", "pluggy", "torch", "numpy", "redis", "transformers", "hypothesis"}
OF_A_COMMAND = {"rich", "msgspec", "zmq", "pluggy"}
SHOW = """
import sys
from kvframework.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
loaded = {name.split('.')[0] for name in sys.modules}
own = {name for name in sys.modules if name.startswith(('kvframework.', 'kvframework_bench'))}
print(*sorted(loaded & set(sys.argv.pop(0).split())), *sorted(own), file=sys.stderr)
"""


def imported(*arguments: str, site: Path | None = None, **variables: str) -> set[str]:
    code = f"import sys; sys.argv = [{' '.join(sorted(HEAVY))!r}, *sys.argv[1:]]\n{SHOW}"
    done = ran(sys.executable, "-c", code, *arguments, env=environment(site, **variables))
    return set(done.stderr.split())


def test_help_imports_no_command() -> None:
    found = imported("--help")
    assert not found & HEAVY
    light = {"api", "api.command", "api.installing", "cli", "errors", "bounded_calls", "text"}
    light |= {"cli.main", "cli.commands", "cli.serving"}
    assert {name for name in found if name.startswith("kvframework")} <= {f"kvframework.{name}" for name in light}


@pytest.mark.parametrize(
    "command", ["hold", "status", "top", "config show", "keys new", "plugins check", "new", "doctor", "demo"]
)
def test_help_of_a_command_imports_no_work_of_plugins(command: str) -> None:
    found = imported(*command.split(), "--help")
    assert not found & (HEAVY - OF_A_COMMAND)
    assert not {name for name in found if name.startswith("kvframework_bench")}


def test_commands_are_completed_without_anything_heavy() -> None:
    words = {"_KVFRAMEWORK_COMPLETE": "complete_bash", "COMP_WORDS": "kvframework st", "COMP_CWORD": "1"}
    assert not imported(**words) & HEAVY


def test_help_imports_no_command_of_another_distribution(site: Path) -> None:
    install(
        site, "acme", {"greet": "acme_greet:app"}, {"acme_greet": "raise SystemExit(9)"}, group="kvframework.commands"
    )
    assert "kvframework.cli.commands" in imported("--help", site=site)


def test_the_kinds_that_help_names_are_those_of_the_registry() -> None:
    assert tuple(REGISTERED) == KINDS
