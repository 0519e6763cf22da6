"""A proxy that sends each request to the node that has most of its prompt.

    python proxy.py ROUTER a=http://… a=http://… b=http://… [--policy score|round-robin]

`POST /generate {"tokens": [...]}` goes to an engine, the answer comes back with the node's name in it. A node that has
more of the prompt than others gets the request, unless it is much busier than they are; without an answer from the
router, or where no node has anything, the least busy one gets it. `GET /counts` has the sums.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ROUTER_S = 0.5  # a router that is slow must not be in the way
ENGINE_S = 120.0
# What a request under way weighs against tokens that need not be computed.
BUSY_TOKENS = 2048


class Engines:
    """The engines by node, with the requests under way in each."""

    def __init__(self, router: str, engines: list[str], policy: str) -> None:
        self.router = router
        self.policy = policy
        self.nodes: dict[str, dict[str, int]] = {}
        for each in engines:
            node, url = each.split("=", 1)
            self.nodes.setdefault(node, {})[url] = 0
        self.turn = itertools.cycle([(node, url) for node, urls in self.nodes.items() for url in urls])
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        held = self.held(asked["tokens"]) if self.policy == "score" else {}
        with self.lock:
            node, url = self.chosen(held)
            self.nodes[node][url] += 1
        try:
            answer = posted(f"{url}/generate", asked, ENGINE_S)
        finally:
            with self.lock:
                self.nodes[node][url] -= 1
        with self.lock:
            self.counts.update(requests=1, tokens=answer["tokens"], hit_tokens=answer["hit_tokens"])
        return {**answer, "node": node}

    def held(self, tokens: list[int]) -> dict[str, int]:
        """Tokens of the prompt by node; nothing if the router does not answer."""
        try:
            scores = posted(f"{self.router}/score", {"tokens": tokens, "model": "my-model"}, ROUTER_S)
        except OSError:
            self.counts["unscored"] += 1
            return {}
        return {node: sum(tiers.values()) for node, tiers in scores.items()}

    def chosen(self, held: dict[str, int]) -> tuple[str, str]:
        # Equals take turns: `max` keeps the first of them.
        turns = list(itertools.islice(self.turn, sum(map(len, self.nodes.values()))))
        next(self.turn)
        if not any(held.values()):
            return min(turns, key=lambda each: self.nodes[each[0]][each[1]]) if self.policy == "score" else turns[0]
        return max(turns, key=lambda each: held.get(each[0], 0) - BUSY_TOKENS * self.nodes[each[0]][each[1]])


def posted(url: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Raises `OSError`."""
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout_s) as answer:
        return json.load(answer)


class Handler(BaseHTTPRequestHandler):
    engines: Engines

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(self.engines.generate(asked))

    def do_GET(self) -> None:
        self.answer(dict(self.engines.counts))

    def answer(self, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a proxy by the KV that nodes hold")
    parser.add_argument("router")
    parser.add_argument("engine", nargs="+", metavar="NODE=URL")
    parser.add_argument("--policy", choices=["score", "round-robin"], default="score")
    given = parser.parse_args()
    Handler.engines = Engines(given.router, given.engine, given.policy)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
