"""Hits that end at any chunk of a prompt, with a trained model: the answer is that of the model's own cache, cut at the
same place, and in fp32 that of the whole computation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server_process import ServerProcess
from tests.support.trained_model import trained_file, words_of

pytestmark = pytest.mark.timeout(1800)

CHUNK = 128
TOKENS = 4 * CHUNK + 40
ANSWER = 12
# More of them for the figures of docs/engines/transformers.md.
PROMPTS = int(os.environ.get("KVF_TRAINED_PROMPTS", "1"))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(f"server.chunk_size={CHUNK}", capacity="1GiB") as running:
        yield running


@pytest.fixture(scope="module")
def loaded() -> Any:
    file = trained_file()
    from kvf_transformers.demo_model import local_model

    return local_model(str(file))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hits_cut_at_every_chunk_answer_alike(server: ServerProcess, loaded: Any, dtype: str) -> None:
    import torch

    from kvf_transformers import TransformersKV
    from kvf_transformers.forward import Forward

    model = loaded.model.to(getattr(torch, dtype))
    forward = Forward(model)
    others = own_others = cuts = 0
    for number, prompt in enumerate(words_of(loaded.tokenizer, TOKENS, PROMPTS)):
        logits, whole = cold(forward, prompt)
        expected = list(forward.decode(logits, whole, ANSWER))
        for end in range(CHUNK, TOKENS, CHUNK):
            salt = f"{dtype} {number} {end}"
            with TransformersKV(model, endpoint=server.endpoint, cache_salt=salt, deadline_scale=50.0) as kv:
                # Only what is computed while the session is open is stored.
                assert kv.save(prompt[:end], cold(forward, prompt)[1]).tokens == end
                logits, cache, restored = kv.prefill(prompt)
                assert restored.hit_tokens == end
                found = list(kv.decode(logits, cache, ANSWER))
            cut = own_cache(whole, end)
            own_logits = forward.compute(prompt[end:], cut)
            assert torch.equal(logits, own_logits)
            own_found = list(forward.decode(own_logits, cut, ANSWER))
            assert found == own_found
            cuts += 1
            others += found != expected
            own_others += own_found != expected
    print(
        f"{dtype}: of {cuts} answers after a hit {others} are other than the cold one's; by its own cache {own_others}"
    )
    if dtype == "float32":
        assert others == 0


def cold(forward: Any, prompt: list[int]) -> tuple[Any, Any]:
    """Logits behind the prompt and its cache, computed at once."""
    from transformers import DynamicCache

    cache = DynamicCache()
    return forward.compute(prompt, cache), cache


def own_cache(whole: Any, end: int) -> Any:
    """The first tokens of a cache, as transformers keeps a prefix."""
    from transformers import DynamicCache

    cut = DynamicCache()
    for index, layer in enumerate(whole.layers):
        cut.update(layer.keys[:, :, :end].clone(), layer.values[:, :, :end].clone(), index)
    return cut
