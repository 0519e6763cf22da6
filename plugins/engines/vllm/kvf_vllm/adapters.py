"""The name of an adapter (LoRA) by its content: every byte of its files, its scaling and its rank.

A name and a path do not name an adapter: it may be trained again in place. Adapters may come from several tenants, so
the digest is a cryptographic one. It is remembered for as long as the files stay the same by path, inode, size,
mtime and ctime.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvframework.client import WEIGHT_SUFFIXES, FileState
from kvframework.errors import ConfigFieldError

CONFIG = "adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_FILES = 256
_MAX_REMEMBERED = 4096
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class AdapterFacts:
    """An adapter as a request names it. `settings` are the engine's own that change what the adapter does."""

    name: str
    number: int
    path: str
    settings: tuple[str, ...] = ()
    is_local: bool = True


def adapter_of(request: Any, settings: Sequence[str] = ()) -> AdapterFacts:
    """The facts in vLLM's `LoRARequest`."""
    # Layouts of the same file, by the request's own word.
    own = (*settings, str(bool(getattr(request, "is_3d_lora_weight", False))))
    is_local = not getattr(request, "tensorizer_config_dict", None)
    return AdapterFacts(str(request.lora_name), int(request.lora_int_id), str(request.lora_path), own, is_local)


def settings_of(lora_config: Any) -> tuple[str, ...]:
    """What vLLM's `LoRAConfig` says of the use of an adapter's numbers."""
    fields = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")
    return tuple(f"{field}={getattr(lora_config, field, None)}" for field in fields)


class AdapterReader:
    """Names adapters, and remembers the digests of their files. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: OrderedDict[FileState, str] = OrderedDict()

    def content(self, adapter: AdapterFacts) -> str:
        """64 hex digits. Blocks while files are read that are not remembered. Raises `OSError` for files that cannot be
        read or that change meanwhile, `ConfigFieldError` for what is no adapter."""
        if not adapter.is_local:
            raise _no_adapter(adapter, "it is not loaded from files")
        files = _files(adapter)
        scaling, rank = _scaling(adapter, files[CONFIG])
        digests = [[name, *self._digest(path)] for name, path in files.items()]
        text = json.dumps([digests, scaling, rank, adapter.settings])
        return hashlib.blake2b(text.encode(), digest_size=32, person=b"kvf-vllm-lora").hexdigest()

    def _digest(self, path: Path) -> tuple[int, str]:
        """The size and the digest of a file."""
        started, before = time.time(), FileState.of(path)
        with self._lock:
            digest = self._digests.get(before)
        if digest is None:
            hasher = hashlib.sha256()
            buffer = memoryview(bytearray(_CHUNK_BYTES))
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    hasher.update(buffer[:count])
            digest = hasher.hexdigest()
            if FileState.of(path) != before:
                raise OSError(f"{path} was changed while it was read")
            # A file that was just written may change again without getting another time.
            if before.rested(started):
                with self._lock:
                    self._digests[before] = digest
                    while len(self._digests) > _MAX_REMEMBERED:
                        self._digests.popitem(last=False)
        return before.size, digest


def _files(adapter: AdapterFacts) -> Mapping[str, Path]:
    """The files by name that determine what the adapter does, its configuration among them."""
    folder = Path(adapter.path).expanduser()
    found = {
        path.name: path
        for path in sorted(folder.iterdir())
        if (path.suffix in WEIGHT_SUFFIXES or path.name == CONFIG) and path.is_file()
    }
    if CONFIG not in found or len(found) < 2 or len(found) > _MAX_FILES:
        raise _no_adapter(adapter, f"it has {len(found)} files of weights and configuration")
    return found


def _scaling(adapter: AdapterFacts, path: Path) -> tuple[float, int]:
    """How much the adapter counts, and its rank."""
    with path.open("rb") as file:
        text = file.read(_MAX_CONFIG_BYTES + 1)
    try:
        if len(text) > _MAX_CONFIG_BYTES:
            raise ValueError(f"it is longer than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(text)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), rank
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise _no_adapter(adapter, f"{CONFIG} cannot be used: {error!r}") from error


def _no_adapter(adapter: AdapterFacts, why: str) -> ConfigFieldError:
    return ConfigFieldError(
        f"the adapter {adapter.name!r} has no name by its content: {why}",
        where=adapter.path,
        available=f"a folder with {CONFIG} and files of weights",
        hint="its requests are computed",
    )
