"""Owns the errors of benches. A bench that fails reports no figure at all."""

from __future__ import annotations

from kvframework.errors import KVFrameworkError


class BenchFailed(KVFrameworkError, RuntimeError):
    """A bench could not be carried out, or something it needs did not do what it must.

    What to do: the text says which process or check failed."""

    code = "bench.failed"


class BenchUnavailable(KVFrameworkError):
    """A measurement cannot run on this machine: a package is not installed, or the transport has no such path.

    What to do: install what it names, or leave that part out."""

    code = "bench.unavailable"


class WrongBytes(BenchFailed):
    """What came back is not what was stored, so its speed means nothing.

    What to do: do not use this build; report it with the machine and the command."""

    code = "bench.wrong_bytes"
