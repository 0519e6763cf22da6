"""What docs/plugins/transports.md shows is the example's real code, and the example is proven as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvframework.testing import accelerator
from kvframework.testing.accelerator import memory, runtime
from tests.plugins.fake_distributions import install

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "plugins" / "transports.md").read_text()
EXAMPLE = ROOT / "examples" / "kvf-simdev"
FILES = [EXAMPLE / "kvf_simdev.py", EXAMPLE / "tests" / "simdev_rig.py", EXAMPLE / "tests" / "test_simdev.py"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_every_python_block_is_the_examples_code(number: int) -> None:
    block = blocks("python")[number].strip()
    assert any(_in(block, file.read_text()) for file in FILES)


def _in(block: str, source: str) -> bool:
    """All of it, in pieces that are separated by two empty lines at the top."""
    return all(piece.strip() in source for piece in re.split(r"\n{3,}(?=[@a-zA-Z])", block))


def test_the_metadata_is_the_examples() -> None:
    assert (EXAMPLE / "pyproject.toml").read_text().strip() in [block.strip() for block in blocks("toml")]


def test_the_driver_is_as_short_as_it_says() -> None:
    (said,) = re.findall(r"a provider: (\d+) lines here", GUIDE)
    found = len(FILES[0].read_text().splitlines())
    assert found == int(said) < 200


def test_every_violation_is_explained() -> None:
    source = Path(memory.__file__).read_text() + Path(runtime.__file__).read_text()
    kinds = set(re.findall(r'_misuse\(\s*"(\w+)"', source)) | set(
        re.findall(r'kind = "(\w+)" if .* else "(\w+)"', source)[0]
    )
    table = GUIDE[GUIDE.index("| violation |") :]
    assert kinds | {"leaked_context"} == set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    assert accelerator.Misuse.__name__


def test_the_example_is_proven_by_its_own_tests_once_it_is_installed(tmp_path: Path) -> None:
    """In an environment where nothing but metadata tells of it, as after `pip install`."""
    entry_points = dict(re.findall(r'^"([\w.]+)" = "(\w+)"$', (EXAMPLE / "pyproject.toml").read_text(), re.MULTILINE))
    site = tmp_path / "site"
    site.mkdir()
    install(site, "kvf-simdev", entry_points, {"kvf_simdev": FILES[0].read_text()})
    chosen = "comes_back_in_other_blocks and (nhd or hybrid) or killed_in_mid_copy or cancelled_store"
    known = list(filter(None, [os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), "-c", os.devnull,
         "-W", "error", "-k", chosen, str(EXAMPLE / "tests")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *known])},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert re.search(r"^6 passed", run.stdout, re.MULTILINE), run.stdout + run.stderr
