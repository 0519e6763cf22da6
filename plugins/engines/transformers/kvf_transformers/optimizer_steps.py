"""The steps of optimizers, by the memory they write to: fused kernels and those of other libraries write to a parameter
without counting up its version. Engine side.

Every `torch.optim.Optimizer` of the process counts, from the first `watch` on. The optimizers themselves, and
autograd's knowledge of their parameters, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_MANY = 1 << 16


class OptimizerSteps:
    """Thread-safe without a lock, which a forked child might find taken. Holds no memory of parameters."""

    def __init__(self) -> None:
        # By storage; the weak reference keeps its address from being reused.
        self._steps: dict[int, tuple[StorageWeakRef, int]] = {}
        # Steps of optimizers whose parameters' memory is not known: they may have written to any.
        self._elsewhere = 0
        self._purge_at = _MANY
        self._watched = False

    def watch(self) -> None:
        """Count from now on. Idempotent."""
        if not self._watched:
            self._watched = True
            # Before, too: a step that fails has written to some of its weights.
            register_optimizer_step_pre_hook(self._stepped)
            register_optimizer_step_post_hook(self._stepped)

    @property
    def begun(self) -> bool:
        return bool(self._steps or self._elsewhere)

    def of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return a value that changes when a step of an optimizer of this plain tensor's memory begins or ends."""
        _, steps = self._steps.get(tensor.untyped_storage()._cdata, (None, 0))
        return steps, self._elsewhere

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        try:
            for storage in [
                storage
                for group in optimizer.param_groups
                for parameter in group["params"]
                for storage in _storages(parameter)
            ]:
                self._count(storage)
        except Exception:  # noqa: BLE001 - a training step is not ended by what only names its weights
            self._elsewhere += 1

    def _count(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        known = self._steps.get(place)
        reference = known[0] if known else StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._steps[place] = (reference, known[1] + 1 if known else 1)
        if len(self._steps) > self._purge_at:
            for each, (kept, _) in list(self._steps.items()):
                if kept.expired():  # type: ignore[no-untyped-call]
                    self._steps.pop(each, None)
            self._purge_at = _MANY + 2 * len(self._steps)


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


STEPS = OptimizerSteps()
