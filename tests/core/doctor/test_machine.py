"""What the doctor tells of a machine and its limits, from files and processes made for it. What the doctor says of the
memory that `kvframework hold` keeps. `kvframework doctor`: exit statuses, the document, and the table that a person
reads. An installation without a C compiler: the server, an engine, the doctor and the status say so, each in one
line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from kvframework.api.plugin import Finding
from kvframework.config.endpoint import check_directory, default_endpoint
from kvframework.doctor import machine as checks
from kvframework.doctor.checkup import examine, kept, run_check, socket_findings
from kvframework.errors import EndpointError
from kvframework.keeper.sockets import CONTROL_SUFFIX, KeeperSocket, reply
from kvframework.preflight import RunningServer
from tests.core.cli.command import run
from tests.support.processes import ran
from tests.support.server_process import ServerProcess


def by_id(found: Iterator[Finding]) -> dict[str, Finding]:
    return {each.id: each for each in found}


# the check itself


def test_a_check_that_raises_or_hangs_is_a_finding() -> None:
    def raising() -> Iterator[Finding]:
        yield Finding("a.b", "ok", "seen")
        raise OSError("no such thing")

    first, second = run_check("disk", raising)
    assert first.fact == "seen"
    assert (second.id, second.level) == ("disk.check", "fail")
    assert "no such thing" in second.fact
    (late,) = run_check("disk", lambda: time.sleep(60) or [], timeout_s=0.05)  # type: ignore[func-returns-value]
    assert "no result within 0.05 s" in late.fact


def test_a_check_that_hangs_does_not_keep_the_command() -> None:
    program = (
        "import time; from kvframework.doctor.checkup import run_check\n"
        "print(run_check('disk', lambda: time.sleep(600), timeout_s=0.05)[0].id)"
    )
    done = ran(sys.executable, "-c", program)
    assert done.stdout == "disk.check\n"


# sockets


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check may take as long as a busy machine takes."""
    monkeypatch.setattr("kvframework.doctor.checkup.CHECK_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_path_that_is_too_long_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert list(socket_findings(default_endpoint())) == []
    (refused,) = (each for each in examine().findings if each.level == "fail")
    assert refused.id == "config.endpoint"
    assert "the socket path" in refused.fact
    assert "[server] endpoint" in refused.advice


def test_the_directory_is_private_or_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    endpoint = f"ipc://{folder}/server.sock"
    assert (
        "does not exist; the server will create the socket directory"
        in by_id(socket_findings(endpoint))["socket.directory"].fact
    )
    folder.mkdir(mode=0o700)
    assert by_id(socket_findings(endpoint))["socket.directory"].level == "ok"
    folder.chmod(0o777)
    assert "socket.directory" not in by_id(socket_findings(endpoint))
    with pytest.raises(EndpointError, match="other users may write to the directory"):
        check_directory(folder)
    with pytest.raises(EndpointError, match="this user may not create the directory in /proc"):
        check_directory(Path("/proc/self/status/run"))


def test_a_server_that_runs_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint, running = f"ipc://{tmp_path}/server.sock", RunningServer(7, "kvf.toml", 1 << 20)
    assert "(process 7, configuration kvf.toml)" in by_id(socket_findings(endpoint, running))["socket.server"].fact
    assert by_id(socket_findings(endpoint))["socket.server"].fact == "no server of this user answers at the endpoint"


# limits


@pytest.mark.parametrize(
    ("limit", "level", "text"),
    [
        ("NOFILE, (100, 100)", "fail", "0 client"),
        ("NOFILE, (1024, 1024)", "warn", "150 client"),
        ("NOFILE, (4096, 4096)", "ok", "649 client"),
    ],
)
def test_descriptors_are_counted(limit: str, level: str, text: str) -> None:
    found = in_a_child(limit)["limits.descriptors"]
    assert found[0] == level
    assert text in found[1]


def test_locked_memory_is_told() -> None:
    assert in_a_child("MEMLOCK, (65536, 65536)")["limits.memlock"][:2] == (
        "ok",
        "a process may lock 64.0 KiB of memory; only device transports lock memory",
    )


def in_a_child(limit: str) -> dict[str, tuple[str, str]]:
    program = (
        "import json, resource; from kvframework.doctor.machine import limits\n"
        f"resource.setrlimit(resource.RLIMIT_{limit})\n"
        "print(json.dumps({each.id: (each.level, each.fact) for each in limits()}))"
    )
    done = ran(sys.executable, "-c", program)
    return msgspec.json.decode(done.stdout, type=dict[str, tuple[str, str]])


# memory


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_counts(tmp_path: Path, version: int) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  4194304 kB\nMemAvailable:  2097152 kB\n")
    (proc / "self" / "cgroup").write_text("0::/a/b\n" if version == 2 else "3:cpu:/\n4:memory:/a/b\n")
    top = cgroups if version == 2 else cgroups / "memory"
    limit, used = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    none = "max" if version == 2 else str(1 << 63)
    for folder, most in ((top, str(1 << 31)), (top / "a", str(1 << 30)), (top / "a" / "b", none)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(most)
        (folder / used).write_text(str(1 << 20))
    found = by_id(checks.memory(proc, cgroups))
    assert found["memory.machine"].fact == "2.0 GiB of 4.0 GiB are available"
    assert (found["memory.cgroup"].level, "allows 1.0 GiB" in found["memory.cgroup"].fact) == ("ok", True)
    (top / "a" / used).write_text(str(1000 << 20))
    assert by_id(checks.memory(proc, cgroups))["memory.cgroup"].level == "warn"
    for folder in (top, top / "a"):
        (folder / limit).write_text(none)
    assert by_id(checks.memory(proc, cgroups))["memory.cgroup"].fact == "no cgroup limits the memory"


def test_a_build_without_the_lock_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_id(checks.python())["python.gil"].level == "ok"
    monkeypatch.setattr(checks.sysconfig, "get_config_var", lambda _: 1)
    assert by_id(checks.python())["python.gil"].level == "warn"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_without_its_package_is_named_with_the_line_that_installs_it(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {engine}
    monkeypatch.setattr(checks, "find_spec", lambda name: object() if name in here else None)
    (found,) = (each for each in checks.installation() if each.id == "kvframework.engine")
    assert (found.level, f"without kvframework-{engine}" in found.fact) == ("warn", True)
    assert found.advice == f"pip install DIR-OF-CLONE/plugins/engines/{engine}"
    here.add(f"kvf_{engine}")
    (found,) = (each for each in checks.installation() if each.id == "kvframework.engine")
    assert found.level == "ok"


@pytest.fixture
def socket() -> Iterator[Path]:
    # Socket paths are short, so not below pytest's long tmp_path.
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        yield Path(folder) / "s.sock"


def answer(control: KeeperSocket, document: dict[str, object], ending: int) -> None:
    while True:
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(ending, select.POLLIN)
        if ending in dict(poll.poll()):
            return
        received = control.receive()
        if received is not None and received.fd is not None:
            reply(received.fd, document)


@contextlib.contextmanager
def keeping(socket: Path, server: dict[str, object] | None, nbytes: int) -> Iterator[None]:
    """A keeper with this server and an arena with so many bytes of memory."""
    control, ending = KeeperSocket(f"{socket}{CONTROL_SUFFIX}"), os.eventfd(0)
    held = [{"name": "kvf-arena", "size": 1, "bytes": nbytes}]
    thread = threading.Thread(
        target=answer, args=(control, {"done": True, "pid": 7, "server": server, "held": held}, ending)
    )
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(ending, 1)
        thread.join()
        control.close()
        os.close(ending)


@pytest.mark.parametrize(
    ("server", "nbytes", "level"), [({"pid": 8}, 1 << 20, "ok"), (None, 1 << 20, "warn"), (None, 0, "ok")]
)
def test_kept_memory_without_a_server_is_worth_a_look(
    socket: Path, server: dict[str, object] | None, nbytes: int, level: str
) -> None:
    with keeping(socket, server, nbytes):
        (finding,) = kept(f"ipc://{socket}")
    assert finding.level == level
    assert finding.fact.startswith("`kvframework hold`, process 7, holds ")
    # Its server may wait for a corrected configuration: freeing L1 is not the first thing to do.
    assert ("see the log of `kvframework hold`; `kvframework hold --drop` frees" in finding.advice) == (level == "warn")


def test_nothing_is_said_where_no_keeper_runs(socket: Path) -> None:
    assert list(kept(f"ipc://{socket}")) == []


def test_what_is_kept_needs_no_room_beside_itself(socket: Path) -> None:
    """As `serve`: the next server has it, or frees it."""
    settings = [f"server.endpoint=ipc://{socket}", "l1.capacity=900TiB"]
    for held in (False, True):
        with keeping(socket, None, 1 << 20) if held else contextlib.nullcontext():
            checked = run("config", "check", *(word for setting in settings for word in ("--set", setting)))
            found = [each for each in examine(overrides=settings).findings if "does not fit" in each.fact]
        assert (checked.returncode, len(found)) == ((0, 0) if held else (2, 1)), checked.stderr


SMALL = ("--set", "l1.capacity=1MiB")


def test_a_machine_that_is_well_is_status_0(tmp_path: Path) -> None:
    done = run("doctor", *SMALL, "--json", XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document.keys() == {"findings", "ok", "warn", "fail"}
    assert document["findings"][0].keys() == {"id", "level", "fact", "advice", "where"}
    assert document["fail"] == 0
    assert document["ok"] + document["warn"] == len(document["findings"])
    subjects = {each["id"].split(".")[0] for each in document["findings"]}
    assert subjects == {"config", "python", "kvframework", "memory", "limits", "numa", "socket", "plugin", "pinned"}


def test_a_failure_is_status_1_and_reads_well(tmp_path: Path) -> None:
    config = tmp_path / "kvf.toml"
    config.write_text(
        '[l1]\nuse = "pinned"\ncapacity = "900TiB"\n[[l2]]\nuse = "filesystm"\n[hasher]\nuse = "sha256"\n'
    )
    done = run("doctor", "--config", str(config), XDG_RUNTIME_DIR=str(tmp_path), FORCE_COLOR="1", TERM="xterm")
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "fail storage.arena" in text
    assert "hint: lower [l1] capacity" in text
    assert "hint: did you mean 'filesystem'?" in text
    assert lines[-1].endswith("2 failed")


def test_a_configuration_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    done = run("doctor", "--config", str(tmp_path / "none.toml"), "--json")
    assert (done.returncode, done.stderr) == (1, "")
    findings = {each["id"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["config.file"]["level"] == "fail"
    assert findings["limits.memlock"]["level"] == "ok"
    assert "plugin.usable" not in findings


def test_for_a_pipe_a_finding_is_a_line(tmp_path: Path) -> None:
    done = run("doctor", "--config", str(tmp_path / "none.toml"))
    (line,) = (line for line in done.stdout.splitlines() if "config.file" in line)
    assert re.match(r"fail +config.file .*none\.toml: the file cannot be read: .*; hint: ", line)


ENGINE = """
import logging, sys
logging.basicConfig(format="%(message)s")
from kvframework.client import KVClient, WorkerAdapter
with KVClient(sys.argv[1]) as client:
    assert client.wait_up(60)
    for number in (1, 2):
        WorkerAdapter(client, instance_id=number, model_name="m").close()
"""
MISSING = ("copies of cpu_gather", "hashes", "planes of codecs", "copies that bypass caches", "packing of token ids")
LINE = f"compiled kernels are missing, so these are slower: {', '.join(MISSING)}"
PACKAGES = ("kvframework", "kvf_pinned", "kvf_eviction", "kvf_hashers", "kvf_cpu_gather", "kvf_codecs", "kvf_layouts")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is installed without its libraries, first in the path of processes."""
    folder = tmp_path / "bare"
    for name in PACKAGES:
        found = find_spec(name)
        assert found.origin is not None
        shutil.copytree(Path(found.origin).parent, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.chdir(tmp_path)  # a checkout in the working directory would come before it
    return folder


def said(log: str) -> int:
    return log.count(LINE)


def test_it_is_said_once_by_each(bare: Path) -> None:
    with ServerProcess() as server:
        assert said(server.log) == 1
        assert "put a C compiler into PATH and run: pip install " in server.log
        assert len(server.status()["server"]["missing_kernels"]) == len(MISSING)
        engine = ran(sys.executable, "-c", ENGINE, server.endpoint, timeout=120)
        assert said(engine.stderr) == 1
        shown = run("status", "--endpoint", server.endpoint, COLUMNS="200").stdout
        assert said(shown) == 1
    doctor = ran(
        sys.executable,
        "-m",
        "kvframework.cli.main",
        "doctor",
        "--json",
        code=None,
        env=os.environ | {"KVFRAMEWORK_CONFIG": ""},
    )
    (found,) = (each for each in json.loads(doctor.stdout)["findings"] if each["id"] == "kvframework.kernels")
    assert (found["level"], said(found["fact"])) == ("warn", 1)
    assert "pip install" in found["advice"]


def test_where_they_are_there_nothing_is_said() -> None:
    from kvframework.api.installing import missing_kernels

    if missing_kernels():
        pytest.skip("this installation has none")
    with ServerProcess() as server:
        assert "kernels" not in server.log
        assert server.status()["server"]["missing_kernels"] == []
