"""The optional part of the build: the copy kernel of `kvf_cpu_gather`, where there is a C compiler.

Without one the wheel is pure Python and copies by torch. `KVFRAMEWORK_NATIVE=0` leaves the kernel out, `=1` requires
it; `CC` names the compiler. The library does not depend on Python, so one wheel serves all interpreters of a platform.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("plugins", "kvf_cpu_gather", "native")
LIBRARY = "libkvf_copy.so"
FLAGS = ["-std=c11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]


class CopyKernelHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the library; `version` is "standard" or "editable"."""
        wanted = os.environ.get("KVFRAMEWORK_NATIVE", "")
        library = Path(self.root, FOLDER, LIBRARY)
        if wanted == "0":
            return
        failure = _compile(Path(self.root, FOLDER, "copy.c"), library)
        if failure:
            if wanted == "1":
                raise RuntimeError(failure)
            self.app.display_warning(f"kvframework is built without its copy kernel, torch copies instead: {failure}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        if version != "editable":
            build_data["force_include"][str(library)] = f"kvf_cpu_gather/native/{LIBRARY}"


def _compile(source: Path, library: Path) -> str:
    """Compiles the library; returns the reason of a failure, "" after success."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"there is no C compiler {compiler[0]!r}"
    # Written beside its place: a process that has the former one mapped keeps it.
    fresh = library.with_suffix(".new")
    try:
        done = subprocess.run(
            [*compiler, *FLAGS, str(source), "-o", str(fresh)], capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode:
            return f"{compiler[0]} failed:\n{done.stderr[-2000:]}"
        fresh.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        fresh.unlink(missing_ok=True)
    return ""
