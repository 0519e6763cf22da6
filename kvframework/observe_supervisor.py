"""The process of `kvframework observe` that a server with `[observe]` keeps running."""

from __future__ import annotations

import logging
import os
import subprocess
import time

import msgspec

from kvframework.config import ObserveConfig
from kvframework.logs.form import LogForm, chosen_log
from kvframework.supervise.child import SupervisedChild, start_process
from kvframework.supervise.state import HEALTHY_S

log = logging.getLogger(__name__)

STOP_S = 0.5


class ObserveSupervisor(SupervisedChild):
    """Keeps one process running from `start` to `stop`. Its failure never concerns the server."""

    def __init__(self, endpoint: str, config: ObserveConfig) -> None:
        super().__init__("`kvframework observe`", thread="kvf-observe", stop_s=STOP_S)
        self._config = config
        form = chosen_log() or LogForm("info", "human")
        start = {"parent": os.getpid(), "endpoint": endpoint, "config": config, "log": form}
        self._argument = msgspec.json.encode(start).decode()
        self._started = 0.0

    def spawn(self) -> subprocess.Popen[bytes]:
        self._started = time.monotonic()
        return start_process("kvf_observe.process", self._argument)

    def stop(self) -> None:
        """End the process, which is killed after `STOP_S` seconds, and wait for that. Idempotent."""
        super().stop()
        self.join(2 * STOP_S)

    def ended(self, why: str) -> None:
        if why:
            log.error("%s: there are no metrics until it runs again", why)

    def status(self) -> dict[str, object]:
        """Return the part of the status document; `problem` is "" once a process has run for `HEALTHY_S` since the last
        end. From any thread."""
        pid = self.pid
        healthy = pid is not None and time.monotonic() - self._started >= HEALTHY_S
        return {
            "listen": self._config.listen,
            "pid": pid,
            "starts": self.starts,
            "problem": "" if healthy else self.last_error,
        }
