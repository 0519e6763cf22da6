"""Adapters (LoRA) by their content: their names, what the scheduler knows of them, and what a worker's vLLM has loaded.

A name and a path do not name an adapter: it may be trained again in place. So it is named by every byte of its files,
its scaling and its rank. Adapters may come from several tenants, so the digest is a cryptographic one. It is remembered
for as long as the files stay the same by path, inode, size, mtime and ctime.

vLLM reports neither loads nor evictions of adapters to a connector, so one call of vLLM's is watched in the worker: the
load. The files are named before and after it; if they differ, what was loaded is unknown, and the adapter has no name.
Without such a call in this vLLM no adapter has one.

For the scheduler an adapter has the name that all workers tell once they have loaded it: the first request with it is
computed, and stored from the next step on. vLLM's own prefix cache goes by an adapter's name and path. Once these had
two contents in the engine's life, blocks of both may lie there, and their requests are left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvf_vllm.requests import Asking, Wish
from kvf_vllm.step_messages import AdapterNews, AdapterUse
from kvframework.client import WEIGHT_SUFFIXES, FileState, WatchedCall, watch_calls
from kvframework.errors import ConfigFieldError

log = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
NOT_LOADED = "lora_not_loaded"
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
    # Layouts of the same file, by the request's own word.
    own = (*settings, str(bool(getattr(request, "is_3d_lora_weight", False))))
    is_local = not getattr(request, "tensorizer_config_dict", None)
    return AdapterFacts(str(request.lora_name), int(request.lora_int_id), str(request.lora_path), own, is_local)


def settings_of(lora_config: Any) -> tuple[str, ...]:
    """What vLLM's `LoRAConfig` says of the use of an adapter's numbers."""
    fields = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")
    return tuple(f"{field}={getattr(lora_config, field, None)}" for field in fields)


class AdapterReader:
    """Names adapters, and remembers the digests of their files. For one thread."""

    def __init__(self) -> None:
        self._digests: OrderedDict[FileState, str] = OrderedDict()

    def content(self, adapter: AdapterFacts) -> str:
        """64 hex digits. Blocks while files are read that are not remembered. Raises `OSError` for files that cannot be
        read or that change meanwhile, `ConfigFieldError` for what is no adapter."""
        if not adapter.is_local:
            raise _no_adapter(adapter, "the adapter is not loaded from files")
        files = _files(adapter)
        scaling, rank = _scaling(adapter, files[CONFIG])
        digests = [[name, *self._digest(path)] for name, path in files.items()]
        text = json.dumps([digests, scaling, rank, adapter.settings])
        return hashlib.blake2b(text.encode(), digest_size=32, person=b"kvf-vllm-lora").hexdigest()

    def _digest(self, path: Path) -> tuple[int, str]:
        started, before = time.time(), FileState.of(path)
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
                self._digests[before] = digest
                if len(self._digests) > _MAX_REMEMBERED:
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
        raise _no_adapter(adapter, f"the folder has {len(found)} files of weights and configuration")
    return found


def _scaling(adapter: AdapterFacts, path: Path) -> tuple[float, int]:
    with path.open("rb") as file:
        text = file.read(_MAX_CONFIG_BYTES + 1)
    try:
        if len(text) > _MAX_CONFIG_BYTES:
            raise ValueError(f"the file is longer than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(text)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), rank
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise _no_adapter(adapter, f"{CONFIG} cannot be used: {error!r}") from error


def _no_adapter(adapter: AdapterFacts, why: str) -> ConfigFieldError:
    return ConfigFieldError(
        f"the adapter {adapter.name!r} cannot be named by its content: {why}",
        where=adapter.path,
        available=f"a folder with {CONFIG} and files of weights",
        hint="requests with this adapter are computed",
    )


class AdapterNames:
    """The scheduler's side. `by_path` False: vLLM's prefix cache goes by the adapter's name alone. For one thread."""

    def __init__(self, workers: int, *, by_path: bool = True) -> None:
        self._workers = workers
        self._by_path = by_path
        self._held: dict[int, dict[int, AdapterNews]] = {}
        self._contents: dict[tuple[str, str], set[str]] = {}

    def heard(self, worker: int, news: Mapping[int, AdapterNews | None]) -> None:
        for number, each in news.items():
            held = self._held.setdefault(number, {})
            if each is None:
                held.pop(worker, None)
                if not held:
                    del self._held[number]
                continue
            held[worker] = each
            self._contents.setdefault(self._key(each.name, each.path), set()).add(each.content)

    def use_of(self, request: Any) -> AdapterUse | str:
        """The adapter of vLLM's `LoRARequest`, or why it has no name: for now (`NOT_LOADED`), or for good."""
        held = self._held.get(int(request.lora_int_id), {})
        if len(held) < self._workers:
            return NOT_LOADED
        contents = {each.content for each in held.values()}
        content = contents.pop() if len(contents) == 1 else ""
        if not content:
            return "lora_unnamed"
        if self._contents.get(self._key(str(request.lora_name), str(request.lora_path)), set()) - {content}:
            return "lora_changed"
        return AdapterUse(int(request.lora_int_id), content)

    def lacks(self, asking: Asking) -> str:
        """Return why the request's adapter has no name, "" if it has one, or there is none. A request whose adapter
        gets none, or another one than before, is left out."""
        lora = asking.request.lora_request
        if lora is None or not (asking.wish.load or asking.wish.store):
            return ""
        found = self.use_of(lora)
        if isinstance(found, AdapterUse):
            before, asking.adapter = asking.adapter, found
            if before in (None, found):
                return ""
            found = "lora_changed"
        if found != NOT_LOADED:
            asking.wish = Wish(False, False, reason=found)
        return found

    def _key(self, name: str, path: str) -> tuple[str, str]:
        return name, path if self._by_path else ""


class LoadedAdapters:
    """The adapters of the engine with this `LoRAConfig`, None: it has none. `resolve` gives the folder for a path, as
    vLLM finds it. `base_uses_last_slot`: vLLM computes requests without an adapter by whatever lies in the last slot
    for adapters, as its code for CPUs does (index -1). For the worker's thread."""

    def __init__(
        self,
        lora_config: Any = None,
        *,
        resolve: Callable[[str], str] = str,
        base_uses_last_slot: bool = False,
        reader: AdapterReader | None = None,
    ) -> None:
        self._config = lora_config
        self._base_uses_last_slot = base_uses_last_slot
        self._is_base_spoiled = False
        self._settings = settings_of(lora_config)
        self._resolve = resolve
        self._reader = reader or AdapterReader()
        self._content: dict[int, str] = {}
        self._news: dict[int, AdapterNews] = {}
        self._held: Callable[[], set[int]] = set
        self._slots: Callable[[], Sequence[int | None]] = tuple

    def watch(self, manager_class: Any) -> None:
        """Follow the loads of vLLM's class from now on. Never raises."""
        try:
            watch_calls(manager_class, ("_load_adapter",), self)
        except AttributeError as error:
            log.warning(
                "requests with adapters are computed, because this vLLM does not report adapter loads: %s", error
            )

    @contextmanager
    def around(self, call: WatchedCall) -> Iterator[None]:
        """A load by vLLM. Several engines may share a process."""
        manager = call.args[0]
        if self._config is None or getattr(manager, "lora_config", None) is not self._config:
            yield
            return
        adapter = adapter_of(call.argument(1, "lora_request"), self._settings)
        before = self._named(adapter)
        yield
        self._loaded(manager, adapter, before)

    def _loaded(self, manager: Any, adapter: AdapterFacts, before: str) -> None:
        """A load has succeeded; `before` is the adapter's name from before that."""
        content = self._named(adapter)
        if content != before:
            log.warning(
                "the files of adapter %s changed while vLLM loaded it, so its requests are computed", adapter.name
            )
            content = ""
        self._content[adapter.number] = content
        self._news[adapter.number] = AdapterNews(adapter.name, adapter.path, content)
        self._held = manager.list_adapters
        # In doubt the last slot is taken.
        slots = getattr(manager, "_adapter_manager", None)
        self._slots = lambda: getattr(slots, "lora_index_to_id", [adapter.number])

    def holds(self, use: AdapterUse) -> bool:
        """True if vLLM holds the adapter with just this content."""
        return bool(use.content) and self._content.get(use.number) == use.content and use.number in self._held()

    def spoils_base(self) -> bool:
        """True once requests without an adapter may have been computed by one, and lie so in vLLM's own prefix cache.
        To be asked after each step."""
        if self._base_uses_last_slot and not self._is_base_spoiled and self._slots()[-1:] not in ([], (), [None]):
            self._is_base_spoiled = True
            log.warning("requests without an adapter are not stored: on a CPU vLLM applies its last adapter to them")
        return self._is_base_spoiled

    def take_news(self) -> dict[int, AdapterNews | None]:
        """What was loaded since the last call, by number; None for what vLLM has dropped."""
        news: dict[int, AdapterNews | None] = dict(self._news)
        self._news.clear()
        if self._content:
            for number in self._content.keys() - self._held():
                del self._content[number]
                news[number] = None
        return news

    def _named(self, adapter: AdapterFacts) -> str:
        try:
            return self._reader.content(replace(adapter, path=self._resolve(adapter.path)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the adapter has no name
            log.warning("requests with adapter %s are computed: %s", adapter.name, error)
            return ""
