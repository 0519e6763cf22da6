"""`kvframework control` in a process of its own, at a free port, and the way to order."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.observe_process import SLOW_S, ListeningProcess
from tests.support.server_process import ServerProcess
from tests.support.wire_client import WireClient, key_for

TOKEN = "the token of orders"
CHUNK = 256
OBJECT = 32768


class ControlAt:
    """The way to order at an address."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, path: str, body: object = None, *, token: str = TOKEN) -> tuple[int, Any]:
        """Return the status, and what the answer's JSON says; its text where it is none."""
        place = urlsplit(self.url)
        sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        with closing(http.client.HTTPConnection(str(place.hostname), place.port, timeout=SLOW_S)) as connection:
            connection.request(method, path, sent, {"authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            text = answer.read()
            try:
                return answer.status, json.loads(text)
            except ValueError:
                return answer.status, text.decode()

    def order(self, path: str, **body: Any) -> dict[str, Any]:
        status, answer = self.ask("POST", path, body)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def directive(self, name: str) -> dict[str, Any]:
        return next(each for each in self.listed() if each["id"] == name)

    def listed(self) -> list[dict[str, Any]]:
        status, listed = self.ask("GET", "/v1/directives")
        assert status == 200
        assert isinstance(listed, list)
        return listed


class ControlProcess(ListeningProcess, ControlAt):
    """Beside a server; `folder` is for the file of its token."""

    says = "orders"

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        file = folder / "token"
        file.write_text(TOKEN)
        options = ("--listen", "127.0.0.1:0", "--token-file", str(file), "--endpoint", server.endpoint)
        ListeningProcess.__init__(self, "control", *options)


def prompt(number: int, chunks: int, *, after: Sequence[int] = ()) -> list[int]:
    return [*after, *([number] * (chunks * CHUNK))]


class Engine(WireClient):
    """An engine of the model `tiny`, whose chunks have `OBJECT` bytes."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server.endpoint)
        self._registered = self.register()

    def save(self, tokens: Sequence[int], **fields: Any) -> None:
        self.store(key_for(self._registered, list(tokens), **fields), b"kv")

    def l1_tokens(self, tokens: Sequence[int], **fields: Any) -> int:
        """How many tokens of a prompt L1 has; counts as a use."""
        return int(self.hit(key_for(self._registered, list(tokens), **fields)))

    def fill_up(self, chunks: int) -> None:
        """Store so many chunks that nobody asks for again."""
        for number in range(chunks):
            self.save(prompt(1_000_000 + number, 1))
