"""The files that determine a model's weights, and a name for all their bytes. Engine side; reads files, downloads
nothing."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from kvframework.client.file_digests import digest_files

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Training leaves these files beside the weights; engines do not read them.
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
# Further files of a model's directory that change KV and are not in its configuration: scales, and the preprocessing of
# images.
_BESIDE_WEIGHTS = frozenset(
    {
        "adapter_config.json",
        "hf_quant_config.json",
        "quant_config.json",
        "quantize_config.json",
        "params.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)


def model_files(
    model: str, revision: str | None = None, download_dir: str | None = None, *, code: bool = False
) -> tuple[Path, ...]:
    """The files of a model, given by its directory, a weight file, or its name in the local cache of a hub; with `code`
    the modelling code too. () if they are not on this machine."""
    path = Path(model)
    if path.is_file():
        # A GGUF file, or the first of its shards: `name-00001-of-00003.gguf`.
        first = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\..*)", path.name)
        every = re.compile(f"{re.escape(first[1])}\\d{{5}}{re.escape(first[2])}") if first else None
        return tuple(sorted(each for each in path.parent.iterdir() if every and every.fullmatch(each.name))) or (path,)
    try:
        if not path.is_dir():
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
        found = sorted(each for each in path.iterdir() if each.is_file())
    except Exception:  # noqa: BLE001 - whatever it is, the files are not here
        return ()
    weights = [each for each in found if each.suffix in WEIGHT_SUFFIXES and each.name not in _NOT_WEIGHTS]
    if not weights:
        return ()
    return (*weights, *(each for each in found if each.name in _BESIDE_WEIGHTS or (code and each.suffix == ".py")))


def fingerprint(files: Sequence[Path]) -> str:
    """32 hex digits over the names, sizes and bytes of the files, independent of their folder. Reads those that are not
    remembered whole, see `digest_files`. Raises `OSError`."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvf-model-bytes")
    for path, content in sorted(digest_files(files).items(), key=lambda item: item[0].name):
        digest.update(f"{path.name}:{content.size}:{content.digest}\n".encode())
    return digest.hexdigest()


def changed_since(files: Sequence[Path], started: float) -> list[Path]:
    """The files that were written, or that a link came to name, after `started`, seconds since the epoch. Files of a
    hub's cache are written once, often by this engine's own download, and count as unchanged. Raises `OSError`."""
    return [path for path in files if not _is_hubs(path) and _changed_at(path) > started]


def _is_hubs(path: Path) -> bool:
    """True for a link to one of the files that a hub's cache names by their content."""
    return path.is_symlink() and path.resolve().parent.name == "blobs"


def _changed_at(path: Path) -> float:
    links = [each for each in (path, *path.parents) if each.is_symlink()]
    found = [path.stat(), *(each.lstat() for each in links)]
    return max(max(each.st_mtime, each.st_ctime) for each in found)


def process_started() -> float:
    """The start of this process in seconds since the epoch; infinite where the kernel does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return math.inf
    return time.time() - age
