"""The environment of a demo: a private directory, a server in it, and the tier behind the server, which returns
everything after the server was killed. Nothing is left behind.

The course of `kvframework demo`: a server and two engine processes, of which the second skips the prefill that the
first has computed. The CLI process imports neither torch nor the engine integration; it starts processes that do.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvf_demo.models import chosen_model
from kvf_demo.processes import DemoFailed, EngineProcess, HeldServerProcess, ServerProcess, uninterrupted
from kvf_demo.result import DemoResult, EngineRun, Recovered
from kvf_demo.view import DemoView, moved
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


ENGINE_TIMEOUT_S = 900.0
# The server's default.
CHUNK_TOKENS = 256
_MORE = f"give a prompt of more than {CHUNK_TOKENS} tokens, and a larger --l1-capacity for a large model"
_ENGINE = "kvf_transformers.demo_engine"


def run_demo(options: DemoOptions, view: DemoView) -> DemoResult:
    """Run the demo. Blocks for as long as the model takes; leaves no process and no file behind. Raises
    `DemoFailed`."""
    check(options)
    if 0 < options.tokens <= CHUNK_TOKENS:
        raise DemoFailed(f"a prompt of {options.tokens} tokens has no whole chunk to skip", hint=_MORE)
    model = chosen_model(options.model)
    view.tell_model(model)
    with DemoStage(options, view) as stage:
        prompt = stage.directory / "prompt.txt"
        prompt.write_bytes(options.text.read_bytes())
        arguments = ["--endpoint", stage.endpoint, "--text", str(prompt), "--size", options.size]
        arguments += ["--tokens", str(options.tokens), "--new-tokens", str(options.new_tokens)]
        arguments += ["--question", options.question, *model.arguments]
        cold = _run_engine("engine A", arguments, stage.directory, view)
        if cold.hit_tokens:
            raise DemoFailed(
                f"engine A had a hit of {cold.hit_tokens} tokens in an empty cache",
                hint="give the tier an empty store: it already held the prompt",
            )
        if not cold.stored_tokens:
            raise DemoFailed(f"engine A stored none of its {cold.prompt_tokens} tokens", hint=_MORE)
        if options.l2:
            stage.restart_server()
        spoiled = ["--corrupt-kv"] if options.corrupt_kv else []
        if not options.held:
            warm = _run_engine("engine B", arguments + spoiled, stage.directory, view)
            return DemoResult(cold, warm, options.l2, question=options.question)
        # The model is loaded before: what is timed is the cache.
        warm = _run_engine("engine B", [*arguments, *spoiled, "--wait"], stage.directory, view, stage.kill_server)
        recovered = stage.recovered()
        recovered.hit_s = warm.asked_s
        return DemoResult(cold, warm, recovered=recovered, question=options.question)


def _run_engine(
    name: str, arguments: list[str], directory: Path, view: DemoView, before: Callable[[], float] | None = None
) -> EngineRun:
    """Run an engine. One that waits asks the server after `before`, which returns when, of the monotonic clock."""
    run = EngineRun()
    with ExitStack() as stack:
        with uninterrupted():
            engine = EngineProcess(name, _ENGINE, arguments, directory, timeout_s=ENGINE_TIMEOUT_S)
            stack.enter_context(engine)
        events = engine.events()
        with view.step(f"{name}: a new process loads the model") as step:
            for event in events:
                run.take(event)
                if event["event"] == "ready":
                    break
            step.done(f"{run.parameters / 1e6:.1f} M parameters, fp32")
        asked = time.monotonic() if before is None else before()
        engine.go_on()
        with view.step(f"{name}: asks the {'new ' if before else ''}server for the prompt") as step:
            for event in events:
                run.take(event)
                if event["event"] == "restored":
                    break
            run.asked_s = time.monotonic() - asked
            step.done(moved(run) if run.hit_tokens else "a miss")
        with view.step(f"{name}: computes {run.prompt_tokens - run.hit_tokens} tokens of the prompt") as step:
            for event in events:
                run.take(event)
                if event["event"] == "computed":
                    step.say(f"{event['tokens']} of {run.prompt_tokens} tokens")
                if event["event"] == "first_token":
                    break
            step.done(f"TTFT {run.ttft_s:.2f} s in all")
        with view.step(f"{name}: generates and stores") as step:
            for event in events:
                run.take(event)
                if event["event"] == "token":
                    step.say(f"token {event['count']}")
            step.done(f"{len(run.tokens)} tokens")
    return run
