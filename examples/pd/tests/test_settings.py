"""Settings by which a prefiller and a decoder would move nothing are named: at an engine's start, and by the example's
check before requests come."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pair import CHUNK, ROLES, Engine, Pair, pair, transfer

from tests.support.server_process import ServerProcess
from tests.vllm.model import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

CHECK = Path(__file__).resolve().parents[1] / "check.py"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("settings"), "KvFrameworkConnector") as running:
        yield running


def check(prefill: Engine, decode: Engine) -> str:
    """What the example's check prints; "" for status 0."""
    command = [sys.executable, str(CHECK), "--prefill", f"http://{prefill.address}"]
    command += ["--decode", f"http://{decode.address}", "--wait", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return done.stderr if done.returncode else ""


def refused(engine: Engine) -> str:
    """What an engine says that ends at its start."""
    with ExitStack() as stack:
        stack.callback(engine.kill)
        engine.start()
        assert engine.process is not None
        assert engine.process.wait(900)
    return engine.log.read_text()


def test_a_pair_that_fits_passes_the_check(both: Pair) -> None:
    assert check(both.prefill, both.decode) == ""


def test_two_engines_with_one_port_of_nixl(both: Pair, tmp_path: Path) -> None:
    third = Engine(tmp_path, transfer(both.server, "KvFrameworkConnector", ROLES[1]), 1)
    third.side_port = both.prefill.side_port
    said = refused(third)
    assert f"VLLM_NIXL_SIDE_CHANNEL_PORT: port {third.side_port} cannot be used" in said


def test_the_check_names_what_differs(both: Pair, tmp_path: Path) -> None:
    """Another decoder behind another server, which holds nothing of the prefiller's."""
    with ServerProcess(capacity="256MiB") as other:
        third = Engine(tmp_path, transfer(other, "KvFrameworkConnector", ROLES[1]), 1)
        try:
            third.start()
            third.wait()
            assert "the decoder finds nothing that the prefiller stored" in check(both.prefill, third)
            # Two decoders fetch nothing from each other.
            assert "kv_transfer_params" in check(both.decode, third) or "nothing by NIXL" in check(both.decode, third)
            third.kill()
            third.options = ["--block-size", "64"]
            third.start()
            third.wait()
            assert "block_size is 128 and 64" in check(both.prefill, third)
            # Whoever skips the check only computes.
            tokens = prompt(3 * CHUNK, seed=61)
            wanted = both.prefill.ask(tokens)
            assert third.ask(tokens, kv_transfer_params=wanted.place).tokens == wanted.tokens
        finally:
            third.kill()
