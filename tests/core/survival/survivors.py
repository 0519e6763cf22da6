"""Engine processes as a test sees them: started together, watched by what they tell, and asked for their reports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.core.survival.survivor_program import Report, Settings
from tests.support.waiting import wait_until

_START_S = 60.0
_END_S = 60.0


@dataclass(frozen=True)
class Event:
    what: str
    at: float  # by the clock that all processes of a machine share
    boot: str


class Survivor:
    """One engine process."""

    def __init__(self, endpoint: str, directory: Path, instance_id: int, path: str) -> None:
        self.instance_id = instance_id
        self._events = directory / f"events-{instance_id}"
        self._events.touch()
        settings = Settings(endpoint, instance_id, path, str(self._events))
        command = [sys.executable, "-m", "tests.core.survival.survivor_program", json.dumps(asdict(settings))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]

    def events(self, what: str, *, since: float = 0.0, boot: str = "") -> list[Event]:
        found = [Event(**json.loads(line)) for line in self._events.read_text().splitlines()]
        return [each for each in found if each.what == what and each.at >= since and boot in ("", each.boot)]

    def await_event(self, what: str, timeout: float = 20.0, *, since: float = 0.0, boot: str = "") -> Event:
        def told() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"engine {self.instance_id} has ended: {self.process.communicate()[1]}")
            return bool(self.events(what, since=since, boot=boot))

        wait_until(told, timeout, f"{what!r} of engine {self.instance_id}")
        return self.events(what, since=since, boot=boot)[0]

    def stop(self) -> Report:
        """Ends it after the turn that it is at."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None
        self.process.wait(_END_S)
        out, problems = self.process.communicate()
        assert self.process.returncode == 0, problems
        return Report(**json.loads(out))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Survivors:
    """One process for each of `paths`, all at work. Leaving the block ends what still runs."""

    def __init__(self, endpoint: str, directory: Path, paths: Sequence[str]) -> None:
        self.engines = [Survivor(endpoint, directory, number, path) for number, path in enumerate(paths, start=1)]

    def __enter__(self) -> Survivors:
        try:
            for engine in self.engines:
                engine.await_event("ready", _START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        for engine in self.engines:
            engine.kill()
