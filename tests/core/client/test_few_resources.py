"""An engine that has run out of descriptors or threads: its cache never ends it, and comes when there are some."""

from __future__ import annotations

import pytest

from tests.core.client import squeezed_program
from tests.support.line_process import LineProcess
from tests.support.server_process import ServerProcess, server_fixture

server = server_fixture(capacity="1MiB", scope="module")


def engine(deed: str, server: ServerProcess, *free: int) -> LineProcess:
    return LineProcess("-m", squeezed_program.__name__, deed, server.endpoint, *map(str, free))


def last_word(process: LineProcess) -> str:
    word = process.hear()
    assert process.process.wait(120) == 0
    return word


def test_a_client_made_with_few_descriptors(server: ServerProcess) -> None:
    with engine("start", server, *range(13), 20, 31) as process:
        assert last_word(process) == "lives"


def test_a_server_that_comes_back_to_few_descriptors(server: ServerProcess) -> None:
    with engine("reconnect", server, 2) as process:
        assert process.hear() == "squeezed"
        server.kill9()
        server.start()
        process.tell()
        assert last_word(process) == "lives"


def test_a_client_made_without_a_thread_to_get(server: ServerProcess) -> None:
    with engine("threads", server) as process:
        word = last_word(process)
    if word == "no limit binds here":
        pytest.skip("nothing limits this user's threads")
    assert word == "lives"
