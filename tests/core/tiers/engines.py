"""Engine processes as a test sees them: started together, told to stop, and asked for their reports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType

from tests.core.tiers import engine_program
from tests.core.tiers.engine_program import Report, Settings

# 192 objects of these engines: less than they use, so that they need L2 all the time; more than they ever pin.
SMALL_L1 = "6MiB"
_END_S = 100.0
FOR_EVER = 1 << 40


class Engines:
    """One process for each of `endpoints`. Leaving the block ends what still runs."""

    def __init__(self, endpoints: Sequence[str], *, seed: int, rounds: int = FOR_EVER) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        for number, endpoint in enumerate(endpoints):
            settings = Settings(endpoint, seed, instance_id=100 + number, rounds=rounds)
            command = [sys.executable, "-m", engine_program.__name__, json.dumps(asdict(settings))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self._processes.append(subprocess.Popen(command, text=True, **pipes))  # type: ignore[call-overload]

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def check(self) -> None:
        """All still run."""
        for process in self._processes:
            if process.poll() is not None:
                self._ended(process)
                raise AssertionError("an engine has ended")

    def stop(self) -> list[Report]:
        """Ends them after the turn that each is at; their reports."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        return self.finish()

    def finish(self) -> list[Report]:
        """Waits for their ends; their reports."""
        return [self._ended(process) for process in self._processes]

    def _ended(self, process: subprocess.Popen[str]) -> Report:
        process.wait(_END_S)  # first, because `communicate` would tell it to stop
        out, problems = process.communicate()
        assert process.returncode == 0, problems
        return Report(**json.loads(out))
