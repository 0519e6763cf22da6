"""The course of `kvframework demo`: a server and two engine processes, of which the second skips the prefill that the
first has computed. The CLI process imports neither torch nor the engine integration; it starts processes that do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvf_demo.models import chosen_model
from kvf_demo.processes import DemoFailed, EngineProcess, uninterrupted
from kvf_demo.result import DemoResult, EngineRun
from kvf_demo.stage import DemoOptions, DemoStage, check
from kvf_demo.view import DemoView, moved

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
