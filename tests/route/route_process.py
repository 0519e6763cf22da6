"""`kvframework route` in a process of its own, at a free port."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from tests.support.observe_process import SLOW_S, ListeningProcess

# As the command, with times that tests can wait for: what is slow for an operator is not for a test.
_HASTY = """
import sys
from kvf_route import subscription
subscription.AWAY_S = subscription.ANSWER_S = subscription.ASK_AGAIN_S = 0.3
subscription._POLL_MS = 50
from kvframework.cli.main import main
sys.argv[0] = "kvframework"
main()
"""


class RouteProcess(ListeningProcess):
    """With `hasty` its times are short."""

    says = "scores"

    def __init__(self, *arguments: str, hasty: bool = False) -> None:
        program = ("-c", _HASTY) if hasty else ("-m", "kvframework.cli.main")
        super().__init__("route", "--listen", "127.0.0.1:0", "--blocks", "100000", *arguments, program=program)

    def connect(self) -> socket.socket:
        place = urlsplit(self.url)
        return socket.create_connection((place.hostname, place.port), SLOW_S)

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        place = urlsplit(self.url)
        with closing(http.client.HTTPConnection(str(place.hostname), place.port, timeout=SLOW_S)) as connection:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def score(self, tokens: list[int] | None = None, **asked: Any) -> dict[str, dict[str, int]]:
        if tokens is not None:
            asked["tokens"] = tokens
        status, body = self.ask("POST", "/score", json.dumps(asked).encode())
        assert status == 200, body
        return json.loads(body)

    def publishers(self) -> list[dict[str, Any]]:
        return json.loads(self.ask("GET", "/publishers")[1])["publishers"]
