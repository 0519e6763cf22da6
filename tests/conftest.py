"""What holds for every test: a run may be of one part of the suite, what an environment lacks is skipped with a reason,
what only a GPU can prove is counted at the end, soaks run only when asked for, no example of hypothesis has a deadline,
and a run in the background is like one in the foreground."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.parts import DEFAULT, PARTS, part_of
from tests.support.engine_results import EngineResults, note_features

if TYPE_CHECKING:
    from tests.support.redis_server import RedisServer

# The files whose collection imported torch, which takes each process that shares the tests 3 s.
IMPORTED_TORCH: list[str] = []
NEEDS = {"torch": ("torch",), "transformers": ("torch", "transformers"), "vllm": ("vllm",), "sglang": ("sglang",)}


# Models of these tests are so small that a second thread of torch, here or in a child, only waits: twenty times as long
# where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is, nothing of the code.
settings.register_profile("kvframework", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvframework")


SEED = "KVFRAMEWORK_TEST_SEED"


@pytest.fixture
def seed() -> int:
    """Of all that is left to chance; a test that fails shows it. `KVFRAMEWORK_TEST_SEED` repeats a run."""
    chosen = int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))
    print(f"{SEED}={chosen}")
    return chosen


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of installed distributions for commands, see `tests.core.cli.command.run`."""
    path = tmp_path / "site"
    path.mkdir()
    return path


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    # Its client belongs to the tier's distribution, which not every environment has.
    from tests.support.redis_server import RedisServer

    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as running:
        yield running


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The directory in which the demo creates its own, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvf-t-") as directory:
        yield Path(directory)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=(DEFAULT, *PARTS), help="collect one part of the suite, see tests/parts.py")
    parser.addoption("--engine-results", action="store_true", help="renew what docs/engines/README.md says of engines")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    part = config.getoption("part")
    if part is None or collection_path.suffix != ".py":
        return None
    return part_of(collection_path) != part or None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    before = "torch" in sys.modules
    try:
        return (yield)
    finally:
        if "torch" in sys.modules and not before:
            IMPORTED_TORCH.append(collector.nodeid)


class UnprovenWithoutGpu:
    """Counts the tests marked `gpu` that a run has skipped: its success says nothing of what only a GPU can prove."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        count = sum("gpu" in getattr(report, "keywords", ()) for report in terminalreporter.stats.get("skipped", ()))
        if count:
            terminalreporter.write_line(f"{count} tests need a GPU and were not run", yellow=True)


def pytest_configure(config: pytest.Config) -> None:
    # The benchmarks' conftest has this function, too.
    if not config.pluginmanager.has_plugin("unproven"):
        config.pluginmanager.register(UnprovenWithoutGpu(), "unproven")
    # Processes that share the tests report to the first one.
    if config.getoption("engine_results", default=None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(EngineResults())
    # Shells start background jobs with SIGINT ignored, and every process that a test starts would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # Thousands of tests and the modules are there until the end: no collection walks over them from here on.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    note_features(items)
    # The files that import the largest packages come first and together, so that few of the processes import them.
    large = {
        marker: {item.path for item in items if item.get_closest_marker(marker)} for marker in ("torch", "transformers")
    }
    items.sort(key=lambda item: (item.path not in large["transformers"], item.path not in large["torch"]))
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="a long soak: ask for it by -m slow"))
    for marker, packages in NEEDS.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            for item in items:
                if item.get_closest_marker(marker) is not None:
                    item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)} not installed"))
