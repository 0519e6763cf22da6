"""Owns what a vLLM engine's KV is called, so that engines whose KV may differ never share it. Reads weight files.

A model's name and revision do not name its weights: a checkpoint may be overwritten in place. So the revision always
holds a fingerprint of the weight files, or the name that the user gave them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvframework.client import KvIdentity, named_identity
from kvframework.errors import ConfigFieldError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TENSOR_SAMPLES = 16
_FILE_SAMPLES = 4096
_SAMPLE_BYTES = 8
_MAX_HEADER = 100_000_000
# What may differ between two loads of the same weights.
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "_commit_hash", "use_cache"}


@dataclass(frozen=True)
class ModelFacts:
    """What vLLM knows of its model. `directory` None: the weights are no local files. `dtype` is what it computes in,
    `settings` are the engine's own settings that change KV."""

    name: str
    revision: str
    quantization: str
    load_format: str
    seed: int
    config: Mapping[str, object]
    dtype: str
    settings: Mapping[str, object]
    directory: Path | None


def identify(facts: ModelFacts, *, model: str = "", weights: str = "") -> KvIdentity:
    """`model` and `weights` are the user's names for them; with both, the KV is called as engines of other kinds call
    it, see `named_identity`. Without `weights`, reads samples of the weight files.

    Raises `ConfigFieldError` if the weights have no name: they are no local files and `weights` is empty.
    """
    if model and weights:
        return named_identity(
            model,
            weights,
            config=facts.config,
            dtype=facts.dtype,
            quantization=facts.quantization,
            settings=facts.settings,
        )
    told = {key: value for key, value in facts.config.items() if key not in _NOT_IDENTITY}
    text = json.dumps([told, {"dtype": facts.dtype, **facts.settings}], sort_keys=True, default=str)
    shape = hashlib.blake2b(text.encode(), digest_size=8, person=b"kvf-vllm-config").hexdigest()
    revision = f"{facts.revision}+{shape}+{weights or _weights(facts)}"
    return KvIdentity(model or facts.name, revision, facts.quantization)


def fingerprint(directory: Path) -> str:
    """32 hex digits over the names, sizes and samples of the weight files, "" if there are none: evenly spread over
    each tensor of a safetensors file, over the whole of another. Raises `OSError`."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvf-vllm-files")
    files = sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            header = _safetensors_header(file, size) if path.suffix == ".safetensors" else None
            if header is None:
                _sample(digest, file, 0, size, _FILE_SAMPLES)
                continue
            digest.update(header)
            for begin, end in _tensors(header):
                _sample(digest, file, 8 + len(header) + begin, end - begin, _TENSOR_SAMPLES)
    return digest.hexdigest() if files else ""


def _weights(facts: ModelFacts) -> str:
    if facts.load_format == "dummy":
        return f"dummy-{facts.seed}"
    found = fingerprint(facts.directory) if facts.directory is not None else ""
    if not found:
        raise ConfigFieldError(
            f"the weights of {facts.name!r} are no local files, so that they cannot be told from others",
            where="kvframework.weights", available="any text that is another one for other weights",
            hint='set "kvframework.weights" in kv_connector_extra_config',
        )  # fmt: skip
    return found


def _safetensors_header(file: BinaryIO, size: int) -> bytes | None:
    """The JSON header, None if this is no safetensors file after all."""
    raw = file.read(8)
    length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
    if not 0 < length <= min(size - 8, _MAX_HEADER):
        return None
    return file.read(length)


def _tensors(header: bytes) -> list[tuple[int, int]]:
    entries = json.loads(header)
    return sorted(tuple(each["data_offsets"]) for name, each in entries.items() if name != "__metadata__")


def _sample(digest: hashlib.blake2b, file: BinaryIO, start: int, size: int, count: int) -> None:
    last = max(size - _SAMPLE_BYTES, 0)
    for offset in sorted({last * index // max(count - 1, 1) for index in range(count)}):
        digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, size), start + offset))
