"""Models with recurrent states, and caches of other kinds, against a real server process: what is restored goes on as
what was computed, and nothing is restored without its states."""

from __future__ import annotations

import pytest

from kvframework.errors import BadLayout, RequestError
from tests.support.lazy import torch, transformers
from tests.transformers.hybrid_models import CHUNK, FORGETFUL, HYBRIDS, SMALL, attach, made, plain_tokens, prompt

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global PagedAttentionCache, Snapshots, TransformersKV, learn_form
    from transformers.generation.continuous_batching import PagedAttentionCache

    from kvf_transformers import TransformersKV
    from kvf_transformers.cache_form import learn_form
    from kvf_transformers.shapes import Snapshots


# One token after the hit: a state that is missing shows before it is forgotten.
TOKENS = 3 * CHUNK + 1


def test_a_hit_ends_where_a_state_was_kept(server):
    ids = prompt(5 * CHUNK + 7, seed=1)[0].tolist()
    with attach(made(HYBRIDS["lfm2"]()), server, "every two", state_interval=CHUNK + 1) as kv:
        assert kv.generate(ids, 1).saved.tokens == 5 * CHUNK
        assert [kv.restore(ids[: chunks * CHUNK + 1]).hit_tokens // CHUNK for chunks in range(7)] == [
            0,
            0,
            2,
            2,
            4,
            5,
            5,
        ]
        assert kv.restore([*ids[: 3 * CHUNK], 5, *ids[3 * CHUNK + 1 :]]).hit_tokens == 2 * CHUNK
    with attach(made(HYBRIDS["lfm2"]()), server, "the last one", state_interval=0) as kv:
        assert kv.generate(ids, 1).saved.tokens == 5 * CHUNK
        assert kv.restore(ids[: 4 * CHUNK + 1]).hit_tokens == 0
        assert kv.generate(ids, 1).restored.hit_tokens == 5 * CHUNK


def test_a_conversation_goes_on_from_the_states_of_its_answers(server):
    model, first = made(HYBRIDS["qwen3-next"]()), prompt(CHUNK + 5, seed=2)
    with attach(model, server, "conversation") as kv:
        answer = kv.generate(first, 2 * CHUNK)
        assert answer.saved.tokens == 3 * CHUNK
        second = [*first[0].tolist(), *answer.tokens, 3, 4, 5]
        again = kv.generate(second, 8)
        assert again.restored.hit_tokens == 3 * CHUNK
        assert again.tokens == plain_tokens(model, torch.tensor([second]))


def test_states_that_others_computed_are_not_taken_for_the_prompts_own(server):
    """A cache that is used again, or computed into, between our calls."""
    model, ids, others = made(HYBRIDS["lfm2"]()), prompt(2 * CHUNK + 1, seed=3), prompt(2 * CHUNK + 1, seed=4)
    with attach(model, server, "others") as kv:
        _, cache, _ = kv.prefill(ids)
        cache.reset()
        with torch.no_grad():
            model(input_ids=others, past_key_values=cache)
        assert kv.save(others, cache).tokens == 0
        _, cache, _ = kv.prefill(ids[:, : CHUNK + 1])
        with torch.no_grad():
            logits = model(input_ids=others[:, : CHUNK - 2], past_key_values=cache).logits[:, -1]
        answer = list(kv.decode(logits, cache, 3))
        mixed = [*ids[0, : CHUNK + 1].tolist(), *others[0, : CHUNK - 2].tolist(), *answer[:2]]
        assert kv.save(mixed, cache).tokens == 0


def test_a_cache_that_ends_with_a_chunk_is_stored_whoever_computed_it(server):
    model, ids = made(HYBRIDS["lfm2"]()), prompt(2 * CHUNK, seed=5)
    with attach(model, server, "their own loop") as kv:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        assert kv.save(ids, cache).tokens == 2 * CHUNK
        assert kv.restore([*ids[0].tolist(), 7]).hit_tokens == 2 * CHUNK


@pytest.mark.parametrize("family", ["bamba", "jamba"])
def test_a_model_that_forgets_its_states_when_several_tokens_follow_is_refused(family):
    with pytest.raises(BadLayout, match=r"(conv|recurrent) states"):
        learn_form(made(FORGETFUL[family]()))


def test_a_model_of_states_only_is_refused():
    with pytest.raises(BadLayout, match="LinearAttentionLayer"):
        learn_form(made(transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)))


def test_an_interval_is_no_negative_number():
    with pytest.raises(RequestError, match="state_interval"):
        TransformersKV(None, state_interval=-1)


STATIC = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "gemma2 with windows": lambda: transformers.Gemma2Config(**SMALL, sliding_window=24),
    "qwen3-next": HYBRIDS["qwen3-next"],
}


@pytest.mark.engine_feature("transformers", "static caches")
@pytest.mark.parametrize("family", STATIC)
def test_a_static_cache_is_filled_as_a_dynamic_one(server, family):
    model, ids = made(STATIC[family]()), prompt(TOKENS, seed=6)
    expected = plain_tokens(model, ids)
    with attach(model, server, f"static {family}") as kv:
        assert kv.generate(ids, 8).saved.tokens == 3 * CHUNK
        cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 8)
        logits, cache, restored = kv.prefill(ids, cache=cache)
        assert restored.hit_tokens == 3 * CHUNK
        assert list(kv.decode(logits, cache, 8)) == expected


@pytest.mark.engine_feature("transformers", "static caches")
def test_a_static_cache_is_stored(server):
    model, ids = made(transformers.LlamaConfig(**SMALL)), prompt(TOKENS, seed=7)
    with attach(model, server, "from static") as kv:
        cold = kv.generate(ids, 8, cache=transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 8))
        assert cold.saved.tokens == 3 * CHUNK
        assert cold.tokens == plain_tokens(model, ids)
    with attach(model, server, "from static") as kv:
        warm = kv.generate(ids, 8)
        assert (warm.restored.hit_tokens, warm.tokens) == (3 * CHUNK, cold.tokens)


@pytest.mark.engine_feature("transformers", "continuous batching", "refused")
def test_caches_that_cannot_be_filled_or_stored_are_refused(tmp_path):
    model, ids = made(transformers.Gemma2Config(**SMALL, sliding_window=24)), prompt(TOKENS)
    with TransformersKV(model, endpoint=f"ipc://{tmp_path}/none", model_name="m", connect_timeout_s=0.0) as kv:
        for cache, reason in (
            (transformers.StaticCache(config=model.config, max_cache_len=TOKENS - 1), "room"),
            (transformers.DynamicCache(config=HYBRIDS["lfm2"]()), "different layers"),
            (object.__new__(PagedAttentionCache), "continuous batching"),
        ):
            with pytest.raises(BadLayout, match=reason):
                kv.restore(ids, cache)
        with pytest.raises(BadLayout, match="room"):
            kv.generate(ids, 4, cache=transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 2))
        windows = transformers.StaticCache(config=model.config, max_cache_len=TOKENS)
        kv.prefill(ids, cache=windows)
        with pytest.raises(BadLayout, match="not empty"):
            kv.restore(ids, windows)
        with pytest.raises(BadLayout, match=r"StaticSlidingWindowLayer holds 24 of"):
            kv.save(ids, windows)
        with pytest.raises(BadLayout, match="PagedAttentionCache"):
            kv.save(ids, object.__new__(PagedAttentionCache))


@pytest.mark.engine_feature("transformers", "speculative decoding", "refused")
def test_assisted_generation_is_refused_from_a_restored_cache_since_it_would_be_wrong(server):
    model, ids = made(transformers.LlamaConfig(**SMALL)), prompt(TOKENS, seed=8)
    expected = plain_tokens(model, ids)
    with attach(model, server, "assisted") as kv:
        kv.generate(ids, 1)
        restored = kv.restore(ids)
        with pytest.raises(RequestError, match=f"holds {3 * CHUNK} tokens"):
            plain_tokens(model, ids, past_key_values=restored.cache, prompt_lookup_num_tokens=3)
        assert plain_tokens(model, ids, past_key_values=restored.cache) == expected
    # What is refused: here the cache is transformers' own, and so are the tokens.
    own = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=ids[:, : 3 * CHUNK], past_key_values=own)
    assert plain_tokens(model, ids, past_key_values=own, prompt_lookup_num_tokens=3) != expected


@pytest.mark.parametrize("by", ["another model", "the prompt", "the prompt, of states"])
def test_what_assisted_generation_has_computed_is_stored(server, by):
    config = HYBRIDS["lfm2"]() if "states" in by else transformers.LlamaConfig(**SMALL)
    model, ids = made(config), prompt(CHUNK + 3, seed=9)
    ids[0, 16 : CHUNK + 3] = ids[0, : CHUNK - 13].clone()
    helper = {"prompt_lookup_num_tokens": 3}
    if by == "another model":
        helper = {"assistant_model": made(transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1}))}
    # The last token is computed by nobody: with it the cache ends a chunk.
    new = 3 * CHUNK - ids.shape[1] + 1
    expected = plain_tokens(model, ids, new)
    cache = transformers.DynamicCache(config=model.config)
    whole = [*ids[0].tolist(), *expected]
    with attach(model, server, f"stored after assistance by {by}") as kv:
        assert plain_tokens(model, ids, new, past_key_values=cache, **helper) == expected
        assert kv.save(whole, cache).tokens == 3 * CHUNK
        further = kv.generate(whole, 8)
        assert further.restored.hit_tokens == 3 * CHUNK
        assert further.tokens == plain_tokens(model, torch.tensor([whole]))


def test_transformers_refuses_to_assist_a_model_with_recurrent_states(server):
    model, ids = made(HYBRIDS["qwen3-next"]()), prompt(TOKENS)
    with attach(model, server, "assisted") as kv, pytest.raises(ValueError, match="stateful"):
        model.generate(ids, past_key_values=kv.restore(ids).cache, prompt_lookup_num_tokens=3, max_new_tokens=2)


def test_stops_are_the_intervals_and_the_last_chunks():
    kept = Snapshots(32, 60, range(32))
    assert kept.stops(200) == [64, 128, 192]
    assert kept.stops(192) == [64, 128, 160, 192]
    assert kept.stops(33) == []
    assert Snapshots(32, 0, []).stops(200) == [192]
    assert Snapshots(32, 0, []).stops(32) == [32]


def test_the_states_of_a_decode_pass_but_for_those_of_an_interval():
    kept = Snapshots(2, 4, [])
    ends = {}
    for token in range(1, 12):
        if kept.computed([token]):
            kept.keep((torch.tensor(token),), passing=True)
            ends[token] = sorted(kept.of(range(1, 12)))
    assert ends == {2: [2], 4: [4], 6: [4, 6], 8: [4, 8], 10: [4, 8, 10]}
    assert sorted(kept.of([1, 2, 3, 4, 5, 6, 7, 9])) == [4]
