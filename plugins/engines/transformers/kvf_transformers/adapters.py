"""The adapters of a model's layers as they are at this moment: which are at work, and how often any was merged. By the
attributes of PEFT's layers, which is not imported. Engine side."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any


class Merges(list[str]):
    """The merged adapters of a layer, in place of its own list. PEFT writes to weights through `data` whenever it
    changes this list: `number` is another one after each change, of any layer."""

    numbers = itertools.count()

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.number = next(self.numbers)

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _numbered(change: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def numbered(merges: Merges, *args: Any) -> Any:
        merges.number = next(merges.numbers)
        return change(merges, *args)

    return numbered


for _name in ("append", "extend", "insert", "pop", "remove", "clear", "__setitem__", "__delitem__", "__iadd__"):
    setattr(Merges, _name, _numbered(getattr(list, _name)))


def at_work(tuners: Sequence[Any]) -> tuple[object, ...]:
    """Return which adapters of these modules are at work, quickly enough for every forward pass."""
    return tuple(
        (
            bool(vars(each)["_disable_adapters"]),
            tuple(each.active_adapters),
            tuple(getattr(each, "merged_adapters", ())),
        )
        for each in tuners
    )


def by_request(tuners: Sequence[Any]) -> bool:
    """Return whether each request of the pass under way has an adapter of its own, by PEFT's `adapter_names`."""
    hooks = (hook for each in tuners for hook in vars(each)["_forward_pre_hooks"].values())
    return any("adapter_names" in getattr(getattr(hook, "func", hook), "__name__", "") for hook in hooks)
