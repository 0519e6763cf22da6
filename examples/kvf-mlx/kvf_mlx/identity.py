"""The name of a model's KV: the content of its files, not its path."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvframework.client import KvIdentity, digest_files
from kvframework.errors import RequestError


def by_content(model: Path | str, adapter: Path | str | None = None) -> KvIdentity:
    """Return the identity of a model's folder, as `mlx_lm.load` takes it, and of the adapter's that is loaded with it.

    Reads every file once, and remembers the digests for all processes of the user. Raises `RequestError` for a folder
    without weights.
    """
    folders = [Path(folder) for folder in (model, adapter) if folder]
    # A folder may bring the code of its model.
    patterns = ("*.json", "*.py", "*.safetensors")
    files = [file for folder in folders for pattern in patterns for file in sorted(folder.glob(pattern))]
    if not any(file.suffix == ".safetensors" for file in files):
        raise RequestError(f"{model} holds no weights", available="a folder with config.json and *.safetensors")
    digest = hashlib.blake2b(digest_size=16, person=b"kvf-mlx")
    for file, found in digest_files(files).items():
        digest.update(f"{file.parent == folders[-1]}{file.name}={found.digest}\n".encode())
    return KvIdentity("mlx", digest.hexdigest())
