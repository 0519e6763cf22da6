"""podman with storage of its own, as root, and an image of Debian's Python: no registry is asked."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.processes import ran
from tests.support.waiting import wait_until

BASE = "localhost/base"
# A root file system with these as a tar, instead of one that mmdebstrap makes in minutes.
BASE_VARIABLE = "KVFRAMEWORK_TEST_BASE_TAR"
RELEASE, PACKAGES = "bookworm", "usr-is-merged,python3,python3-venv"
# As the images of registries are made.
FORM = ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
FORM += [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "info", "locale", "man")]
PYTHON = "3.11"
# With it what would be skipped fails, as in .ci/run.
REQUIRED = "KVFRAMEWORK_TEST_CONTAINERS" in os.environ
skip = pytest.fail if REQUIRED else pytest.skip
# Of one command on a busy machine: an image is copied for each container.
LONG_S = 600.0


def missing() -> str:
    """Why there can be no containers here; "" if it is worth a try."""
    if os.geteuid() != 0:
        return "needs root, for users of containers without a user namespace"
    if shutil.which("podman") is None:
        return "needs podman"
    if not os.environ.get(BASE_VARIABLE) and shutil.which("mmdebstrap") is None:
        return f"needs mmdebstrap, or {BASE_VARIABLE}"
    return ""


class Podman:
    """A context manager; its end removes every container and image. `refused` says why no container runs here, ""
    after a start of one."""

    def __init__(self) -> None:
        # podman allows 50 characters for the place of its sockets.
        self.folder = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))
        self._options: tuple[str, ...] = ()
        self.refused = ""

    def __enter__(self) -> Podman:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self("rm", "--all", "--force", "--time", "0", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Run podman; return what it printed, both streams. Raises `AssertionError` with that. Blocking."""
        command = ["podman", "--cgroup-manager", "cgroupfs", *self._options, *arguments]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONG_S, check=False
        )
        if check:
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
        return done.stdout

    def build(self, image: str, dockerfile: Path, context: Path, *options: str) -> None:
        form = ("--layers=false", "--format=docker", *_limits(), *options)
        self("build", *form, f"--file={dockerfile}", f"--tag={image}", str(context))

    def run(self, *arguments: str, user: int | None = None) -> str:
        """Run a container with nothing but its mounts: no capability, no network, no writable place, 64 KiB of
        /dev/shm."""
        as_user = [] if user is None else [f"--user={user}:{user}"]
        nothing = ["--read-only", "--read-only-tmpfs=false", "--shm-size=64k", "--network=none", "--no-healthcheck"]
        rights = ["--cap-drop=all", "--security-opt=no-new-privileges"]
        return self("run", *_limits(), *as_user, *nothing, *rights, *arguments)

    def _start(self) -> None:
        tar = os.environ.get(BASE_VARIABLE, "")
        if not tar:
            tar = str(self.folder / "base.tar")
            make = ["mmdebstrap", "--quiet", "--variant=minbase", *FORM, f"--include={PACKAGES}", RELEASE, tar]
            made = ran(*make, code=None, timeout=2 * LONG_S)
            if made.returncode:
                self.refused = f"mmdebstrap failed: {made.stderr[-500:]}"
                return
        reasons = []
        # vfs copies the image for each container, and works where overlay does not.
        for driver in ("overlay", "vfs"):
            for runtime in ("crun", "runc"):
                places = ("--root", f"{self.folder}/{driver}", "--runroot", f"{self.folder}/run-{driver}")
                self._options = (*places, "--storage-driver", driver, "--runtime", runtime)
                try:
                    if BASE not in self("images", "--format", "{{.Repository}}"):
                        self("import", tar, BASE)
                    self.run("--rm", BASE, "true", user=10001)
                    return
                except AssertionError as error:
                    reasons.append(f"{driver}, {runtime}: {str(error).strip().splitlines()[-1]}")
        self.refused = f"no container runs here: {'; '.join(reasons)}"


def wait_for_server(podman: Podman, container: str) -> None:
    """Wait until the server of the container answers. Fails with its log."""

    def answers() -> bool:
        assert podman("inspect", container, "--format={{.State.Running}}").strip() == "true", "it has ended"
        return podman("exec", container, "kvframework", "status", "--check", check=False).strip() == "ok"

    try:
        wait_until(answers, LONG_S, "a server's answer")
    except AssertionError:
        raise AssertionError(podman("logs", container)) from None


def _limits() -> Sequence[str]:
    """Within this process's own: for more, podman's default, a capability is needed that not every root has."""
    found = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    hard = {name: resource.getrlimit(which)[1] for name, which in found.items()}
    most = {name: 4096 if limit == resource.RLIM_INFINITY else min(limit, 4096) for name, limit in hard.items()}
    return [word for name, limit in most.items() for word in ("--ulimit", f"{name}={limit}:{limit}")]
