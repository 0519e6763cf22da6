"""The table `[control]` of a server: a process of `kvframework control` that the server starts, and starts again after
its end. It is a listener that reads no record: all of HTTP is in that process."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Mapping

import msgspec

from kvf_control.settings import ControlConfig, check_settings
from kvframework.api.listener import Listener, ListenerContext, ListenerProvider, Records, hookimpl
from kvframework.api.plugin import TableContext
from kvframework.api.process import (
    LogForm,
    SupervisedChild,
    chosen_log,
    configure_logging,
    end_logging,
    end_with_parent,
    start_process,
)
from kvframework.errors import KVFrameworkError

log = logging.getLogger(__name__)

STOP_S = 1.0
# A process that has run for so long has started well.
HEALTHY_S = 5.0


class Start(msgspec.Struct, frozen=True):
    """The argument of the process; `parent` is the server's process id."""

    parent: int
    endpoint: str
    config: ControlConfig
    log: LogForm


class ControlProcess(SupervisedChild):
    """Keeps a process that takes orders from `start` to `stop`. Its failure never concerns the server."""

    def __init__(self, endpoint: str, config: ControlConfig) -> None:
        super().__init__("`kvframework control`", thread="kvf-control", stop_s=STOP_S)
        start = Start(os.getpid(), endpoint, config, chosen_log() or LogForm("info", "human"))
        self._argument = msgspec.json.encode(start).decode()
        self.started = 0.0

    def spawn(self) -> subprocess.Popen[bytes]:
        self.started = time.monotonic()
        return start_process("kvf_control.listener", self._argument)


class ControlListener(Listener):
    def __init__(self, options: ControlConfig, context: ListenerContext) -> None:
        self._listen = options.listen
        self._process = ControlProcess(context.server.endpoints[0], options)

    def start(self, *, keeps: bool) -> None:
        del keeps
        self._process.start()

    def listen(self, records: Records) -> None:
        try:
            for _ in records:
                pass
        finally:
            self._process.stop()
            self._process.join(1.5 * STOP_S)

    def status(self) -> Mapping[str, object]:
        process = self._process
        healthy = process.pid is not None and time.monotonic() - process.started >= HEALTHY_S
        problem = "" if healthy else process.last_error
        return {"listen": self._listen, "pid": process.pid, "starts": process.starts, "problem": problem}


def check(options: ControlConfig, context: TableContext) -> None:
    """Raise `ConfigError` of the first thing that keeps the process from starting. A server that will be replaced has
    the port, and so may another, which only the log then tells."""
    check_settings(options, context.where, running=context.replaces is not None)


@hookimpl
def kvf_listeners() -> list[ListenerProvider[ControlConfig]]:
    return [
        ListenerProvider(
            name="control",
            summary="takes orders of gateways and people over HTTP, in a separate process",
            options=ControlConfig,
            check=check,
            create=ControlListener,
        )
    ]


def main(arguments: list[str]) -> int:
    """Run as the child of a server, with which it ends. The only argument is a `Start`. Returns the exit status."""
    from kvf_control.app import control

    start = msgspec.json.decode(arguments[0], type=Start)
    end_with_parent(start.parent)
    configure_logging(*start.log)
    try:
        check_settings(start.config, "[control]")
        control(start.endpoint, start.config)
    except KVFrameworkError as error:
        log.error("%s", error)
        return 1
    finally:
        end_logging()
    return 0
