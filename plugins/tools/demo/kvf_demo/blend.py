"""The course of `kvframework demo blend`: one engine process pre-computes documents, another asks a question over them
in another order. The CLI process imports neither torch nor the engine integration; it starts processes that do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from kvf_demo.child import uninterrupted
from kvf_demo.models import chosen_model
from kvf_demo.prefix import ENGINE_TIMEOUT_S
from kvf_demo.processes import DemoFailed, EngineProcess
from kvf_demo.result import BlendResult, WayResult
from kvf_demo.stage import DemoStage, StageOptions, check_stage, check_text
from kvf_demo.view import DemoView, copied

_ENGINE = "kvf_blend.engine.demo_engine"
_TITLES = {
    "full": "computes all of the prompt, as without a cache",
    "blend": "loads the documents, rotates them, and computes a share again",
    "rotated": "loads and rotates them, and computes only the question",
    "naive": "loads them as they are, and computes only the question",
}


class BlendDemoOptions(msgspec.Struct, frozen=True):
    """The command's options. `model` is a name for `chosen_model`; `size` is for tests."""

    text: Path
    question: str
    model: str
    stage: StageOptions
    tokens: int
    share: float
    size: str


def run_blend_demo(options: BlendDemoOptions, view: DemoView) -> BlendResult:
    """Run the demo. Blocks for as long as the model takes; leaves no process and no file behind. Raises
    `DemoFailed`."""
    check_stage(options.stage)
    check_text(options.text)
    if not options.question:
        raise DemoFailed("an empty question", hint="give one with --question")
    model = chosen_model(options.model)
    view.tell_model(model)
    with DemoStage(options.stage, view) as stage:
        documents = stage.directory / "documents.txt"
        documents.write_bytes(options.text.read_bytes())
        arguments = ["--endpoint", stage.endpoint, "--text", str(documents), "--size", options.size]
        arguments += ["--tokens", str(options.tokens), "--share", str(options.share)]
        arguments += ["--question", options.question, *model.arguments]
        result = BlendResult(l2=options.stage.l2, question=options.question)
        _store(result, arguments, stage.directory, view)
        if options.stage.l2:
            stage.restart_server()
        _ask(result, arguments, stage.directory, view)
        return result


def _store(result: BlendResult, arguments: list[str], directory: Path, view: DemoView) -> None:
    with ExitStack() as stack:
        events = _start(stack, "engine A", ["store", *arguments], directory)
        with view.step("engine A: a new process loads the model") as step:
            result.take_model(next(events))
            step.done(f"{result.parameters / 1e6:.1f} M parameters, fp32")
        with view.step("engine A: computes each document alone, and stores it") as step:
            stored = next(events)
            if stored["documents"] != len(result.documents):
                raise DemoFailed(
                    f"engine A stored {stored['documents']} of {len(result.documents)} documents",
                    hint="give more --l1-capacity to a big model",
                )
            step.done(f"{', '.join(map(str, result.documents))} tokens, {copied(stored['nbytes'])}")
            for _ in events:
                pass


def _ask(result: BlendResult, arguments: list[str], directory: Path, view: DemoView) -> None:
    with ExitStack() as stack:
        events = _start(stack, "engine B", ["ask", *arguments], directory)
        with view.step("engine B: a new process loads the model") as step:
            result.take_model(next(events))
            step.done(f"{result.parameters / 1e6:.1f} M parameters, fp32")
        result.prompt_tokens = next(events)["tokens"]
        for way, title in _TITLES.items():
            with view.step(f"engine B: {title}") as step:
                result.ways[way] = done = msgspec.convert(next(events), WayResult)
                step.done(f"TTFT {done.ttft_s:.2f} s")
        for _ in events:
            pass


def _start(stack: ExitStack, name: str, arguments: list[str], directory: Path) -> Iterator[dict[str, Any]]:
    with uninterrupted():
        engine = EngineProcess(name, _ENGINE, arguments, directory, timeout_s=ENGINE_TIMEOUT_S)
        stack.enter_context(engine)
    return engine.events()
