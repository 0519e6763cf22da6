"""`kvframework run` before engines that are small programs: the server that it starts outlives them, their streams,
signals and exit codes are their own, and nothing of ours keeps them from running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from kvf_run.node_server import end_keeper, keeper_of
from tests.support.held_server import HeldServer
from tests.support.redis_server import RedisServer
from tests.support.terminal import Terminal
from tests.support.user_node import SLOW_S, Node, user_node
from tests.support.waiting import wait_until


@pytest.fixture
def node() -> Iterator[Node]:
    with user_node() as made:
        yield made


SMALL = ("--l1", "64MiB")
SHOW = "import os; print(os.environ['KVFRAMEWORK_ENDPOINT'])"


def test_the_server_outlives_the_engine_and_the_next_one_finds_it(node: Node) -> None:
    first = node.engine(SHOW, *SMALL)
    assert first.stdout == f"{node.endpoint}\n"
    assert "started the server" in first.stderr
    assert "L1 64.0 MiB" in first.stderr
    keeper = node.keeper
    second = node.engine(SHOW)
    assert second.stdout == first.stdout
    assert "started" not in second.stderr
    assert node.keeper == keeper
    status = json.loads(node.ask("status", "--json").stdout) if _has("kvf_observe") else None
    assert status is None or status["l1"]["capacity_bytes"] == 64 << 20
    assert "a server already runs at" in node.engine(SHOW, "--l1", "1GiB").stderr
    assert "serving at" in node.ask("logs").stdout
    assert "stopped the server" in node.ask("stop").stdout
    assert node.keeper is None
    assert "no server of `kvframework run`" in node.ask("stop", code=2).stderr


def test_a_restart_keeps_the_keeper(node: Node) -> None:
    node.ask("run", *SMALL)
    before = keeper_of(node.endpoint)
    assert before is not None
    node.ask("restart")
    after = keeper_of(node.endpoint)
    assert (after["pid"], after["server"]["pid"]) != (before["pid"], before["server"]["pid"])
    assert after["pid"] == before["pid"]


@pytest.mark.parametrize(
    ("program", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9), ("1 / 0", 1)]
)
def test_the_exit_code_is_that_of_the_engine(node: Node, program: str, code: int) -> None:
    node.engine(program, *SMALL, code=code)


def test_streams_are_those_of_the_engine(node: Node) -> None:
    program = "import sys; sys.stdout.write(sys.stdin.read()); sys.stderr.write('bad\\n')"
    command = node.command("run", *SMALL, "--", sys.executable, "-c", program)
    text = "line \N{SNOWMAN}\n" * 20_000
    done = subprocess.run(
        command, env=node.environ, input=text, capture_output=True, text=True, timeout=SLOW_S, check=True
    )
    assert done.stdout == text
    assert done.stderr.endswith("bad\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_engine(node: Node, number: signal.Signals) -> None:
    program = f"import signal; signal.sigwait; signal.pthread_sigmask(0, [{int(number)}]); print('up', flush=True); "
    program += f"print(signal.sigwait([{int(number)}]), flush=True)"
    running = node.start("run", *SMALL, "--", sys.executable, "-c", program)
    assert running.stdout.readline() == "up\n"
    running.send_signal(number)
    output, _ = running.communicate(timeout=SLOW_S)
    assert output == f"{int(number)}\n" or output == f"{number!s}\n"
    assert running.returncode == 0


@pytest.mark.parametrize(
    ("program", "code"), [("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 15)", -15)]
)
def test_in_front_of_a_terminal_it_stays_and_ends_as_the_engine(node: Node, program: str, code: int) -> None:
    command = node.command("run", *SMALL, "--", sys.executable, "-c", f"print('here'); {program}")
    with Terminal(command, node.environ) as terminal:
        assert terminal.ended() == code
        assert "here" in terminal.shown


def test_a_key_of_the_terminal_interrupts_the_engine_once(node: Node) -> None:
    lines = "import time", "try:", " print('up', flush=True)", " time.sleep(600)", "except KeyboardInterrupt:"
    program = "\n".join((*lines, " raise SystemExit(3)"))
    with Terminal(node.command("run", *SMALL, "--", sys.executable, "-c", program), node.environ) as terminal:
        wait_until(lambda: "up" in terminal.shown, SLOW_S)
        terminal.type("\x03")
        assert terminal.ended() == 3


def test_two_commands_at_once_start_one_server(node: Node) -> None:
    both = [node.start("run", *SMALL, "--", sys.executable, "-c", SHOW) for _ in range(3)]
    said = [each.communicate(timeout=SLOW_S)[1] for each in both]
    assert [each.returncode for each in both] == [0, 0, 0]
    assert sum("started the server" in each for each in said) == 1


def test_an_engine_that_kills_its_children_does_not_end_the_server(node: Node) -> None:
    """As SGLang does when it ends."""
    program = "import psutil; [each.kill() for each in psutil.Process().children(recursive=True)]"
    node.engine(program, *SMALL)
    assert node.keeper is not None
    assert "started" not in node.engine(SHOW).stderr
    assert (node.folder / "kvframework" / "server.sock.log").read_text()


def test_it_works_under_torchrun_and_before_it(node: Node) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    show = [sys.executable, "-c", SHOW]
    under = [*torchrun, *node.command("run", *SMALL, "--", *show)]
    done = subprocess.run(under, env=node.environ, capture_output=True, text=True, timeout=SLOW_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count(node.endpoint) == 2
    assert done.stderr.count("started the server") == 1
    before = node.ask("run", "--", *torchrun, *show)
    assert before.stdout.split().count(node.endpoint) == 2
    assert "is not a known command" not in before.stderr


def test_the_first_process_of_a_container_takes_the_server_with_it(node: Node) -> None:
    """A namespace of processes ends with its first process, as a container does."""
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives users no namespaces")
    program = "import os, sys; print(os.getpid()); sys.exit(7)"
    command = [*container, *node.command("run", *SMALL, "--", sys.executable, "-c", program)]
    done = subprocess.run(command, env=node.environ, capture_output=True, text=True, timeout=SLOW_S, check=False)
    assert (done.returncode, done.stdout) == (7, "1\n"), done.stderr
    assert "the server ends with it" in done.stderr
    wait_until(lambda: node.processes() == [], SLOW_S, "the end of the container")


def test_two_users_have_two_servers(node: Node) -> None:
    # The other one may read the interpreter, which may lie in root's home, and no more.
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    other += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    if subprocess.run([*other, "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root can be two users")
    folder = node.folder / "other"
    folder.mkdir(mode=0o700)
    node.folder.chmod(0o711)
    os.chown(folder, 65534, 65534)
    mine = node.engine(SHOW, *SMALL).stdout
    # The runtime folder is still the first user's, as after `su`.
    environ = node.environ | {"TMPDIR": str(folder), "HOME": str(folder)}

    def as_other(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*other, *node.command(*words)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SLOW_S, check=False)
        assert done.returncode == 0, done.stderr
        return done

    theirs = as_other("run", *SMALL, "--", sys.executable, "-c", SHOW)
    assert theirs.stdout == f"ipc://{folder}/kvframework-65534/server.sock\n" != mine
    assert "started the server" in theirs.stderr
    as_other("stop")
    assert node.engine(SHOW).stdout == mine


def test_stale_files_of_a_killed_server_do_not_matter(node: Node) -> None:
    node.ask("run", *SMALL)
    keeper = keeper_of(node.endpoint)
    for pid in (keeper["pid"], keeper["server"]["pid"]):
        os.kill(pid, signal.SIGKILL)
    assert "started the server" in node.engine(SHOW, *SMALL).stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--config", "/no/such/file.toml"), "no such file"),
        (("--set", "l1.use=nonsense", *SMALL), "nonsense"),
        (("--l1", "1KiB"), "no server"),
    ],
)
def test_an_engine_runs_without_a_server_that_cannot_start(node: Node, options: Sequence[str], said: str) -> None:
    if options[0] == "--config":
        assert said in node.engine(SHOW, *options, code=2).stderr.lower()
        return
    done = node.engine(SHOW, *options)
    assert done.stdout == f"{node.endpoint}\n"
    assert "no server is available, so the engine runs without the cache:" in done.stderr
    assert said in done.stderr
    wait_until(lambda: node.processes() == [], SLOW_S, "the end of what was started")


def test_a_run_that_is_killed_while_it_starts_a_server_leaves_one_that_stop_knows(node: Node) -> None:
    running = node.start("run", *SMALL)
    lock = node.folder / "kvframework" / "server.sock.run"
    wait_until(lambda: lock.exists() and lock.read_text().strip(), SLOW_S, "the start of a server")
    running.kill()
    running.communicate()
    wait_until(lambda: node.keeper is not None, SLOW_S, "the server's keeper")
    assert "stopped the server" in node.ask("stop").stdout


def test_an_interrupt_while_a_server_starts_leaves_nothing(node: Node) -> None:
    running = node.start("run", *SMALL, "--", sys.executable, "-c", SHOW)
    lock = node.folder / "kvframework" / "server.sock.run"
    wait_until(lambda: lock.exists() and lock.read_text().strip(), SLOW_S, "the start of a server")
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=SLOW_S)
    # The engine may have begun already.
    assert (running.returncode, output) in ((130, ""), (0, f"{node.endpoint}\n"), (-2, ""))
    if running.returncode == 130:
        wait_until(lambda: node.processes() == [], SLOW_S, "the end of what was started")


def test_a_folder_that_cannot_be_made_is_one_line(node: Node) -> None:
    file = node.folder / "file"
    file.write_text("")
    done = node.engine(SHOW, "--endpoint", f"ipc://{file}/server.sock")
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvframework:")]
    assert len([line for line in lines if "no server" in line]) == 1
    assert done.stdout


def test_a_command_that_is_missing_is_a_shells_status(node: Node) -> None:
    assert "command not found" in node.ask("run", *SMALL, "--", "/no/such/engine", code=127).stderr
    assert "Permission denied" in node.ask("run", *SMALL, "--", str(node.folder), code=126).stderr


def test_a_contradiction_starts_nothing(node: Node) -> None:
    done = node.ask("run", *SMALL, "--", "vllm", "serve", "m", "--kv-transfer-config", '{"kv_connector": "X"}', code=2)
    assert "contradicts" in done.stderr
    assert node.processes() == []


def test_a_server_without_an_engine_ends_by_itself(node: Node) -> None:
    node.ask("run", *SMALL, "--set", "server.idle_stop_s=1")
    wait_until(lambda: node.processes() == [], SLOW_S, "the end of the idle server")
    log = (node.folder / "kvframework" / "server.sock.log").read_text()
    assert "no engine was connected for 1 s" in log
    assert "the keeper frees its memory and ends" in log


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


@pytest.mark.redis
def test_who_stops_a_server_waits_for_its_drain(redis: RedisServer) -> None:
    # Skips where the tiers are not installed.
    from tests.core.server.test_drain import CHUNKS, ended, filled

    with filled(HeldServer, redis.url, "server.drain_s=4") as server:
        redis.sigstop()
        assert server.process is not None
        assert end_keeper(server.process.pid, server.endpoint, 1.0)
        assert ended(server) == 0
        assert f"drained: 0 objects are written, {CHUNKS} (" in server.log
