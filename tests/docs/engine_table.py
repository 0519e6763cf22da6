"""Makes docs/engines/README.md: what tests have proven of each engine, see `tests.support.engine_results`."""

from __future__ import annotations

from pathlib import Path

from tests.support.engine_results import ENGINES, FEATURES, FOLDER, recorded

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "engines"
HEAD = """\
# Engines

This page lists the engines that work with the server, and the features that tests prove for each.
Start with the page of your engine: [vLLM](vllm.md), [SGLang](sglang.md),
[transformers](transformers.md), [llama.cpp](llamacpp.md), [MLX](mlx.md), [TensorRT-LLM](tensorrt_llm.md).
For another engine, see [an engine of your own](own_engine.md) and [porting](porting.md).

## What is proven
Each cell links to its tests ([how to run them](../testing.md)). **tested**: tests ran with the real
engine on CPUs, in the release named. **refused**: the engine computes, or refuses to start with a
reason. **stand-ins**: tests ran only the integration's logic, without the engine. **-**: not tested.
"""
NOTHING = "-"


def page() -> str:
    """Return the page, without its note."""
    return f"{HEAD}\n{table()}"


def table(folder: Path = FOLDER) -> str:
    """A row for each feature of which something is known, a column for each engine."""
    results = {engine: recorded(engine, folder) for engine in ENGINES}
    lines = [
        "| | " + " | ".join(map(_head, ENGINES)) + " |",
        "|---" * (len(ENGINES) + 1) + "|",
        "| release | " + " | ".join(each["release"] or NOTHING for each in results.values()) + " |",
    ]
    for feature, meaning in FEATURES.items():
        cells = [_cell(each["features"].get(feature)) for each in results.values()]
        if any(cell != NOTHING for cell in cells):
            lines.append(f"| **{feature}**: {meaning} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _head(engine: str) -> str:
    page = ENGINES[engine].page
    return f"[{engine}]({page})" if (PAGES / page).exists() else engine


def _cell(found: dict[str, object] | None) -> str:
    if not found:
        return NOTHING
    tests = found["tests"]
    assert isinstance(tests, list)
    files = dict.fromkeys(str(test).partition("::")[0] for test in tests)
    return f"[{found['how']}](../../{next(iter(files))})"
