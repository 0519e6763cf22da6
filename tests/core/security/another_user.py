"""A child process of another user, for tests that run as root."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_another_user(work: Callable[[], object], uid: int = NOBODY) -> object:
    """What `work` returns (plain values of JSON) in a forked child of `uid`; an `OSError` comes back as its name."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                result = work()
            except OSError as error:
                result = type(error).__name__
            os.write(writing, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return json.loads(told)
