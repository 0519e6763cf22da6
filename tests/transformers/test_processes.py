"""transformers: what one process has stored, this one loads, for each family of models; with states left out, or keys
and values changed, the answer is another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess
from tests.transformers.hybrid_models import CHUNK

pytestmark = pytest.mark.transformers

# One token after the hit: a state that is missing shows before it is forgotten.
TOKENS = 3 * CHUNK + 1
NAMES = ["qwen3-next", "qwen3.5", "lfm2", "falcon-h1", "granite-4", "zamba2", "nemotron-h", "olmo-hybrid"]


@pytest.fixture(scope="module")
def answers(server: ServerProcess) -> dict[str, list[int]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.transformers.program", server.endpoint, str(CHUNK), str(TOKENS)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_family_is_tried(answers: dict[str, list[int]]) -> None:
    assert set(answers) == {"llama", *NAMES}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", marks=pytest.mark.engine_feature("transformers", "new process")),
        *(
            pytest.param(
                name,
                marks=[
                    pytest.mark.engine_feature("transformers", "new process"),
                    pytest.mark.engine_feature("transformers", "hybrid models"),
                ],
            )
            for name in NAMES
        ),
    ],
)
def test_what_another_process_stored_is_loaded(
    server: ServerProcess, answers: dict[str, list[int]], family: str
) -> None:
    from kvf_transformers import TransformersKV
    from tests.transformers.hybrid_models import made, prompt
    from tests.transformers.program import FAMILIES

    model, ids = made(FAMILIES[family]()), prompt(TOKENS)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    with TransformersKV(model, endpoint=server.endpoint, model_name=family, deadline_scale=20.0) as kv:
        loaded = kv.generate(ids, 12)
        assert (loaded.restored.hit_tokens, loaded.saved.nbytes) == (3 * CHUNK, 0)
        assert loaded.tokens == answers[family] == plain[0, TOKENS:].tolist()
        restored = kv.restore(ids)
        for layer in restored.cache.layers:
            if family == "llama":
                layer.keys.neg_()
                layer.values.neg_()
            for kind in ("conv_states", "recurrent_states"):
                for state in getattr(layer, kind, {}).values():
                    if state is not None:
                        state.zero_()
        logits, cache, _ = kv.prefill(ids, restored)
        assert list(kv.decode(logits, cache, 12)) != answers[family]
