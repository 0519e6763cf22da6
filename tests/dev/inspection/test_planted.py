"""Every problem that an inspection knows is found where it was planted, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvf_dev.inspection import PROBLEMS, inspect_plugin
from kvframework.errors import PluginError
from kvframework.registry.registry import PluginRegistry
from tests.core.registry.fake_distributions import install
from tests.dev.inspection.planted import PLANTED, SOUND
from tests.support.waiting import wait_until

PROPER = "Requires-Python: >=3.10\nRequires-Dist: kvframework>=0.1\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On the path of this process, and so of those that it starts. Somebody's torch is there too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "acme_client.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("module", PLANTED)
def test_what_was_planted_is_found_and_nothing_else(module: str, site: Path) -> None:
    planted = PLANTED[module]
    install(site, "acme", dict.fromkeys(planted.titles, module), {module: planted.source}, metadata=PROPER)
    report = inspect_plugin(module, deadline_s=planted.deadline_s)
    found = {f"{each.id} {each.where.split(':')[0].split(',')[0]}": each for each in report.problems}
    assert found.keys() == planted.found.keys(), report
    for key, place in planted.found.items():
        assert place in found[key].where
        assert found[key].severity == PROBLEMS[found[key].id][0]
        assert found[key].fact
        assert found[key].hint
    assert report.errors == sum(each.severity == "error" for each in report.problems)


def test_every_problem_was_planted() -> None:
    """Those of metadata by the tests below."""
    planted = {key.split()[0] for each in PLANTED.values() for key in each.found}
    elsewhere = {"name-conflict", "not-installed", "no-requires-python", "no-dependency", "options-refused"}
    assert planted | elsewhere == PROBLEMS.keys()
    assert not planted & elsewhere


def test_a_sound_plugin_has_no_problem(site: Path) -> None:
    install(site, "acme", {"codec.one": "sound"}, {"sound": SOUND}, metadata=PROPER)
    for target in ("sound", "codec.one"):
        report = inspect_plugin(target)
        assert (report.problems, report.notes, report.checked) == ([], [], ["codec.one"])


def test_an_inspection_that_ends_before_its_first_step_is_a_problem(site: Path) -> None:
    """As on a machine so busy that the process has no time to import anything."""
    install(site, "acme", {"codec.one": "sound"}, {"sound": SOUND}, metadata=PROPER)
    (found,) = inspect_plugin("sound", deadline_s=0.001).problems
    assert (found.id, found.where) == ("import-dies", "sound")
    assert found.fact == "the start of the inspection: the process did not end within 0.001 s"


def test_what_a_plugin_started_is_ended_with_the_process(site: Path) -> None:
    """It may hold what it was given open; nobody waits for it."""
    pids = site / "pids"
    child = f"child = subprocess.Popen(['sleep', '600'])\nprint(child.pid, file=open({str(pids)!r}, 'a'))"
    source = f"{SOUND}import subprocess\n{child}\n"
    install(site, "acme", {"codec.one": "starter"}, {"starter": source}, metadata=PROPER)
    assert inspect_plugin("starter").checked == ["codec.one"]
    started = pids.read_text().split()
    assert started
    wait_until(lambda: not any(map(_runs, started)), what="the end of what it started")


def _runs(pid: str) -> bool:
    """A zombie that nobody reaps, as in a container, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_only_the_named_provider_is_looked_at(site: Path) -> None:
    planted = PLANTED["planted_options"]
    titles = dict.fromkeys(planted.titles, "planted_options")
    install(site, "acme", titles, {"planted_options": planted.source}, metadata=PROPER)
    report = inspect_plugin("codec.silent")
    assert [each.id for each in report.problems] == ["undocumented-option"]
    assert report.checked == ["codec.silent"]


def test_metadata_is_read(site: Path) -> None:
    install(site, "acme", {"codec.one": "sound"}, {"sound": SOUND})
    install(site, "bolt", {"codec.one": "other"}, {"other": SOUND}, metadata=PROPER)
    report = inspect_plugin("sound")
    assert [each.id for each in report.problems] == ["name-conflict", "no-requires-python", "no-dependency"]
    assert "bolt 1.0" in report.problems[0].fact


def test_a_module_that_nobody_installed_is_inspected_too(site: Path) -> None:
    (site / "loose.py").write_text(SOUND)
    report = inspect_plugin("loose")
    assert [(each.id, each.severity) for each in report.problems] == [("not-installed", "warning")]
    assert report.checked == ["codec.one"]


def test_an_entry_point_for_another_api_is_told(site: Path) -> None:
    install(site, "acme", {"codec.one": "sound"}, {"sound": SOUND}, group="kvframework.v9", metadata=PROPER)
    assert [each.id for each in inspect_plugin("sound").problems] == ["api-version"]


def test_hooks_may_be_in_an_object(site: Path) -> None:
    source = SOUND.replace("@hookimpl\ndef kvf_codecs():", "class Hooks:\n  @hookimpl\n  def kvf_codecs(self):")
    install(site, "acme", {"codec.one": "objects:hooks"}, {"objects": f"{source}\nhooks = Hooks()"}, metadata=PROPER)
    report = inspect_plugin("codec.one")
    assert (report.problems, report.checked) == ([], ["codec.one"])


NEEDS_PATH = """
from kvframework.api.plugin import Options
from kvframework.api.tier import Tier, TierError, TierProvider, hookimpl
from typing import Annotated
from msgspec import Meta
class Where(Options, frozen=True):
    path: Annotated[str, Meta(description="where")]
    depth: Annotated[int, Meta(description="how deep", ge=1)] = 1
def _made(path):
    class Hidden(Tier):
        name = "hidden"
        def __init__(self):
            if path == "refused":
                raise TierError("no such folder", hint="make it")
            open(path + "/made", "w").close()
        def contains(self, keys, *, deadline): ...
        def get_into(self, keys, parts, *, deadline): ...
        def put(self, keys, parts, *, deadline): ...
        def delete(self, keys, *, deadline): ...
        def scan(self): ...
        def close(self): ...
    return Hidden()
@hookimpl
def kvf_tiers():
    create = lambda options, context: _made(options.path)
    return [TierProvider(name="deep", summary="d", options=Where, create=create)]
"""


def test_a_plugin_with_required_options_is_made_with_those_that_are_given(site: Path) -> None:
    install(site, "acme", {"tier.deep": "deep"}, {"deep": NEEDS_PATH}, metadata=PROPER)
    report = inspect_plugin("tier.deep")
    assert report.problems == []
    assert "give --set path=VALUE; the conformance kit checks the rest" in report.notes[0]
    report = inspect_plugin("tier.deep", {"path": str(site), "depth": 2})
    assert (site / "made").exists()
    assert report.notes == []
    assert {each.id for each in report.problems} == {"wrong-signature"}
    report = inspect_plugin("tier.deep", {"path": str(site), "depht": 2})
    assert report.notes == []
    (refused,) = (each for each in report.problems if each.id == "options-refused")
    assert refused.fact == "--set: unknown key 'depht' [config.field]"
    assert report.errors
    report = inspect_plugin("tier.deep", {"path": "refused"})
    assert report.notes == []
    (refused,) = (each for each in report.problems if each.id == "options-refused")
    assert (refused.fact, refused.hint) == ("no such folder [storage.tier]", "make it")
    report = inspect_plugin("tier.deep", {"path": "/nowhere/at/all"})
    fails = next(each for each in report.problems if each.id == "create-fails")
    assert fails.fact.startswith("create raised FileNotFoundError: [Errno 2]")
    assert fails.fact.endswith(", with the options path")


RAISES = SOUND + "\ndef kvf_codecs(): raise OSError('no luck')\nkvf_codecs = hookimpl(kvf_codecs)\n"
NEEDS = SOUND.replace("CodecProvider(", "CodecProvider(requires_api='1.99', ")


@pytest.mark.parametrize(("source", "problem"), [(RAISES, "hook-fails"), (NEEDS, "api-version")])
def test_an_author_is_told_what_to_change_and_a_user_whom_to_ask(site: Path, source: str, problem: str) -> None:
    module = problem.replace("-", "_")
    install(site, "acme", {"codec.one": module}, {module: source}, metadata=PROPER)
    (found,) = inspect_plugin("codec.one").problems
    assert found.id == problem
    assert found.hint
    assert not {"author", "release"} & set(re.findall(r"\w+", found.hint))
    with pytest.raises(PluginError) as caught:
        PluginRegistry().resolve("codec", "one")
    said = {
        "hook-fails": "report the error to the author of acme; run `kvframework plugins check` for details",
        "api-version": "install a release of the plugin for this kvframework, or another kvframework",
    }
    assert caught.value.hint == said[problem]
