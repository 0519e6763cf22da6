"""KV that is not that of its tokens alone: under masks, at other positions, of batches. It is never stored as theirs,
and theirs is never used for it. Against a real server process; the control is the model without a cache of ours."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest

from kvframework.errors import BadLayout, RequestError
from tests.support.lazy import torch, transformers
from tests.transformers.hybrid_models import CHUNK, HYBRIDS, SMALL, attach, exact, plain_tokens, prompt
from tests.transformers.hybrid_models import made as model_of

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global add_adapters, learn_form, set_adapter
    from kvf_transformers.cache_form import learn_form
    from tests.transformers.lora_layers import add_adapters, set_adapter


TOKENS = 3 * CHUNK + 9
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=None
    ),
    "gemma2 with windows": lambda: transformers.Gemma2Config(**SMALL, sliding_window=24),
    "lfm2 with states": HYBRIDS["lfm2"],
    "qwen3-next with states": HYBRIDS["qwen3-next"],
}


def made(family="llama", seed=0):
    return model_of(FAMILIES[family](), seed)


def check_plain(model, server, name, ids, hits):
    with attach(model, server, name) as kv:
        exact(kv, model, ids, hits)


def zeros_first(ids):
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    return mask


def blind(ids):
    """A mask under which each token sees the one before it and itself."""
    length = ids.shape[1]
    near = torch.ones(length, length, dtype=torch.bool).tril() & torch.ones(length, length, dtype=torch.bool).triu(-1)
    return near[None, None]


def from_one(ids):
    return torch.arange(1, ids.shape[1] + 1)[None]


# A family, what is given beside the prompt or in its place, and the word that the refusal has.
DEPARTURES = {
    "left padding": ("llama", lambda ids, _: {"attention_mask": zeros_first(ids)}, "zeros"),
    "left padding with positions": (
        "llama",
        lambda ids, _: {
            "attention_mask": zeros_first(ids),
            "position_ids": (zeros_first(ids).cumsum(1) - 1).clamp(min=0),
        },
        "position_ids",
    ),
    "positions from 1 on": ("llama", lambda ids, _: {"position_ids": from_one(ids)}, "position"),
    "learned positions from 1 on": ("gpt2", lambda ids, _: {"position_ids": from_one(ids)}, "position"),
    "two texts in one row": (
        "llama",
        lambda ids, _: {"position_ids": torch.arange(ids.shape[1])[None] % 50},
        "position_ids",
    ),
    "a mask of four dimensions": ("llama", lambda ids, _: {"attention_mask": blind(ids)}, "attention_mask"),
    "a mask under windows": ("gemma2 with windows", lambda ids, _: {"attention_mask": zeros_first(ids)}, "zeros"),
    "a mask over states": ("lfm2 with states", lambda ids, _: {"attention_mask": zeros_first(ids)}, "zeros"),
    "embeddings": ("llama", lambda ids, model: {"inputs_embeds": model.model.embed_tokens(ids) * 2}, "inputs_embeds"),
    "token types": ("gpt2", lambda ids, _: {"token_type_ids": torch.ones_like(ids)}, "token_type_ids"),
    "attention to later tokens": ("llama", lambda *_: {"is_causal": False}, "is_causal"),
}


def departing(case, ids, model):
    """The arguments of a pass that departs so."""
    given = DEPARTURES[case][1](ids, model)
    return given if "inputs_embeds" in given else {"input_ids": ids, **given}


@pytest.mark.parametrize("case", DEPARTURES)
def test_kv_that_its_tokens_do_not_name_is_not_stored_under_them(server, case):
    family, _, reason = DEPARTURES[case]
    model, ids = made(family), prompt()
    with attach(model, server, case) as kv:
        # Once into a cache of the caller's, once into one that the model makes.
        own = transformers.DynamicCache(config=None if "windows" in family else model.config)
        with torch.no_grad():
            model(**departing(case, ids, model), past_key_values=own)
            made_by_it = model(**departing(case, ids, model)).past_key_values
        for cache in (own, *([] if "windows" in family else [made_by_it])):
            assert cache.get_seq_length() == TOKENS
            with pytest.raises(RequestError, match=reason) as refused:
                kv.save(ids, cache)
            assert "restore each prompt of a batch separately" in refused.value.hint
    check_plain(model, server, case, ids, 0)


@pytest.mark.parametrize("case", DEPARTURES)
def test_restored_kv_is_not_used_for_what_its_tokens_do_not_name(server, case):
    family, _, reason = DEPARTURES[case]
    model, ids = made(family), prompt(seed=1)
    with attach(model, server, f"restored, {case}") as kv:
        assert kv.generate(ids, 1).saved.tokens == 3 * CHUNK
        restored = kv.restore(ids)
        assert restored.hit_tokens == 3 * CHUNK
        given = departing(case, ids, model)
        given = {
            name: value[:, 3 * CHUNK :]
            if name in ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
            else value
            for name, value in given.items()
        }
        if "dimensions" in case:
            given["attention_mask"] = given["attention_mask"][:, :, 3 * CHUNK :]
        with pytest.raises(RequestError, match=reason), torch.no_grad():
            model(**given, past_key_values=restored.cache)
        # The refusal left the cache as it was.
        assert plain_tokens(model, ids, past_key_values=restored.cache) == plain_tokens(model, ids)


def test_a_cold_cache_of_restore_refuses_what_a_warm_one_does(server):
    model, ids = made(), prompt(seed=2)
    with attach(model, server, "cold") as kv, pytest.raises(RequestError, match="zeros"):
        plain_tokens(model, ids, past_key_values=kv.restore(ids).cache, attention_mask=zeros_first(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_that_is_padded_is_restored_prompt_by_prompt(server, family):
    """As the page says: without the padding, one by one."""
    model, long, short = made(family), prompt(seed=3), prompt(2 * CHUNK + 3, seed=4)
    padded = torch.cat([long, torch.cat([torch.zeros(1, long.shape[1] - short.shape[1], dtype=torch.long), short], 1)])
    mask = (padded != 0).long()
    with attach(model, server, f"padded {family}") as kv:
        for _ in range(2):
            answers = []
            for row, seen in zip(padded, mask, strict=True):
                answers.append(kv.generate(row[seen.bool()], 8))
    assert [answer.restored.hit_tokens for answer in answers] == [3 * CHUNK, 2 * CHUNK]
    assert [answer.tokens for answer in answers] == [plain_tokens(model, each) for each in (long, short)]


PLAIN = {
    "nothing": lambda _: {},
    "a mask of ones": lambda ids: {"attention_mask": torch.ones_like(ids)},
    "the positions that it has": lambda ids: {"position_ids": torch.arange(ids.shape[1])[None]},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_passes_are_stored_and_restored_however_they_are_said(server, family):
    model = made(family)
    with attach(model, server, f"plain {family}") as kv:
        for seed, given in enumerate(PLAIN):
            ids = prompt(3 * CHUNK, seed=50 + seed)
            cache = kv.restore(ids).cache
            with torch.no_grad():
                model(input_ids=ids, past_key_values=cache, **PLAIN[given](ids))
            assert kv.save(ids, cache).tokens == 3 * CHUNK, given
            longer = torch.cat([ids, prompt(7, seed=6)], 1)
            restored = kv.restore(longer)
            assert restored.hit_tokens == 3 * CHUNK
            found = plain_tokens(model, longer, past_key_values=restored.cache, **PLAIN["a mask of ones"](longer))
            assert found == plain_tokens(model, longer), given


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_generate_makes_for_a_static_cache_is_plain(server, family, attention):
    """It makes masks of four dimensions itself."""
    model, ids, name = made(family), prompt(seed=7), f"static {family} {attention}"
    model.set_attn_implementation(attention)
    expected = plain_tokens(model, ids, 2 * CHUNK)
    with attach(model, server, name) as kv:
        cache = kv.restore(ids, transformers.StaticCache(config=model.config, max_cache_len=256)).cache
        assert plain_tokens(model, ids, 2 * CHUNK, past_key_values=cache) == expected
        whole = [*ids[0].tolist(), *expected]
        assert kv.save(whole, cache).tokens == len(whole) // CHUNK * CHUNK
        cache = kv.restore(ids, transformers.StaticCache(config=model.config, max_cache_len=256)).cache
        assert plain_tokens(model, ids, 2 * CHUNK, past_key_values=cache) == expected
        cache = transformers.StaticCache(config=model.config, max_cache_len=256)
        plain_tokens(model, ids, past_key_values=cache, attention_mask=zeros_first(ids))
        with pytest.raises(RequestError, match=r"another one|position_ids"):
            kv.save(ids, cache)


def test_windows_of_a_static_cache_are_plain(server):
    model, ids = made("gemma2 with windows"), prompt(seed=8)
    expected = plain_tokens(model, ids)
    with attach(model, server, "static windows") as kv:
        kv.generate(ids, 1)
        restored = kv.restore(ids, transformers.StaticCache(config=model.config, max_cache_len=128))
        assert restored.hit_tokens == 3 * CHUNK
        assert plain_tokens(model, ids, past_key_values=restored.cache) == expected


ROWS = {
    "beams": {"num_beams": 3},
    "beams, all returned": {"num_beams": 3, "num_return_sequences": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize(
    ("family", "rows"),
    [*((family, "beams") for family in FAMILIES), ("llama", "beams, all returned"), ("llama", "samples")],
)
def test_several_rows_from_a_restored_cache_are_right_or_refused_with_the_call_to_make(server, family, rows):
    model, ids = made(family), prompt(seed=9)
    torch.manual_seed(3)
    expected = plain_tokens(model, ids, **ROWS[rows])
    with attach(model, server, f"rows {rows} {family}") as kv:
        for hits in (0, 3 * CHUNK):
            restored = kv.restore(ids)
            assert restored.hit_tokens == hits
            if hits:
                with pytest.raises(RequestError) as refused:
                    plain_tokens(model, ids, past_key_values=restored.cache, **ROWS[rows])
                assert "cache.batch_repeat_interleave(3)" in refused.value.hint
            restored.cache.batch_repeat_interleave(3)
            torch.manual_seed(3)
            assert plain_tokens(model, ids, past_key_values=restored.cache, **ROWS[rows]) == expected
            with pytest.raises(BadLayout, match="save each request of a batch"):
                kv.save(ids, restored.cache)
            kv.generate(ids, 1)


def test_one_row_of_several_is_not_stored(server):
    """It may be any beam's."""
    model, ids = made(), prompt(seed=20)
    with attach(model, server, "one of several") as kv:
        cache = kv.restore(ids).cache
        answer = plain_tokens(model, ids, past_key_values=cache, **ROWS["beams"])
        cache.batch_select_indices(torch.tensor([0]))
        with pytest.raises(RequestError, match="batch of 3"):
            kv.save([*ids[0].tolist(), *answer], cache)


def test_a_static_cache_has_one_row(server):
    model, ids = made(), prompt(seed=21)
    with attach(model, server, "static rows") as kv:
        kv.generate(ids, 1)
        cache = kv.restore(ids, transformers.StaticCache(config=model.config, max_cache_len=256)).cache
        with pytest.raises(RequestError) as refused:
            plain_tokens(model, ids, past_key_values=cache, **ROWS["beams"])
        assert "restore() without a cache" in refused.value.hint


def test_tokens_that_did_not_go_through_the_model_are_not_stored(server):
    model, ids, others = made(), prompt(seed=10), prompt(seed=10)
    others[0, 40] += 1
    with attach(model, server, "others") as kv:
        _, cache, _ = kv.prefill(ids)
        with pytest.raises(RequestError, match="token 40 of input_ids"):
            kv.save(others, cache)
        assert kv.save(others[:, :40], cache).tokens == CHUNK
    check_plain(model, server, "others", others, CHUNK)


def test_what_was_computed_unseen_is_not_stored(server, caplog):
    model, ids = made(), prompt(seed=11)
    with torch.no_grad():
        cache = model(input_ids=ids, position_ids=from_one(ids)).past_key_values
    with attach(model, server, "unseen") as kv:
        assert kv.save(ids, cache).tokens == 0
        assert "105 of 105 tokens were computed by an unguarded model" in caplog.text
    check_plain(model, server, "unseen", ids, 0)


def test_a_pass_that_fails_keeps_no_cache(server):
    """As one without memory, after which its cache is given up to have some."""
    model, ids, cache = made(), prompt(seed=11), transformers.DynamicCache()

    def fails(*_):
        raise torch.OutOfMemoryError

    with attach(model, server, "fails") as kv:
        hook = model.model.layers[2].register_forward_pre_hook(fails)
        with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        hook.remove()
        assert kv.save(ids, cache).tokens == 0
        seen = weakref.ref(cache)
        del cache
        gc.collect()
        assert seen() is None


def test_a_plain_beginning_is_stored_and_no_more(server):
    model, ids = made(), prompt(seed=12)
    with attach(model, server, "beginning") as kv:
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(input_ids=ids[:, :40], past_key_values=cache)
            model(input_ids=ids[:, 40:], past_key_values=cache, position_ids=torch.arange(41, TOKENS + 1)[None])
        with pytest.raises(RequestError, match="from token 40 on"):
            kv.save(ids, cache)
        assert kv.save(ids[:, :40], cache).tokens == CHUNK
    check_plain(model, server, "beginning", ids, CHUNK)


@pytest.mark.parametrize("named", [{}, {"weights": "w"}], ids=["by content", "by names"])
def test_weights_that_change_behind_a_computation_do_not_store_it(server, caplog, named):
    """The cache is transformers' own: nothing of ours began it."""
    model, ids, name = made(), prompt(seed=13), f"stepped {named}"
    with attach(model, server, name, **named) as kv:
        with torch.no_grad():
            cache = model.generate(ids, max_new_tokens=1, return_dict_in_generate=True).past_key_values
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert kv.save(ids, cache).tokens == 0
        assert "changed after" in caplog.text
        assert kv.save(ids, exact(kv, model, ids, 0)).tokens == 3 * CHUNK


def test_what_other_weights_computed_is_not_gone_on_from(server):
    model, ids = made(), prompt(seed=14)
    with attach(model, server, "gone on") as kv:
        kv.generate(ids, 1)
        restored = kv.restore(ids)
        assert restored.hit_tokens
        model.load_state_dict(made(seed=1).state_dict())
        with pytest.raises(RequestError, match="changed since the cache was restored"):
            plain_tokens(model, ids, past_key_values=restored.cache)
        assert plain_tokens(model, ids, past_key_values=kv.restore(ids).cache) == plain_tokens(made(seed=1), ids)


def test_changes_that_come_and_go_within_a_computation_are_not_stored(server):
    model, ids = made(), prompt(seed=15)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    layers = add_adapters(model, a=1, b=2)
    set_adapter(layers, "a")
    with attach(model, server, "come and go") as kv:
        for change in ("adapter", "autocast", "weights"):
            _, cache, _ = kv.prefill(ids[:, :40])
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"):
                set_adapter(layers, "b" if change == "adapter" else "a")
                if change == "weights":
                    model.model.embed_tokens.weight.add_(1)
                model(input_ids=ids[:, 40:70], past_key_values=cache)
                if change == "weights":
                    model.model.embed_tokens.weight.copy_(weights["model.embed_tokens.weight"])
                set_adapter(layers, "a")
            logits = model(input_ids=ids[:, 70:], past_key_values=cache).logits[:, -1]
            list(kv.decode(logits, cache, 3))
            assert kv.save(ids, cache).tokens == CHUNK, change
    check_plain(model, server, "come and go", ids, CHUNK)


def test_the_beginning_of_a_text_that_sees_its_end_is_refused():
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL, is_causal=False)).eval()
    with pytest.raises(BadLayout, match="attend to later tokens"):
        learn_form(model)


def test_the_guard_stays_with_the_model_it_was_given_and_goes_with_the_session(server):
    model, ids = made(), prompt(seed=16)
    with attach(model, server, "copies") as kv:
        assert plain_tokens(copy.deepcopy(model), ids) == plain_tokens(model, ids)
        torch.save(model, io.BytesIO())  # a whole model may be saved meanwhile
        kv.generate(ids, 1)
        restored = kv.restore(ids)
        _, cache, _ = kv.prefill(ids)
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks
    assert plain_tokens(model, ids, past_key_values=restored.cache) == plain_tokens(model, ids)
    with attach(model, server, "copies") as kv:
        assert kv.save(ids, cache).tokens == 0


def test_training_beside_it_reads_no_weights(server, monkeypatch):
    model, ids = made(), prompt(seed=17)
    with attach(model, server, "training") as kv:
        read = []
        monkeypatch.setattr("kvf_transformers.weight_digests._digest", lambda *each: read.append(each) or "0")
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input_ids=ids.expand(2, -1), labels=ids.expand(2, -1)).loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(input_ids=ids.expand(2, -1))
        assert not read
        assert kv.restore(ids).hit_tokens == 0
        assert read


def test_a_compiled_model_stores_what_this_package_computes(server):
    plain, ids = made(), prompt(seed=18)
    torch._dynamo.reset()
    model = torch.compile(made(), backend="eager", fullgraph=True)
    with attach(model, server, "compiled") as kv:
        cold = kv.generate(ids, 4)
        assert cold.saved.tokens == 3 * CHUNK
        assert cold.tokens == plain_tokens(plain, ids, 4)
        restored = kv.restore(ids)
        assert restored.hit_tokens == 3 * CHUNK
        with pytest.raises(RequestError, match="zeros"), torch.no_grad():
            model(input_ids=ids[:, 3 * CHUNK :], attention_mask=zeros_first(ids), past_key_values=restored.cache)
    check_plain(plain, server, "compiled", ids, 3 * CHUNK)


@pytest.mark.filterwarnings("ignore")
def test_rows_with_adapters_of_their_own_are_not_stored(server):
    peft = pytest.importorskip("peft", reason="peft not installed: `pip install --group peft`")
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model, ids = peft.get_peft_model(made(), config, adapter_name="a").eval(), prompt(seed=19)
    model.add_adapter("b", config)
    model.eval()
    with attach(model, server, "adapter names") as kv, torch.no_grad():
        by_row = model(input_ids=ids, adapter_names=["b"]).past_key_values
        with pytest.raises(RequestError, match="adapter_names"):
            kv.save(ids, by_row)
        plain = model(input_ids=ids).past_key_values
        assert kv.save(ids, plain).tokens == 3 * CHUNK
        assert not torch.equal(by_row.layers[0].keys, plain.layers[0].keys)
