"""Blending with a real server process: what is loaded, from where, in which order, and what is left when it fails."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvf_blend import messages as m
from kvf_blend.engine.client import BlendClient
from kvf_blend.errors import BadSegments, BlendRefused
from kvframework.client import KVClient
from kvframework.errors import KVFrameworkError, RequestError, UnknownRequest, VersionMismatch
from tests.support.lazy import torch, transformers
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until
from tests.transformers.hybrid_models import SMALL, VOCABULARY, made

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global BlendTransformers, CacheSession, TransformersKV, add_adapters, set_adapter
    from kvf_blend.engine.blend import BlendTransformers
    from kvf_transformers import TransformersKV
    from kvf_transformers.session import CacheSession
    from tests.transformers.lora_layers import add_adapters, set_adapter


CHUNK = 32
SETTINGS = (f"server.chunk_size={CHUNK}", "requests.0.use=blend")
CONFIG = {**SMALL, "max_position_embeddings": 1024}
SEPARATOR = [95, 96]


def tokens_of(count, seed):
    return random.Random(seed).choices(range(2, 90), k=count)


# Less than a chunk, chunks and a part, whole chunks; 6 chunks of storage in all.
DOCUMENTS = [tokens_of(20, 1), tokens_of(45, 2), tokens_of(96, 3)]
QUESTION = tokens_of(9, 4)
LOADED = 20 + 45 + 96


def make_model(seed=0, dtype="float32"):
    return made(transformers.LlamaConfig(**CONFIG), seed, dtype)


@pytest.fixture(scope="module")
def model():
    return make_model()


server = server_fixture(*SETTINGS, scope="module")


def attach(model, server, name, **options):
    return BlendTransformers(model, endpoint=server.endpoint, model_name=name, deadline_scale=20.0, **options)


def joined(documents, question=()):
    tokens, ranges = [], []
    for document in documents:
        ranges.append((len(tokens), len(tokens) + len(document)))
        tokens += document
    return [*tokens, *question], ranges


def separated(documents, question=()):
    tokens = []
    for document in documents:
        tokens += [*document, *SEPARATOR]
    return [*tokens, *question]


def store(kv):
    tokens, ranges = joined(DOCUMENTS)
    return kv.pre_compute(tokens, ranges=ranges)


SHUFFLED, RANGES = joined([DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]], QUESTION)


def computed(model, tokens, new_tokens=4):
    """Logits behind the prompt and greedy tokens, without any of this package."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[:, -1]
        text, greedy = list(tokens), []
        for _ in range(new_tokens):
            greedy.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
            text.append(greedy[-1])
    return logits, greedy


def same(done, model, tokens):
    logits, greedy = computed(model, tokens)
    assert torch.allclose(done.logits, logits, rtol=1e-4, atol=1e-4)
    return greedy


def test_documents_are_found_in_another_order_by_another_session(server, model):
    with attach(model, server, "order") as kv:
        stored = store(kv)
        assert (stored.segments, stored.held, stored.computed_tokens) == (3, 3, LOADED)
        assert stored.nbytes > 0
        again = store(kv)
        assert (again.held, again.computed_tokens, again.nbytes) == (3, 0, 0)
    with attach(model, server, "order", share=0.2) as kv:
        done = kv.prefill(SHUFFLED, ranges=RANGES)
        assert (done.blended.prefix_tokens, done.blended.hit_tokens, done.blended.recomputed) == (0, LOADED, 33)
        assert done.blended.nbytes > 0
        assert done.cache.get_seq_length() == len(SHUFFLED)
        assert kv.prefill(SHUFFLED, ranges=RANGES, share=0.0).blended.recomputed == 0
        whole = kv.prefill(SHUFFLED, ranges=RANGES, share=1.0)
        assert whole.blended.hit_tokens == LOADED
        assert list(kv.decode(whole.logits, whole.cache, 4)) == same(whole, model, SHUFFLED)


def test_segments_are_held_as_shards(model):
    with ServerProcess(*SETTINGS, "server.tp_lcm=2", "server.pp_lcm=3") as sharding:
        with attach(model, sharding, "shards") as kv:
            assert (store(kv).held, sharding.status()["l1"]["objects"]) == (3, 6 * 2 * 3)
        with attach(model, sharding, "shards") as kv:
            layers = kv.prefill(SHUFFLED, ranges=RANGES, share=0.0).cache.layers
            whole = kv.prefill(SHUFFLED, ranges=RANGES, share=1.0)
            assert whole.blended.hit_tokens == LOADED
            assert list(kv.decode(whole.logits, whole.cache, 4)) == same(whole, model, SHUFFLED)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([SHUFFLED]), past_key_values=cache)
    assert torch.allclose(layers[0].keys, cache.layers[0].keys, rtol=1e-4, atol=1e-4)
    assert torch.allclose(layers[0].values, cache.layers[0].values, rtol=1e-4, atol=1e-5)


HEAD = tokens_of(7, 9)


def test_segments_computed_behind_a_head_are_nearer(server, model):
    """The first one stands where it was computed, and is exact; all are as those of a computation behind the head."""
    text, ranges = joined([HEAD, *DOCUMENTS[::-1]], QUESTION)
    ranges = ranges[1:]
    whole = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([text]), past_key_values=whole)
    distances = {}
    for before in ((), HEAD):
        with attach(model, server, "head", before=before) as kv:
            assert kv.restore(text, ranges=ranges).held.loaded == 0, "segments of another head"
            assert store(kv).computed_tokens == LOADED
            assert store(kv).computed_tokens == 0
        with attach(model, server, "head", before=before) as kv:
            done = kv.prefill(text, ranges=ranges, share=0.0)
            assert done.blended.hit_tokens == LOADED
            pairs = list(zip(done.cache.layers, whole.layers, strict=True))
            first = slice(*ranges[0])
            exact = [torch.allclose(a.keys[:, :, first], b.keys[:, :, first], rtol=1e-4, atol=1e-4) for a, b in pairs]
            assert all(exact) == (before == HEAD)
            assert torch.allclose(pairs[0][0].keys, pairs[0][1].keys, rtol=1e-4, atol=1e-4)
            distances[len(before)] = sum(float((a.values - b.values).norm()) for a, b in pairs)
            same(kv.prefill(text, ranges=ranges, share=1.0), model, text)
    assert 0 < distances[len(HEAD)] < distances[0]


def test_a_segment_goes_to_the_front_of_a_prompt_that_has_no_head(server, model):
    text, ranges = joined(DOCUMENTS, QUESTION)
    with attach(model, server, "front", before=torch.tensor([HEAD])) as kv:
        store(kv)
        done = kv.prefill(text, ranges=ranges, share=0.0)
        assert done.blended.hit_tokens == LOADED
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(input_ids=torch.tensor([text]), past_key_values=cache)
        assert torch.allclose(done.cache.layers[0].keys, cache.layers[0].keys, rtol=1e-4, atol=1e-4)
        same(kv.prefill(text, ranges=ranges, share=1.0), model, text)


def test_a_server_that_knows_no_tokens_before_segments_is_refused(server, model, monkeypatch):
    """An older release drops the field and names segments as if they were computed alone."""
    request = KVClient.request

    def older(client, name, payload, *given, **named):
        if name == m.CB_REGISTER_KV_CACHE.name:
            payload = msgspec.structs.replace(payload, before=b"")
        return request(client, name, payload, *given, **named)

    monkeypatch.setattr(KVClient, "request", older)
    with pytest.raises(VersionMismatch, match="tokens before segments"):
        attach(model, server, "older", before=HEAD)
    with attach(model, server, "older") as kv:
        assert store(kv).held == 3


def test_segments_between_separators_and_unmarked_ones_are_found(server, model):
    with attach(model, server, "separator") as kv:
        assert kv.pre_compute(separated(DOCUMENTS), separator=SEPARATOR).held == 3
        tokens = separated([DOCUMENTS[1], DOCUMENTS[2]], QUESTION)
        assert kv.prefill(tokens, separator=SEPARATOR).blended.hit_tokens == 45 + 96
        # The server was told of them: it finds them anywhere.
        loaded = kv.restore([5, *DOCUMENTS[2], 6, 7, *DOCUMENTS[1], 8])
        assert loaded.held.segments == ((1, 97), (99, 144))


def test_a_document_twice_in_a_text_is_stored_once_and_hits_twice(server, model):
    text, ranges = joined([DOCUMENTS[1], DOCUMENTS[1]], QUESTION)
    with attach(model, server, "twice") as kv:
        stored = kv.pre_compute(text, ranges=ranges)
        assert (stored.segments, stored.held, stored.computed_tokens) == (2, 2, 45)
        done = kv.prefill(text, ranges=ranges, share=1.0)
        assert done.blended.hit_tokens == 90
        same(done, model, text)


def test_a_prefix_is_used_before_segments(server, model):
    system = tokens_of(2 * CHUNK, 7)
    text, ranges = joined([system, *DOCUMENTS[::-1]], QUESTION)
    with TransformersKV(model, endpoint=server.endpoint, model_name="prefix", deadline_scale=20.0) as plain:
        prompt = system + DOCUMENTS[2]
        plain.save(prompt, plain.prefill(prompt)[1])
    with attach(model, server, "prefix") as kv:
        store(kv)
        done = kv.prefill(text, ranges=ranges[1:], share=1.0)
        # The longest document is part of the prefix that was found, so it is no segment any more.
        assert (done.blended.prefix_tokens, done.blended.hit_tokens) == (160, 160 + 20 + 45)
        assert (done.blended.exact, done.blended.recomputed) == (True, 65)
        same(done, model, text)


def test_a_saved_blend_is_a_prefix_for_blend_only(server, model):
    longer = [*SHUFFLED, *tokens_of(40, 8)]
    with attach(model, server, "final") as kv:
        store(kv)
        done = kv.prefill(SHUFFLED, ranges=RANGES)
        assert kv.save_final(SHUFFLED, done.cache).tokens == len(SHUFFLED) // CHUNK * CHUNK
        after = kv.prefill(longer)
        assert (after.blended.prefix_tokens, after.blended.exact) == (len(SHUFFLED) // CHUNK * CHUNK, False)
        for mine, saved in zip(after.cache.layers, done.cache.layers, strict=True):
            assert torch.equal(mine.keys[:, :, :160], saved.keys[:, :, :160])
    with TransformersKV(model, endpoint=server.endpoint, model_name="final", deadline_scale=20.0) as plain:
        assert plain.restore(longer).hit_tokens == 0
        assert plain.restore(DOCUMENTS[2] + [3]).hit_tokens == 0


def test_a_blend_that_goes_on_under_a_mask_is_not_saved_as_its_tokens(server, model):
    longer = [*SHUFFLED, *tokens_of(CHUNK, 9)]
    with attach(model, server, "masked") as kv:
        store(kv)
        cache = kv.prefill(SHUFFLED, ranges=RANGES).cache
        mask = torch.ones(1, len(longer), dtype=torch.long)
        mask[:, :9] = 0
        with pytest.raises(RequestError, match="zeros"), torch.no_grad():
            model(torch.tensor([longer[len(SHUFFLED) :]]), attention_mask=mask, past_key_values=cache)
        own = transformers.DynamicCache()
        with torch.no_grad():
            model(torch.tensor([longer]), attention_mask=mask, past_key_values=own)
        with pytest.raises(RequestError, match="zeros"):
            kv.save_final(longer, own)
        with torch.no_grad():
            model(torch.tensor([longer[len(SHUFFLED) :]]), past_key_values=cache)
        assert kv.save_final(longer, cache).tokens == len(longer) // CHUNK * CHUNK


def test_other_weights_and_other_salts_share_nothing(server, model):
    with attach(model, server, "apart") as kv:
        store(kv)
        assert kv.restore(SHUFFLED, ranges=RANGES).held.loaded == LOADED
    for other in (attach(make_model(1), server, "apart"), attach(model, server, "apart", cache_salt="tenant")):
        with other as kv:
            assert kv.restore(SHUFFLED, ranges=RANGES).held.loaded == 0


def test_nothing_stays_pinned(server, model):
    with attach(model, server, "pins") as kv:
        store(kv)
        kv.save_final(SHUFFLED, kv.prefill(SHUFFLED, ranges=RANGES).cache)
        assert kv.prefill([*SHUFFLED, 3], ranges=RANGES).blended.hit_tokens
        wait_until(lambda: server.status()["tickets"] == 0, what="the next PING")
        status = server.status()
        assert (status["l1"]["pin_leases"], status["l1"]["write_leases"]) == (0, 0)


def test_bfloat16_is_blended_as_it_is_stored(server):
    model = make_model(dtype="bfloat16")
    with attach(model, server, "bfloat16") as kv:
        store(kv)
        done = kv.prefill(SHUFFLED, ranges=RANGES, share=1.0)
        assert done.blended.hit_tokens == LOADED
        assert done.cache.layers[0].keys.dtype == torch.bfloat16
        expected = computed(model, SHUFFLED)[0]
        assert (done.logits - expected).norm() < 0.1 * expected.norm()


def test_a_server_that_dies_costs_the_prefill_and_a_new_one_is_used_again(model, caplog, monkeypatch):
    greedy = computed(model, SHUFFLED)[1]
    with ServerProcess(*SETTINGS) as own, attach(model, own, "killed") as kv:
        store(kv)

        plan = BlendClient.plan

        def dies(blend, request_id, hits):
            """Between the answer to the lookup and the load."""
            assert hits.segments
            own.kill9()
            return plan(blend, request_id, hits)

        with monkeypatch.context() as patch:
            patch.setattr(BlendClient, "plan", dies)
            done = kv.prefill(SHUFFLED, ranges=RANGES)
        assert done.blended.hit_tokens == 0
        assert list(kv.decode(done.logits, done.cache, 4)) == greedy
        assert "failed and counts as a miss:" in caplog.text
        assert store(kv).held == 0
        assert kv.save_final(SHUFFLED, done.cache).tokens == 0
        own.start()
        wait_until(lambda: store(kv).held == 3, what="the new server's first store")
        done = kv.prefill(SHUFFLED, ranges=RANGES, share=1.0)
        assert done.blended.hit_tokens == LOADED
        assert list(kv.decode(done.logits, done.cache, 4)) == greedy


def test_what_is_lost_behind_the_plan_costs_the_prefill(server, model, monkeypatch):
    greedy = computed(model, SHUFFLED)[1]
    load = CacheSession.load_named
    monkeypatch.setattr(CacheSession, "load_named", lambda session, now, digests: load(session, now, digests[::-1]))
    with attach(model, server, "lost") as kv:
        store(kv)
        done = kv.prefill(SHUFFLED, ranges=RANGES)
        assert done.blended.hit_tokens == 0
        assert list(kv.decode(done.logits, done.cache, 4)) == greedy
        wait_until(lambda: server.status()["tickets"] == 0, what="the next PING")


@pytest.mark.parametrize(
    "pieces",
    [
        (m.Piece(0, 0, 4000, 0),),
        (m.Piece(0, 10, 20, 10), m.Piece(20, 5, 20, 5)),
        (m.Piece(100, 0, 150, 0),),
        (m.Piece(0, len(SHUFFLED) - 5, 5, 0),),
        # As told but for one thing, (96, 96, 20, 96): another rotation, source, place or length.
        (m.Piece(96, 96, 20, 95),),
        (m.Piece(128, 96, 20, 96),),
        (m.Piece(97, 96, 20, 96),),
        (m.Piece(96, 97, 20, 97),),
        (m.Piece(96, 96, 19, 96),),
    ],
)
def test_a_plan_that_makes_no_sense_costs_the_prefill(server, model, monkeypatch, pieces):
    greedy = computed(model, SHUFFLED)[1]
    plan = BlendClient.plan
    monkeypatch.setattr(BlendClient, "plan", lambda *given: msgspec.structs.replace(plan(*given), pieces=pieces))
    with attach(model, server, "nonsense") as kv:
        store(kv)
        done = kv.prefill(SHUFFLED, ranges=RANGES)
        assert done.blended.hit_tokens == 0
        assert list(kv.decode(done.logits, done.cache, 4)) == greedy


def test_without_a_server_prompts_are_computed(tmp_path, model, caplog):
    endpoint = f"ipc://{tmp_path}/none"
    with BlendTransformers(model, endpoint=endpoint, model_name="m", connect_timeout_s=0.1) as kv:
        assert store(kv).held == 0
        done = kv.prefill(SHUFFLED, ranges=RANGES)
        assert done.blended.hit_tokens == 0
        same(done, model, SHUFFLED)
    assert "kvframework serve" in caplog.text


def test_a_server_without_the_plugin_says_so(model):
    with (
        ServerProcess(f"server.chunk_size={CHUNK}") as plain,
        pytest.raises(UnknownRequest, match=r"blend\.CB_REGISTER"),
    ):
        attach(model, plain, "plain")


@pytest.mark.parametrize("ranges", [[(0, 5), (3, 9)], [(5, 9), (0, 3)], [(4, 4)], [(0, 10_000)]])
def test_wrong_marks_are_the_callers_mistake(server, model, ranges):
    with attach(model, server, "mistakes") as kv:
        for call in (kv.pre_compute, kv.restore, kv.prefill):
            with pytest.raises(BadSegments):
                call(SHUFFLED, ranges=ranges)
            with pytest.raises(BadSegments):
                call(QUESTION, separator=SHUFFLED)


def test_wrong_arguments_and_models_are_refused(tmp_path, model):
    endpoint = f"ipc://{tmp_path}/none"
    options = {"endpoint": endpoint, "model_name": "m", "connect_timeout_s": 0.0}
    with BlendTransformers(model, **options) as kv:
        for ids in (torch.zeros(2, 5, dtype=torch.long), []):
            with pytest.raises(RequestError):
                kv.prefill(ids)
        with pytest.raises(RequestError, match="share"):
            kv.prefill(SHUFFLED, share=1.5)
        with pytest.raises(RequestError, match="the loaded KV has 9 tokens"):
            kv.prefill(SHUFFLED, loaded=kv.restore(QUESTION))
    with pytest.raises(RequestError, match="share"):
        BlendTransformers(model, share=-1.0, **options)
    with pytest.raises(RequestError, match="4097 tokens"):
        BlendTransformers(model, before=[1] * 4097, **options)
    auto = transformers.AutoModelForCausalLM
    window = transformers.MistralConfig(**{key: CONFIG[key] for key in ("vocab_size", "hidden_size")})
    with pytest.raises(BlendRefused, match="window"):
        BlendTransformers(auto.from_config(window).eval(), **options)
    mamba = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(KVFrameworkError):
        BlendTransformers(auto.from_config(mamba).eval(), **options)


def test_segments_of_one_adapter_are_not_blended_into_prompts_of_another(server):
    model = make_model()
    layers = add_adapters(model, a=1, b=2)
    set_adapter(layers, "a")
    with attach(model, server, "adapters", share=0.0) as kv:
        assert store(kv).held == len(DOCUMENTS)
        assert kv.prefill(SHUFFLED, ranges=RANGES).blended.hit_tokens == LOADED
        loaded = kv.restore(SHUFFLED, ranges=RANGES)
        filled = kv.prefill(SHUFFLED, ranges=RANGES)
        set_adapter(layers, "b")
        for given in (None, loaded):
            done = kv.prefill(SHUFFLED, ranges=RANGES, loaded=given)
            assert done.blended.hit_tokens == 0
            same(done, model, SHUFFLED)
        assert kv.save_final(SHUFFLED, filled.cache).tokens == 0
        set_adapter(layers, "a")
        assert kv.prefill(SHUFFLED, ranges=RANGES).blended.hit_tokens == LOADED
        assert kv.save_final(SHUFFLED, filled.cache).tokens
        # A model that no name can stand for is computed.
        hook = model.model.layers[0].register_forward_hook(lambda _module, _given, output: output)
        done = kv.prefill(SHUFFLED, ranges=RANGES)
        assert done.blended.hit_tokens == 0
        same(done, model, SHUFFLED)
        hook.remove()
