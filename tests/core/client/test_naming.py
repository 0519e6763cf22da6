"""What KV is called by the user's own names: equal for equal promises and facts, else never. The canary: a declaration
that is not the engine's own is refused at registration, on the transport's real path."""

from __future__ import annotations

from typing import Any

import pytest

from kvframework.api.layout import EngineView, LayerGroup
from kvframework.api.plugin import DTYPE_BYTES
from kvframework.client import KVClient, WorkerAdapter, named_identity
from kvframework.errors import BadLayout, RequestError
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess

CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "text_config": {"layer_types": ["full_attention"] * 2},
}


def named(**changes: Any) -> Any:
    given: dict[str, Any] = {"config": CONFIG, "dtype": "float32"}
    return named_identity(changes.pop("model", "m"), changes.pop("weights", "w"), **{**given, **changes})


def test_the_dtype_is_told_beside_the_name() -> None:
    assert named(dtype="torch.bfloat16").dtype == named(dtype="bfloat16").dtype == "bfloat16"
    assert named(dtype="torch.bfloat16") == named(dtype="bfloat16")


def test_whatever_may_change_kv_changes_the_name() -> None:
    variants = [
        named(),
        named(model="n"),
        named(weights="v"),
        named(dtype="bfloat16"),
        named(quantization="awq"),
        named(settings={"code_revision": "abc"}),
        named(config={**CONFIG, "hidden_size": 9}),
        named(config={**CONFIG, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}}),
        named(config={**CONFIG, "text_config": {"layer_types": ["sliding_attention", "full_attention"]}}),
        named(config={**CONFIG, "new_field_of_a_new_model": 2}),
        # Names run into each other nowhere.
        named(model="mw", weights="w"),
        named(model="m", weights="ww"),
    ]
    assert len(set(variants)) == len(variants)


def test_what_two_engines_say_differently_of_the_same_kv_does_not_count() -> None:
    same = [
        named(dtype="torch.float32"),
        named(settings={"code_revision": "", "disable_sliding_window": False}),
        named(config={**CONFIG, "_name_or_path": "/somewhere", "transformers_version": "5", "dtype": "bfloat16"}),
        named(config={**CONFIG, "text_config": {"layer_types": ("full_attention",) * 2, "torch_dtype": "float16"}}),
        named(config=dict(reversed(CONFIG.items()))),
    ]
    assert {*same} == {named()}


@pytest.mark.parametrize("missing", ["model", "weights"])
def test_both_names_are_needed(missing: str) -> None:
    with pytest.raises(RequestError, match="weights"):
        named(**{missing: ""})


pytestmark = pytest.mark.torch


LAYERS, BLOCKS, BLOCK, HEADS, DIM = 3, 20, 16, 16, 4
NHD = ["plane", "block", "token", "head", "dim"]
HND = ["plane", "block", "head", "token", "dim"]


class View(EngineView):
    """How this engine's attention sees `[2, blocks, tokens, heads, dim]`, whatever was declared."""

    def __init__(self, kv: dict[str, torch.Tensor], *, planes: tuple[int, int] = (0, 1)) -> None:
        self.spare_blocks = (BLOCKS - 1,)
        self.writes = 0
        self._layers = list(kv.values())
        self._planes = planes

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        return self._layers[layer][self._planes[plane], block].clone()

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        self.writes += 1
        self._layers[layer][self._planes[plane], block] = values


def memory(dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    return {f"layer{i}": torch.randn(2, BLOCKS, BLOCK, HEADS, DIM).to(getattr(torch, dtype)) for i in range(LAYERS)}


def register(client: KVClient, kv: dict[str, torch.Tensor], view: View, axes: list[str]) -> WorkerAdapter:
    worker = WorkerAdapter(client, instance_id=1, model_name="m", layout="paged", layout_options={"axes": axes})
    worker.register_kv_caches(kv, block_size=BLOCK, view=view)
    return worker


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8"])
def test_a_right_declaration_passes_and_leaves_the_memory_as_it_was(client: KVClient, dtype: str) -> None:
    kv = memory(dtype)
    before = {name: tensor.clone() for name, tensor in kv.items()}
    worker = register(client, kv, view := View(kv), NHD)
    assert view.writes == 2 * 2 * LAYERS, "the pattern and what was there before"
    for name, tensor in kv.items():
        assert torch.equal(tensor, before[name])
    worker.close()


@pytest.mark.parametrize(
    ("axes", "planes", "reorder"),
    [(NHD, (1, 0), False), (HND, (0, 1), False), (NHD, (0, 1), True), (HND, (1, 0), False)],
    ids=["planes", "tokens and heads", "layers", "both"],
)
def test_a_wrong_declaration_is_refused(
    server: ServerProcess, client: KVClient, axes: list[str], planes: tuple[int, int], reorder: bool
) -> None:
    kv = memory()
    declared = dict(reversed(kv.items())) if reorder else kv
    before = {name: tensor.clone() for name, tensor in kv.items()}
    with pytest.raises(BadLayout, match=r"expected .* found .* places differ"):
        register(client, declared, View(kv, planes=planes), axes)
    with server.client() as watcher:
        assert watcher.status()["instances"] == [], "refused means not registered"
    for name, tensor in kv.items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_patterns_are_finite_and_nowhere_alike(dtype: str) -> None:
    from kvframework.client.canary import pattern

    group = LayerGroup(2, 16, 4, 32, dtype)
    values = torch.stack([torch.stack(plane) for plane in pattern(0, group)])
    assert values.shape == (2, 2, 16, 4, 32)
    assert torch.isfinite(values.to(torch.float64)).all()
    rows = values.view(torch.uint8).reshape(2 * 2 * 16 * 4, -1)
    assert len({bytes(row.tolist()) for row in rows}) == len(rows)


class Fails(View):
    def __init__(self, kv: dict[str, torch.Tensor], mistake: str) -> None:
        super().__init__(kv)
        self._mistake = mistake
        if mistake == "no spare block":
            self.spare_blocks = ()  # type: ignore[assignment]

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        if self._mistake == "read raises":
            raise IndexError("index 20 is out of bounds")
        found = super().read(group, layer, plane, block)
        return found[0] if self._mistake == "another shape" else found.double() if "dtype" in self._mistake else found

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        if self._mistake == "write raises":
            raise RuntimeError("shape mismatch")
        if self._mistake != "write does nothing":
            super().write(group, layer, plane, block, values)


@pytest.mark.parametrize(
    "mistake", ["no spare block", "read raises", "write raises", "another shape", "another dtype", "write does nothing"]
)
def test_a_mistake_of_the_view_is_refused_by_name(server: ServerProcess, client: KVClient, mistake: str) -> None:
    kv = memory()
    before = {name: tensor.clone() for name, tensor in kv.items()}
    with pytest.raises(BadLayout, match="the engine's view"):
        register(client, kv, Fails(kv, mistake), NHD)
    with server.client() as watcher:
        assert watcher.status()["instances"] == []
    for name, tensor in kv.items():
        assert torch.equal(tensor, before[name])
