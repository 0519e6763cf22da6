"""The former place of `kvf_dev.testing`, the conformance kits. Goes with release 0.4."""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OLD, _NEW = __name__, "kvf_dev.testing"


class _Moved(MetaPathFinder, Loader):
    """Gives each module of the former package the module of the same name in the new one."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(f"{_OLD}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(_NEW + spec.name.removeprefix(_OLD))

    def exec_module(self, module: ModuleType) -> None:
        """It is loaded already."""


warnings.warn(f"{_OLD} has moved to {_NEW}, of the distribution kvframework-dev", DeprecationWarning, stacklevel=2)
sys.meta_path.insert(0, _Moved())
sys.modules[_OLD] = import_module(_NEW)
