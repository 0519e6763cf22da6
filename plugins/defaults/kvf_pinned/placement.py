"""The system call that sets the NUMA nodes of a mapping's pages.

For a memfd the kernel keeps the policy with the file: it holds for every process, whichever touches a page first.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from collections.abc import Sequence

# The number of mbind in the system call table, for 64-bit processes.
_NUMBERS = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}

# Neither makes an allocation fail where another node has room. <linux/mempolicy.h>
_PREFERRED, _INTERLEAVE = 1, 3

_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_OFF = 'set [l1] numa = "off"'
_HINTS = {
    errno.EPERM: f"give the container the capability SYS_NICE, or {_OFF}",
    errno.EINVAL: f"name nodes of Mems_allowed_list in /proc/self/status, or {_OFF}",
}

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def place(segment: mmap.mmap | memoryview, nodes: Sequence[int]) -> None:
    """Sets the nodes of the pages of `segment` that are not resident yet: one preferred node, or several interleaved,
    while they have room.

    Does not block. Raises `OSError`, which `hint` explains: EPERM where a container does not allow it, EINVAL for a
    node that does not exist or is not allowed, ENOSYS for a kernel without NUMA.
    """
    number = _NUMBERS.get(platform.machine())
    if number is None or sys.maxsize < 1 << 32:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mask = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    anchor = ctypes.c_char.from_buffer(segment)
    # The kernel uses one bit less than the given number.
    bits = _WORD_BITS * len(mask) + 1
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    status = _syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(ctypes.addressof(anchor)),
        ctypes.c_size_t(len(segment)),
        ctypes.c_ulong(mode),
        mask,
        ctypes.c_ulong(bits),
        ctypes.c_ulong(0),
    )
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def hint(error: OSError) -> str:
    """The remedy for an error of `place`."""
    return _HINTS.get(error.errno or 0, _OFF)
