"""`kvframework new` writes a folder or nothing, says what to do next, and refuses what could not work."""

from __future__ import annotations

import ast
import contextlib
import keyword
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvf_dev import scaffold
from kvf_dev.scaffold import (
    VARIANTS,
    FolderExists,
    NameRefused,
    PluginNames,
    ScaffoldError,
    choose_names,
    render,
    write_distribution,
)
from kvframework import __version__
from kvframework.api.codec import MAX_CODEC_NAME
from kvframework.api.installing import requirement
from kvframework.registry.discovery import KINDS
from tests.core.cli.command import COMMAND, environment
from tests.core.registry.fake_distributions import install

RENDERED = [*((kind, "") for kind in KINDS), *VARIANTS]


def new(folder: Path, *arguments: str, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    command, env = [*COMMAND, "new", *arguments], environment(site)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_it_writes_a_distribution_and_says_what_comes_next(tmp_path: Path) -> None:
    done = new(tmp_path, "tier", "my_store")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "kvf-my-store"
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == {
        ".github/workflows/test.yml",
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "tox.ini",
        "kvf_my_store/__init__.py",
        "kvf_my_store/options.py",
        "kvf_my_store/py.typed",
        "kvf_my_store/tier.py",
        "tests/plugin_options.py",
        "tests/test_conformance.py",
        "tests/test_diagnosis.py",
    }
    first, *commands = done.stdout.splitlines()
    assert first.startswith("kvf-my-store: 12 files")
    assert [command.strip() for command in commands] == [
        f"cd kvf-my-store && pip install -e . {requirement(distribution='kvframework-dev')}",
        "pytest",
        "kvframework plugins check tier.my_store",
    ]


@pytest.mark.parametrize(("kind", "variant"), RENDERED)
def test_no_word_of_the_templates_is_left(kind: str, variant: str) -> None:
    names = PluginNames(kind, "my_store", variant)
    files = render(names)
    for path, text in files.items():
        assert not re.search(
            "newname|newkind|PRESENT_MINOR|TEST_EXTRAS|WHEEL_COMMAND|KITS_REQUIREMENT|CORE_REQ|REQUIRED_BESIDE|"
            "SUBDIRECTORIES|-tpl",
            path + text,
            re.IGNORECASE,
        ), path
        assert text.endswith("\n") or not text
    minor = ".".join(__version__.split(".")[:2])
    devices = f', "kvframework-devices>={minor}.0.dev0"' if variant == "driver" else ""
    assert f'dependencies = ["kvframework>={minor}.0.dev0"{devices}]' in files["pyproject.toml"]
    assert f'"{kind}.my_store" = "kvf_my_store"' in files["pyproject.toml"]


def test_no_template_is_there_twice() -> None:
    """What checks a release's wheel refuses equal files."""
    found: dict[bytes, Path] = {}
    for file in sorted((Path(scaffold.__file__).parent / "templates").rglob("*-tpl")):
        if content := file.read_bytes():
            assert found.setdefault(content, file) == file


def test_the_folder_may_be_given_with_parents_that_are_not_there(tmp_path: Path) -> None:
    done = new(tmp_path, "hasher", "mine", "--path", "some where/mine")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "some where" / "mine" / "kvf_mine" / "hasher.py").is_file()
    assert "cd 'some where/mine' && " in done.stdout


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("tier", "MyStore", "did you mean my_store?"),
        ("tier", "my-store", "did you mean my_store?"),
        ("tier", "my store", "did you mean my_store?"),
        ("tier", "KVF-store", "did you mean store?"),
        ("tier", "2fast", "choose one such as"),
        ("tier", "", "choose one such as"),
        ("tier", "../up", "did you mean up?"),
        ("tier", "a__b", "did you mean a_b?"),
        ("tier", "größe", "did you mean gr_e?"),
        ("tier", "x" * 33, "did you mean xxx"),
        ("codec", "a_name_of_seventy", "did you mean a_name_of_sevent?"),
        ("codec", "allow", "did you mean allow_codec?"),
        ("transport", "auto", "did you mean auto_transport?"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_that_can(kind: str, name: str, hint: str) -> None:
    with pytest.raises(NameRefused) as refused:
        choose_names(kind, name)
    assert hint in refused.value.hint
    assert refused.value.where == "NAME"


def test_a_codecs_longest_name_is_that_of_a_values_header() -> None:
    assert choose_names("codec", "x" * MAX_CODEC_NAME).name == "x" * MAX_CODEC_NAME
    with pytest.raises(NameRefused, match=rf"it has {MAX_CODEC_NAME + 1} characters\n.* at most {MAX_CODEC_NAME}"):
        choose_names("codec", "x" * (MAX_CODEC_NAME + 1))
    assert choose_names("tier", "x" * 32).name == "x" * 32


@pytest.mark.parametrize(("kind", "variant"), RENDERED)
def test_no_class_hides_one_that_its_module_imports(kind: str, variant: str) -> None:
    """`hasher.key` would make a `KeyHasher` that is a subclass of itself."""
    names = ["key", "eviction", "device", "kv", "no", "copy", "transfer"]
    for name in [word for word in keyword.kwlist if word.islower()] + names:
        with contextlib.suppress(NameRefused):
            for path, text in render(PluginNames(kind, name, variant)).items():
                if path.endswith(".py"):
                    _check_module(ast.parse(text), path)


def _check_module(tree: ast.Module, path: str) -> None:
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in froms for alias in node.names}
    assert not imported & {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, path


def test_a_class_would_have_the_name_of_its_base() -> None:
    for kind, name in (("hasher", "key"), ("eviction", "eviction")):
        with pytest.raises(NameRefused, match="is a name of kvframework itself"):
            render(PluginNames(kind, name))


@pytest.mark.parametrize(
    ("kind", "name", "fact"),
    [
        ("tear", "mine", "unknown kind 'tear'"),
        ("tier", "filesystem", "already offers tier.filesystem"),
        ("codec", "redis", "a module kvf_redis already exists"),
    ],
)
def test_what_would_not_work_is_refused(kind: str, name: str, fact: str) -> None:
    with pytest.raises(NameRefused) as refused:
        choose_names(kind, name)
    assert fact in refused.value.fact


@pytest.mark.parametrize(
    ("there", "offers", "kind", "fact"),
    [
        ("kvf-mine", "eviction.other", "tier", "a distribution kvf-mine is already installed"),
        ("acme-kvf", "eviction.mine", "eviction", "[scaffold.name] NAME: acme-kvf 1.0 already offers eviction.mine"),
    ],
)
def test_what_is_installed_is_not_replaced(tmp_path: Path, there: str, offers: str, kind: str, fact: str) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    work.mkdir()
    install(site, there, {offers: "acme"})
    done = new(work, kind, "mine", site=site)
    assert done.returncode == 2
    assert fact in done.stderr
    assert os.listdir(work) == []
    # Another kind may have the name of a plugin, but no distribution that of another.
    assert (new(work, "codec", "mine", site=site).returncode == 0) is (there != "kvf-mine")


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_nothing_is_ever_overwritten(tmp_path: Path, there: str) -> None:
    place = tmp_path / "kvf-mine"
    if there == "folder":
        place.mkdir()
    elif there == "file":
        place.write_text("mine")
    else:
        place.symlink_to("nowhere")
    with pytest.raises(FolderExists, match="already exists"):
        write_distribution(place, {"a": "text"})
    assert os.listdir(tmp_path) == ["kvf-mine"]
    assert there != "folder" or not os.listdir(place)
    assert there != "file" or place.read_text() == "mine"


@pytest.mark.parametrize("parent", ["file", "/proc", "read_only"])
def test_where_nothing_can_be_written_it_says_so(tmp_path: Path, parent: str) -> None:
    folder = Path(parent) if parent == "/proc" else tmp_path / parent
    if parent == "file":
        folder.write_text("")
    elif parent == "read_only":
        folder.mkdir(mode=0o555)
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write everywhere")
    with pytest.raises(ScaffoldError) as refused:
        write_distribution(folder / "kvf-mine", {"a": "text"})
    assert refused.value.code == "scaffold.failed"
    assert "cannot be written" in refused.value.fact
    assert refused.value.hint


def test_what_was_begun_is_removed_when_it_cannot_be_finished(tmp_path: Path) -> None:
    with pytest.raises(ScaffoldError, match="cannot be written"):
        write_distribution(tmp_path / "mine", {"a": "text", "a/b": "below a file"})
    assert os.listdir(tmp_path) == []


def test_tox_and_ci_find_kvframework_without_an_index() -> None:
    files = render(PluginNames("tier", "mine"))
    assert "PIP_FIND_LINKS = wheels {env:PIP_FIND_LINKS:}" in files["tox.ini"]
    for path in ("tox.ini", "README.md"):
        assert (
            f"pip wheel --no-deps --wheel-dir wheels {requirement()} {requirement(distribution='kvframework-dev')}"
            in files[path]
        )
    assert 'wheels "$KVFRAMEWORK" "$KVFRAMEWORK#subdirectory=plugins/tools/dev"' in files[".github/workflows/test.yml"]
    assert "wheels/" in files[".gitignore"]


def test_a_tier_in_a_helper_process_differs_in_what_it_must(tmp_path: Path) -> None:
    assert new(tmp_path, "tier", "mine", "--helper").returncode == 0
    plain, helped = render(PluginNames("tier", "mine")), render(PluginNames("tier", "mine", "helper"))
    folder = tmp_path / "kvf-mine"
    assert {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()} == helped.keys()
    assert helped.keys() - plain.keys() == {"tests/test_freeze.py"}
    changed = {path for path in plain if plain[path] != helped[path]}
    assert changed == {"kvf_mine/__init__.py", "README.md"}


def test_a_transport_is_driven_by_the_engine_or_by_the_server(tmp_path: Path) -> None:
    found = {}
    for variant in ("", "--driver", "--async"):
        folder = tmp_path / f"mine{variant}"
        assert new(tmp_path, "transport", "mine", *[variant] * bool(variant), "--path", folder.name).returncode == 0
        found[variant] = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    plain, driver, asynchronous = found.values()
    accelerator = {"kvf_mine/runtime.py", "kvf_mine/options.py", "tests/mine_rig.py"}
    assert plain - driver == {"kvf_mine/context.py", "kvf_mine/blocks.py"}
    assert driver - plain == accelerator | {"kvf_mine/engine.py", "kvf_mine/copier.py"}
    assert asynchronous - plain == accelerator | {"kvf_mine/device.py", "kvf_mine/copies.py"}
    assert plain - asynchronous == {"kvf_mine/blocks.py"}


def test_one_plugin_is_of_one_variant() -> None:
    with pytest.raises(NameRefused, match="--driver and --async exclude each other"):
        choose_names("transport", "mine", "driver", "async")


@pytest.mark.parametrize(
    ("kind", "option"), [("codec", "--helper"), ("transport", "--helper"), ("tier", "--driver"), ("memory", "--driver")]
)
def test_a_variant_that_the_kind_lacks_is_refused(tmp_path: Path, kind: str, option: str) -> None:
    done = new(tmp_path, kind, "mine", option)
    assert done.returncode == 2
    assert f"{option}: the kind {kind} has no {option}" in done.stderr
    assert "expected: tier --helper, transport --driver, transport --async" in done.stderr
    assert f"hint: leave {option} out" in done.stderr
    assert os.listdir(tmp_path) == []
