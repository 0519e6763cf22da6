"""The checks of the interpreter and of the installed distributions. Imports none of them."""

from __future__ import annotations

import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata

import kvframework
from kvframework.api.findings import Finding
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
