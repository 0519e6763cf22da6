"""NIXL's transfers between registered memory and files."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

from kvf_nixl.build import installed_build

# The build itself: the package `nixl` imports torch to choose one.
_api: Any = import_module(f"{installed_build()}._api")
nixl_agent, nixl_agent_config = _api.nixl_agent, _api.nixl_agent_config
_BackendError: type[Exception] = import_module(f"{installed_build()}._bindings").nixlBackendError

_numbers = itertools.count()
_POLL_S = 0.0005


class Transfers:
    """An agent with one backend, for one thread. Every call blocks for as long as the files do."""

    def __init__(self) -> None:
        self._name = f"kvf-{next(_numbers)}"
        configuration = nixl_agent_config(enable_prog_thread=False, backends=["POSIX"])
        self._agent: Any = nixl_agent(self._name, configuration)
        self._registered: dict[int, Any] = {}

    def register(self, memory: memoryview) -> None:
        """Make memory known: only then it can be a piece of a transfer."""
        at = _address(memory)
        self._registered[at] = self._agent.register_memory([(at, memory.nbytes, 0, "")], "DRAM", backends=["POSIX"])

    def forget(self, memory: memoryview) -> None:
        """Undo `register`."""
        self._agent.deregister_memory(self._registered.pop(_address(memory)), backends=["POSIX"])

    def run(self, operation: Literal["READ", "WRITE"], moved: Sequence[tuple[memoryview, int]]) -> list[bool]:
        """Move between pieces of registered memory and the beginnings of open files, all at once; return for each
        whether it was moved whole."""
        if not moved:
            return []
        files = [(0, memory.nbytes, descriptor, "") for memory, descriptor in moved]
        registered = self._agent.register_memory(files, "FILE", backends=["POSIX"])
        try:
            handles = [self._start(operation, memory, descriptor) for memory, descriptor in moved]
            return [handle is not None and self._wait(handle) for handle in handles]
        finally:
            self._agent.deregister_memory(registered, backends=["POSIX"])

    def _start(self, operation: str, memory: memoryview, descriptor: int) -> Any:
        here = self._agent.get_xfer_descs([(_address(memory), memory.nbytes, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(0, memory.nbytes, descriptor)], "FILE")
        handle = self._agent.initialize_xfer(operation, here, there, self._name)
        try:
            self._agent.transfer(handle)
        except _BackendError:
            self._agent.release_xfer_handle(handle)
            return None
        return handle

    def _wait(self, handle: Any) -> bool:
        try:
            while (state := self._agent.check_xfer_state(handle)) == "PROC":
                time.sleep(_POLL_S)
        except _BackendError:  # a file that is too short, a disk that is full
            return False
        finally:
            self._agent.release_xfer_handle(handle)
        return bool(state == "DONE")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
