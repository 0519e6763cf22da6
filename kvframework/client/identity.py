"""The name of the KV of an engine that loads its model from files: engines whose KV may differ never share a name.

A model's name and revision do not name its weights: a checkpoint may be overwritten in place. So the revision always
holds a digest over every byte of the weight files, or the name that the user gave them. Files are named by XXH3-128,
for contents that differ by accident, as checkpoints do, not for crafted collisions. Engine side; once a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from kvframework.errors import ConfigFieldError, RequestError

log = logging.getLogger(__name__)

# Names that the user gives, by one rule for all engines: engines of different kinds find each other's objects by them.
# Each engine can also name its KV from its own knowledge of its weights; such names never equal these.

# The settings that may differ between two engines, or two loads, of the same model. The dtype is named by itself: an
# engine may compute in a dtype other than its configuration's.
_NOT_KV = frozenset(
    {"architectures", "dtype", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache"}
)


class KvIdentity(NamedTuple):
    """The identity of KV within the namespace, see `kvframework.api.keys.compute_namespace`. `dtype` is what the model
    computes in, for the server's status: where it changes KV, `revision` names it, too."""

    model_name: str
    revision: str
    quantization: str = ""
    dtype: str = ""


def named_identity(
    model: str,
    weights: str,
    *,
    config: Mapping[str, object],
    dtype: str,
    quantization: str = "",
    settings: Mapping[str, object] | None = None,
) -> KvIdentity:
    """Return the identity of a model's KV for a user who has named the model and its weights, and promises that equal
    names mean equal weights, adapters and the like included. The engine adds `config`, the model's configuration in the
    words of transformers (rope scaling is in it), `dtype`, in which it computes, `quantization`, "" for none, and its
    own `settings` that change KV, except those that are off. Raises `RequestError` for an empty name."""
    if not model or not weights:
        fact, available = f"the model name is {model!r}, the weights name {weights!r}", "two names that are not empty"
        raise RequestError(fact, available=available, hint="give the same two names to every engine that shares KV")
    dtype = dtype.removeprefix("torch.")
    more = {name: value for name, value in (settings or {}).items() if value}
    described = msgspec.json.encode([_kv_part(config), dtype, more], enc_hook=str, order="deterministic")
    digest = hashlib.blake2b(described, digest_size=16, person=b"kvf-named").hexdigest()
    return KvIdentity(model, f"named+{digest}+{weights}", quantization, dtype)


def _kv_part(config: object) -> object:
    """Return a configuration without the settings that do not change KV, at any depth."""
    if isinstance(config, Mapping):
        return {
            str(key): _kv_part(value)
            for key, value in config.items()
            if key not in _NOT_KV and not str(key).startswith("_")
        }
    return [_kv_part(each) for each in config] if isinstance(config, (list, tuple)) else config


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Training leaves these files beside the weights; engines do not read them.
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
# Further files of a model's directory that change KV and are not in its configuration: scales, and preprocessing.
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
FILE_NAME = "file-digests.json"
_VERSION = 2
_MAX_ENTRIES = 8192
_MAX_BYTES = 4 << 20
# Times of files have a granularity, some milliseconds on local file systems, up to two seconds on others: a file that
# was changed less than this before it was read may be changed again without getting another time.
REST_S = 3.0
_CHUNK_BYTES = 8 << 20
_THREADS = 8
# A file that is replaced during the read is read again; after this many attempts it fails.
_ATTEMPTS = 3


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


class FileState(NamedTuple):
    """The state of a file that changes with its content. `place` names the resolved path; times are nanoseconds. The
    ctime cannot be set back as the mtime can. Writes through a shared mapping change the times later than the content,
    and not at all on tmpfs: they are not seen."""

    place: str
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(path: Path) -> FileState:
        """Return the state of the file. Raises `OSError`."""
        real = os.path.realpath(path)
        found = os.stat(real)
        place = hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()
        return FileState(place, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def rested(self, now: float) -> bool:
        """Return whether any change after `now` (seconds since the epoch) gives the file different times."""
        return now - max(self.mtime_ns, self.ctime_ns) / 1e9 > REST_S


class FileDigest(NamedTuple):
    """`digest` is XXH3-128 of the whole content, 32 hex digits; `size` in bytes."""

    size: int
    digest: str


def digest_files(paths: Iterable[Path], memory: Path | None = None) -> dict[Path, FileDigest]:
    """Return the digest of each file, in the order given; links are followed. Blocks until every file that is not
    remembered has been read whole (8 MiB of memory for each of up to 8 threads).

    Digests are remembered in the directory `memory`, for all processes of the user, while path, inode, size, mtime and
    ctime are unchanged. None: `$XDG_CACHE_HOME/kvframework`, by default `~/.cache/kvframework`; nothing is remembered
    without a home. Raises `OSError` for a file that cannot be read, or is written all the time.
    """
    memory = memory or _users_memory()
    states = {path: FileState.of(path) for path in paths}
    known = load_digests(memory)
    found = {path: FileDigest(state.size, known[state]) for path, state in states.items() if state in known}
    by_size = sorted(states.keys() - found.keys(), key=lambda path: states[path].size, reverse=True)
    if by_size:
        total, started = sum(states[path].size for path in by_size), time.monotonic()
        log.info("reading %d weight files to name their content, %.1f GB", len(by_size), total / 1e9)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="kvf-digest") as pool:
            read = list(pool.map(_read, by_size))
        log.info("read %.1f GB of weight files in %.1f s", total / 1e9, time.monotonic() - started)
        _remember(memory, {state: digest for state, digest, began in read if state.rested(began)})
        for path, (state, digest, _) in zip(by_size, read, strict=True):
            found[path] = FileDigest(state.size, digest)
    return {path: found[path] for path in states}


def _read(path: Path) -> tuple[FileState, str, float]:
    """Return the state in which the whole file was read, its digest, and the begin in seconds since the epoch."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for _ in range(_ATTEMPTS):
        began, before = time.time(), FileState.of(path)
        hasher = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
        if FileState.of(path) == before:
            return before, hasher.hexdigest(), began
    raise OSError(f"{path} was changed each of {_ATTEMPTS} times while it was read")


# The remembered digests are one private JSON file. It is only a cache: a problem with it costs a line in the log and
# reading the files. It is replaced whole; of two processes that write at once one may lose what it has read.


class _Content(msgspec.Struct, frozen=True):
    version: int
    entries: list[tuple[FileState, str]]


def _users_memory() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "kvframework"
    except RuntimeError:
        return None


def load_digests(memory: Path | None) -> dict[FileState, str]:
    """Return all remembered digests; none, with a line in the log, if the file is damaged or not private."""
    if memory is None:
        return {}
    path = memory / FILE_NAME
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            _check_private(os.fstat(file.fileno()))
            content = msgspec.json.decode(file.read(_MAX_BYTES + 1), type=_Content)
        if content.version != _VERSION:
            raise ValueError(f"the file has version {content.version}, expected {_VERSION}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("cached weight digests are not used, and %s is written again: %s", path, error)
        return {}
    return dict(content.entries)


def _remember(memory: Path | None, digests: Mapping[FileState, str]) -> None:
    """Add digests, for each file its newest state; the oldest entries are dropped when there are too many."""
    if memory is None or not digests:
        return
    places = {state.place for state in digests}
    kept = [(state, digest) for state, digest in load_digests(memory).items() if state.place not in places]
    try:
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(os.stat(memory))
        descriptor, written = tempfile.mkstemp(prefix=f"{FILE_NAME}.", dir=memory)
        try:
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(_Content(_VERSION, [*kept, *digests.items()][-_MAX_ENTRIES:])))
            os.replace(written, memory / FILE_NAME)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(written)
    except OSError as error:
        log.warning("weight digests cannot be cached for the next start: %s", error)


def _check_private(found: os.stat_result) -> None:
    """Raise `OSError` for a file that other users may write: they could give one content the name of another."""
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise OSError("other users may write the file")


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
    hubs = {path for path in files if path.is_symlink() and path.resolve().parent.name == "blobs"}
    return [path for path in files if path not in hubs and _changed_at(path) > started]


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


# Fields that may differ between two loads of the same weights.
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "_commit_hash", "use_cache"}


class EngineKind(NamedTuple):
    """A kind of engine. `person` (16 bytes at most) keeps its names apart from those of other kinds; `formats` are the
    load formats that load the files of the model's directory; `options`: where the user sets options."""

    person: bytes
    formats: frozenset[str]
    options: str


@dataclass(frozen=True)
class ModelFacts:
    """The model as the engine knows it. `files` determine its weights, (): they are no local files. `dtype` is that of
    its computation, `settings` are the engine's own settings that change KV. `draft` is the model that proposes tokens,
    and keeps KV; `adapters` are the files of each LoRA adapter that is always part of the model, by name. `engine`
    names the engine, whose weights were read after `started`, seconds since the epoch."""

    name: str
    revision: str
    quantization: str
    load_format: str
    seed: int
    config: Mapping[str, object]
    dtype: str
    settings: Mapping[str, object]
    files: tuple[Path, ...] = ()
    draft: ModelFacts | None = None
    adapters: Mapping[str, tuple[Path, ...]] | None = None
    engine: str = ""
    started: float = math.inf


def model_identity(kind: EngineKind, facts: ModelFacts, *, model: str = "", weights: str = "") -> KvIdentity:
    """`model` and `weights` are the user's names for them; with both, the KV has the same name as in engines of other
    kinds, see `named_identity`. Without `weights`, reads the weight files whole, once, see `digest_files`. Raises
    `ConfigFieldError` if the weights or an adapter have no name: they are no local files, or change while they are
    read, and `weights` is empty."""
    settings = dict(facts.settings)
    if facts.draft is not None:
        draft = model_identity(kind, facts.draft, weights=weights)
        settings["draft"] = [draft.revision, draft.quantization]
    if facts.adapters:
        settings["adapters"] = {
            name: _content(kind, facts, files, f"adapter {name}") for name, files in facts.adapters.items()
        }
    config, dtype, quantization = facts.config, facts.dtype, facts.quantization
    if model and weights:
        return named_identity(model, weights, config=config, dtype=dtype, quantization=quantization, settings=settings)
    relevant = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    text = json.dumps([relevant, {"dtype": dtype, **settings}], sort_keys=True, default=str)
    shape = hashlib.blake2b(text.encode(), digest_size=8, person=kind.person).hexdigest()
    revision = f"{facts.revision}+{shape}+{weights or _weights(kind, facts)}"
    return KvIdentity(model or facts.name, revision, quantization, dtype.removeprefix("torch."))


def _weights(kind: EngineKind, facts: ModelFacts) -> str:
    if facts.load_format == "dummy":
        return f"dummy-{facts.seed}"
    if facts.load_format not in kind.formats:
        why = f"are loaded as {facts.load_format!r}, which may differ from the model's files"
        raise _unnamed(kind, facts, "weights", why)
    return _content(kind, facts, facts.files, "weights")


def _content(kind: EngineKind, facts: ModelFacts, files: tuple[Path, ...], what: str) -> str:
    if not files:
        raise _unnamed(kind, facts, what, "are not local files")
    try:
        content = fingerprint(files)
        changed = changed_since(files, facts.started)
    except OSError as error:
        raise _unnamed(kind, facts, what, f"cannot be read: {error}") from error
    if not changed:
        return content
    # The engine may have loaded the former contents of the file.
    log.warning(
        "%s of %s changed after this engine started: no other engine shares its KV until it restarts",
        ", ".join(path.name for path in changed[:3]),
        facts.name,
    )
    return f"{content}+{facts.engine}"


def _unnamed(kind: EngineKind, facts: ModelFacts, what: str, why: str) -> ConfigFieldError:
    return ConfigFieldError(
        f"the {what} of {facts.name!r} {why}, so their content cannot be named",
        where="kvframework.weights",
        available="a text that differs for different weights",
        hint=f'set "kvframework.weights" in {kind.options}',
    )
