"""The layout of an engine whose keys and values have different strides: two groups of one plane each."""

from kvframework.api.layout import KVLayout, LayerGroup, Layout
from kvframework.errors import BadLayout


class ApartLayout(Layout):
    name = "apart"

    def describe(self, kv_caches, *, block_size):
        if not kv_caches:
            raise BadLayout("there are no layers", where="kv_caches")
        keys, values = next(iter(kv_caches.values()))
        blocks, tokens, heads, dim = keys.shape
        if tokens != block_size:
            raise BadLayout(f"blocks of {tokens} tokens", where="kv_caches", available=f"block_size {block_size}")
        ways = ((keys, "k", ("block", "token", "head", "dim")), (values, "v", ("block", "head", "dim", "token")))
        groups = tuple(
            LayerGroup(
                num_layers=len(kv_caches),
                block_size=tokens,
                heads=heads,
                head_dim=dim,
                planes=1,
                axes=axes,
                dtype=str(tensor.dtype).removeprefix("torch."),
                strides=tuple(tensor.stride()),
                layer_names=tuple(f"{name}.{letter}" for name in kv_caches),
            )
            for tensor, letter, axes in ways
        )
        layout = KVLayout(self.name, groups, blocks)
        self.block_views(layout, kv_caches)
        return layout

    def block_views(self, layout, kv_caches):
        views = []
        for index, group in enumerate(layout.groups):
            if tuple(f"{name}.{'kv'[index]}" for name in kv_caches) != group.layer_names:
                raise BadLayout(f"layers {', '.join(kv_caches)}", available=", ".join(group.layer_names))
            sizes = {"block": layout.num_blocks, "token": group.block_size, "head": group.heads, "dim": group.head_dim}
            told = (*(sizes[axis] for axis in group.axes), f"torch.{group.dtype}", *group.strides)
            if wrong := [name for name, pair in kv_caches.items() if len(pair) != 2]:
                raise BadLayout(f"{len(kv_caches[wrong[0]])} tensors", where=wrong[0], available="keys and values")
            tensors = [pair[index] for pair in kv_caches.values()]
            for name, tensor in zip(group.layer_names, tensors, strict=True):
                found = (*tensor.shape, str(tensor.dtype), *tensor.stride())
                if found != told:
                    raise BadLayout(f"shape, dtype and strides {found}", where=name, available=f"{told}")
            order = [group.axes.index(axis) for axis in ("block", "token", "head", "dim")]
            views.append([[tensor.permute(order) for tensor in tensors]])
        return views
