"""The selective prefill against the model itself: equal where it must be, near where it may be, or refused."""

from __future__ import annotations

from functools import partial

import pytest

from kvf_blend.errors import BlendRefused
from kvf_blend.messages import Piece
from tests.support.lazy import torch, transformers
from tests.transformers.hybrid_models import SMALL, made

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global Decoder, Held, Loaded, by_deviation, check_decoder, layers_of, learn_form, placed
    global prefill, prefill_module, rotary_of
    from kvf_blend.engine import prefill as prefill_module
    from kvf_blend.engine.model_rotary import rotary_of
    from kvf_blend.engine.placing import Loaded, placed
    from kvf_blend.engine.prefill import Decoder, check_decoder, prefill
    from kvf_blend.engine.recompute import Held, by_deviation
    from kvf_transformers.cache_form import learn_form
    from kvf_transformers.shapes import layers_of


WITHOUT_HEAD_DIM = {key: value for key, value in SMALL.items() if key != "head_dim"}

FAMILIES = {
    "llama": lambda t: t.LlamaConfig(**SMALL),
    "llama of one layer": lambda t: t.LlamaConfig(**{**SMALL, "num_hidden_layers": 1}),
    "mistral": lambda t: t.MistralConfig(**SMALL, sliding_window=None),
    "qwen2": lambda t: t.Qwen2Config(**WITHOUT_HEAD_DIM),
    "qwen3": lambda t: t.Qwen3Config(**SMALL),
}
REFUSED = {
    "a window": lambda t: (t.MistralConfig(**SMALL, sliding_window=8), "window"),
    "windows in some layers": lambda t: (t.Gemma2Config(**SMALL), "window"),
    "learned positions": lambda t: (
        t.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None),
        "rotary_emb",
    ),
    "scaled logits": lambda t: (
        t.GraniteConfig(**WITHOUT_HEAD_DIM, logits_scaling=8.0, embedding_multiplier=12.0),
        "wrong logits",
    ),
    "layers that want to be told more": lambda t: (
        t.Gemma3TextConfig(**SMALL, layer_types=["full_attention"] * 3),
        "cannot be called one by one",
    ),
}


def make_model(config, attention="sdpa", dtype="float32"):
    return made(config, dtype=dtype, attn_implementation=attention)


def tokens_of(count, seed=0):
    return torch.randint(2, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def computed(model, tokens):
    """Logits behind the last token and KV, by the model alone."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), past_key_values=cache).logits[:, -1]
    return logits, layers_of(cache, tokens=len(tokens))


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


class Documents:
    """A prompt of documents computed alone, in another order, and a question."""

    def __init__(self, model, documents, question, prefix):
        self.model, self.decoder, self.rotary = model, Decoder(model), rotary_of(model)
        alone = [computed(model, tokens)[1] for tokens in ([prefix] if prefix else []) + documents]
        self.sources = tuple(
            tuple(torch.cat([kv[layer][plane] for kv in alone], dim=2) for plane in (0, 1))
            for layer in range(self.decoder.layers)
        )
        places, at = [], len(prefix)
        for document in documents:
            places.append((at, len(document)))
            at += len(document)
        self.tokens, self.pieces, spans = list(prefix), [], []
        if prefix:
            self.pieces.append(Piece(0, 0, len(prefix), 0))
        for index in reversed(range(len(documents))):
            source, count = places[index]
            start = len(self.tokens)
            self.pieces.append(Piece(source, start, count, start))
            spans.append((start, start + count))
            self.tokens += documents[index]
        self.tokens += question
        self.held = Held(len(self.tokens), len(prefix), tuple(spans))
        self.templates = learn_form(model).pairs
        self.expected, self.exact = computed(model, self.tokens)

    def pairs(self, rotated=True):
        pieces = [piece if rotated else Piece(piece.source, piece.start, piece.tokens, 0) for piece in self.pieces]
        return placed(Loaded(self.held, tuple(pieces), self.sources, rotary=self.rotary), self.templates)

    def run(self, choose, rotated=True):
        pairs = self.pairs(rotated)
        return prefill(self.decoder, self.tokens, self.held, pairs, choose), pairs


def documents(model, prefix=None):
    return Documents(model, [tokens_of(40, 1), tokens_of(33, 2), tokens_of(64, 3)], tokens_of(9, 4), prefix or [])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_of_it_computed_again_the_logits_are_the_models_own(family, attention, monkeypatch):
    monkeypatch.setattr(prefill_module, "_SLICE", 29)  # several slices, the last of them short
    model = make_model(FAMILIES[family](transformers), attention)
    check_decoder(model, Decoder(model))
    prompt = documents(model, prefix=tokens_of(17, 5))
    done, pairs = prompt.run(partial(by_deviation, share=1.0))
    assert done.recomputed == 137
    assert torch.allclose(done.logits, prompt.expected, rtol=1e-4, atol=1e-4)
    for (keys, values), (own_keys, own_values) in zip(pairs, prompt.exact, strict=True):
        assert torch.allclose(keys, own_keys, rtol=1e-3, atol=1e-4)
        assert torch.allclose(values, own_values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_hit_the_logits_are_the_models_own(family):
    model = make_model(FAMILIES[family](transformers))
    tokens = tokens_of(50)
    expected, exact = computed(model, tokens)
    pairs = [(torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan)) for keys, values in exact]
    for choose in (None, partial(by_deviation, share=0.15)):
        done = prefill(Decoder(model), tokens, Held(50), pairs, choose)
        assert done.recomputed == 0
        assert torch.allclose(done.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5])
def test_only_what_is_chosen_is_replaced(share):
    model = make_model(FAMILIES["llama"](transformers))
    prompt = documents(model, prefix=tokens_of(17, 5))
    chosen = []

    def choose(held, deviation):
        chosen.append(by_deviation(held, deviation, share))
        return chosen[0]

    before = prompt.pairs()
    done, pairs = prompt.run(choose)
    positions = chosen[0].tolist()
    assert done.recomputed == len(positions) - 9
    kept = sorted(set(range(prompt.held.tokens)) - set(positions))
    for layer in (1, 2):
        for plane in (0, 1):
            assert torch.equal(pairs[layer][plane][:, :, kept], before[layer][plane][:, :, kept])
            replaced = pairs[layer][plane][:, :, positions] != before[layer][plane][:, :, positions]
            assert replaced.any(dim=-1).all()
    # Layer 0 depends on the token and its position only: computed or rotated, it is exact.
    assert torch.allclose(pairs[0][0], prompt.exact[0][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(pairs[0][0][:, :, :17], prompt.exact[0][0][:, :, :17])


def test_rotation_alone_is_exact_in_layer_0_and_leaves_values():
    model = make_model(FAMILIES["llama"](transformers))
    prompt = documents(model)
    _, pairs = prompt.run(None)
    assert torch.allclose(pairs[0][0], prompt.exact[0][0], rtol=1e-4, atol=1e-4)
    assert torch.allclose(pairs[0][1], prompt.exact[0][1], rtol=1e-4, atol=1e-5)
    _, naive = prompt.run(None, rotated=False)
    assert not torch.allclose(naive[0][0], prompt.exact[0][0], rtol=1e-4, atol=1e-4)


def test_the_right_kv_deviates_nowhere_and_wrong_kv_where_it_is_wrong():
    model = make_model(FAMILIES["llama"](transformers))
    tokens = tokens_of(60)
    expected, exact = computed(model, tokens)
    pairs = [(keys.clone(), values.clone()) for keys, values in exact]
    wrong = [12, 33, 34]
    pairs[1][0][:, :, 12] += 1
    pairs[1][1][:, :, 33:35] += 1
    told = []

    def choose(held, deviation):
        told.append(deviation)
        return by_deviation(held, deviation, 3 / held.loaded)

    held = Held(60, 4, ((10, 20), (30, 40)))
    done = prefill(Decoder(model), tokens, held, pairs, choose)
    by_position = dict(zip(held.loaded_positions().tolist(), told[0].tolist(), strict=True))
    assert all((by_position[at] > 1e-3) == (at in wrong) for at in by_position)
    assert done.recomputed == 3
    assert torch.allclose(done.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_reason_to_refuse(dtype):
    model = make_model(FAMILIES["qwen3"](transformers), dtype=dtype)
    check_decoder(model, Decoder(model))
    prompt = documents(model)
    assert distance(prompt.run(partial(by_deviation, share=1.0))[0].logits.float(), prompt.expected.float()) < 0.1


@pytest.mark.parametrize("kind", REFUSED)
def test_models_of_another_build_are_refused_and_told_why(kind):
    config, reason = REFUSED[kind](transformers)
    model = make_model(config, "eager")
    with pytest.raises(BlendRefused, match=reason) as refused:
        check_decoder(model, Decoder(model))
    assert type(model).__name__ in str(refused.value)
    assert "TransformersKV" in refused.value.hint
