"""A model whose adapters or weights change, against a real server process: what was stored for one state is never
served to another."""

from __future__ import annotations

import pytest

from tests.support.lazy import torch
from tests.transformers.hybrid_models import CHUNK, attach, exact, llama, prompt

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global PROMPT, add_adapters, disable_adapters, set_adapter
    from tests.transformers.lora_layers import add_adapters, disable_adapters, set_adapter

    PROMPT = prompt()


@pytest.mark.engine_feature("transformers", "LoRA")
@pytest.mark.parametrize("names", [{}, {"weights": "w"}], ids=["by its weights", "by names"])
def test_what_one_adapter_stored_is_not_served_to_another(server, names):
    model = llama()
    layers = add_adapters(model, a=1, b=2)
    set_adapter(layers, "a")
    with attach(model, server, f"switched {names}", **names) as kv:
        kv.save(PROMPT, exact(kv, model, PROMPT, 0))
        exact(kv, model, PROMPT, 3 * CHUNK)
        set_adapter(layers, "b")
        kv.save(PROMPT, exact(kv, model, PROMPT, 0))
        set_adapter(layers, "a", "b")
        exact(kv, model, PROMPT, 0)
        disable_adapters(layers)
        kv.save(PROMPT, exact(kv, model, PROMPT, 0))
        set_adapter(layers, "a")
        exact(kv, model, PROMPT, 3 * CHUNK)
        for layer in layers:
            layer.scaling["a"] *= 2
        exact(kv, model, PROMPT, 0)
        set_adapter(layers, "b")
        exact(kv, model, PROMPT, 3 * CHUNK)
    # With its adapters off it is the model that never had any; and adapters are what they hold, however called.
    with attach(llama(), server, f"switched {names}", **names) as kv:
        exact(kv, llama(), PROMPT, 3 * CHUNK)
    model = llama()
    set_adapter(add_adapters(model, other=2), "other")
    with attach(model, server, f"switched {names}", **names) as kv:
        exact(kv, model, PROMPT, 3 * CHUNK)


def test_adapters_that_the_next_forward_pass_takes_out_make_a_miss(server, caplog):
    model = llama()
    layers = add_adapters(model, a=1)
    set_adapter(layers, "a")
    for layer in layers:
        layer.merge()
    with attach(model, server, "taken out") as kv:
        kv.save(PROMPT, exact(kv, model, PROMPT, 0))
        disable_adapters(layers)
        _, cache, restored = kv.prefill(PROMPT)
        assert (restored.hit_tokens, kv.save(PROMPT, cache).tokens) == (0, 0)
        assert "unmerge_adapter" in caplog.text
        exact(kv, model, PROMPT, 0)


def test_writes_around_torch_are_seen_once_they_are_told(server):
    model = llama()
    with attach(model, server, "told") as kv:
        kv.save(PROMPT, exact(kv, model, PROMPT, 0))
        model.model.embed_tokens.weight.data[40:80] += 1.0
        kv.weights_changed()
        exact(kv, model, PROMPT, 0)


def test_a_cache_that_another_model_began_is_neither_stored_nor_continued(server, caplog):
    model = llama()
    layers = add_adapters(model, a=1, b=2)
    set_adapter(layers, "a")
    with attach(model, server, "begun") as kv:
        _, cache, restored = kv.prefill(PROMPT)
        set_adapter(layers, "b")
        assert kv.save(PROMPT, cache).tokens == 0
        assert "changed after" in caplog.text
        set_adapter(layers, "a")
        assert kv.save(PROMPT, cache).tokens == 3 * CHUNK
        restored = kv.restore(PROMPT)
        assert restored.hit_tokens == 3 * CHUNK
        set_adapter(layers, "b")
        with torch.no_grad():
            expected = model(input_ids=PROMPT).logits[:, -1]
        logits, _, used = kv.prefill(PROMPT, restored)
        assert used.hit_tokens == 0
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_model_of_another_dtype_is_registered_again(server):
    model = llama()
    with attach(model, server, "dtypes") as kv:
        kv.save(PROMPT, exact(kv, model, PROMPT, 0))
        model.to(torch.bfloat16)
        _, cache, restored = kv.prefill(PROMPT)
        assert restored.hit_tokens == 0
        assert kv.save(PROMPT, cache).tokens == 3 * CHUNK
        assert kv.restore(PROMPT).cache.layers[0].keys.dtype == torch.bfloat16


def test_many_adapters_are_no_more_registrations_than_are_kept(server):
    model = llama()
    layers = add_adapters(model, **{f"adapter{at}": at for at in range(11)})
    with attach(model, server, "many") as kv:
        for at in range(11):
            set_adapter(layers, f"adapter{at}")
            kv.save(PROMPT, kv.prefill(PROMPT)[1])
        with server.client() as client:
            assert len(client.status()["instances"]) <= 8
        set_adapter(layers, "adapter0")
        exact(kv, model, PROMPT, 3 * CHUNK)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_texts_whose_positions_depend_on_their_length_are_left_out(server, kind):
    """Beyond the length of training all tokens get other positions, those of the prefix too."""
    factors = {"factor": 4.0} if kind == "dynamic" else {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    model = llama(rope_parameters=rope, max_position_embeddings=64 if kind == "dynamic" else 256)
    short = PROMPT[:, :50]
    with attach(model, server, kind) as kv:
        assert kv.save(short, kv.prefill(short)[1]).tokens == CHUNK
        assert kv.restore(short).hit_tokens == CHUNK
        with torch.no_grad():
            expected = model(input_ids=PROMPT).logits[:, -1]
        logits, cache, restored = kv.prefill(PROMPT)
        assert restored.hit_tokens == 0
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
        assert kv.save(PROMPT, cache).tokens == 0
        # The model goes back to short positions by itself, with its next short text.
        kv.prefill(short)
        assert kv.prefill(short)[2].hit_tokens == CHUNK
