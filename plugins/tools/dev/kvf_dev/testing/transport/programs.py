"""The processes of the transport kit, each with a rig of its own: a server and engines, and how a test drives them.

As a program: `server RIG ENDPOINT` serves until its input ends; `engine RIG ENDPOINT INSTANCE CASE` takes one JSON list
a line and answers with one. `["store", seed]` and `["load", seed]` wait for the result, `["begin", "store" or "load",
seed]` does not. `["check", instance]` returns the differences after a load of objects that another instance of the same
case has stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

from kvf_dev.testing.kit import wait_until
from kvf_dev.testing.transport.cases import CASES
from kvf_dev.testing.transport.engine import PATIENCE_S, KitEngine, registry_for
from kvf_dev.testing.transport.node import client_of, settings_for
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.config import load_config
from kvframework.server import Server

_SAYS = {"server": "serving", "engine": "registered"}


class Program:
    """A process of this module, or of one like it, that is `what` at the server's `endpoint`."""

    module: ClassVar[str] = "kvf_dev.testing.transport.programs"

    def __init__(self, what: str, spec: RigSpec, endpoint: str, *arguments: str) -> None:
        self.endpoint = endpoint
        rig = json.dumps([spec.factory, dict(spec.arguments)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, what, rig, endpoint, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": ""},
        )
        assert (line := self.next_line()) == _SAYS[what], f"a process of the kit says {line!r}"

    def kill(self) -> None:
        """Kill the process, and wait for its end and that of its children, which the kernel kills a moment later."""
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [int(child) for each in lists for child in each.read_text().split()]
        self.process.kill()
        self.close()
        wait_until(lambda: not any(map(_is_running, children)), "the end of the children of a killed process")

    def close(self) -> None:
        """End the process by the end of its input. Idempotent."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def next_line(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with status {self.process.wait()}"
        return line.strip()

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: object) -> object:
        self.send(*words)
        return json.loads(self.next_line())


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _serve(rig: TransportRig, endpoint: str) -> None:
    server = Server(load_config(None, tuple(settings_for(rig, endpoint))), registry_for(rig))
    server.bind()

    def stop_with_input() -> None:
        sys.stdin.read()
        server.stop()

    threading.Thread(target=stop_with_input, daemon=True).start()
    _say(_SAYS["server"])
    server.serve_forever()


def _compute(rig: TransportRig, endpoint: str, instance: str, case: str) -> None:
    with client_of(rig, endpoint) as client:
        engine = KitEngine(rig, client, int(instance), CASES[case], seed=int(instance))
        _say(_SAYS["engine"])
        for line in sys.stdin:
            _say(json.dumps(_done(engine, *json.loads(line))))
        engine.close()


def _done(engine: KitEngine, what: str, *words: object) -> object:
    number = int(str(words[-1]))
    if what == "check":
        engine.expect_loaded(engine.model_of(number), engine.source(seed=number), engine.target())
        return engine.differences()
    request, submit = engine.request(number), str(words[0] if what == "begin" else what)
    if submit == "store":
        stored = engine.store(request, engine.source())
        return what == "begin" or stored.result(PATIENCE_S).ok
    loaded = engine.load(request, engine.target())
    return what == "begin" or loaded.result(PATIENCE_S).ok


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def rig_told(argument: str) -> TransportRig:
    """Return the rig that a program was given."""
    factory, options = json.loads(argument)
    return RigSpec(factory, options).make()


def endpoint_in(directory: Path) -> str:
    return f"ipc://{directory}/s.sock"


def main() -> None:
    what, told, *arguments = sys.argv[1:]
    rig = rig_told(told)
    if what == "server":
        _serve(rig, *arguments)
    else:
        _compute(rig, *arguments)
    rig.close()


if __name__ == "__main__":
    main()
