"""A user's environment with a runtime folder of its own, in which `kvframework run` starts a server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvf_run.node_server import started_keeper
from tests.support.processes import ran
from tests.support.waiting import wait_until

SLOW_S = 90.0


class Node:
    """A user's environment with a runtime folder of its own; its server ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
        self.environ.pop("KVFRAMEWORK_ENDPOINT", None)
        self.endpoint = f"ipc://{folder}/kvframework/server.sock"

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "kvframework", *words]

    def ask(self, *words: str, code: int = 0, timeout: float = SLOW_S) -> subprocess.CompletedProcess[str]:
        return ran(*self.command(*words), code=code, env=self.environ, timeout=timeout, stdin=subprocess.DEVNULL)

    def engine(self, program: str, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.ask("run", *options, "--", sys.executable, "-c", program, code=code)

    def start(self, *words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command(*words), env=self.environ, stdout=pipe, stderr=pipe, text=True)

    @property
    def keeper(self) -> int | None:
        return started_keeper(self.endpoint)

    def processes(self) -> list[str]:
        """The processes of this node: its folder stands in what they were started with."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in (entry / "cmdline").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


@contextlib.contextmanager
def user_node() -> Iterator[Node]:
    """A node whose server ends with the block; that no process of it is left is checked."""
    with tempfile.TemporaryDirectory(prefix="kvf-run-") as folder:
        made = Node(Path(folder))
        try:
            yield made
        finally:
            if (keeper := made.keeper) is not None:
                os.kill(keeper, signal.SIGTERM)
            wait_until(lambda: made.processes() == [], SLOW_S, "the end of the node's processes")
