"""vLLM alone, with kvframework and with LMCache, alternating in one run: time to first token of a cold request, of a
hit in the same engine, and of a hit in a new engine.

    benchmarks/kvframework_bench/vllm/install.sh ENV
    ENV/bin/python -m kvframework_bench.vllm.side_by_side --models DIR

It runs from the root of a checkout: the engines are those of `tests/vllm`.

Each round starts a server and two engine processes for each contender. Every answer's tokens are compared with those of
vLLM alone; one other token ends the run. The time that storing adds is also measured within one engine, where the
machine's drift cancels: of its cold requests every second one opts out of storing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from kvframework_bench.lmcache_server import prepare, running_lmcache
from kvframework_bench.process import scratch
from tests.support.server_process import ServerProcess
from tests.vllm.engine import Ask, Order, kvframework_transfer
from tests.vllm.model import make, prompt
from tests.vllm.rows import Answer, run_engine

Transfer = dict[str, Any]
WARM_UP = 512
CASES = ("cold", "hit, same engine", "hit, new engine")


@contextlib.contextmanager
def alone() -> Iterator[Transfer]:
    yield {}


@contextlib.contextmanager
def kvframework() -> Iterator[Transfer]:
    with ServerProcess(capacity="2GiB") as server:
        yield kvframework_transfer(server.endpoint, {}, "kvf_vllm.connector:KvFrameworkConnector")


@contextlib.contextmanager
def lmcache_shared() -> Iterator[Transfer]:
    with scratch() as directory, running_lmcache(directory, shared=True, l1_gb=2) as server:
        host, _, port = server.endpoint.rpartition(":")
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": host, "lmcache.mp.port": int(port)},
        }


CONTENDERS: dict[str, Callable[[], AbstractContextManager[Transfer]]] = {
    "vLLM alone": alone,
    "kvframework": kvframework,
    "LMCache 0.5.6, shared memory": lmcache_shared,
}


@dataclass
class Setting:
    model: Path
    directory: Path
    prompts: list[list[int]]
    new_tokens: int
    cores: str

    def engine(self, transfer: Transfer, asks: list[Ask]) -> list[Answer]:
        """Return the answers to `asks` of a new engine that has computed another prompt before."""
        warm_up = Ask(prompt(WARM_UP, seed=4711), tokens=2)
        order = Order(str(self.model), [warm_up, *asks], transfer)
        answers: list[Answer] = run_engine(order, self.directory, cores=self.cores)
        return answers[1:]

    def asks(self, *, reset: bool) -> list[Ask]:
        return [Ask(text, tokens=self.new_tokens, reset=reset and not index) for index, text in enumerate(self.prompts)]


@dataclass
class Results:
    expected: list[list[int]] = field(default_factory=list)
    ttft: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, contender: str, case: str, answers: list[Answer]) -> None:
        tokens = [answer.tokens for answer in answers]
        self.expected = self.expected or tokens
        if tokens != self.expected:
            raise SystemExit(f"{contender}, {case}: the engine's tokens differ from those of vLLM alone")
        if case != "cold" and not all(answer.cached for answer in answers):
            raise SystemExit(
                f"{contender}, {case}: the engine had no hit; the end of the engine's log:\n{answers[0].log[-4000:]}"
            )
        self.ttft.setdefault((contender, case), []).extend(answer.ttft for answer in answers)

    def table(self) -> Iterator[str]:
        yield "| | " + " | ".join(f"{case}, s" for case in CASES) + " | added to cold: median | best |"
        yield "|---|" + "---:|" * (len(CASES) + 2)
        alone = self.ttft["vLLM alone", "cold"]
        for contender in CONTENDERS:
            cells = [self._cell(self.ttft.get((contender, case), [])) for case in CASES]
            mine = self.ttft[contender, "cold"]
            added = [reduce(mine) / reduce(alone) - 1 for reduce in (statistics.median, min)]
            yield f"| {contender} | " + " | ".join(cells) + f" | {added[0]:+.1%} | {added[1]:+.1%} |"

    @staticmethod
    def _cell(values: list[float]) -> str:
        if not values:
            return "-"
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def one_round(setting: Setting, results: Results, backwards: bool, say: Callable[[str], None]) -> None:
    order = list(CONTENDERS.items())
    # The first contender of the first round sets the expected tokens.
    for name, contender in reversed(order) if backwards else order:
        with contender() as transfer:
            say(f"{name}: cold, and hits in the same engine")
            # vLLM alone hits in its own cache; with a connector that cache is dropped.
            again = setting.asks(reset=bool(transfer))
            answers = setting.engine(transfer, [*setting.asks(reset=False), *again])
            count = len(setting.prompts)
            results.add(name, CASES[0], answers[:count])
            results.add(name, CASES[1], answers[count:])
            if transfer:
                say(f"{name}: hits in a new engine")
                results.add(name, CASES[2], setting.engine(transfer, setting.asks(reset=False)))


def added_by_storing(setting: Setting, pairs: int) -> str:
    """Compare neighbouring cold requests of one engine, of which one stores and one does not, in changing order."""
    stores = {"kvframework.load": False}
    computes = {"kvframework.load": False, "kvframework.store": False}
    asks = []
    for pair in range(pairs):
        for step, params in enumerate((stores, computes) if pair % 2 else (computes, stores)):
            text = prompt(len(setting.prompts[0]), seed=1000 + 2 * pair + step)
            asks.append(Ask(text, tokens=setting.new_tokens, params=params))
    with kvframework() as transfer:
        answers = setting.engine(transfer, asks)
    ttft = {
        name: [a.ttft for a, ask in zip(answers, asks, strict=True) if ask.params == params]
        for name, params in (("storing", stores), ("not", computes))
    }
    ratios = sorted(a / b - 1 for a, b in zip(ttft["storing"], ttft["not"], strict=True))
    return (
        f"Storing, in one engine, {pairs} pairs: {statistics.median(ttft['storing']):.3f} s next to "
        f"{statistics.median(ttft['not']):.3f} s; median of the pairs {statistics.median(ratios):+.1%} "
        f"({ratios[0]:+.1%} to {ratios[-1]:+.1%}), best {min(ttft['storing']) / min(ttft['not']) - 1:+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "kvf-vllm-models")
    parser.add_argument("--size", default="mid")
    parser.add_argument("--tokens", type=int, default=4096, help="number of tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=3, help="number of prompts of a round")
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of rounds; 0: measure only the time that storing adds"
    )
    parser.add_argument("--pairs", type=int, default=8, help="number of pairs of cold requests in one engine")
    parser.add_argument("--cores", default="0-1", help="cores of the engine")
    arguments = parser.parse_args()
    prepare()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kvf-side-") as directory, console.status("model") as status:
        prompts = [prompt(arguments.tokens, seed=seed) for seed in range(arguments.prompts)]
        model = make(arguments.models / arguments.size, arguments.size)
        setting = Setting(model, Path(directory), prompts, new_tokens=8, cores=arguments.cores)
        results = Results()
        for number in range(arguments.rounds):
            head = f"round {number + 1} of {arguments.rounds}: "
            one_round(setting, results, bool(number % 2), lambda text, head=head: status.update(head + text))  # type: ignore[misc]
        status.update("what storing adds")
        added = added_by_storing(setting, arguments.pairs)
    for line in results.table() if arguments.rounds else ():
        print(line)
    print(f"\n{added}")


if __name__ == "__main__":
    main()
