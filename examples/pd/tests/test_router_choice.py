"""vLLM's router chooses the prefiller whose server holds the prompt, by the events of real servers. The engines are
stand-ins: the choice is made before any of them computes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pair import Api, running_router

from tests.core.cli.command import run
from tests.events.node import Engine as Storing
from tests.events.node import prompt
from tests.events.test_announced import TellingServer
from tests.route.routers.stream import sockets
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
MODEL = "tiny"


class Worker:
    """Answers as vLLM's OpenAI server does, and counts the prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL}]})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                worker.prompts.append(asked.get("prompt", []))
                choice = {"index": 0, "text": "", "finish_reason": "length"}
                self._answer({"id": "1", "object": "text_completion", "choices": [choice], "kv_transfer_params": {}})

            def _answer(self, answer: dict[str, Any]) -> None:
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Worker:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class Fleet:
    """Two prefillers, each with a server that publishes events, one decoder, and the router, which reads no topics."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.servers = [stack.enter_context(TellingServer(block_size=16, engines=[""])) for _ in range(2)]
        self.prefillers = [stack.enter_context(Worker()) for _ in range(2)]
        self.decoder = stack.enter_context(Worker())
        options = ["--prefill-policy", "kv_aware", "--decode-policy", "round_robin", "--kv-event-model", MODEL]
        for worker, server in zip(self.prefillers, self.servers, strict=True):
            options += ["--pd-kv-events", f"{worker.url}={sockets(server)[0]}"]
        prefill = [worker.url for worker in self.prefillers]
        self.front: Api = stack.enter_context(running_router(folder, MODEL, prefill, [self.decoder.url], *options))
        self.storing = [Storing(stack.enter_context(server.client())) for server in self.servers]

    def chosen(self, tokens: list[int]) -> int:
        before = [len(worker.prompts) for worker in self.prefillers]
        self.front.ask(tokens)
        (index,) = (at for at, worker in enumerate(self.prefillers) if len(worker.prompts) > before[at])
        return index


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, tmp_path)


def test_the_prefiller_of_the_node_that_holds_the_prompt_is_chosen(fleet: Fleet) -> None:
    prompts = [prompt(1 + 1000 * number, 4) for number in range(8)]
    for number, tokens in enumerate(prompts):
        fleet.storing[number % 2].store(tokens)
    for number, tokens in enumerate(prompts):
        wait_until(lambda tokens=tokens, number=number: fleet.chosen(tokens) == number % 2, 60, "the events")  # type: ignore[misc]
    assert [fleet.chosen(tokens) for tokens in prompts] == [number % 2 for number in range(8)]
    # A longer prompt goes where its beginning is.
    assert fleet.chosen([*prompts[1], *range(50)]) == 1
    assert fleet.chosen([*prompts[0], *range(50)]) == 0


def test_the_choice_follows_what_a_server_forgets(fleet: Fleet) -> None:
    tokens = prompt(5, 4)
    fleet.storing[1].store(tokens)
    wait_until(lambda: fleet.chosen(tokens) == 1, 60, "the events")
    assert run("clear", "--yes", "--endpoint", fleet.servers[1].endpoint).returncode == 0
    fleet.storing[0].store(tokens)
    wait_until(lambda: fleet.chosen(tokens) == 0, 60, "the removal")
