"""Two nodes, four engines, S3: where hits come from, and what the failure of each part costs. `python fleet.py`

Every process is a real one, all on this machine: SeaweedFS for S3, a server a node with its TOML, engines with a model
that takes an eighth of a millisecond a token. Ends with 1 if a request fails, or a single element that was loaded is
wrong.
"""

from __future__ import annotations

import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from parts import Engine, Node, Part, Store, free_ports

CHUNK = 256
CHUNKS = 8  # of a prompt; one token more is computed in any case
AFTER = 8  # requests behind a failure: one after the other, as of one engine with nothing else to do
BACK_S = 60.0


@dataclass(frozen=True)
class Asked:
    """What a request cost: seconds until its first token, tokens computed that had been computed before, and where the
    others came from."""

    ttft_s: float
    recomputed: int
    source: str


@dataclass(frozen=True)
class Cost:
    """What a failure costs: a request before it, and those of the same kind after it. `back_s`: from the moment when
    the part answers again to a request that is served as `before`."""

    before: Asked
    after: list[Asked]
    back_s: float


class Fleet:
    """The parts, and the requests made of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.requests = self.errors = self.wrong = 0
        token = folder / "peers.token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        self.store = Store(folder)
        peers = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.a, self.b = [
            Node(name, folder, listen, peers, self.store)
            for name, listen in zip(("node_a", "node_b"), peers, strict=True)
        ]
        self.a1, self.a2, self.b1, self.b2 = [
            Engine(f"engine_{node.name[-1]}{number}", folder, node) for node in (self.a, self.b) for number in (1, 2)
        ]
        parts: list[Part] = [self.store, self.a, self.b, self.a1, self.a2, self.b1, self.b2]
        for part in parts:
            stack.callback(part.kill)
            print(f"{part.name} answers after {part.start():.1f} s", flush=True)

    def ask(self, engine: Engine, prompt: list[int]) -> Asked:
        before = engine.node.hits()
        answer = engine.ask(prompt)
        after = engine.node.hits()
        self.requests += 1
        if "error" in answer:
            self.errors += 1
            print(f"{engine.name}: {answer['error']}", flush=True)
            return Asked(0.0, 0, "error")
        self.wrong += answer["wrong"]
        tiers = [name for name in after if after[name] > before.get(name, 0)]
        source = " + ".join(tiers) or "own L1" if answer["hit_tokens"] else "computed"
        return Asked(answer["ttft_s"], len(prompt) - 1 - answer["hit_tokens"], source)

    def computed(self, engine: Engine, count: int = AFTER + 1, chunks: int = CHUNKS) -> Iterator[list[int]]:
        """New prompts that this engine has computed: in L1 of its node, and in S3."""
        prompts = [random.choices(range(32000), k=chunks * CHUNK + 1) for _ in range(count)]
        for prompt in prompts:
            self.ask(engine, prompt)
        wait_until(engine.node.written, f"the writes of {engine.node.name}")
        return iter(prompts)

    def only_in_s3(self) -> Iterator[list[int]]:
        prompts = self.computed(self.a1)
        self.old = next(self.computed(self.a1, 1, chunks=1))
        self.a.empty()
        self.b.empty()
        return prompts

    def old_of_s3(self) -> list[int]:
        """A prompt that S3 has, and no node."""
        self.b.empty()
        return self.old

    def new_of_a(self) -> list[int]:
        """A new prompt that an engine of node A has computed."""
        return next(self.computed(self.a1, 1, chunks=1))

    # where hits come from

    def sources(self) -> dict[str, Asked]:
        (prompt,) = self.computed(self.a1, 1)
        found = {
            "no node has it": self.ask(self.a1, random.choices(range(32000), k=len(prompt))),
            "an engine of this node has computed it": self.ask(self.a2, prompt),
            "an engine of another node has": self.ask(self.b1, prompt),
        }
        self.a.empty()
        self.b.empty()
        return found | {"the nodes that had it were emptied": self.ask(self.b2, prompt)}

    # failures

    def other_server_killed(self) -> Cost:
        return self.cost(self.b1, self.computed(self.a1), self.a.kill, self.a.start, self.new_of_a)

    def other_server_stopped(self) -> Cost:
        return self.cost(self.b1, self.computed(self.a1), self.a.stop, self.a.go_on, self.new_of_a)

    def s3_stopped(self) -> Cost:
        return self.cost(self.b1, self.only_in_s3(), self.store.stop, self.store.go_on, self.old_of_s3)

    def s3_stopped_peer_has_it(self) -> Cost:
        return self.cost(self.b1, self.computed(self.a1), self.store.stop, self.store.go_on, self.new_of_a)

    def s3_killed(self) -> Cost:
        return self.cost(self.b1, self.only_in_s3(), self.store.kill, self.store.start, self.old_of_s3)

    def own_server_killed(self) -> Cost:
        return self.cost(self.a1, self.computed(self.a1), self.a.kill, self.a.start, self.new_of_a)

    def own_server_stopped(self) -> Cost:
        return self.cost(self.a1, self.computed(self.a1), self.a.stop, self.a.go_on, self.new_of_a)

    def engine_killed(self) -> Cost:
        def killed() -> None:
            self.a2.tell(random.choices(range(32000), k=CHUNKS * CHUNK + 1))
            time.sleep(0.2)
            self.a2.kill()

        return self.cost(self.a1, self.computed(self.a1), killed, self.a2.start, self.new_of_a)

    def cost(
        self,
        engine: Engine,
        prompts: Iterator[list[int]],
        fail: Callable[[], object],
        mend: Callable[[], object],
        probe: Callable[[], list[int]],
    ) -> Cost:
        before = self.ask(engine, next(prompts))
        fail()
        after = [self.ask(engine, next(prompts)) for _ in range(AFTER)]
        mend()
        began = time.monotonic()
        while self.ask(engine, probe()).source != before.source:
            if time.monotonic() > began + BACK_S:
                raise SystemExit(f"{engine.name} has no hit from {before.source} for {BACK_S:.0f} s")
            time.sleep(0.1)
        return Cost(before, after, time.monotonic() - began)


FAILURES: dict[str, Callable[[Fleet], Cost]] = {
    "another node's server is killed": Fleet.other_server_killed,
    "another node's server stops": Fleet.other_server_stopped,
    "S3 stops": Fleet.s3_stopped,
    "S3 stops, another node has the prompt": Fleet.s3_stopped_peer_has_it,
    "S3 is killed": Fleet.s3_killed,
    "the own server is killed": Fleet.own_server_killed,
    "the own server stops": Fleet.own_server_stopped,
    "another engine of the node is killed": Fleet.engine_killed,
}


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BACK_S
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} took longer than {BACK_S:.0f} s")
        time.sleep(0.02)


def ms(*asked: Asked) -> str:
    return f"{sum(each.ttft_s for each in asked) / len(asked) * 1000:.0f} ms"


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # the parts end with this process
    began = time.monotonic()
    with ExitStack() as stack:
        fleet = Fleet(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-"))), stack)
        print(f"\n| {CHUNKS * CHUNK} tokens of a prompt | come from | first token | recomputed |\n|---|---|---|---|")
        for what, asked in fleet.sources().items():
            print(f"| {what} | {asked.source} | {ms(asked)} | {asked.recomputed} |", flush=True)
        print(f"\n| what fails | before | first request | mean of {AFTER} | they come from | recomputed | back after |")
        print("|---|---|---|---|---|---|---|")
        for what, fail in FAILURES.items():
            cost = fail(fleet)
            sources = ", ".join(sorted({each.source for each in cost.after}))
            recomputed = f"{sum(each.recomputed for each in cost.after)} of {AFTER * CHUNKS * CHUNK}"
            before = f"{ms(cost.before)}, {cost.before.source}"
            cells = (what, before, ms(cost.after[0]), ms(*cost.after), sources, recomputed, f"{cost.back_s:.1f} s")
            print(f"| {' | '.join(cells)} |", flush=True)
        corrupt = sum(tier.get("corrupt", 0) for node in (fleet.a, fleet.b) for tier in node.status()["l2"])
    counted = f"{fleet.errors} errors, {fleet.wrong} wrong elements, {corrupt} corrupt values"
    print(f"\n{fleet.requests} requests in {time.monotonic() - began:.0f} s, {counted}")
    if fleet.errors or fleet.wrong or corrupt:
        sys.exit(1)


if __name__ == "__main__":
    main()
