"""A filter at a listening TCP socket: the kernel drops the SYNs of newcomers before they cost a descriptor.

Classic BPF by SO_ATTACH_FILTER, which needs no privilege. The sender repeats a dropped SYN after a second, so a
newcomer is delayed and not refused. Accepted connections are not affected: the filter matches only packets with SYN and
without ACK. See `man 7 socket` and the kernel's Documentation/networking/filter.rst.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Collection, Iterator

MAX_NETWORKS = 64

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python does not name
_LOAD_BYTE, _LOAD_WORD, _AND, _SHIFT_RIGHT, _JUMP, _JUMP_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x74, 0x05, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF; other offsets are from the TCP header
_FLAGS, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12
_SOURCE_V4, _SOURCE_V6 = _NETWORK_HEADER + 12, _NETWORK_HEADER + 8
_MAPPED = bytes(10) + b"\xff\xff"
_DROP = (_RETURN, 0, 0, 0)
_PASS = (_RETURN, 0, 0, 0xFFFFFFFF)

_Instruction = tuple[int, int, int, int]


def network_of(host: str) -> bytes:
    """Return the bytes that identify one peer: the 4 bytes of an IPv4 address, also of one in an IPv6 socket's form, or
    the first 8 of an IPv6 address, its /64."""
    if ":" not in host:
        return socket.inet_pton(socket.AF_INET, host)
    address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return address[12:] if address.startswith(_MAPPED) else address[:8]


def shown(network: bytes) -> str:
    if len(network) == 4:
        return socket.inet_ntop(socket.AF_INET, network)
    return socket.inet_ntop(socket.AF_INET6, network + bytes(8)) + "/64"


def drop_newcomers(listener: socket.socket, *, everybody: bool, networks: Collection[bytes] = ()) -> None:
    """Set whose SYNs `listener` drops from now on, `MAX_NETWORKS` at most; without any, remove the filter. Raises
    `OSError`."""
    if not everybody and not networks:
        listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
        return
    program = [*_newcomers(), *([_DROP] if everybody else _of(list(networks)[:MAX_NETWORKS]))]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("@HP", len(program), ctypes.addressof(code)))


def _newcomers() -> Iterator[_Instruction]:
    yield _LOAD_BYTE, 0, 0, _FLAGS
    yield _AND, 0, 0, _SYN_OR_ACK
    yield _JUMP_EQUAL, 1, 0, _SYN
    yield _PASS


def _of(networks: Collection[bytes]) -> Iterator[_Instruction]:
    v4 = [int.from_bytes(each, "big") for each in networks if len(each) == 4]
    v6 = [int.from_bytes(each, "big") for each in networks if len(each) == 8]
    yield _LOAD_BYTE, 0, 0, _NETWORK_HEADER
    yield _SHIFT_RIGHT, 0, 0, 4
    yield _JUMP_EQUAL, 1, 0, 4
    yield _JUMP, 0, 0, 2 * len(v4) + 2
    yield _LOAD_WORD, 0, 0, _SOURCE_V4
    for address in v4:
        yield _JUMP_EQUAL, 0, 1, address
        yield _DROP
    yield _PASS
    for prefix in v6:
        yield _LOAD_WORD, 0, 0, _SOURCE_V6
        yield _JUMP_EQUAL, 0, 3, prefix >> 32
        yield _LOAD_WORD, 0, 0, _SOURCE_V6 + 4
        yield _JUMP_EQUAL, 0, 1, prefix & 0xFFFFFFFF
        yield _DROP
    yield _PASS
