"""`kvframework plugins info`: what a plugin is, takes and lacks. Commands of other distributions: found by metadata,
imported when they are needed, broken for themselves alone."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvframework.api.installing import install_command
from kvframework.cli.commands import KNOWN
from tests.core.cli.command import install_config_plugins, run, run_process
from tests.core.registry.fake_distributions import HOOKS, codec_module, install, marking


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


GROUP = "kvframework.commands"
COMMAND = """
import typer
app = typer.Typer(help="Greets.", no_args_is_help=True)
@app.command("hello")
def hello(name: str = "you") -> None:
    "Says hello."
    print(f"hello {name}")
@app.callback()
def main() -> None:
    "Greets."
"""


def add(
    site: Path, distribution: str, source: str, *, command: str = "greet", modules: Mapping[str, str] | None = None
) -> None:
    module = f"{distribution.replace('-', '_')}_commands"
    install(
        site,
        distribution,
        {command: f"{module}:app"},
        {module: source},
        group=GROUP,
        metadata="Summary: Greets by name.\n",
    )


def command(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(*arguments, site=site)


def test_the_help_names_it_and_imports_nothing(site: Path, tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    add(site, "acme-greet", marking(marker) + COMMAND)
    done = command(site, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^  greet +Greets by name\.$", done.stdout, re.MULTILINE)
    assert not marker.exists()


def test_it_runs_as_a_command_of_the_core_does(site: Path) -> None:
    add(site, "acme-greet", COMMAND)
    assert command(site, "greet", "hello", "--name", "Ada").stdout == "hello Ada\n"
    done = command(site, "greet", "hello", "--help")
    assert done.stdout.strip().startswith("Usage: kvframework greet hello")
    assert command(site, "greet", "bye").returncode == 2


def test_its_completion_knows_its_commands(site: Path) -> None:
    add(site, "acme-greet", COMMAND)
    words = {"_KVFRAMEWORK_COMPLETE": "complete_bash", "COMP_WORDS": "kvframework greet h", "COMP_CWORD": "2"}
    assert "hello" in run(site=site, **words).stdout


def test_a_broken_one_breaks_no_other(site: Path) -> None:
    add(site, "acme-greet", COMMAND)
    add(site, "acme-broken", "raise ImportError('no libfoo')", command="broken")
    add(site, "acme-number", "app = 1", command="number")
    assert command(site, "greet", "hello").stdout == "hello you\n"
    assert {"broken", "greet", "number"} <= set(command(site, "--help").stdout.split())
    done = command(site, "broken")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == (
        "error: [plugin.broken] kvframework broken: the command cannot be loaded: ImportError: no libfoo"
    )
    assert "acme-broken 1.0" in done.stderr
    done = command(site, "number")
    assert "[plugin.broken] kvframework number: acme_number_commands:app is not a typer.Typer" in done.stderr


def test_two_of_a_name_are_named_and_the_core_wins(site: Path, tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    add(site, "acme-greet", COMMAND)
    add(site, "other-greet", COMMAND)
    add(site, "acme-doctor", marking(marker) + COMMAND, command="doctor")
    done = command(site, "greet")
    assert done.returncode == 2
    assert "[plugin.conflict] kvframework greet: 2 distributions offer this command" in done.stderr
    assert "acme-greet 1.0, other-greet 1.0" in done.stderr
    assert command(site, "doctor", "--help").stdout.startswith("Usage: kvframework doctor")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["bench", "status", "keys"])
def test_a_command_of_a_distribution_that_is_not_here_says_how_to_get_it(site: Path, name: str) -> None:
    distribution = KNOWN[name][0]
    # What this environment has installed is hidden: only what is in `site` is offered.
    (site / "without_bench.py").write_text(
        "from importlib import metadata\n"
        "found = metadata.entry_points\n"
        "metadata.entry_points = lambda **which: () if 'group' in which else found(**which)\n"
    )
    (site / "sitecustomize.py").write_text("import without_bench\n")
    done = run_process(name, site=site)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"error: [plugin.unavailable] kvframework {name}: the command is not installed",
        f"  hint: {install_command(distribution=distribution)}",
    ]
    helped = run_process("--help", site=site).stdout
    assert re.search(rf"^  {name} +Not installed: {distribution}\.$", helped, re.MULTILINE)
