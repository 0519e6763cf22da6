"""The layout: the places of keys and values in llama.cpp's memory. Engine side, except for the declaration.

The form is that of `llama_kv_cache` in llama.cpp's `src/llama-kv-cache.cpp`: per layer `cache_k_l<n>`, made by
`ggml_new_tensor_3d(ctx, type_k, n_embd_k_gqa, kv_size, n_stream)` and read by `get_k` as [cell][head][dim], and
`cache_v_l<n>`, read by `get_v` as the same, or, with `v_trans` (no flash attention), as [head][dim][cell]: element j of
cell i at `j * kv_size + i`. ggml names the innermost axis first, torch the outermost.

Only tensor methods are called: a server makes this class where there is no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvframework.api.layout import KVLayout, LayerGroup, LayerTensors, Layout, validate_layout
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch

_KEYS, _VALUES = "keys", "values"


class _Plane(NamedTuple):
    """Keys or values of one layer, as block views `[blocks, tokens, heads, dim]`."""

    layer: str
    role: str
    view: torch.Tensor

    @property
    def signature(self) -> tuple[int, int, str]:
        """Heads, head size and dtype."""
        return self.view.shape[2], self.view.shape[3], str(self.view.dtype).removeprefix("torch.")


class LlamaCppLayout(Layout):
    """Each layer is a pair (keys, values), or keys alone (MLA), of one stream: `[cells, heads x dim]`, values with
    `v_trans` `[heads x dim, cells]`.

    A block is `block_size` cells one after the other; cells behind the last whole block are left out. Layers whose keys
    and values are alike form a group of two planes; where they differ, keys and values are groups of their own. Objects
    are canonical. Stateless, thread-safe. An engine gives both options; without them nothing can be described.
    """

    name = "llamacpp"

    def __init__(self, *, head_dim: int | None = None, v_trans: bool | None = None) -> None:
        self._head_dim = head_dim
        self._v_trans = v_trans

    def describe(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> KVLayout:
        """See `Layout.describe`. Raises `BadLayout` naming layer, found and expected shape."""
        groups = self._groups(kv_caches, block_size)
        declared = tuple(_declare(planes, block_size) for planes in groups)
        layout = KVLayout(self.name, declared, groups[0][0][0].view.shape[0])
        validate_layout(layout)
        return layout

    def block_views(self, layout: KVLayout, kv_caches: Mapping[str, LayerTensors]) -> list[list[list[torch.Tensor]]]:
        """See `Layout.block_views`."""
        block_size = layout.groups[0].block_size
        found = self.describe(kv_caches, block_size=block_size)
        if (found.groups, found.num_blocks) != (layout.groups, layout.num_blocks):
            raise BadLayout(
                f"the tensors are {found.num_blocks} blocks of {found.groups}",
                available=f"{layout.num_blocks} blocks of {layout.groups} as declared",
                hint="register again when the engine's memory has changed",
            )
        return [
            [[layer[plane].view for layer in layers] for plane in range(len(layers[0]))]
            for layers in self._groups(kv_caches, block_size)
        ]

    def _groups(self, kv_caches: Mapping[str, LayerTensors], block_size: int) -> list[list[list[_Plane]]]:
        """`[group][layer][plane]`, in order of first appearance."""
        if not kv_caches:
            raise BadLayout("there are no layers", available="layer name -> (keys, values), in layer order")
        if block_size < 1:
            raise BadLayout(f"block_size is {block_size}", available="1 or more cells")
        groups: dict[object, list[list[_Plane]]] = {}
        blocks: dict[int, str] = {}
        for name, held in kv_caches.items():
            planes = self._planes(name, held, block_size)
            blocks.update({plane.view.shape[0]: f"{name} ({plane.role})" for plane in reversed(planes)})
            alike = len({plane.signature for plane in planes}) == 1
            for part in [planes] if alike else [[plane] for plane in planes]:
                role = "" if alike else part[0].role
                groups.setdefault((role, len(part), part[0].signature), []).append(part)
        if len(blocks) > 1:
            listed = ", ".join(f"{count} in {where}" for count, where in blocks.items())
            raise BadLayout(f"different numbers of blocks: {listed}", available="one kv_size for all layers")
        return list(groups.values())

    def _planes(self, name: str, held: LayerTensors, block_size: int) -> list[_Plane]:
        pair = list(held) if isinstance(held, Sequence) else [held]
        if len(pair) not in (1, 2):
            raise BadLayout(f"{len(pair)} tensors", where=f"layer {name}", available="(keys, values), or keys alone")
        if self._head_dim is None or (len(pair) == 2 and self._v_trans is None):
            raise BadLayout(
                f"head_dim is {self._head_dim}, v_trans is {self._v_trans}",
                where="layout.llamacpp",
                hint="declare them: the model's head size, and whether the context runs without flash attention",
            )
        planes = [_Plane(name, _KEYS, self._view(f"{name} ({_KEYS})", pair[0], block_size, transposed=False))]
        for values in pair[1:]:
            view = self._view(f"{name} ({_VALUES})", values, block_size, transposed=bool(self._v_trans))
            planes.append(_Plane(name, _VALUES, view))
        return planes

    def _view(self, where: str, tensor: torch.Tensor, block_size: int, *, transposed: bool) -> torch.Tensor:
        """A view `[blocks, block_size, heads, head_dim]` of one plane."""
        shape = "[heads x dim, cells]" if transposed else "[cells, heads x dim]"
        if tensor.dim() != 2:
            raise BadLayout(
                f"shape {tuple(tensor.shape)}",
                where=f"layer {where}",
                available=shape,
                hint="give the view of one stream; several streams are several instances",
            )
        assert self._head_dim is not None
        cells_first = tensor.transpose(0, 1) if transposed else tensor
        cells, hidden = cells_first.shape
        blocks, heads = cells // block_size, hidden // self._head_dim
        if hidden % self._head_dim or blocks < 1:
            raise BadLayout(
                f"{cells} cells of {hidden} elements",
                where=f"layer {where}",
                available=f"{shape}, of at least {block_size} cells and whole heads of {self._head_dim}",
                hint="quantised caches (type_k, type_v) are not elements: use f16, bf16 or f32",
            )
        whole = cells_first.narrow(0, 0, blocks * block_size)
        return whole.unflatten(0, (blocks, block_size)).unflatten(2, (heads, self._head_dim))  # type: ignore[no-untyped-call,no-any-return]


def _declare(layers: Sequence[Sequence[_Plane]], block_size: int) -> LayerGroup:
    """The declaration of one group, without axes and strides: keys and values of one layer may have different ones."""
    heads, head_dim, dtype = layers[0][0].signature
    single = layers[0][0].role if len(layers[0]) == 1 else ""
    suffix = f".{single}" if single == _VALUES else ""
    return LayerGroup(
        num_layers=len(layers),
        block_size=block_size,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        planes=len(layers[0]),
        layer_names=tuple(planes[0].layer + suffix for planes in layers),
    )
