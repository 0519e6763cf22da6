"""`kvframework plugins check`: exit statuses, the document, and what a person reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.core.cli.command import run, run_process
from tests.core.registry.fake_distributions import install
from tests.dev.inspection.planted import PLANTED, SOUND
from tests.dev.inspection.test_planted import NEEDS_PATH, PROPER


def test_a_sound_plugin_is_ok(site: Path) -> None:
    install(site, "acme", {"codec.one": "sound"}, {"sound": f"print('noise')\n{SOUND}"}, metadata=PROPER)
    done = run("plugins", "check", "codec.one", "--json", site=site)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"target": "codec.one", "checked": ["codec.one"], "problems": [], "notes": []}
    assert run("plugins", "check", "sound", site=site).stdout == "ok: codec.one\n"


def test_warnings_leave_the_status_0(site: Path) -> None:
    install(site, "acme", {"codec.one": "sound"}, {"sound": SOUND})
    done = run("plugins", "check", "sound", site=site)
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning [no-dependency] acme\n" in done.stdout
    assert done.stdout.endswith("codec.one: 0 errors, 2 warnings\n")


def test_an_error_is_status_1(site: Path) -> None:
    install(site, "acme", {"codec.hooks": "hooks"}, {"hooks": PLANTED["planted_hooks"].source}, metadata=PROPER)
    done = run("plugins", "check", "hooks", site=site)
    assert (done.returncode, done.stderr) == (1, "")
    assert "error [misspelt-hook] hooks.kvf_codec\n  there is no hook kvf_codec\n" in done.stdout
    assert "  hint: did you mean kvf_codecs?\n" in done.stdout
    document = json.loads(run("plugins", "check", "hooks", "--json", site=site).stdout)
    assert document["problems"][0].keys() == {"id", "severity", "where", "fact", "expected", "hint"}


@pytest.mark.parametrize(
    ("asks", "names", "told"),
    [
        (">=9", ["acme"], ["of acme 1.0 needs kvframework >=9", "install a release of the plugin for this"]),
        (">=0.1", ["acme", "bolt"], ["distributions offer tier.deep: acme 1.0, bolt 1.0", "uninstall all but one"]),
        (">=0.1", ["acme"], ["depth: expected an integer, found a string", "info tier.deep` lists its options"]),
    ],
)
def test_four_commands_say_the_same(site: Path, tmp_path: Path, asks: str, names: list[str], told: list[str]) -> None:
    for name in names:
        install(
            site, name, {"tier.deep": f"of_{name}"}, {f"of_{name}": NEEDS_PATH}, metadata=PROPER.replace(">=0.1", asks)
        )
    file = tmp_path / "kvf.toml"
    file.write_text('l1.capacity = "16MiB"\n[[l2]]\nuse = "deep"\npath = "/x"\ndepth = "many"\n')
    in_file = [f"config check {file}", f"serve --config {file}", f"doctor --config {file}"]
    for command in (*in_file, "plugins check tier.deep --set path=/x --set depth=many"):
        done = run_process(*command.split(), site=site)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode in (1, 2), said
        assert all(each in said for each in told), said
        assert command not in in_file or str(file) in said, said


@pytest.mark.parametrize(
    ("name", "text"),
    [("kvf_nowhere", "[plugin.not_found]"), ("tier.reddis", "did you mean 'redis'?"), ("tyre.redis", "plugins list")],
)
def test_a_plugin_that_is_not_there_is_wrong_usage(name: str, text: str) -> None:
    done = run("plugins", "check", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_options_are_set_for_what_is_checked(site: Path) -> None:
    install(site, "acme", {"tier.deep": "deep"}, {"deep": NEEDS_PATH}, metadata=PROPER)
    done = run("plugins", "check", "tier.deep", "--set", f"path={site}", "--set", "depth=3", site=site)
    assert (done.returncode, done.stderr) == (1, "")
    assert (site / "made").exists()
    assert "error [wrong-signature]" in done.stdout
    refused = run("plugins", "check", "deep", "--set", f"path={site}", site=site)
    assert refused.returncode == 2
    assert "KIND.NAME" in refused.stderr
