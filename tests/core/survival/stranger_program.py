"""A process that sends what nobody should: messages of any number of frames to every socket that it can reach, with a
session and without one, and bytes that are no messages at all.

Arguments: the ipc:// endpoint, the tcp:// endpoint, a seed. It ends with its standard input and says how much it sent.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import sys

import zmq

from kvframework.wire.frames import MAX_BUFFERS
from tests.support.wire_client import WireClient

# What changes nothing for others, whatever comes of it.
NAMES = [b"LOOKUP", b"PREPARE_STORE", b"STORE_CPU_CHUNKS", b"COMMIT_STORE", b"NOOP", b"HELLO", b"ERROR", b"", b"\xff"]
PAYLOADS = [b"", b"\x80", b"\xc1", b"\x91" * 5000, b"\x81\xa4text\x07", b"\xdf" + b"\xff" * 4, b"\xc6" + b"\xff" * 4]


def junk(chance: random.Random) -> list[bytes]:
    """One message: mostly a few frames, sometimes many, rarely more than any message may have."""
    count = chance.choices([chance.randint(1, 6), chance.randint(7, 200), MAX_BUFFERS + 100], [60, 5, 1])[0]
    frames = [
        chance.choice([chance.randbytes(8), b"", chance.randbytes(chance.randint(1, 20))]),
        chance.choice([*NAMES, chance.randbytes(chance.randint(1, 90))]),
        chance.choice([*PAYLOADS, chance.randbytes(chance.randint(0, 300))]),
    ]
    frames += [chance.randbytes(chance.choice([0, 1, 30])) for _ in range(count - 3)]
    return frames[:count]


def shout(client: WireClient, chance: random.Random) -> None:
    with contextlib.suppress(zmq.Again):
        client.socket.send_multipart(junk(chance), zmq.NOBLOCK)
    while client.socket.poll(0):
        client.socket.recv_multipart()


def no_message(address: str | tuple[str, int], chance: random.Random) -> None:
    """Bytes of no protocol, on a connection of their own."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as raw:
        raw.settimeout(1.0)
        raw.connect(address)
        raw.send(chance.choice([b"", b"\xff" + bytes(9), b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL", chance.randbytes(500)]))


def main(endpoint: str, tcp: str, seed: str) -> None:
    chance = random.Random(seed)
    path = endpoint.removeprefix("ipc://")
    host, _, port = tcp.removeprefix("tcp://").rpartition(":")
    sent = 0
    with (
        WireClient(endpoint, timeout=60.0) as known,
        WireClient(tcp, timeout=60.0) as remote,
        WireClient(endpoint, hello=False) as unknown,
        WireClient(tcp, hello=False) as far,
    ):
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            for client in (known, remote, unknown, far):
                shout(client, chance)
            if sent % 20 == 0:
                for address in (path, path + ".live", (host, int(port))):
                    no_message(address, chance)
            sent += 4
    print(sent, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
