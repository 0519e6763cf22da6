"""An engine that has run out of descriptors or threads: its cache never ends it, and comes when there are some."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.server_process import ServerProcess, server_fixture

server = server_fixture(capacity="1MiB", scope="module")


def engine(deed: str, server: ServerProcess, *free: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.core.client.squeezed_program", deed, server.endpoint, *map(str, free)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_client_made_with_few_descriptors(server: ServerProcess) -> None:
    with engine("start", server, *range(13), 20, 31) as process:
        said, errors = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "lives\n"), errors


def test_a_server_that_comes_back_to_few_descriptors(server: ServerProcess) -> None:
    few = (2,)
    with engine("reconnect", server, *few) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in few:
            assert process.stdout.readline() == "squeezed\n"
            server.kill9()
            server.start()
            process.stdin.write("\n")
            process.stdin.flush()
        said, errors = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "lives\n"), errors


def test_a_client_made_without_a_thread_to_get(server: ServerProcess) -> None:
    with engine("threads", server) as process:
        said, errors = process.communicate(timeout=120)
    if "no limit" in said:
        pytest.skip("nothing limits this user's threads")
    assert (process.returncode, said) == (0, "lives\n"), errors
