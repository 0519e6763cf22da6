"""What docs/plugins/transports.md shows of a driver is the example's real code, and that is proven as it says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import get_args

import pytest

from kvf_dev.testing import accelerator
from kvf_dev.testing.accelerator import node
from tests.core.registry.fake_distributions import install
from tests.docs.shown import blocks, entry_points
from tests.support.processes import ran
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "plugins" / "transports.md").read_text()
EXAMPLE = ROOT / "examples" / "kvf-simdev"
FILES = [EXAMPLE / "kvf_simdev.py", EXAMPLE / "tests" / "simdev_rig.py", EXAMPLE / "tests" / "test_simdev.py"]
DEMO = EXAMPLE / "use_simdev.py"
OPENCL = ROOT / "examples" / "kvf-opencl" / "tests" / "test_conformance.py"


@pytest.mark.parametrize("number", range(len(blocks(GUIDE, "python"))))
def test_every_python_block_is_the_examples_code(number: int) -> None:
    block = blocks(GUIDE, "python")[number].strip()
    assert any(_in(block, file.read_text()) for file in [*FILES, DEMO, OPENCL])


def _in(block: str, source: str) -> bool:
    """All of it, in pieces that are separated by two empty lines at the top."""
    return all(piece.strip() in source for piece in re.split(r"\n{3,}(?=[@a-zA-Z])", block))


def test_every_fault_can_be_injected(tmp_path: Path) -> None:
    with accelerator.SimulatedNode(tmp_path / "made" / "for" / "it") as made:
        for fault in get_args(node.Fault):
            made.inject(fault, made.devices[0])
        with pytest.raises(ValueError, match="there is no fault 'copy_failed'"):
            made.inject("copy_failed", made.devices[0])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="or no device 'gpu-9'"):
            made.inject("poison", "gpu-9")


def test_the_engine_in_small_stores_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "kvf-simdev", {"transport.simdev": "kvf_simdev"}, {"kvf_simdev": FILES[0].read_text()})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with accelerator.SimulatedNode(tmp_path / "node") as made:
        path = str(made.path)
        with ServerProcess("transport.0.use=simdev", f"transport.0.node={path}") as server:
            command = [sys.executable, "-W", "error", str(DEMO), server.endpoint, path]
            done = ran(*command, code=None)
            assert done.stdout.splitlines() == ["stored True", "loaded True True"], done.stderr + server.log
        assert made.violations() == []


def test_the_example_is_proven_by_its_own_tests_once_it_is_installed(tmp_path: Path) -> None:
    """In an environment where nothing but metadata tells of it, as after `pip install`."""
    site = tmp_path / "site"
    site.mkdir()
    install(
        site, "kvf-simdev", entry_points((EXAMPLE / "pyproject.toml").read_text()), {"kvf_simdev": FILES[0].read_text()}
    )
    chosen = "comes_back_in_other_blocks and (nhd or hybrid) or killed_in_mid_copy or what_is_cancelled and store"
    known = list(filter(None, [os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE)]
    run = ran(
        *(*command, "-c", os.devnull, "-W", "error", "-k", chosen, str(EXAMPLE / "tests")),
        code=None,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *known])},
        timeout=110,
    )
    assert re.search(r"^6 passed", run.stdout, re.MULTILINE), run.stdout + run.stderr
