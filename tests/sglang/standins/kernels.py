"""The modules `sgl_kernel` and `sgl_kernel.mamba`, which SGLang imports on a CPU without asking. Each kernel that has
no stand-in raises when it is called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from tests.sglang.standins import gated_delta

_NAMES = {"sgl_kernel", "sgl_kernel.mamba"}


class _Kernels(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_cpu"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} has no stand-in")

        return missing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in _NAMES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sgl_kernel":
            module.assign_req_to_token_pool_cpu = _assign_req_to_token_pool  # type: ignore[attr-defined]
        else:
            for kernel in gated_delta.KERNELS:
                setattr(module, f"{kernel.__name__}_cpu", kernel)
            for kernel in gated_delta.OPERATORS:
                setattr(torch.ops.sgl_kernel, f"{kernel.__name__}_cpu", kernel)


def install() -> None:
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _assign_req_to_token_pool(
    req_pool_indices: Any, req_to_token: Any, allocated: Any, wanted: Any, out_cache_loc: Any, *_rest: object
) -> None:
    """Writes the slots that were just allocated into the requests' rows."""
    done = 0
    for index, row in enumerate(req_pool_indices):
        start, end = int(allocated[index]), int(wanted[index])
        req_to_token[int(row), start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start
