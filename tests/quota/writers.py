"""Eight processes that write values of one tenant into one store, as eight servers do: asking what it admits first.

Each writer is a `python -m tests.quota.writers` with its place as JSON; what the store holds is measured from outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import Outcome, Terms, Tier
from kvframework.errors import TierError

WRITERS = 8
TENANT = "paying"
BATCH = 8


def open_tier(kind: str, options: Mapping[str, Any]) -> Tier:
    if kind == "redis":
        from tests.support.redis_tier import open_redis_tier

        return open_redis_tier(**options)
    if kind == "filesystem":
        from kvf_filesystem import FilesystemOptions
        from kvf_filesystem.tier import open_tier as open_folder
        from kvframework.api.plugin import ByteSize

        return open_folder(FilesystemOptions(**{**options, "capacity": ByteSize(options["capacity"])}), where="[[l2]]")
    from tests.support.s3_tier import open_s3_tier

    return open_s3_tier(**options)


def soon() -> float:
    return time.monotonic() + 30


def write(tier: Tier, salt: bytes, most: int, nbytes: int, until: float) -> dict[str, Any]:
    """Write values of fresh keys until a time: the numbers of those stored and refused, and what failed as a whole."""
    value, stored, refused, failures = memoryview(os.urandom(nbytes)), 0, 0, []
    while time.time() < until:
        keys = [key_of(salt) for _ in range(BATCH)]
        try:
            admitted = tier.admit([Terms(key, TENANT, most, nbytes) for key in keys], deadline=soon())
            some = [key for key, each in zip(keys, admitted, strict=True) if each is Outcome.STORED]
            stored += tier.put(some, [[value]] * len(some), deadline=soon()).count(Outcome.STORED)
        except TierError as error:  # a busy store is one that a server asks again
            failures.append(str(error))
        else:
            refused += len(keys) - len(some)
    return {"stored": stored, "refused": refused, "failures": failures}


def key_of(salt: bytes) -> bytes:
    return bytes(16) + salt + os.urandom(PACKED_KEY_BYTES - 16 - len(salt))


@contextmanager
def writing(kind: str, options: Mapping[str, Any], *, most: int, nbytes: int, seconds: float) -> Iterator[Callable]:
    """Run the writers; yields a function that tells whether one still runs. Behind the block all have ended well."""
    said = {"kind": kind, "options": options, "most": most, "nbytes": nbytes, "seconds": seconds}
    with ExitStack() as stack:
        command = [sys.executable, "-m", "tests.quota.writers", json.dumps(said)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(WRITERS)]
        for process in processes:
            stack.enter_context(process)
        yield lambda: any(process.poll() is None for process in processes)
        answers = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * WRITERS
        told = [json.loads(answer) for answer in answers]
        assert all(each["stored"] > 0 and len(each["failures"]) < 10 for each in told), told


def main() -> None:
    said = json.loads(sys.argv[1])
    tier = open_tier(said["kind"], said["options"])
    try:
        salt = b"salt-of-a-tenant"
        written = write(tier, salt, said["most"], said["nbytes"], time.time() + said["seconds"])
    finally:
        tier.close()
    print(json.dumps(written))


if __name__ == "__main__":
    main()
