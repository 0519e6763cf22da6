"""`kvframework hold` as the first process of a container, under a limit of memory, and what it imports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.keeper.supervisor import memory_kills
from tests.core.keeper.held import TIMEOUT, Held
from tests.support.control_group import control_group
from tests.support.processes import children, states
from tests.support.waiting import wait_until

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture(scope="module")
def namespaces() -> None:
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], check=False, timeout=60).returncode:
        pytest.skip("needs to make a pid namespace: root and unshare")


def test_it_imports_the_standard_library_and_itself() -> None:
    program = "import kvframework.keeper.supervisor, sys; print(*sorted(name for name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=TIMEOUT)
    others = {name.partition(".")[0] for name in run.stdout.split()} - set(sys.stdlib_module_names)
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT,
    )
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


class TestLackOfMemory:
    @pytest.fixture
    def group(self) -> Iterator[Path]:
        yield from control_group(128)

    def test_a_server_that_the_kernel_killed_is_named(self, group: Path) -> None:
        within = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        with Held(within=within) as held:
            held.ready(1)
            held.fail("eats memory")
            os.kill(held.ready(1)["pid"], signal.SIGKILL)
            held.says("ended by signal SIGKILL: the kernel killed it for lack of memory")
            held.fail("")
            # What was kept is there, and no kill by hand is taken for one of the kernel.
            assert len(held.ready(2)["found"]) == 2
            assert f"{held.reports()[0]['pid']}, ended by signal SIGKILL;" in held.log
            with contextlib.suppress(ProcessLookupError):
                assert states(held.process.pid)


@pytest.mark.parametrize(
    ("membership", "file", "text", "count"),
    [
        ("0::/a.slice\n", "a.slice/memory.events", "low 0\noom_kill 3\n", 3),
        ("0::/\n", "memory.events", "oom_kill 1\n", 1),
        ("0::/not/here\n", "memory.events", "oom_kill 2\n", 2),
        ("9:name=systemd:/\n4:cpu,memory:/b\n0::/\n", "memory/b/memory.oom_control", "under_oom 0\noom_kill 5\n", 5),
        ("0::/\n", "memory.events", "oom_kill x\n", None),
        ("0::/\n", "other", "", None),
        ("", "other", "", None),
    ],
)
def test_where_the_kernel_counts_its_kills(
    tmp_path: Path, membership: str, file: str, text: str, count: int | None
) -> None:
    (tmp_path / "membership").write_text(membership)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert memory_kills(str(tmp_path / "membership"), str(tmp_path)) == count
