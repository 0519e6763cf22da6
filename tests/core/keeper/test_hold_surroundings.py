"""`kvframework hold` as the first process of a container, and what it imports."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.core.keeper.held import TIMEOUT, Held
from tests.support.processes import children, ran
from tests.support.waiting import wait_until

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture(scope="module")
def namespaces() -> None:
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], check=False, timeout=60).returncode:
        pytest.skip("needs to make a pid namespace: root and unshare")


def test_it_imports_the_standard_library_and_itself() -> None:
    program = "import kvframework.keeper.supervisor, sys; print(*sorted(name for name in sys.modules))"
    run = ran(sys.executable, "-c", program, timeout=TIMEOUT)
    others = {name.partition(".")[0] for name in run.stdout.split()} - set(sys.stdlib_module_names)
    bare = ran(sys.executable, "-c", "import sys; print(*sys.modules)", timeout=TIMEOUT)
    assert others - {name.partition(".")[0] for name in bare.stdout.split()} == {"kvframework"}
    own = {name for name in run.stdout.split() if name.startswith("kvframework.") and "keeper" not in name}
    assert own == {"kvframework.supervise", "kvframework.supervise.state"}


@pytest.mark.usefixtures("namespaces")
class TestFirstProcess:
    def test_signals_reach_it_and_its_server(self) -> None:
        with Held(within=UNSHARE) as held:
            held.ready(1)
            (first,) = children(held.process.pid)
            os.kill(first, signal.SIGHUP)
            wait_until(lambda: held.reports()[-1]["event"] == "SIGHUP", TIMEOUT, "SIGHUP")
            os.kill(first, signal.SIGTERM)
            assert held.process.wait(TIMEOUT) == 0

    def test_it_reaps_orphans(self) -> None:
        with Held(within=UNSHARE, fails="leaves an orphan") as held:
            held.ready(1)
            (first,) = children(held.process.pid)
            wait_until(lambda: len(children(first)) == 1, TIMEOUT, "the end of the orphan")
