"""Owns the errors of benches. A bench that fails reports no figure at all."""

from __future__ import annotations

from kvframework.errors import KVFrameworkError


class BenchFailed(KVFrameworkError, RuntimeError):
    """A bench could not be carried out, or something it needs did not do what it must."""

    code = "bench.failed"


class BenchUnavailable(KVFrameworkError):
    """What is to be measured is not here: a package is not installed, or the transport has no such path."""

    code = "bench.unavailable"


class WrongBytes(BenchFailed):
    """What came back is not what was stored, so its speed means nothing."""

    code = "bench.wrong_bytes"
