"""transformers as an engine, against a real server process: what is restored is what was computed."""

from __future__ import annotations

import json

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from kvf_layouts.dynamic_cache import DynamicCacheLayout
from kvframework.client import named_identity
from kvframework.errors import BadLayout, RequestError
from kvframework.wire import messages as m
from tests.support.lazy import torch, transformers
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.transformers.hybrid_models import CHUNK, SMALL, VOCABULARY, attach, made, prompt

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global CacheView, ModelIdentity, TransformersKV, learn_form
    from kvf_transformers import TransformersKV
    from kvf_transformers.cache_form import learn_form
    from kvf_transformers.identity import ModelIdentity
    from kvf_transformers.session import CacheView


TOKENS = 3 * CHUNK + 9

FAMILIES = {
    "llama with grouped heads": lambda t: t.LlamaConfig(**SMALL),
    "gpt2 with learned positions": lambda t: t.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "mistral with a window shorter than the prompt": lambda t: t.MistralConfig(**SMALL, sliding_window=24),
    "gemma2 with window and full layers": lambda t: t.Gemma2Config(**SMALL, sliding_window=24),
    "deepseek with unequal keys and values": lambda t: t.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4, "head_dim": 8},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=3,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
}


def identify(model, *names, **named):
    return ModelIdentity(model, *names, **named).current()


def control(model, ids, new_tokens):
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -1]
        text, tokens = ids, []
        for _ in range(new_tokens):
            tokens.append(int(model(input_ids=text).logits[0, -1].argmax()))
            text = torch.cat([text, torch.tensor([[tokens[-1]]])], dim=1)
    return logits, tokens


@pytest.mark.engine_feature("transformers", "sliding windows")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_restored_prompt_has_the_logits_and_tokens_of_a_computed_one(server, family):
    ids = prompt()
    with attach(made(FAMILIES[family](transformers)), server, family) as kv:
        cold = kv.generate(ids, 8)
        assert cold.restored.hit_tokens == 0
        assert cold.saved.tokens == TOKENS // CHUNK * CHUNK
        assert cold.saved.nbytes > 0
    # a new model object and a new session, as in another process
    model = made(FAMILIES[family](transformers))
    expected_logits, expected_tokens = control(model, ids, 8)
    with attach(model, server, family) as kv:
        logits, cache, restored = kv.prefill(ids)
        assert restored.hit_tokens == 3 * CHUNK
        assert restored.nbytes == cold.saved.nbytes
        assert cache.get_seq_length() == TOKENS
        assert torch.allclose(logits, expected_logits, rtol=1e-4, atol=1e-4)
        warm = kv.generate(ids, 8)
        assert warm.saved.nbytes == 0
    assert cold.tokens == warm.tokens == expected_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restored_keys_and_values_are_the_stored_bytes(server, dtype):
    model = made(transformers.LlamaConfig(**SMALL)).to(getattr(torch, dtype))
    ids = prompt(seed=2)
    with attach(model, server, f"bytes {dtype}") as kv:
        _, cache, _ = kv.prefill(ids)
        assert kv.save(ids, cache).tokens == 3 * CHUNK
        restored = kv.restore(ids[0])
        assert restored.hit_tokens == 3 * CHUNK
        for mine, theirs in zip(restored.cache.layers, cache.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys[:, :, : 3 * CHUNK])
            assert torch.equal(mine.values, theirs.values[:, :, : 3 * CHUNK])


@pytest.mark.engine_feature("transformers", "other prompts")
def test_prefixes_are_shared_and_one_token_is_left_to_compute(server):
    with attach(made(transformers.LlamaConfig(**SMALL)), server, "prefixes") as kv:
        ids = prompt(2 * CHUNK, seed=3)[0].tolist()
        assert kv.generate(ids, 1).saved.tokens == 2 * CHUNK
        assert kv.restore(ids).hit_tokens == CHUNK
        assert kv.restore([*ids, 7]).hit_tokens == 2 * CHUNK
        assert kv.restore([*ids[:CHUNK], 1, 1, *ids[CHUNK + 2 :], 7]).hit_tokens == CHUNK
        assert kv.restore([1, *ids]).hit_tokens == 0
        assert kv.restore(ids[: CHUNK - 1]).hit_tokens == 0


def test_a_conversation_grows_from_chunk_to_chunk(server):
    with attach(made(transformers.LlamaConfig(**SMALL)), server, "conversation") as kv:
        first = kv.generate(prompt(CHUNK + 20, seed=4), 16)
        assert first.saved.tokens == 2 * CHUNK
        longer = [*prompt(CHUNK + 20, seed=4)[0].tolist(), *first.tokens, 3, 4, 5]
        second = kv.generate(longer, 1)
        assert second.restored.hit_tokens == 2 * CHUNK


def test_generation_ends_at_a_stop_id(server):
    with attach(made(transformers.LlamaConfig(**SMALL)), server, "stop") as kv:
        tokens = kv.generate(prompt(), 8).tokens
        assert kv.generate(prompt(), 8, stop_ids=[tokens[2]]).tokens == tokens[: tokens.index(tokens[2]) + 1]


@pytest.mark.engine_feature("transformers", "tenants")
def test_models_with_other_weights_or_salt_share_nothing(server):
    ids = prompt(seed=6)
    with attach(made(transformers.LlamaConfig(**SMALL), seed=1), server, "same name") as kv:
        assert kv.generate(ids, 1).saved.tokens
        assert kv.restore(ids).hit_tokens
    with attach(made(transformers.LlamaConfig(**SMALL), seed=2), server, "same name") as kv:
        assert kv.restore(ids).hit_tokens == 0
    with attach(made(transformers.LlamaConfig(**SMALL), seed=1), server, "same name", cache_salt="tenant") as kv:
        assert kv.restore(ids).hit_tokens == 0


def test_requests_belong_to_the_trace_of_their_thread(server):
    ids, trace = prompt(seed=17), f"00-{'ab' * 16}-{'cd' * 8}-01"
    span = NonRecordingSpan(SpanContext(int("ab" * 16, 16), int("cd" * 8, 16), False, TraceFlags(1)))
    with attach(made(transformers.LlamaConfig(**SMALL)), server, "traced") as kv, server.client() as client:
        before = client.call("RECENT", m.Recent(traced=True)).last
        kv.generate(ids, 1)
        with use_span(span):
            kv.generate(ids, 1)
        records = client.call("RECENT", m.Recent(before, traced=True)).records
    assert {each.trace for each in records} == {trace}
    assert {"LOOKUP", "RETRIEVE"} <= {each.request for each in records}


def test_nothing_stays_pinned(server):
    with attach(made(transformers.LlamaConfig(**SMALL)), server, "pins") as kv:
        kv.generate(prompt(seed=7), 1)
        assert kv.generate(prompt(seed=7), 1).restored.hit_tokens
        with server.client() as client:
            wait_until(lambda: client.status()["tickets"] == 0, what="the next PING")
            status = client.status()
        assert (status["l1"]["pin_leases"], status["l1"]["write_leases"]) == (0, 0)


def test_a_prompt_that_is_done_leaves_first():
    long = 500
    with (
        ServerProcess(f"server.chunk_size={CHUNK}", capacity="1MiB") as small,
        attach(made(transformers.LlamaConfig(**SMALL)), small, "hints") as kv,
    ):
        kv.generate(prompt(long, seed=1), 1)
        kv.retain("done")
        kv.generate(prompt(long, seed=2), 1)
        kv.retain(None)
        kv.generate(prompt(long, seed=3), 1)
        assert kv.generate(prompt(long, seed=1), 1).restored.hit_tokens == long // CHUNK * CHUNK
        assert kv.generate(prompt(long, seed=2), 1).restored.hit_tokens < long // CHUNK * CHUNK
        with small.client() as client:
            assert client.status()["l1"]["evicted"]["hinted"] > 0
        with pytest.raises(RequestError, match="later"):
            kv.retain("later")


def test_a_miss_in_l2_is_no_error(tmp_path, caplog):
    l2 = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}")
    with ServerProcess(f"server.chunk_size={CHUNK}", *l2) as running:
        with attach(made(FAMILIES["llama with grouped heads"](transformers)), running, "cold") as kv:
            assert kv.generate(prompt(), 1).restored.hit_tokens == 0
        counters = running.status()["messaging"]["counters"]
    assert not [name for name in counters if name.startswith("errors.")]
    assert not caplog.records


@pytest.mark.engine_feature("transformers", "no server")
def test_a_killed_server_costs_a_prefill_and_a_new_one_is_used_again():
    model, ids = made(transformers.LlamaConfig(**SMALL)), prompt(seed=8)
    with ServerProcess(f"server.chunk_size={CHUNK}") as own, attach(model, own, "killed") as kv:
        before = kv.generate(ids, 4)
        own.kill9()
        during = kv.generate(ids, 4)
        assert (during.restored.hit_tokens, during.saved.tokens) == (0, 0)
        own.start()
        wait_until(lambda: kv.save(ids, kv.prefill(ids)[1]).tokens == 3 * CHUNK, what="the new server's first store")
        after = kv.generate(ids, 4)
        assert after.restored.hit_tokens == 3 * CHUNK
        assert before.tokens == during.tokens == after.tokens


@pytest.mark.engine_feature("transformers", "no server")
def test_without_a_server_prompts_are_computed(tmp_path, caplog):
    model, ids = made(transformers.LlamaConfig(**SMALL)), prompt()
    with TransformersKV(model, endpoint=f"ipc://{tmp_path}/none", model_name="m", connect_timeout_s=0.1) as kv:
        generated = kv.generate(ids, 4)
    assert generated.tokens == control(model, ids, 4)[1]
    assert (generated.restored.hit_tokens, generated.saved.tokens) == (0, 0)
    assert "kvframework serve" in caplog.text


def test_batches_and_empty_prompts_are_refused(tmp_path):
    model = made(transformers.LlamaConfig(**SMALL))
    with TransformersKV(model, endpoint=f"ipc://{tmp_path}/none", model_name="m", connect_timeout_s=0.0) as kv:
        for ids in (prompt().expand(2, -1), torch.zeros(1, 1, 5), []):
            with pytest.raises(RequestError):
                kv.restore(ids)
        two = transformers.DynamicCache()
        two.update(torch.zeros(2, 2, 40, 16), torch.zeros(2, 2, 40, 16), 0)
        with pytest.raises(BadLayout, match="save each request of a batch"):
            kv.save(prompt(), two)
        window = transformers.DynamicCache(config=transformers.MistralConfig(**SMALL, sliding_window=24))
        with torch.no_grad():
            model(input_ids=prompt(), past_key_values=window)
        with pytest.raises(BadLayout, match="DynamicSlidingWindowLayer"):
            kv.save(prompt(), window)


def test_encoder_decoders_and_models_without_this_cache_are_refused():
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    torch.manual_seed(0)
    with pytest.raises(BadLayout, match="encoder-decoder"):
        learn_form(transformers.T5ForConditionalGeneration(config))

    class NoCache(torch.nn.Module):
        config = transformers.LlamaConfig(**SMALL)
        device = torch.device("cpu")

        def forward(self, input_ids):
            return input_ids

    with pytest.raises(BadLayout, match="DynamicCache"):
        learn_form(NoCache())


def test_a_model_without_a_name_needs_one():
    model = made(transformers.LlamaConfig(**SMALL))
    with pytest.raises(RequestError, match="no name"):
        identify(model)
    assert identify(model, "mine").model_name == "mine"
    assert identify(model, "mine", "v1").revision == f"v1{identify(model, 'mine').revision}"
    model.config._name_or_path = "org/model"
    assert identify(model).model_name == "org/model"


def test_a_saved_model_is_the_same_in_every_process_and_another_after_a_change(tmp_path):
    made(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    first, second = load(tmp_path), load(tmp_path)
    assert identify(first) == identify(second)
    assert identify(first).model_name == str(tmp_path)
    with torch.no_grad():
        second.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    assert identify(first) != identify(second)
    third = load(tmp_path)
    third.config.rope_parameters["rope_theta"] = 12345.0
    assert identify(first) != identify(third)


def test_named_weights_are_called_as_engines_of_other_kinds_call_them(tmp_path):
    made(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    first = load(tmp_path)
    named = identify(first, "ours", weights="w1")
    config = json.loads((tmp_path / "config.json").read_text())
    config = transformers.LlamaConfig.from_dict(config).to_dict()
    assert named == named_identity("ours", "w1", config=config, dtype="float32")
    others = [
        identify(first, "theirs", weights="w1"),
        identify(first, "ours", weights="w2"),
        identify(load(tmp_path, dtype=torch.bfloat16), "ours", weights="w1"),
        identify(load(tmp_path, rope_parameters={"rope_theta": 7.0, "rope_type": "default"}), "ours", weights="w1"),
        identify(first, "ours"),
    ]
    assert len({named, *others}) == 6


@pytest.mark.parametrize("given", [{"weights": "w"}, {"model_name": "m", "weights": "w", "revision": "r"}])
def test_weights_are_named_with_the_model_and_without_a_revision(given):
    with pytest.raises(RequestError, match="weights"):
        identify(made(transformers.LlamaConfig(**SMALL)), **given)


def test_sessions_share_by_names_alone(server):
    """The promise is the user's: weights are not looked at."""
    model, ids = made(transformers.LlamaConfig(**SMALL)), prompt(seed=11)
    with attach(model, server, "named", weights="w") as kv:
        kv.save(ids, kv.prefill(ids)[1])
        assert kv.restore(ids).hit_tokens == 3 * CHUNK
    with attach(made(transformers.LlamaConfig(**SMALL), seed=1), server, "named", weights="w") as kv:
        assert kv.restore(ids).hit_tokens == 3 * CHUNK
    for other in ({"weights": "x"}, {}):
        with attach(model, server, "named", **other) as kv:
            assert kv.restore(ids).hit_tokens == 0


def test_a_server_hears_how_fast_the_model_computes(server):
    model = made(FAMILIES["llama with grouped heads"](transformers))
    with attach(model, server, "speed") as kv:
        told = []
        for number in range(8):
            ids = prompt(8 * CHUNK, seed=500 + number)
            restored = kv.restore(ids)
            told += [each for each in server.status()["price"]["engines"] if each["client"] == "transformers"]
            kv.prefill(ids, restored)
    assert 0 < len(told) < 8, "the first ones are not known yet"
    assert told[-1]["tokens_per_s"] > 0
    assert told[-1]["queued_s"] == 0


def test_the_speed_is_that_of_prefills_alone():
    from kvf_transformers.kv import PrefillSpeed

    now = [100.0]
    speed = PrefillSpeed(lambda: now[0])

    def takes(seconds):
        def compute():
            now[0] += seconds
            return torch.zeros(1, VOCABULARY)

        return compute

    def fails():
        now[0] += 60.0
        raise RuntimeError("out of memory")

    for number in range(8):
        assert (speed.now() is None) is (number < 3)
        assert speed.measured(0, 512, takes(0.512)).shape == (1, VOCABULARY)
        for _ in range(20):  # tokens that are generated take longer
            speed.measured(512, 1, takes(0.1))
        with pytest.raises(RuntimeError, match="out of memory"):
            speed.measured(0, 512, fails)
    assert speed.now().tokens_per_s == pytest.approx(1000, rel=0.01)


def test_every_group_layer_and_plane_is_what_the_declaration_means() -> None:
    """Also where keys and values differ in size, and layers in shape."""
    sizes = [(8, 8), (8, 6), (4, 4)]
    pairs = {f"layers.{i}": (torch.randn(1, 2, 16, k), torch.randn(1, 2, 16, v)) for i, (k, v) in enumerate(sizes)}
    plugin = DynamicCacheLayout()
    layout = plugin.describe(pairs, block_size=16)
    view = CacheView(pairs)
    view.declared(layout)
    assert view.spare_blocks == (0, 0, 0, 0)
    for group, planes in enumerate(plugin.block_views(layout, pairs)):
        for plane, layers in enumerate(planes):
            for layer, expected in enumerate(layers):
                assert torch.equal(view.read(group, layer, plane, 0), expected[0])
                values = torch.randn_like(expected[0])
                view.write(group, layer, plane, 0, values)
                assert torch.equal(expected[0], values)


def test_a_state_is_one_block_of_one_slot() -> None:
    tensors = {"layers.0": (torch.randn(1, 2, 16, 4),) * 2, "states.1": torch.randn(1, 12)}
    plugin = DynamicCacheLayout(["states.*"])
    layout = plugin.describe(tensors, block_size=16)
    view = CacheView(tensors)
    view.declared(layout)
    expected = plugin.block_views(layout, tensors)[1][0][0][0]
    assert torch.equal(view.read(1, 0, 0, 0), expected)
    view.write(1, 0, 0, 0, torch.ones_like(expected))
    assert tensors["states.1"].eq(1).all()
