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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts import Engine, Node, Part, Store, free_ports

CHUNK = 256
CHUNKS = 8  # of a prompt; one token more is computed in any case
AFTER = 8  # requests behind a failure: one after the other, as of one engine with nothing else to do
BACK_S = 60.0


@dataclass(frozen=True)
class Asked:
    """What requests cost: the seconds until each one's first token, the tokens computed that had been computed before,
    where the others came from, and when the last answer came."""

    ttfts_s: list[float]
    recomputed: int
    sources: str
    ended: float

    @property
    def mean(self) -> str:
        return ms(sum(self.ttfts_s) / len(self.ttfts_s))


@dataclass(frozen=True)
class Cost:
    """What a failure costs: a request before it, and those of the same kind after it. `back_s`: from the moment when
    the part answers again to a request that is served as `before`."""

    before: Asked
    after: Asked
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

    def ask(self, engine: Engine, prompts: list[list[int]]) -> Asked:
        """Ask one after the other."""
        before = engine.node.hits()
        answers = [self.answer(engine, prompt) for prompt in prompts]
        ended = time.monotonic()
        after = engine.node.hits()
        hits = sum(answer["hit_tokens"] for answer in answers)
        tiers = ", ".join(name for name in after if after[name] > before.get(name, 0))
        sources = tiers or "own L1" if hits else "computed"
        recomputed = sum(len(prompt) - 1 for prompt in prompts) - hits
        return Asked([answer["ttft_s"] for answer in answers], recomputed, sources, ended)

    def answer(self, engine: Engine, prompt: list[int]) -> dict[str, Any]:
        answer = engine.ask(prompt)
        self.requests += 1
        if "error" in answer:
            self.errors += 1
            print(f"{engine.name}: {answer['error']}", flush=True)
            return {"ttft_s": 0.0, "hit_tokens": 0}
        self.wrong += answer["wrong"]
        return answer

    def computed(self, engine: Engine, count: int = AFTER + 1, chunks: int = CHUNKS) -> list[list[int]]:
        """New prompts that this engine has computed: in L1 of its node, and in S3."""
        prompts = [random.choices(range(32000), k=chunks * CHUNK + 1) for _ in range(count)]
        for prompt in prompts:
            self.answer(engine, prompt)
        deadline = time.monotonic() + BACK_S
        while not engine.node.written():
            if time.monotonic() > deadline:
                raise SystemExit(f"{engine.node.name} has not written within {BACK_S:.0f} s")
        return prompts

    def only_in_s3(self) -> list[list[int]]:
        prompts = self.computed(self.a1)
        (self.old,) = self.computed(self.a1, 1, chunks=1)
        self.a.empty()
        self.b.empty()
        return prompts

    def old_of_s3(self) -> list[int]:
        """A prompt that S3 has, and no node."""
        self.b.empty()
        return self.old

    def new_of_a(self) -> list[int]:
        """A new prompt that an engine of node A has computed."""
        return self.computed(self.a1, 1, chunks=1)[0]

    # where hits come from

    def sources(self) -> dict[str, Asked]:
        prompts = self.computed(self.a1, 1)
        found = {
            "no node has it": self.ask(self.a1, [random.choices(range(32000), k=len(prompts[0]))]),
            "an engine of this node has computed it": self.ask(self.a2, prompts),
            "an engine of another node has": self.ask(self.b1, prompts),
        }
        self.a.empty()
        self.b.empty()
        return found | {"the nodes that had it were emptied": self.ask(self.b2, prompts)}

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
        prompts: list[list[int]],
        fail: Callable[[], object],
        mend: Callable[[], object],
        probe: Callable[[], list[int]],
    ) -> Cost:
        before = self.ask(engine, prompts[:1])
        fail()
        after = self.ask(engine, prompts[1:])
        mend()
        began = time.monotonic()
        while (asked := self.ask(engine, [probe()])).sources != before.sources:
            if time.monotonic() > began + BACK_S:
                raise SystemExit(f"{engine.name} has no hit from {before.sources} for {BACK_S:.0f} s")
        return Cost(before, after, asked.ended - began)


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


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # the parts end with this process
    began = time.monotonic()
    with ExitStack() as stack:
        fleet = Fleet(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-"))), stack)
        print(f"\n| {CHUNKS * CHUNK} tokens of a prompt | come from | first token | recomputed |\n|---|---|---|---|")
        for what, asked in fleet.sources().items():
            print(f"| {what} | {asked.sources} | {asked.mean} | {asked.recomputed} |", flush=True)
        print(f"\n| what fails | before | first request | mean of {AFTER} | they come from | recomputed | back after |")
        print("|---|---|---|---|---|---|---|")
        for what, fail in FAILURES.items():
            cost = fail(fleet)
            before, after = f"{cost.before.mean}, {cost.before.sources}", cost.after
            recomputed = f"{after.recomputed} of {AFTER * CHUNKS * CHUNK}"
            back = f"{cost.back_s:.1f} s"
            cells = (what, before, ms(after.ttfts_s[0]), after.mean, after.sources, recomputed, back)
            print(f"| {' | '.join(cells)} |", flush=True)
        corrupt = sum(tier.get("corrupt", 0) for node in (fleet.a, fleet.b) for tier in node.status()["l2"])
    counted = f"{fleet.errors} errors, {fleet.wrong} wrong elements, {corrupt} corrupt values"
    print(f"\n{fleet.requests} requests in {time.monotonic() - began:.0f} s, {counted}")
    if fleet.errors or fleet.wrong or corrupt:
        sys.exit(1)


if __name__ == "__main__":
    main()
