"""NVIDIA Dynamo's indexer, unchanged and in a process of its own: with which blocks it credits which worker."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from tests.events.node import BLOCK, packed
from tests.support.ports import free_port
from tests.support.waiting import wait_until

MODEL = "tiny"
WAIT_S = 60
# With which it hashes the tokens of a block.
_SEED = 1337
# Blocks, each as the hashes of the tokens of all blocks of its prompt up to it.
Blocks = set[tuple[int, ...]]


class Dynamo:
    """`python -m dynamo.indexer`. Workers are instances, which are registered one rank at a time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvf-")
        self._log = Path(self._folder.name) / "dynamo.log"
        self._port = free_port()

    def __enter__(self) -> Dynamo:
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(self._answers, WAIT_S, "Dynamo's indexer")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        self._folder.cleanup()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def register(
        self, endpoint: str, replay: str, *, instance: int = 1, rank: int = 0, block: int = BLOCK, model: str = MODEL
    ) -> None:
        named = {"instance_id": instance, "dp_rank": rank, "model_name": model, "block_size": block}
        self._ask("/register", {**named, "endpoint": endpoint, "replay_endpoint": replay or None})

    def unregister(self, *, instance: int = 1) -> None:
        self._ask("/unregister", {"instance_id": instance, "model_name": MODEL})

    def matched(self, tokens: Sequence[int], medium: str = "cpu", *, instance: int = 1, **asked: object) -> int:
        """The tokens of a prompt that a worker has down to a medium: gpu, cpu or disk."""
        found = self._ask("/query", {"token_ids": list(tokens), "model_name": MODEL, **asked})
        return int(found["instances"].get(str(instance), {}).get(medium, 0))

    def blocks(self, tier: str = "host_pinned", *, instance: int = 1) -> Blocks:
        """What a worker has in a tier: host_pinned or disk. A block is there once, and so is its parent."""
        found: dict[int, tuple[int | None, int]] = {}
        for each in self._ask("/dump")[f"{MODEL}:default"]["events"]:
            if (each["worker_id"], each["storage_tier"]) == (instance, tier):
                stored = each["event"]["data"]["stored"]
                for block in stored["blocks"]:
                    assert block["block_hash"] not in found
                    found[block["block_hash"]] = stored["parent_hash"], block["tokens_hash"]
        return {_path(found, each) for each in found}

    def until(self, right: Callable[[], object], what: str = "what Dynamo knows") -> None:
        """Wait for a condition, and for the ends of answers: for the rest of one that a killed server has not sent,
        Dynamo would wait for ever."""
        try:
            wait_until(lambda: right() and self._has_all_answers(), WAIT_S, what)
        except AssertionError:
            print(self.log)
            raise

    def _has_all_answers(self) -> bool:
        log = self.log
        return log.count("Requesting replay") == log.count("Replay complete") + log.count("No replay endpoint")

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log
        try:
            self._ask("/workers")
        except urllib.error.URLError:
            return False
        return True

    def _ask(self, path: str, question: object = None) -> Any:
        data = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=WAIT_S) as answer:
            return json.load(answer)


def blocks_of(beginnings: Iterable[Sequence[int]], *, block: int = BLOCK) -> Blocks:
    """The last blocks of beginnings of prompts, as Dynamo names them."""
    return {
        tuple(xxhash.xxh3_64_intdigest(packed(each[at : at + block]), seed=_SEED) for at in range(0, len(each), block))
        for each in beginnings
    }


def _path(found: dict[int, tuple[int | None, int]], last: int) -> tuple[int, ...]:
    path: list[int] = []
    at: int | None = last
    while at is not None:
        at, tokens_hash = found[at]
        path.append(tokens_hash)
    return tuple(reversed(path))
