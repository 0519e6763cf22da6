"""The optional part of the build, where there is a C compiler: the copy kernel of `kvf_cpu_gather`, the plane kernel of
`kvf_codecs`, the hash kernel of `kvf_hashers`, the token kernel of the client, and the streaming kernel.

Without one the wheel is pure Python: torch copies, NumPy splits planes, hashlib hashes. `KVFRAMEWORK_NATIVE=0` leaves
the kernels out, `=1` requires them; `CC` names the compiler. The libraries do not link to Python, so one wheel serves
all interpreters of a platform.
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

# By library, as the wheel has it, its source in the tree, beside which it is built.
KERNELS = {
    Path("kvf_cpu_gather", "native", "libkvf_copy.so"): Path(
        "plugins", "defaults", "kvf_cpu_gather", "native", "copy.c"
    ),
    Path("kvf_codecs", "native", "libkvf_planes.so"): Path("plugins", "defaults", "kvf_codecs", "native", "planes.c"),
    Path("kvf_hashers", "native", "libkvf_sha256.so"): Path("plugins", "defaults", "kvf_hashers", "native", "sha256.c"),
    Path("kvframework", "api", "native", "libkvf_streaming.so"): Path("kvframework", "api", "native", "streaming.c"),
    Path("kvframework", "client", "native", "libkvf_token_ids.so"): Path(
        "kvframework", "client", "native", "token_ids.c"
    ),
}
FLAGS = ["-std=c11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]


class BuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the libraries for a wheel; `version` is "standard" or "editable"."""
        if self.target_name != "wheel":
            return
        wanted = os.environ.get("KVFRAMEWORK_NATIVE", "")
        if wanted == "0":
            return
        for library, source in KERNELS.items():
            built = Path(self.root, source).with_name(library.name)
            failure = _compile(Path(self.root, source), built)
            if failure:
                if wanted == "1":
                    raise RuntimeError(failure)
                self.app.display_warning(f"kvframework is built without {library.name}, which is slower: {failure}")
                continue
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            if version != "editable":
                build_data["force_include"][str(built)] = str(library)


def _compile(source: Path, library: Path) -> str:
    """Compiles a library; returns the reason of a failure, "" after success."""
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
