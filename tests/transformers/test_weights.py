"""Weights that change in place, by calls of torch, transformers, accelerate and PEFT: from then on a model neither
restores what its other weights computed nor stores under their name. Against a real server process, beside a second
engine with the first weights; the control is the model without a cache."""

from __future__ import annotations

import contextlib
import copy

import pytest

from kvframework.errors import RequestError
from tests.support.lazy import torch
from tests.transformers.hybrid_models import CHUNK, attach, exact, llama
from tests.transformers.hybrid_models import prompt as prompt_of

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global ModelIdentity, add_adapters, set_adapter
    from kvf_transformers.identity import ModelIdentity
    from tests.transformers.lora_layers import add_adapters, set_adapter


NAMES = pytest.mark.parametrize("names", [{}, {"weights": "w"}], ids=["by its weights", "by names"])


@pytest.fixture(scope="module")
def prompt():
    return prompt_of()


def keys(model):
    return model.model.layers[0].self_attn.k_proj.weight


def fused_step(model):
    keys(model).grad = torch.ones_like(keys(model))
    torch.optim.AdamW([keys(model)], lr=0.3, fused=True).step()


def failed_step(model):
    class Foreign(torch.optim.Optimizer):
        """Writes as kernels of other libraries do, and runs out of memory."""

        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(0.5)
            raise RuntimeError("out of memory")

    with contextlib.suppress(RuntimeError):
        Foreign([keys(model)], {}).step()


def swapped(model):
    torch.utils.swap_tensors(keys(model), torch.nn.Parameter(keys(llama(1)).detach()))


CHANGES = {
    "a fused step of an optimizer": fused_step,
    "a step that fails halfway": failed_step,
    "load_state_dict": lambda model: model.load_state_dict(llama(1).state_dict()),
    "load_state_dict that assigns": lambda model: model.load_state_dict(llama(1).state_dict(), assign=True),
    "initialisation": lambda model: torch.nn.init.normal_(keys(model)),
    "a vector of all weights": lambda model: torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(llama(1).parameters()), model.parameters()
    ),
    "tensors that are swapped": swapped,
    "a dtype and back": lambda model: model.bfloat16().float(),
}


@NAMES
@pytest.mark.parametrize("change", CHANGES)
def test_what_other_weights_computed_is_neither_restored_nor_stored_over(server, prompt, change, names):
    model, twin = llama(), llama()
    name = f"{change} {names}"
    with attach(model, server, name, **names) as kv, attach(twin, server, name, **names) as other:
        kv.save(prompt, exact(kv, model, prompt, 0))
        exact(other, twin, prompt, 3 * CHUNK)
        with contextlib.nullcontext() if "step" in change else torch.no_grad():
            CHANGES[change](model)
        kv.save(prompt, exact(kv, model, prompt, 0))
        exact(kv, model, prompt, 3 * CHUNK)
        exact(other, twin, prompt, 3 * CHUNK)
        model.load_state_dict(twin.state_dict())
        # Names of the user's stand for the weights from before alone; content is known again. Buffers are not loaded.
        exact(kv, model, prompt, 0 if names or "dtype" in change else 3 * CHUNK)


@NAMES
def test_weights_that_count_no_changes_are_seen_to_change(server, prompt, names):
    """Those of a model that was loaded under inference mode."""
    with torch.inference_mode():
        model = llama()
    name = f"inference {names}"
    with attach(model, server, name, **names) as kv, attach(llama(), server, name, **names) as other:
        kv.save(prompt, exact(kv, model, prompt, 0))
        exact(kv, model, prompt, 3 * CHUNK)
        with torch.inference_mode():
            model.load_state_dict(llama(1).state_dict())
        kv.save(prompt, exact(kv, model, prompt, 0))
        exact(other, llama(), prompt, 3 * CHUNK)
        with torch.inference_mode():
            model.load_state_dict(llama().state_dict())
        exact(kv, model, prompt, 3 * CHUNK)


def retrained(layers):
    for layer in layers:
        layer.lora_A["a"].weight.data.mul_(3)


@NAMES
def test_adapters_that_are_merged_and_taken_out_between_two_requests_are_seen(server, prompt, names):
    """PEFT writes through `data`, and the model looks like the one before."""
    model = llama()
    layers = add_adapters(model, a=1)
    with attach(model, server, f"merges {names}", **names) as kv:
        kv.save(prompt, exact(kv, model, prompt, 0))
        set_adapter(layers, "a")
        for layer in layers:
            layer.merge()
        kv.save(prompt, exact(kv, model, prompt, 0))
        exact(kv, model, prompt, 3 * CHUNK)
        for layer in layers:
            layer.unmerge()
        retrained(layers)
        for layer in layers:
            layer.merge()
        kv.save(prompt, exact(kv, model, prompt, 0))
        # Taken out is not what was merged: the weights are others for good.
        set_adapter(layers)
        retrained(layers)
        for layer in layers:
            layer._active_adapter = ["a"]
            layer.unmerge()
            layer._active_adapter = []
        exact(kv, model, prompt, 0)


@NAMES
@pytest.mark.parametrize("where", ["in host memory", "on disk"])
def test_weights_that_are_offloaded_are_seen_to_change(server, prompt, tmp_path, where, names):
    accelerate = pytest.importorskip("accelerate", reason="accelerate not installed: `pip install --group peft`")
    model, state = llama(), llama(1).model.layers[0].state_dict()
    layer = model.model.layers[0]
    if where == "on disk":
        accelerate.disk_offload(layer, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        held = {name: weight.clone() for name, weight in layer.state_dict().items()}
        accelerate.cpu_offload(layer, execution_device=torch.device("cpu"), state_dict=held)
    name = f"offloaded {where} {names}"
    with attach(model, server, name, **names) as kv, attach(llama(), server, name, **names) as other:
        kv.save(prompt, exact(kv, model, prompt, 0))
        exact(kv, model, prompt, 3 * CHUNK)
        if where == "on disk":
            accelerate.utils.offload_state_dict(str(tmp_path), state)
        else:
            for key, weight in held.items():
                weight.copy_(state[key])
        kv.save(prompt, exact(kv, model, prompt, 0))
        # By its modules, which accelerate wraps, an offloaded model is another one.
        exact(other, llama(), prompt, 3 * CHUNK if names else 0)


def test_offloaded_weights_are_read_once(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="accelerate not installed: `pip install --group peft`")
    model = llama()
    accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    identity = ModelIdentity(model, "m")
    before = identity.current()
    monkeypatch.setattr("kvf_transformers.weight_digests._digest", lambda *_: pytest.fail("read again"))
    assert identity.current() == before


@pytest.mark.filterwarnings("ignore")
def test_layers_that_torch_has_quantised_are_refused():
    """They keep their weights where no name sees them."""
    model = llama()
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch.backends.quantized has no fbgemm on this machine")
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    with pytest.raises(RequestError, match="quantised by torch"):
        ModelIdentity(model, "m").current()


@pytest.mark.filterwarnings("ignore")
@NAMES
def test_adapters_of_peft_that_are_merged_loaded_and_swapped(server, prompt, tmp_path, names):
    peft = pytest.importorskip("peft", reason="peft not installed: `pip install --group peft`")
    from peft.utils.hotswap import hotswap_adapter

    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(llama(7), config).save_pretrained(tmp_path)
    model = peft.get_peft_model(llama(), config, adapter_name="a").eval()

    def trained():
        for path, parameter in model.named_parameters():
            if "lora_A" in path:
                parameter.data.mul_(2)

    def merged_again():
        model.unmerge_adapter()
        trained()
        model.merge_adapter()

    changes = [
        model.merge_adapter,
        merged_again,
        model.unmerge_adapter,
        trained,
        lambda: model.load_adapter(tmp_path, "a"),
        trained,
        lambda: hotswap_adapter(model, tmp_path, adapter_name="a"),
    ]
    with attach(model, server, f"peft {names}", **names) as kv:
        # The last two restore what was there before.
        for at, change in enumerate(changes):
            kv.save(prompt, exact(kv, model, prompt, 0))
            change()
            if at == len(changes) - 1:
                exact(kv, model, prompt, 3 * CHUNK)


def test_the_list_that_counts_merges_is_as_peft_knows_it():
    model = llama()
    layers = add_adapters(model, a=1)
    ModelIdentity(model, "m").current()
    merged = layers[0].merged_adapters
    numbers = {merged.number}
    for change in (
        lambda: merged.append("a"),
        lambda: merged.extend(["b"]),
        lambda: merged.insert(0, "c"),
        lambda: merged.pop(),
        lambda: merged.remove("c"),
        lambda: merged.__setitem__(0, "d"),
        merged.clear,
    ):
        change()
        numbers.add(merged.number)
    assert len(numbers) == 8
    assert merged == []
    assert isinstance(merged, list)
    assert type(copy.deepcopy(merged)) is list
