"""A real server process that `kvframework hold` starts again after its end, and whose L1 it keeps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from kvframework.errors import HelloRequired
from kvframework.keeper.sockets import ask
from kvframework.storage.l1.journal import HEADS_AT, read_start
from tests.support.processes import descriptors, has_ended, send
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

_HOLD = "import sys; from kvframework.keeper.supervisor import main; sys.exit(main(sys.argv[1]))"
_COMMAND = ("-m", "kvframework.cli.main")
_PATIENCE_S = 60.0


class HeldServer(ServerProcess):
    """`process` is the keeper, `pid` the server. `kill9` kills the server, and `start` waits until the next one serves
    (the keeper starts it by itself). `more` are further options of `serve`."""

    def __init__(self, *settings: str, more: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(*settings, **options)
        self._more = more
        self._killed = 0
        self._pids: set[int] = set()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        # A killed keeper leaves its server.
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def base(self) -> str:
        return self.endpoint.removeprefix("ipc://")

    @property
    def pid(self) -> int:
        found: list[int] = []

        def running() -> bool:
            server = self.keeper()["server"]
            found[:] = [server["pid"]] if server is not None else []
            return bool(found)

        wait_until(running, _PATIENCE_S, "a server")
        self._pids.add(found[0])
        return found[0]

    def keeper(self, do: str = "status", **more: object) -> Any:
        """Ask the keeper."""
        return ask(self.base + ".hold", {"do": do, **more}, _PATIENCE_S)

    def start(self) -> None:
        """Return when a server serves that is not the killed one, with all of its memory."""
        if self.process is None:
            self._begin()
        wait_until(self._answers, _PATIENCE_S, "the server")

    def serving(self, pid: int) -> None:
        """Wait until a server serves that is not the process `pid`."""
        self._killed = pid
        self.start()

    def kill9(self) -> None:
        self.signal9(self.pid)

    def adopt(self) -> None:
        """Start a keeper in the place of one that was killed, whose server takes over from the one that lives on."""
        self._killed = self.status()["server"]["pid"]
        self._more = ("--takeover",)
        self.process = None
        self.start()

    def signal9(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self._killed = pid
        wait_until(lambda: has_ended(pid), _PATIENCE_S, "the end of the server")

    def sigstop(self) -> None:
        send(self.pid, signal.SIGSTOP)

    def stop(self) -> int:
        """Send SIGTERM to the keeper, and return its exit status."""
        if self.process is None:
            return 0
        with contextlib.suppress(OSError, AssertionError):
            os.kill(self.pid, signal.SIGCONT)
        return super().stop()

    def recovered(self) -> dict[str, Any]:
        """How the running server began, see docs/status.md."""
        found: dict[str, Any] = self.status()["l1"]["recovered"]
        return found

    def unwritten(self, client: WireClient | None = None) -> None:
        """Wait until no client of an earlier server may write any more."""
        with contextlib.ExitStack() as stack:
            asking = client or stack.enter_context(self.client())
            wait_until(lambda: asking.status()["l1"]["quarantined_bytes"] == 0, _PATIENCE_S, "the end of quarantine")

    def _begin(self) -> None:
        settings = [word for setting in self._settings for word in ("--set", setting)]
        options = [*self._more, *settings]
        if self._program == _COMMAND:
            command = [sys.executable, *_COMMAND, "hold", "--", *options]
        else:
            served = [sys.executable, *self._program, "serve", *options]
            argument = {"command": served, "base": self.base, "log_form": "human"}
            command = [sys.executable, "-c", _HOLD, json.dumps(argument)]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONWARNINGS": ""})

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        if not os.path.exists(self.base):
            return False
        try:
            with self.client(timeout=2.0) as client:
                status = client.status()
        except (OSError, HelloRequired):  # not there, or about to end: its sockets go one after the other, and the next
            return False  # server binds the same path between HELLO and the question
        self._pids.add(status["server"]["pid"])
        return status["server"]["pid"] != self._killed and self._is_ready(status)

    def journal(self) -> int:
        """A descriptor of the kept journal, owned by the caller."""
        assert self.process is not None
        held = descriptors(self.process.pid)
        (number,) = [fd for fd, target in held.items() if "kvframework-journal" in target]
        return os.open(f"/proc/{self.process.pid}/fd/{number}", os.O_RDWR)

    def has_served(self) -> None:
        """Wait until the running server's start counts as one that has not failed."""
        fd = self.journal()
        try:
            wait_until(lambda: read_start(memoryview(os.pread(fd, HEADS_AT, 0))).failed == 0, _PATIENCE_S, "a service")
        finally:
            os.close(fd)
