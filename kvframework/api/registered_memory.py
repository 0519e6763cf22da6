"""What a tier in a helper process learns of the memory in which its values lie."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["RegistersMemory"]


class RegistersMemory(ABC):
    """A tier whose client library wants to know memory before it reads or writes there, as RDMA does: a second base
    class of a `Tier` that `HelperTier` runs. The parts of `put` and `get_into` are pieces of registered memory then.

    There are several memories, one for each call at a time, and each call of these two has all bytes of one. They come
    from the thread that makes the calls of that memory, so several threads call at once. An exception fails the call
    for which the memory was wanted.
    """

    @abstractmethod
    def register_memory(self, memory: memoryview) -> None:
        """Registers memory, which is mapped, writable and page-aligned, and stays so until `unregister_memory`."""

    @abstractmethod
    def unregister_memory(self, memory: memoryview) -> None:
        """Forgets what `register_memory` was given: no call uses it any more, and it is unmapped after this."""
