"""The places of a layout's views in an engine's tensors, remembered without holding a tensor.

A layout makes views by rules and checks; making the same views of the same tensors again is one call of torch each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvframework.api.layout import LayerTensors

if TYPE_CHECKING:
    from kvf_cpu_gather.torch_copies import GroupViews


class _Place(NamedTuple):
    """A view of one of the tensors, which is named by its order; `offset` is in elements from the tensor's first."""

    tensor: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class RememberedViews:
    """The places of views, valid for tensors with an equal `signature`."""

    def __init__(self, places: Sequence[Sequence[Sequence[_Place]]]) -> None:
        self._places = places

    @classmethod
    def of(cls, views: Sequence[GroupViews], kv_caches: Mapping[str, LayerTensors]) -> RememberedViews | None:
        """Return the places of `views`; None if a view has another dtype than its memory, or is of none of the
        tensors."""
        tensors = {
            (tensor.untyped_storage().data_ptr(), tensor.dtype): index
            for index, tensor in enumerate(tensors_of(kv_caches))
        }
        starts = [tensor.storage_offset() for tensor in tensors_of(kv_caches)]

        def place(view: torch.Tensor) -> _Place:
            index = tensors[view.untyped_storage().data_ptr(), view.dtype]
            return _Place(index, view.shape, view.stride(), int(view.storage_offset()) - int(starts[index]))

        try:
            return cls([[[place(view) for view in plane] for plane in planes] for planes in views])
        except KeyError:
            return None

    def again(self, kv_caches: Mapping[str, LayerTensors]) -> list[GroupViews]:
        """Return the views of these tensors. Torch checks that their storage reaches as far."""
        tensors = list(tensors_of(kv_caches))
        starts = [tensor.storage_offset() for tensor in tensors]
        return [
            [
                [
                    tensors[place.tensor].as_strided(place.shape, place.stride, starts[place.tensor] + place.offset)
                    for place in plane
                ]
                for plane in planes
            ]
            for planes in self._places
        ]


def signature(kv_caches: Mapping[str, LayerTensors]) -> list[object]:
    """Return everything that a layout's views depend on; equal for two calls only if all tensors lie in the same way at
    the same places, and their storage still reaches as far: torch checks that where it makes views."""
    found: list[object] = []
    for name, tensors in kv_caches.items():
        found.append(name)
        for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
            found += (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            found.append(tensor.untyped_storage().nbytes())
    return found


def tensors_of(kv_caches: Mapping[str, LayerTensors]) -> Iterator[torch.Tensor]:
    """Yield all tensors, layer by layer."""
    for tensors in kv_caches.values():
        yield from (tensors,) if isinstance(tensors, torch.Tensor) else tensors
