"""Every test file is in one part of the suite, every part is run by an environment of tox, and a run says what it has
not proven."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import IMPORTED_TORCH
from tests.parts import DEFAULT, PARTS, ROOT, part_of

TOX = ROOT.parent / "tox.ini"
FILES = sorted(ROOT.rglob("test_*.py"))


def environments() -> dict[str, set[str]]:
    """The parts that each environment of tox.ini runs when it is given no arguments."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(TOX)
    return {
        section.partition(":")[2]: set(re.findall(r"--part=(\w+)", tox[section].get("commands", "")))
        for section in tox.sections()
        if section.startswith("testenv")
    }


def label(name: str) -> set[str]:
    """The environments of a label, or of `env_list`."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(TOX)
    if name in tox["tox"]:
        return set(re.split(r"[,\s]+", tox["tox"][name]))
    (line,) = (line for line in tox["tox"]["labels"].splitlines() if line.strip().startswith(f"{name} "))
    return set(re.split(r"[,\s]+", line.partition("=")[2].strip()))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_names_what_is_there_and_nothing_twice(part: str) -> None:
    for place in PARTS[part]:
        assert (ROOT / place).exists(), place
        parents = {parent.as_posix() for parent in Path(place).parents}
        assert [other for each in PARTS.values() for other in each if other == place or other in parents] == [place]


def test_every_part_is_run_by_full_or_by_its_name() -> None:
    run = environments()
    assert {part for name in label("full") | {"survival"} for part in run.get(name, ())} == {DEFAULT, *PARTS}
    assert {part for name in label("env_list") for part in run.get(name, ())} == {DEFAULT}
    assert run["survival"] == {"survival"}
    assert "--part=survival" in (ROOT.parent / ".ci" / "run").read_text()


def test_files_of_every_part_are_found() -> None:
    assert {part_of(file) for file in FILES} == {DEFAULT, *PARTS}


def test_no_file_of_the_default_part_imports_torch_when_it_is_collected() -> None:
    """Each process that shares the tests collects them all."""
    assert [file for file in IMPORTED_TORCH if part_of(ROOT.parent / file) == DEFAULT] == []


def test_the_page_of_tests_names_every_folder_that_is_no_room_and_no_package() -> None:
    rooms = {f"core/{room.stem}" for room in (ROOT.parent / "kvframework").iterdir()}
    packages = {file.parent.name for file in (ROOT.parent / "plugins").rglob("pyproject.toml")}
    page = (ROOT.parent / "docs" / "testing.md").read_text()
    parents = {file.relative_to(ROOT).parts[:-1] for file in FILES} - {(), ("core",)}
    folders = {"/".join(each[: 2 if each[0] == "core" else 1]) for each in parents}
    assert sorted(folder for folder in folders - rooms - packages if f"`{folder}/`" not in page) == []


def test_tests_that_need_a_gpu_are_counted_where_there_is_none(tmp_path: Path) -> None:
    skipping = "@pytest.mark.gpu\n@pytest.mark.parametrize('at', range(3))\ndef test_a(at): pytest.skip('no GPU')\n"
    (tmp_path / "test_gpu.py").write_text(f"import pytest\n{skipping}def test_b(): pytest.skip('no Redis')\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-2:-1] == ["3 tests need a GPU and were not run"], done.stdout + done.stderr
