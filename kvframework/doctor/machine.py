"""The checks of the interpreter, of the installed distributions, of the limits of this process, which a server started
in the same way would have, too, and of the machine's NUMA nodes. Imports none of the distributions."""

from __future__ import annotations

import platform
import re
import resource
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import kvframework
from kvframework.api.findings import Finding, Level
from kvframework.api.options import ByteSize
from kvframework.config.schema import SAFE_LIMIT, SESSIONS_SHARE
from kvframework.kernels import kernels_hint, missing_kernels

_NEEDED = re.compile(r"^([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)$")


def python() -> Iterator[Finding]:
    what = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield Finding("python.version", "ok", what)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        yield Finding(
            "python.gil",
            "warn",
            "this build has no global interpreter lock; kvframework is not tested on it",
            "run the server with the usual build of the same version",
        )
    else:
        yield Finding("python.gil", "ok", "a build with the global interpreter lock")
    if sys.platform != "linux":
        yield Finding("python.platform", "fail", f"this is {sys.platform}", "the server needs Linux")


def distributions() -> Iterator[Finding]:
    yield Finding("kvframework.version", "ok", f"kvframework {kvframework.__version__}")
    if missing := missing_kernels():
        what = f"no compiled kernels for {', '.join(missing)}, which is slower"
        yield Finding("kvframework.kernels", "warn", what, kernels_hint())
    else:
        yield Finding("kvframework.kernels", "ok", "the compiled kernels are there")
    versions = []
    for text in metadata.requires("kvframework") or ():
        match = _NEEDED.match(text)
        if match is None:
            continue  # for an extra, or another Python
        name, floor = match.groups()
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("kvframework.dependencies", "fail", f"{name} is not installed", f'pip install "{text}"')
            continue
        if _numbers(version) < _numbers(floor):
            yield Finding("kvframework.dependencies", "fail", f"{name} is {version}", f'pip install "{text}"')
        versions.append(f"{name} {version}")
    yield Finding("kvframework.dependencies", "ok", ", ".join(sorted(versions)))


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)[:3]]


# docs/operations.md: 64 for the server and 4 for each client process.
_SERVER_DESCRIPTORS = 64
_CLIENT_DESCRIPTORS = 4
_FEWEST_CLIENTS = 1


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
    level: Level = "warn" if clients >= _FEWEST_CLIENTS else "fail"
    return Finding(
        "limits.descriptors",
        level,
        f"{fact}; below {SAFE_LIMIT} a burst of connections may use them up before the server reacts",
        "raise it: LimitNOFILE=65536 under systemd, or ulimit -Hn",
    )


def memlock(needed_by: str = "") -> Finding:
    """The check of lockable memory. `needed_by` is the transport that pins L1, if one does."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("limits.memlock", "ok", "no limit")
    fact = f"{ByteSize(soft)} of memory may be locked"
    if not needed_by:
        return Finding("limits.memlock", "ok", f"{fact}; only device transports lock memory")
    return Finding(
        "limits.memlock",
        "warn",
        f"{fact}, and {needed_by} pins L1 for its device",
        "LimitMEMLOCK=infinity under systemd, --ulimit memlock=-1 for a container, or ulimit -l unlimited",
    )


# Classes of PCI devices: 3D controllers and processing accelerators; of display controllers only NVIDIA's.
_COMPUTES = ("0x0302", "0x1200")
_SHOWS, _NVIDIA = "0x0300", "0x10de"


def nodes(sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    folder = sysfs / "devices" / "system" / "node"
    found = sorted(folder.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    if len(found) < 2:
        yield Finding("numa.nodes", "ok", "one node" if found else "the kernel reports none")
        return
    listed = "; ".join(f"{node.name} has the CPUs {_cpus(node)}" for node in found)
    yield Finding("numa.nodes", "ok", f"{len(found)}: {listed}")
    yield _accelerators(sysfs / "bus" / "pci" / "devices")


def _cpus(node: Path) -> str:
    try:
        return (node / "cpulist").read_text().strip() or "none"
    except OSError:
        return "unknown"


def _accelerators(folder: Path) -> Finding:
    places: dict[str, list[str]] = {}
    for device in sorted(filter(_computes, folder.glob("*"))):
        node = _text(device / "numa_node")
        places.setdefault(f"node{node}" if node.isdigit() else "no known node", []).append(device.name)
    if not places:
        return Finding("numa.accelerators", "ok", "there are no accelerators on the PCI bus")
    listed = "; ".join(f"{', '.join(devices)} on {place}" for place, devices in sorted(places.items()))
    (first, *others) = places
    if others or not first.startswith("node"):
        return Finding("numa.accelerators", "ok", listed)
    advice = (
        f"run the server and its engines there: numactl --cpunodebind={first.removeprefix('node')} kvframework serve"
    )
    return Finding("numa.accelerators", "ok", listed, advice)


def _computes(device: Path) -> bool:
    kind = _text(device / "class")[:6]
    return kind in _COMPUTES or (kind == _SHOWS and _text(device / "vendor") == _NVIDIA)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
