"""What a transformers model's KV is called: another name for whatever may change KV, the same for what does not."""

from __future__ import annotations

import pytest

from kvframework.errors import BadLayout, RequestError
from tests.support.lazy import torch, transformers
from tests.transformers.hybrid_models import SMALL, llama

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global LoraLayer, ModelIdentity, NamedModel, _chunks, add_adapters, disable_adapters, length_limit
    global set_adapter
    from kvf_transformers.identity import ModelIdentity, NamedModel, length_limit
    from kvf_transformers.weight_digests import _chunks
    from tests.transformers.lora_layers import LoraLayer, add_adapters, disable_adapters, set_adapter


def name(model, **named):
    return ModelIdentity(model, "m", **named).current()


def test_every_element_of_every_weight_counts():
    model = llama(vocab_size=4096)
    names = {name(model)}
    with torch.no_grad():
        model.model.embed_tokens.weight[100:140] += 1.0
        names.add(name(model))
        for weight in model.parameters():
            element = torch.randint(weight.numel(), ())
            weight.view(-1)[element] += 0.5
            names.add(name(model))
    assert len(names) == 2 + len([*model.parameters()])


def test_the_name_is_that_of_the_content():
    names = {name(llama()), name(llama())}
    moved = llama()
    for parameter in moved.parameters():
        # Other memory, other strides, the same elements.
        parameter.data = parameter.data.t().contiguous().t() if parameter.dim() == 2 else parameter.data.clone()
    names.add(name(moved))
    assert len(names) == 1


def _hook(module, args, output):
    return output


def _attention(model):
    return model.model.layers[0].self_attn


CHANGES = {
    "a setting of the configuration": lambda model: setattr(model.config, "sliding_window", 8),
    "a buffer that is not saved": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    "a factor of positions": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0),
    "a factor of attention": lambda model: setattr(_attention(model), "scaling", 2.0),
    "an epsilon": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "the order of layers": lambda model: model.model.layers.append(model.model.layers.pop(0)),
    "a tensor that is no parameter": lambda model: setattr(_attention(model), "table", torch.ones(3)),
    "a module in a list": lambda model: setattr(_attention(model), "more", [torch.nn.Linear(2, 2)]),
    "a replaced forward": lambda model: setattr(_attention(model), "forward", _hook),
    "attention of another kind": lambda model: setattr(model.config, "_attn_implementation_internal", "mine"),
    "a parameter that is replaced": lambda model: setattr(
        _attention(model).v_proj, "weight", torch.nn.Parameter(_attention(model).v_proj.weight * 1.5)
    ),
    "the dtype": lambda model: model.to(torch.bfloat16),
    "an extra layer": lambda model: model.model.layers.append(torch.nn.Identity()),
}


@pytest.mark.parametrize("named", [{}, {"weights": "w"}], ids=["by content", "by the user"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_may_change_kv_changes_the_name(change, named):
    model = llama()
    identity = ModelIdentity(model, "m", **named)
    before = identity.current()
    change(model)
    assert identity.current() != before


def test_autocast_is_another_name():
    identity = ModelIdentity(llama(), "m")
    before = identity.current()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert identity.current() != before
    assert identity.current() == before


def test_what_changes_no_kv_keeps_the_name():
    model = llama()
    identity = ModelIdentity(model, "m")
    before = identity.current()
    model.config.use_cache = False
    model.config._name_or_path = "elsewhere"
    model.config._attn_implementation = "eager"
    model.requires_grad_(False)
    model.generation_config.max_length = 7
    model.train()
    assert identity.current() == before
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.clone()
    assert identity.current() == before


def test_weights_are_read_when_they_change_and_not_again(monkeypatch):
    model = llama()
    identity = ModelIdentity(model, "m")
    before = identity.current()
    read = []
    monkeypatch.setattr("kvf_transformers.weight_digests._chunks", lambda t: read.append(t.shape) or _chunks(t))
    assert identity.current() == before
    assert read == []
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert identity.current() != before
    assert len(read) == 1
    # A parameter whose memory was freed and given to another is another.
    weight = model.lm_head.weight
    old, weight.data = weight.data.data_ptr(), torch.empty(0)
    weight.data = torch.zeros(97, 64)
    identity.current()
    assert len(read) == 2, old


def _foreign(parameters):
    class Foreign(torch.optim.Optimizer):
        """Writes to weights as kernels of other libraries do, which tell torch nothing."""

        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1.0)

    return Foreign(parameters, {})


@pytest.mark.parametrize("named", [{}, {"weights": "w"}], ids=["by content", "by the user"])
@pytest.mark.parametrize(
    "make", [lambda each: torch.optim.AdamW(each, lr=0.1, fused=True), _foreign], ids=["fused", "foreign"]
)
def test_steps_of_optimizers_that_count_no_versions_are_seen(make, named):
    model, other = llama(), llama()
    identity, same = (ModelIdentity(each, "m", **named) for each in (model, other))
    before = identity.current()
    assert before == same.current()
    optimizer = make([model.model.norm.weight])
    seen = {before}
    for _ in range(2):
        model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
        version = model.model.norm.weight._version
        optimizer.step()
        assert model.model.norm.weight._version == version, "else this test shows nothing"
        seen.add(identity.current())
    assert len(seen) == 3
    assert same.current() == before


def test_by_the_users_names_no_weight_is_read_until_one_changes(monkeypatch):
    model = llama()
    read = []
    monkeypatch.setattr("kvf_transformers.weight_digests._chunks", lambda t: read.append(t.shape) or _chunks(t))
    identity = ModelIdentity(model, "m", weights="w")
    before = identity.current()
    assert before.revision.endswith("+w")
    assert identity.current() == before
    assert read == []
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert identity.current().revision.startswith(f"{before.revision}+changed-")


def test_adapters_count_by_what_is_at_work():
    model = llama()
    layers = add_adapters(model, a=1, b=2)
    identity = ModelIdentity(model, "m")
    plain = name(llama())
    names = {identity.current()}
    assert names == {plain}
    for active in (["a"], ["b"], ["a", "b"]):
        set_adapter(layers, *active)
        names.add(identity.current())
    set_adapter(layers, "a")
    before = identity.current()
    # As hot swapping writes, without counting a version up.
    kept = layers[0].lora_A["a"].weight.data.clone()
    layers[0].lora_A["a"].weight.data += 1.0
    names.add(identity.current())
    layers[0].lora_A["a"].weight.data.copy_(kept)
    layers[0].lora_A["b"].weight.data += 1.0
    add_adapters(model, c=3)
    assert identity.current() == before
    disable_adapters(layers[:1])
    names.add(identity.current())
    assert len(names) == 6
    disable_adapters(layers)
    assert identity.current() == plain


def test_adapters_of_another_method_count_whole():
    class OtherLayer(torch.nn.Module):
        adapter_layer_names = ("vector",)
        other_param_names = ()
        merged_adapters: tuple[str, ...] = ()
        active_adapters = ("a",)

        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer
            self.vector = torch.nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(3)})
            self._disable_adapters = False

    model = llama()
    plain = name(model)
    model.model.layers[0].mlp.up_proj = layer = OtherLayer(model.model.layers[0].mlp.up_proj)
    identity = ModelIdentity(model.eval(), "m")
    names = {plain, identity.current()}
    for adapter in ("a", "b"):
        layer.vector[adapter].data += 1
        names.add(identity.current())
    assert len(names) == 4
    layer._disable_adapters = True
    assert identity.current() == plain


def test_what_quantised_layers_keep_beside_their_weights_counts():
    class Packed(torch.nn.Linear):
        """A quantised layer that keeps its scales beside its parameters."""

        def __init__(self, scale):
            super().__init__(4, 4)
            torch.nn.init.ones_(self.weight)
            torch.nn.init.ones_(self.bias)
            self._scale = scale

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "scale"] = torch.full((2,), self._scale)
            destination[prefix + "kind"] = "nf4"

    def packed(scale):
        model = llama()
        model.model.packed = Packed(scale)
        return name(model.eval())

    assert packed(1.0) == packed(1.0) != packed(2.0)


def test_offloaded_weights_are_read_from_where_they_lie():
    def offloaded(**changes):
        model = llama()
        linear = model.lm_head
        kept = {"weight": linear.weight.detach() * changes.get("scale", 1)}
        linear.weight = torch.nn.Parameter(linear.weight.to("meta"))
        linear._hf_hook = type("Hook", (), {"weights_map": kept})()
        return name(model)

    assert offloaded() == offloaded() != offloaded(scale=2)


def _hooked(model):
    model.model.layers[0].register_forward_hook(_hook)
    return model


def _random(model):
    model.model.layers[0].self_attn.attention_dropout = 0.1
    return model.train()


def _merged_and_disabled(model):
    layers = add_adapters(model, a=1)
    set_adapter(layers, "a")
    for layer in layers:
        layer.merge()
    disable_adapters(layers)
    return model


def _alora(model):
    set_adapter(add_adapters(model, a=1), "a")
    model.peft_config = {"a": type("Config", (), {"peft_type": "LORA", "alora_invocation_tokens": [1]})()}
    return model


REFUSED = {
    "a hook": (_hooked, "forward hook"),
    "dropout": (_random, r"model\.eval"),
    "dropout by the configuration": (
        lambda model: setattr(model.config, "attention_dropout", 0.1) or model.train(),
        r"model\.eval",
    ),
    "adapters that are about to be taken out": (_merged_and_disabled, "unmerge_adapter"),
    "adapters that begin in the midst of a prompt": (_alora, "merge the adapter"),
    "weights without content": (lambda model: model.to("meta"), "meta device"),
    "weights that are sparse": (lambda model: model.register_buffer("s", torch.eye(3).to_sparse()) or model, "dense"),
}


@pytest.mark.parametrize(("prepare", "text"), REFUSED.values(), ids=REFUSED)
def test_models_that_no_name_can_stand_for_are_refused(prepare, text):
    with pytest.raises(RequestError, match=text):
        name(prepare(llama()))


def test_a_model_that_keeps_more_than_it_is_given_is_refused():
    class Prefixed(type(llama())):
        def forward(self, input_ids, past_key_values, **more):
            return super().forward(input_ids.repeat(1, 3), past_key_values=past_key_values, **more)

    model = llama()
    model.__class__ = Prefixed
    with pytest.raises(BadLayout, match="more tokens"):
        NamedModel(model, "m")


def test_where_positions_depend_on_the_length_of_the_text():
    assert length_limit(llama().config) == 0
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert length_limit(transformers.LlamaConfig(**SMALL, rope_parameters=rope)) == 512
    assert length_limit(type("Config", (), {"rope_parameters": {"sliding": rope, "full": {}}})()) == 1


@pytest.fixture
def peft():
    return pytest.importorskip("peft", reason="peft not installed: `pip install --group peft`")


def lora(peft, **changes):
    return peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj", "embed_tokens"], "init_lora_weights": False, **changes}
    )


@pytest.mark.filterwarnings("ignore")
def test_pefts_own_wrapper(peft):
    plain = name(llama())
    model = peft.get_peft_model(llama(), lora(peft), adapter_name="a").eval()
    model.add_adapter("b", lora(peft, lora_alpha=32, use_dora=True, target_modules=["v_proj"]))
    model.eval()
    identity = NamedModel(model, "m")
    names = [identity.now().identity]
    model.set_adapter("b")
    names.append(identity.now().identity)
    with model.disable_adapter():
        assert identity.now().identity == plain
    assert identity.now().identity == names[1]
    model.set_adapter("a")
    assert identity.now().identity == names[0]
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("a", 3.0)
    names.append(identity.now().identity)
    model.merge_adapter()
    names.append(identity.now().identity)
    model.unmerge_adapter()
    names.append(identity.now().identity)
    model.merge_adapter()
    with model.disable_adapter(), pytest.raises(RequestError, match="unmerge_adapter"):
        identity.now()
    assert len({plain, *names}) == 6
    merged = model.merge_and_unload()
    assert name(merged) not in {plain, *names[:3]}


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_transformers_by_peft(peft):
    plain = name(llama())
    model = llama()
    identity = ModelIdentity(model, "m")
    assert identity.current() == plain
    names = []
    for adapter in ("a", "b"):
        model.add_adapter(lora(peft), adapter_name=adapter)
        model.eval()
        model.set_adapter(adapter)
        names.append(identity.current())
    model.set_adapter("a")
    assert identity.current() == names[0]
    model.disable_adapters()
    assert identity.current() == plain
    model.enable_adapters()
    assert len({plain, *names}) == 3


@pytest.mark.filterwarnings("ignore")
def test_other_methods_of_peft(peft, tmp_path):
    plain = name(llama())
    kinds = [
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False),
        peft.LoHaConfig(r=2, target_modules=["v_proj"], init_weights=False),
        peft.VeraConfig(r=2, target_modules=["v_proj"], init_weights=False),
        lora(peft, target_modules=["v_proj"], modules_to_save=["lm_head"]),
    ]
    found = set()
    for config in kinds:
        model = peft.get_peft_model(llama(), config).eval()
        identity = NamedModel(model, "m")
        found.add(identity.now().identity)
        with model.disable_adapter():
            assert identity.now().identity == plain, config
    assert len({plain, *found}) == 1 + len(kinds)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises((RequestError, BadLayout)):
        NamedModel(peft.get_peft_model(llama(), prompt).eval(), "m")


@pytest.mark.filterwarnings("ignore")
def test_the_stand_in_is_like_pefts_layers(peft):
    model = peft.get_peft_model(llama(), lora(peft, target_modules=["v_proj"]))
    real = model.base_model.model.model.layers[0].self_attn.v_proj
    stand_in = LoraLayer(torch.nn.Linear(2, 2))
    stand_in.add("a", 0)
    mine = {key for key in vars(stand_in) if key not in vars(torch.nn.Module())} | set(vars(stand_in)["_modules"])
    theirs = set(vars(real)) | set(vars(real)["_modules"])
    assert mine <= theirs
    assert any(each.__name__ == "LoraLayer" for each in type(real).__mro__)
    for attribute in ("adapter_layer_names", "other_param_names"):
        assert set(getattr(stand_in, attribute)) <= set(getattr(real, attribute))
