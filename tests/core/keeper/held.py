"""The process of `kvframework hold` with a stand-in for its server, seen from a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvframework.keeper.sockets import ask
from tests.support.processes import children
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
HOLD = "import sys; from kvframework.keeper.supervisor import main; sys.exit(main(sys.argv[1]))"
SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.core.keeper.stand_in import main
sys.exit(main(Path(sys.argv[2]), "--takeover" in sys.argv))
"""
TIMEOUT = 60.0
# Holds the keeper up, when it has seen the end of a server, until there is a message.
HELD_UP = f"""
import os, select
from kvframework.keeper import sockets as places, supervisor
sockets = []
class KeeperSocket(places.KeeperSocket):
    def __init__(self, path):
        super().__init__(path)
        sockets.append(self)
def waits(see):
    def seen(*arguments):
        ended = see(*arguments)
        if ended not in (None, (0, 0)) and arguments[-1]:
            select.select(sockets, [], [], {TIMEOUT})
        return ended
    return seen
places.KeeperSocket, os.waitid, os.waitpid = KeeperSocket, waits(os.waitid), waits(os.waitpid)
{HOLD}
"""


class Held:
    """Starts the keeper, and reads what its servers report."""

    def __init__(
        self,
        log_form: str = "human",
        *,
        within: Sequence[str] = (),
        keeper: str = HOLD,
        fails: str = "",
        stderr: int | None = None,
    ) -> None:
        """`within`: the command that runs the keeper's; `stderr`: a descriptor instead of the log."""
        self._within, self._keeper, self._stderr = within, keeper, stderr
        self._directory = tempfile.TemporaryDirectory(prefix="kvf-")
        self.folder = Path(self._directory.name)
        self.base = str(self.folder / "s.sock")
        self.log_file = self.folder / "log"
        self.fail(fails)
        self.process = self.begin(log_form)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        # Servers outlive a killed keeper.
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in line.read_bytes():
                    os.kill(int(line.parent.name), signal.SIGKILL)
        self._directory.cleanup()

    def begin(self, log_form: str = "human") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SERVER, str(ROOT), str(self.folder)]
        argument = json.dumps({"command": command, "base": self.base, "log_form": log_form})
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                [*self._within, sys.executable, "-c", self._keeper, argument],
                stdout=log,
                stderr=log if self._stderr is None else self._stderr,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def fail(self, how: str) -> None:
        (self.folder / "fails").write_text(how)

    def reports(self) -> list[dict[str, Any]]:
        report = self.folder / "report"
        # The last line may be half written.
        return [json.loads(line) for line in report.read_text().split("\n")[:-1]] if report.exists() else []

    def ready(self, count: int) -> dict[str, Any]:
        wait_until(lambda: len(self._ready()) >= count, TIMEOUT, f"ready server {count}")
        return self._ready()[count - 1]

    def first_is_heard(self) -> dict[str, Any]:
        """Wait until the keeper has received what the first server reports to have sent, and return the report."""
        ready = self.ready(1)
        wait_until(lambda: (self.ask("status")["server"] or {}).get("ready"), TIMEOUT, "the keeper's word of it")
        return ready

    def _ready(self) -> list[dict[str, Any]]:
        return [line for line in self.reports() if line["event"] == "ready"]

    def says(self, text: str) -> None:
        wait_until(lambda: text in self.log, TIMEOUT, f"{text!r} in the log")

    def servers(self) -> set[int]:
        return children(self.process.pid)

    def ask(self, do: str, **more: object) -> Any:
        return ask(self.base + ".hold", {"do": do, **more}, TIMEOUT)
