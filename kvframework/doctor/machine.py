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
from kvframework.api.memory import cgroup_limits
from kvframework.api.plugin import ByteSize, Finding
from kvframework.config.schema import SAFE_LIMIT, SESSIONS_SHARE


def python() -> Iterator[Finding]:
    what = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield Finding("python.version", "ok", what)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        fact = "this build has no global interpreter lock; kvframework is not tested on it"
        yield Finding("python.gil", "warn", fact, "run the server with the usual build of the same version")
    else:
        yield Finding("python.gil", "ok", "a build with the global interpreter lock")
    if sys.platform != "linux":
        yield Finding("python.platform", "fail", f"this is {sys.platform}", "the server needs Linux")


def installation() -> Iterator[Finding]:
    yield Finding("kvframework.version", "ok", f"kvframework {kvframework.__version__}")
    if missing := missing_kernels():
        what = f"no compiled kernels for {', '.join(missing)}, which is slower"
        yield Finding("kvframework.kernels", "warn", what, kernels_hint())
    else:
        yield Finding("kvframework.kernels", "ok", "the compiled kernels are there")
    for engine, package in (("vllm", "kvf_vllm"), ("sglang", "kvf_sglang")):
        if find_spec(engine) is not None:
            distribution = f"kvframework-{engine}"
            if find_spec(package) is not None:
                yield Finding("kvframework.engine", "ok", f"{engine} has {distribution} beside it")
            else:
                what = f"{engine} is installed here without {distribution}: it computes everything"
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
        return Finding("limits.descriptors", "ok", "no limit")
    clients = max(int(SESSIONS_SHARE * hard) - _SERVER_DESCRIPTORS, 0) // _CLIENT_DESCRIPTORS
    fact = f"{hard} descriptors ({soft} until `serve` raises it): enough for {clients} client processes"
    if hard >= SAFE_LIMIT:
        return Finding("limits.descriptors", "ok", fact)
    fact += f"; below {SAFE_LIMIT} a burst of connections may use them up before the server reacts"
    advice = "raise it: LimitNOFILE=65536 under systemd, or ulimit -Hn"
    return Finding("limits.descriptors", "warn" if clients else "fail", fact, advice)


def memlock(needed_by: str = "") -> Finding:
    """The check of lockable memory. `needed_by` is the transport that pins L1, if one does."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("limits.memlock", "ok", "no limit")
    fact = f"{ByteSize(soft)} of memory may be locked"
    if not needed_by:
        return Finding("limits.memlock", "ok", f"{fact}; only device transports lock memory")
    advice = "LimitMEMLOCK=infinity under systemd, --ulimit memlock=-1 for a container, or ulimit -l unlimited"
    return Finding("limits.memlock", "warn", f"{fact}, and {needed_by} pins L1 for its device", advice)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


_ALMOST = 0.9
_NO_LIMIT = 1 << 62  # version 1 of cgroups writes "no limit" as a huge number


def memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[Finding]:
    rows = [line.split() for line in _text(proc / "meminfo").splitlines()]
    sizes = {row[0]: ByteSize(int(row[1]) * 1024) for row in rows if len(row) > 1 and row[1].isdigit()}
    if "MemAvailable:" in sizes and "MemTotal:" in sizes:
        yield Finding("memory.machine", "ok", f"{sizes['MemAvailable:']} available of {sizes['MemTotal:']}")
    yield _cgroup(proc, cgroups)


def _cgroup(proc: Path, cgroups: Path) -> Finding:
    limits = [(limit, used, where) for where, limit, used, _ in cgroup_limits(proc, cgroups)]
    limit, used, where = min(limits, default=(_NO_LIMIT, 0, cgroups))
    if limit >= _NO_LIMIT:
        return Finding("memory.cgroup", "ok", "no cgroup limits the memory")
    fact = f"{where} allows {ByteSize(limit)}, {ByteSize(used)} used, caches included"
    if used > _ALMOST * limit:
        advice = "give the container L1 + 512 MiB or more, or lower [l1] capacity"
        return Finding("memory.cgroup", "warn", fact, advice)
    return Finding("memory.cgroup", "ok", fact)
