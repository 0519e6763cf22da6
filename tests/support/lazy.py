"""torch and transformers for modules that are collected without them: each is imported at its first use.

Every process that shares the tests collects all files, and importing torch takes 3 s."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


class Lazy:
    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_lazy_name", name)

    def __getattr__(self, name: str) -> Any:
        # pytest asks every object of a module for its marks.
        if name.startswith("_") and self._lazy_name not in sys.modules:
            raise AttributeError(name)
        return getattr(import_module(self._lazy_name), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(import_module(self._lazy_name), name, value)


torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
