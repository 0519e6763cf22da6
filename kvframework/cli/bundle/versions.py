"""The versions of what a server consists of: this framework, its plugins, what they need, Python and the kernel."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions

import kvframework

# Beside kvframework's own requirements.
ENGINES = ("torch", "vllm", "sglang", "transformers", "numpy")


def versions() -> dict[str, object]:
    """Return the versions, without the name of the machine. Blocking: reads the metadata of all distributions."""
    return {
        "kvframework": kvframework.__version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "libc": " ".join(platform.libc_ver()),
        "kernel": f"{platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "distributions": _distributions(),
    }


def _distributions() -> dict[str, str]:
    plugins = [each for each in distributions() if any(e.group.startswith("kvframework.") for e in each.entry_points)]
    names = {_name(requirement) for each in plugins for requirement in each.requires or ()} | set(ENGINES)
    found = {each.name: each.version for each in plugins}
    for name in names:
        installed = _installed(name)
        if installed is not None:
            found[installed.name] = installed.version
    return dict(sorted(found.items()))


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
