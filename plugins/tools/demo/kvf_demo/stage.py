"""The environment of a demo: a private directory, a server in it, and the tier behind the server, which returns
everything after the server was killed. Nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvf_demo.processes import DemoFailed, HeldServerProcess, ServerProcess, uninterrupted
from kvf_demo.result import Recovered
from kvf_demo.view import DemoView
from kvframework.api.installing import install_command

_WRITE_TIMEOUT_S = 120.0


class DemoOptions(msgspec.Struct, frozen=True):
    """The command's options. `model` is a name for `chosen_model`; `l2` is "disk", the name of a tier plugin with its
    `settings`, or ""; `held`: a keeper has L1 while no server lives; `size` and `corrupt_kv` are for tests."""

    text: Path
    question: str
    model: str
    l2: str
    settings: list[str]
    held: bool
    capacity: str
    tokens: int
    new_tokens: int
    size: str
    corrupt_kv: bool


class DemoStage:
    """A context manager. Entering blocks until the server answers; raises `DemoFailed`."""

    def __init__(self, options: DemoOptions, view: DemoView) -> None:
        self._options = options
        self._view = view
        self._stack = ExitStack()

    def __enter__(self) -> DemoStage:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def restart_server(self) -> None:
        """Wait until the tier has every stored object, kill the server as a crash would, and start a new one."""
        title = "the disk" if self._options.l2 == "disk" else f"tier {self._options.l2}"
        with self._view.step(f"waiting until {title} has all objects") as step:
            step.done(f"{self._server.await_written(_WRITE_TIMEOUT_S)} values")
        with self._view.step("killing the server (SIGKILL) and starting a new one") as step:
            self._server.kill()
            self._start_server()
            step.done("L1 is empty")

    def kill_server(self) -> float:
        """Kill the held server as a crash would; its keeper starts a new one. Return when, of the monotonic clock."""
        assert isinstance(self._server, HeldServerProcess)
        with self._view.step("killing the server (SIGKILL)") as step:
            pid, killed = self._server.kill_server()
            step.done(f"process {pid}; there is no L2")
        return killed

    def recovered(self) -> Recovered:
        assert isinstance(self._server, HeldServerProcess)
        return self._server.recovered()

    def _set_up(self) -> None:
        self.directory = Path(self._stack.enter_context(_private_directory()))
        self.endpoint = f"ipc://{self.directory}/kvf.sock"
        self._settings = _settings(self._options, self._tier())
        with self._view.step("starting the server") as step:
            self._start_server()
            step.done(self.endpoint)

    def _start_server(self) -> None:
        with uninterrupted():
            kind = HeldServerProcess if self._options.held else ServerProcess
            self._server = kind(self._settings, self.endpoint, self.directory)
            self._stack.enter_context(self._server)
        self._server.await_ready()

    def _tier(self) -> dict[str, object]:
        if self._options.l2 == "disk":
            return {"use": "filesystem", "path": str(self.directory / "l2")}
        return {"use": self._options.l2} if self._options.l2 else {}


def check(options: DemoOptions) -> None:
    """Check the options before anything is started. Raises `DemoFailed`."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoFailed(f"not installed: {', '.join(missing)}", hint=install_command(distribution="kvframework-demo"))
    if options.held and options.l2:
        raise DemoFailed(
            "--kill and --l2 cannot be given together",
            hint="give only one: --kill restores the prefix from L1, --l2 from a tier",
        )
    if options.settings and options.l2 in ("", "disk"):
        raise DemoFailed("--set needs a tier plugin", hint="give its name with --l2")
    if not options.text.is_file():
        raise DemoFailed("the text file does not exist", where=str(options.text))
    try:
        options.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DemoFailed(f"the text is not UTF-8: {error}", where=str(options.text)) from None


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory with a short path, since socket paths are bounded, and readable by this user only."""
    short = len(tempfile.gettempdir()) < 60
    return tempfile.TemporaryDirectory(prefix="kvf-demo-", dir=None if short else "/tmp", ignore_cleanup_errors=True)  # noqa: S108


def _settings(options: DemoOptions, tier: Mapping[str, object]) -> list[str]:
    """Return what the server's configuration has besides the embedded defaults, each as `--set` takes it."""
    own = {"l1.use": "pinned", "l1.capacity": options.capacity, **{f"l2.0.{key}": tier[key] for key in tier}}
    return [
        *(f"{key}={json.dumps(value)}" for key, value in own.items()),
        *(f"l2.0.{each}" for each in options.settings),
    ]
