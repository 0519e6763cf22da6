"""The checks of the machine: the interpreter, the installation, the limits of this process, memory and
the cgroup's limit. Plugins check the devices and NUMA nodes that they use."""

from __future__ import annotations

import platform
import resource
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import kvframework
from kvframework.api.installing import install_command, kernels_hint, missing_kernels
from kvframework.api.memory import cgroup_limits, kernel_table
from kvframework.api.plugin import ByteSize, Finding
from kvframework.config.schema import SAFE_LIMIT, SESSIONS_SHARE


def python() -> Iterator[Finding]:
    what = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield Finding("python.version", "ok", what)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        fact = "this Python has no global interpreter lock; kvframework is not tested without it"
        yield Finding("python.gil", "warn", fact, "run the server with the standard build of this Python version")
    else:
        yield Finding("python.gil", "ok", "this Python has a global interpreter lock")
    if sys.platform != "linux":
        yield Finding("python.platform", "fail", f"the platform is {sys.platform}", "the server needs Linux")


def installation() -> Iterator[Finding]:
    yield Finding("kvframework.version", "ok", f"kvframework {kvframework.__version__}")
    if missing := missing_kernels():
        what = f"compiled kernels are missing, so these are slower: {', '.join(missing)}"
        yield Finding("kvframework.kernels", "warn", what, kernels_hint())
    else:
        yield Finding("kvframework.kernels", "ok", "the compiled kernels are installed")
    for engine, package in (("vllm", "kvf_vllm"), ("sglang", "kvf_sglang")):
        if find_spec(engine) is not None:
            distribution = f"kvframework-{engine}"
            if find_spec(package) is not None:
                yield Finding("kvframework.engine", "ok", f"{engine} and {distribution} are installed")
            else:
                what = f"{engine} is installed without {distribution}, so it does not use the cache"
                yield Finding("kvframework.engine", "warn", what, install_command(distribution=distribution))


# docs/sizing.md: 64 for the server and 4 for each client process.
_SERVER_DESCRIPTORS = 64
_CLIENT_DESCRIPTORS = 4


def limits() -> Iterator[Finding]:
    yield _descriptors()
    yield memlock()


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("limits.descriptors", "ok", "open files have no limit")
    clients = max(int(SESSIONS_SHARE * hard) - _SERVER_DESCRIPTORS, 0) // _CLIENT_DESCRIPTORS
    fact = f"the limit of {hard} open files ({soft} until `serve` raises it) is enough for {clients} client processes"
    if hard >= SAFE_LIMIT:
        return Finding("limits.descriptors", "ok", fact)
    fact += f"; with fewer than {SAFE_LIMIT}, a burst of connections may use them up"
    advice = "raise the limit: LimitNOFILE=65536 under systemd, or ulimit -Hn"
    return Finding("limits.descriptors", "warn" if clients else "fail", fact, advice)


def memlock(needed_by: str = "") -> Finding:
    """The check of lockable memory. `needed_by` is the transport that pins L1, if one does."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("limits.memlock", "ok", "locked memory has no limit")
    fact = f"a process may lock {ByteSize(soft)} of memory"
    if not needed_by:
        return Finding("limits.memlock", "ok", f"{fact}; only device transports lock memory")
    advice = "set LimitMEMLOCK=infinity under systemd, --ulimit memlock=-1 for a container, or ulimit -l unlimited"
    return Finding("limits.memlock", "warn", f"{fact}, but {needed_by} locks all of L1", advice)


_ALMOST = 0.9
_NO_LIMIT = 1 << 62  # version 1 of cgroups writes "no limit" as a huge number


def memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[Finding]:
    sizes = {name: ByteSize(kib * 1024) for name, kib in kernel_table(proc / "meminfo").items()}
    if "MemAvailable:" in sizes and "MemTotal:" in sizes:
        yield Finding("memory.machine", "ok", f"{sizes['MemAvailable:']} of {sizes['MemTotal:']} are available")
    yield _cgroup(proc, cgroups)


def _cgroup(proc: Path, cgroups: Path) -> Finding:
    limits = [(limit, used, where) for where, limit, used, _ in cgroup_limits(proc, cgroups)]
    limit, used, where = min(limits, default=(_NO_LIMIT, 0, cgroups))
    if limit >= _NO_LIMIT:
        return Finding("memory.cgroup", "ok", "no cgroup limits the memory")
    fact = f"the cgroup {where} allows {ByteSize(limit)} and uses {ByteSize(used)}, page cache included"
    if used > _ALMOST * limit:
        advice = "allow the container 512 MiB more than L1, or lower [l1] capacity"
        return Finding("memory.cgroup", "warn", fact, advice)
    return Finding("memory.cgroup", "ok", fact)
