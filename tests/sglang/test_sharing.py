"""SGLang and vLLM behind one server, which hashes as SGLang does: what one has computed the other continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.model import make
from tests.sglang.rows import Answer, Bench
from tests.sglang.test_engine import MODELS
from tests.support.server_process import ServerProcess
from tests.vllm import rows as vllm
from tests.vllm.model import prompt

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

# vLLM's blocks on a CPU.
PAGE, PAGES = 128, 10
# Both leave what is no whole page to be computed.
LENGTH = PAGES * PAGE + 1
NAMES = {"kvframework.model": "tiny-llama", "kvframework.weights": "seed-1234"}
HASHES = ("hasher.use=sglang", f"server.chunk_size={PAGE}")


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = tmp_path_factory.mktemp("sglang")
    return Bench(make(MODELS / "tiny", "tiny"), directory, prompt(LENGTH, seed=5), {"page_size": PAGE}, NAMES)


@pytest.fixture(scope="module")
def engine(sglang: Bench, tmp_path_factory: pytest.TempPathFactory) -> vllm.Bench:
    options = {**NAMES, "kvframework.layout": "canonical"}
    return vllm.Bench(sglang.model, tmp_path_factory.mktemp("vllm"), sglang.prompt, 12, options)


@pytest.fixture(scope="module")
def cold(sglang: Bench) -> Answer:
    return sglang.answers(None)[0]


def vllm_answer(engine: vllm.Bench, server: ServerProcess, **options: Any) -> vllm.Answer:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(Path(__file__).with_name("without_vision")))
        return replace(engine, options={**engine.options, **options}).run(server, engine.ask())[0]


@pytest.mark.engine_feature("SGLang", "other engines")
def test_vllm_continues_what_sglang_has_computed(sglang: Bench, engine: vllm.Bench, cold: Answer) -> None:
    with ServerProcess(*HASHES, capacity="256MiB") as server:
        assert sglang.answers(server, objects=PAGES) == [cold]
        found = vllm_answer(engine, server)
        assert (found.tokens, found.cached, found.computed) == (cold.tokens, PAGES * PAGE, 1)
        # Other names, other objects.
        other = vllm_answer(engine, server, **{"kvframework.weights": "seed-1235"})
        assert (other.tokens, other.computed) == (cold.tokens, LENGTH)


@pytest.mark.engine_feature("SGLang", "other engines")
def test_sglang_continues_what_vllm_has_computed(sglang: Bench, engine: vllm.Bench, cold: Answer) -> None:
    with ServerProcess(*HASHES, capacity="256MiB") as server:
        stored = vllm_answer(engine, server)
        assert (stored.tokens, stored.computed) == (cold.tokens, LENGTH)
        assert sglang.answers(server) == [Answer(cold.tokens, PAGES * PAGE, PAGES * PAGE)]
        # If it were not the loaded bytes that decide, this would be no proof.
        faults = {"module_path": "tests.sglang.faults", "class_name": "SpoiledPages"}
        assert sglang.answers(server, **faults)[0].tokens != cold.tokens
