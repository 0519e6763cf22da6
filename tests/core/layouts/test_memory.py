"""Whether tensors share elements, against counting them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_layouts.tensors import Place, check_apart, overlap
from kvframework.errors import BadLayout
from tests.support.lazy import torch

pytestmark = pytest.mark.torch


@st.composite
def places(draw: st.DrawFn, itemsize: int) -> Place:
    rank = draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    strides = draw(st.lists(st.integers(0, 12), min_size=rank, max_size=rank))
    return Place(draw(st.integers(0, 20)) * itemsize, tuple(sizes), tuple(s * itemsize for s in strides), itemsize)


def addresses(place: Place) -> list[int]:
    return [
        place.address + sum(at * stride for at, stride in zip(index, place.strides, strict=True))
        for index in itertools.product(*map(range, place.sizes))
    ]


@settings(max_examples=300)
@given(st.sampled_from([1, 2, 4]).flatmap(lambda size: st.tuples(places(size), places(size))))
def test_overlap_is_a_shared_element(two: tuple[Place, Place]) -> None:
    one, other = two
    assert overlap(one, other) == bool(set(addresses(one)) & set(addresses(other)))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=3))
def test_a_tensor_that_repeats_an_element_is_refused(axes: list[tuple[int, int]]) -> None:
    memory = torch.zeros(128)
    tensor = memory.as_strided([size for size, _ in axes], [stride for _, stride in axes])
    place = Place(0, tuple(tensor.shape), tuple(tensor.stride()), 1)
    if len(set(addresses(place))) == len(addresses(place)):
        check_apart({"a": tensor})
    else:
        with pytest.raises(BadLayout, match="of one tensor share"):
            check_apart({"a": tensor})


def test_interleaved_layers_of_a_large_engine_are_quick_to_check() -> None:
    memory = torch.empty(2000, 64, 2, 16, 8, device="meta")
    layers = {f"l{index}": layer for index, layer in enumerate(memory.unbind(1))}
    assert not any(
        overlap(_place(one), _place(other)) for one, other in itertools.combinations(list(layers.values())[:12], 2)
    )
    shifted = _place(layers["l0"])._replace(address=4)
    assert overlap(_place(layers["l0"]), shifted)


def _place(tensor: torch.Tensor) -> Place:
    return Place(tensor.storage_offset() * 4, tuple(tensor.shape), tuple(s * 4 for s in tensor.stride()), 4)
