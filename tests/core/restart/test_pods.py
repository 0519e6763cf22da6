"""A rolling update: pods that share the socket directory of a node and nothing else, under engines at work. Each has
namespaces for processes, mounts, network, IPC and cgroups, and `kvframework hold` as its first process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvframework.keeper.sockets import ask
from kvframework.wire import messages as m
from tests.core.survival.test_server_killed import KNOWN, Engine
from tests.core.wire_versions.other_release import VARIABLE, Release
from tests.events import node as events
from tests.support.processes import children, has_ended
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

UNSHARE = ["unshare", "--mount", "--pid", "--net", "--ipc", "--cgroup", "--fork", "--kill-child", "--mount-proc"]
OWN = 'mount --bind "$0" "$KVFRAMEWORK_KEEPER_DIRECTORY" && exec "$@"'
JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
HOLD = "import sys; from kvframework.keeper.supervisor import main; sys.exit(main(sys.argv[1]))"
SERVE = str(Path(__file__).parents[1] / "wire_versions" / "server_program.py")
PATIENCE_S = 60.0
L1 = 32 << 20
OTHER = Release(adds_fields=True)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


class Pod:
    """One of a release, from the start of its container on. `volume` is its own, which outlives that; `group` is the
    control group that it begins in, None for this process's."""

    def __init__(
        self, directory: Path, release: Release, settings: Sequence[str], volume: Path, group: Path | None
    ) -> None:
        self._own, self.volume = directory / "own", volume
        volume.mkdir(mode=0o700, exist_ok=True)
        settings = (f"server.endpoint=ipc://{directory}/s/s.sock", f"l1.capacity={L1}", *settings)
        serve = [sys.executable, SERVE, "serve", "--takeover", *(w for each in settings for w in ("--set", each))]
        held = json.dumps({"command": serve, "base": f"{self._own}/server", "log_form": "human"})
        environ = {"KVFRAMEWORK_KEEPER_DIRECTORY": str(self._own), VARIABLE: msgspec.json.encode(release).decode()}
        self.log = directory / f"{len(list(directory.iterdir()))}.log"
        with self.log.open("ab") as log:
            command = [*(("sh", "-c", JOIN, str(group)) if group else ()), *UNSHARE]
            command += ["sh", "-c", OWN, str(volume), sys.executable, "-c", HOLD, held]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environ)

    def child_of(self, pid: int) -> int:
        wait_until(lambda: children(pid) or self.process.poll() is not None, PATIENCE_S, "a process of the pod")
        return min(children(pid))  # ValueError: the container has ended

    @property
    def server(self) -> int:
        return self.child_of(self.child_of(self.process.pid))

    def ready(self) -> bool:
        with suppress(OSError, ValueError):
            place = f"/proc/{self.child_of(self.process.pid)}/root{self._own}/server.hold"
            server: Any = ask(place, {"do": "status"}, 5.0)["server"]
            return bool(server and server["ready"])
        return False

    def delete(self) -> None:
        os.kill(self.child_of(self.process.pid), signal.SIGTERM)
        self.process.wait(PATIENCE_S)


class Node:
    """`directory` is the one that pods share; `pods` are all that were started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pods: list[Pod] = []
        self.engines: list[Engine] = []
        self.settings: Sequence[str] = ()
        self.group: Path | None = None

    def update(self, release: Release, again: Pod | None = None) -> Pod:
        """Start a pod, or the container of one whose container has ended."""
        volume = self.directory / f"volume-{len(self.pods)}" if again is None else again.volume
        self.pods.append(Pod(self.directory, release, self.settings, volume, self.group))
        return self.pods[-1]

    def ready(self, pod: Pod, release: Release) -> Pod:
        """Wait for a pod, as kubelet does, which starts its container again when that ends: a server that comes back at
        the same moment may have the endpoint."""

        def there() -> bool:
            nonlocal pod
            if pod.process.poll() is not None:
                pod = self.update(release, pod)
            return pod.ready()

        wait_until(there, PATIENCE_S, f"the next pod: {pod.log}")
        return pod

    def work(self, release: Release) -> Pod:
        """Return a pod that serves engines at work, all of whose prompts L1 has."""
        pod = self.ready(self.update(release), release)
        self.engines = [Engine(f"ipc://{self.directory}/s/s.sock", number, "arena") for number in (1, 2)]
        for engine in self.engines:
            engine.start()
        wait_until(lambda: all(engine.hits > KNOWN for engine in self.engines), PATIENCE_S, "hits")
        return pod

    def hits_all(self) -> None:
        """Whatever happened: each engine goes on, and finds each prompt from its next hit on."""
        for engine in self.engines:
            for counted in ("hits", "turns"):
                before, most = (engine.turns, engine.hits), getattr(engine, counted) + 2 * KNOWN
                wait_until(lambda: engine.broken or getattr(engine, counted) > most, PATIENCE_S, counted)  # noqa: B023
                assert not engine.broken, engine.broken
            assert engine.turns - before[0] - (engine.hits - before[1]) <= 1


@pytest.fixture
def node() -> Iterator[Node]:
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], check=False, timeout=60).returncode:
        pytest.skip("needs to make namespaces: root and unshare")
    with ExitStack() as stack:
        made = Node(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-"))))
        for name in ("own", "s"):
            (made.directory / name).mkdir(mode=0o700)
        stack.callback(lambda: [(pod.process.kill(), pod.process.wait()) for pod in made.pods])
        stack.callback(lambda: [engine.stop() for engine in made.engines])
        yield made


def test_an_update_and_the_way_back_keep_l1(node: Node) -> None:
    old = node.work(Release())
    for release in (OTHER, Release()):
        before, begun = [(engine.turns, engine.hits) for engine in node.engines], time.monotonic()
        new = node.update(release)
        wait_until(new.ready, PATIENCE_S, "the next pod")
        old.delete()
        node.hits_all()
        minutes = (time.monotonic() - begun) / 60
        for engine, (turns, hits) in zip(node.engines, before, strict=True):
            turned, hit = engine.turns - turns, engine.hits - hits
            assert turned - hit <= 0.02 * turned / minutes, "two points of the hit rate of a minute"
        assert new.ready()
        old = new


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """A control group, of version 1, as kubelet's of all pods, and two in it."""
    above = Path(f"/sys/fs/cgroup/memory/kvf-{os.getpid()}")
    made = [above, above / "old", above / "new"]
    try:
        for group in made:
            group.mkdir()
    except OSError as error:
        pytest.skip(f"needs control groups: {error}")
    yield made
    for group in reversed(made):
        wait_until(partial(removed, group), PATIENCE_S, f"the end of {group}")


def removed(group: Path) -> bool:
    """Whether a control group is gone, which it cannot before its last process."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_the_group_of_all_pods_counts_l1_when_its_first_pod_is_gone(groups: list[Path], node: Node) -> None:
    """For that the DaemonSet NAME-room asks for memory."""
    above, first, second = groups
    node.group = first
    old = node.work(Release())
    counted = lambda group: int((group / "memory.usage_in_bytes").read_text())  # noqa: E731
    assert counted(first) >= L1
    node.group = second
    new = node.update(OTHER)
    wait_until(new.ready, PATIENCE_S, "the next pod")
    old.delete()
    wait_until(lambda: removed(first), PATIENCE_S, "the end of the first group")
    node.hits_all()
    assert new.ready()
    assert counted(above) - counted(second) >= 0.9 * L1


def test_what_tiers_and_routers_have_goes_the_same_way_and_back(node: Node) -> None:
    shared, prompts = node.directory / "s", [events.prompt(number, 3) for number in range(3)]
    tier = ("l2.0.use=filesystem", f"l2.0.path={node.directory}/values")
    node.settings = (*tier, *events.settings(shared))
    places = (f"ipc://{shared}/told.sock", f"ipc://{shared}/again.sock")
    with closing(events.Router(*places)) as reader:
        for release, tokens in zip((Release(), OTHER, Release()), prompts, strict=True):
            wait_until(node.update(release).ready, PATIENCE_S, "the next pod")
            if len(node.pods) > 1:
                node.pods[-2].delete()
            with WireClient(f"ipc://{shared}/s.sock", timeout=PATIENCE_S) as client:
                engine = events.Engine(client)
                engine.store(tokens)
                stored = {each for some in prompts[: len(node.pods)] for each in events.beginnings(some)}
                wait_until(lambda: events.found(engine, prompts) == stored, PATIENCE_S, "what was stored")  # noqa: B023
                reader.until(stored)
                with closing(events.Router(*places)) as late:
                    late.until(stored)
                wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, PATIENCE_S, "values")
                client.call("CLEAR", m.Clear())
                wait_until(lambda: events.found(engine, prompts) == stored, PATIENCE_S, "loads")  # noqa: B023
                assert client.status()["l2"][0]["corrupt"] == 0


MOMENTS = [(dies, moment) for dies in ("old server", "new server", "new pod") for moment in ("asked", "handed over")]


@pytest.mark.parametrize(("dies", "moment"), [("old server", "started"), *MOMENTS])
def test_whichever_dies_in_the_middle_l1_stays(node: Node, dies: str, moment: str) -> None:
    old = node.work(Release())
    new, first, shared = node.update(Release(adds_fields=True, takes_over_s=1.0)), old.server, node.directory / "s"
    # The socket at which the new server gets L1 has a name of six letters.
    asked = lambda: [*shared.glob("??????")]  # noqa: E731
    reached = {"started": lambda: new.server, "asked": asked, "handed over": lambda: has_ended(first)}[moment]
    wait_until(reached, PATIENCE_S, moment)
    assert not new.ready()
    with contextlib.suppress(ProcessLookupError):  # an old server that has handed over may have ended
        os.kill({"old server": old.server, "new server": new.server, "new pod": new.process.pid}[dies], signal.SIGKILL)
    if dies == "new pod":
        new.process.wait()
    new = node.ready(new, OTHER)
    old.delete()
    node.hits_all()
    assert new.ready()


@pytest.mark.parametrize("killed", ["new", "old"])
def test_a_container_that_ends_between_readiness_and_deletion_does_not_turn_the_update_back(
    node: Node, killed: str
) -> None:
    """Kubelet starts it again: an old pod stays the older one."""
    old, new = node.work(Release()), node.update(OTHER)
    wait_until(new.ready, PATIENCE_S, "the next pod")
    pod, release = {"new": (new, OTHER), "old": (old, Release())}[killed]
    pod.process.kill()
    pod.process.wait()
    again = node.update(release, pod)
    if killed == "old":
        assert again.process.wait(PATIENCE_S) == 2, again.log.read_text()
        assert "another `kvframework hold` keeps this server" in again.log.read_text()
    else:
        new = node.ready(again, OTHER)
        old.delete()
    node.hits_all()
    assert new.ready()


@pytest.mark.parametrize(
    ("release", "why"), [(Release(lacks=("HAND_OVER",)), "HAND_OVER"), (Release(journal=1), "L1 that this release")]
)
def test_releases_that_do_not_fit_are_refused_before_anything_changes(node: Node, release: Release, why: str) -> None:
    """As an update over two releases is."""
    old = node.work(release)
    boots, new = [engine.client.boot_id for engine in node.engines], node.update(OTHER)
    assert new.process.wait(PATIENCE_S) == 2, new.log.read_text()
    assert why in new.log.read_text()
    node.hits_all()
    assert [engine.client.boot_id for engine in node.engines] == boots
    assert old.ready()
