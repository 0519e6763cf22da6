"""Digests of weights in memory: XXH3-128 over all their bytes, on any device, computed again when a weight has
changed. Engine side. A change shows in torch's own record of a tensor: its storage, address, shape and version,
which in-place operations count up; of an offloaded weight in its file's. Steps of optimizers, whose fused kernels
count no version up, are counted here, PEFT's merges in `adapters.py`; active adapters that are not merged are read
before every request. Other writes that bypass the version, through `tensor.data` or foreign code, are not seen.

The steps of optimizers, by the memory they write to: fused kernels and those of other libraries write to a parameter
without counting up its version. Engine side.

Every `torch.optim.Optimizer` of the process counts, from the first `watch` on. The optimizers themselves, and
autograd's knowledge of their parameters, stay as they are.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kvf_transformers.module_state import Offloaded, Section, Weight
from kvframework.errors import RequestError

log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20
_THREADS = 8

# The identity of memory, with the signs of a write to it.
Place = tuple[object, ...]
Stamp = tuple[object, ...]


class _Known(NamedTuple):
    # Storages by weak references: they hold no memory, and keep an address from being reused by another storage.
    kept: tuple[object, ...]
    stamp: Stamp
    digest: str

    @property
    def expired(self) -> bool:
        return any(
            each.expired()  # type: ignore[no-untyped-call]
            if isinstance(each, StorageWeakRef)
            else isinstance(each, weakref.ref) and each() is None
            for each in self.kept
        )


class _Part(NamedTuple):
    path: str
    place: Place
    stamp: Stamp
    kept: tuple[object, ...]
    nbytes: int
    load: Callable[[], Iterable[tuple[str, torch.Tensor]]]

    @property
    def counts(self) -> bool:
        """Whether a change shows in the stamp; it has None for what does not count its changes."""
        return None not in self.stamp


class WeightDigests:
    """The digests of one model's weights. Borrows tensors during calls only. Not thread-safe."""

    def __init__(self) -> None:
        STEPS.watch()
        self._known: dict[Place, _Known] = {}

    def forget(self) -> None:
        self._known.clear()

    def of(self, section: Section, *, always: bool = False) -> list[str]:
        """Return path and digest of each weight. Reads new and changed weights, or all if `always`.

        Blocks meanwhile: about a second for several GB, in up to 8 threads with 64 MiB each, copied from accelerators.
        Raises `RequestError` for a tensor that has no plain memory.
        """
        parts = list(_parts(section))
        stale = {part.place: part for part in parts if always or not self._knows(part)}
        if stale:
            self._read(list(stale.values()))
        if len(self._known) > 4 * len(parts) + 64:
            self._known = {place: known for place, known in self._known.items() if not known.expired}
        return [f"{part.path} {self._known[part.place].digest}" for part in parts]

    def _knows(self, part: _Part) -> bool:
        known = self._known.get(part.place)
        return known is not None and known.stamp == part.stamp and part.counts and not known.expired

    def _read(self, parts: Sequence[_Part]) -> None:
        nbytes, threads = sum(part.nbytes for part in parts), min(_THREADS, os.cpu_count() or 1, len(parts))
        if nbytes < _CHUNK_BYTES:
            digests = [_digest(part.load()) for part in parts]
        else:
            log.info("reading the model's weights to compute their name, %.1f GB", nbytes / 1e9)
            with ThreadPoolExecutor(threads, thread_name_prefix="kvf-weights") as pool:
                digests = list(pool.map(lambda part: _digest(part.load()), parts))
        for part, digest in zip(parts, digests, strict=True):
            self._known[part.place] = _Known(part.kept, part.stamp, digest)


class Stamps:
    """The signs that a weight was written to or replaced since. Reads only weights that do not count their changes."""

    def __init__(self, section: Section) -> None:
        parts = list(_parts(section))
        self._stamps = [
            (part.path, part.place, part.stamp if part.counts else (_digest(part.load()),)) for part in parts
        ]
        self._kept = [part.kept for part in parts]

    def same(self, other: Stamps) -> bool:
        return self._stamps == other._stamps


class WeightSigns:
    """Whether the parameters of a model are written to or replaced. Buffers are left out: some models write to theirs
    in a forward pass. Holds modules by weak references, and no tensor: torch swaps none that has any."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = [weakref.ref(each) for each in modules if any(map(_counts, each._parameters.values()))]

    def now(self) -> int:
        """Return a number that changes with each counted write."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        weights = [weight for module in modules for weight in module._parameters.values() if _counts(weight)]
        steps = [STEPS.of(weight) for weight in weights] if STEPS.begun else []
        return hash((tuple([(weight.data_ptr(), weight._version) for weight in weights]), *steps))


def _counts(weight: torch.Tensor | None) -> TypeGuard[torch.nn.Parameter]:
    return type(weight) is torch.nn.Parameter and not weight.is_inference()


def _parts(section: Section) -> Iterator[_Part]:
    for weight in section.weights:
        yield from _parts_of(weight)
    for path, module in section.packed:
        tensors = [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
        # The data packed beside the tensors is made together with them; without any there is no sign of a change.
        yield _Part(
            f"{path}packed",
            ("packed", id(module), *(_place(each) for each in tensors)),
            tuple(_version(each) for each in tensors) or (None,),
            (weakref.ref(module), *(_storage(each) for each in tensors)),
            0,
            partial(_packed, path, module),
        )


def _parts_of(weight: Weight) -> Iterator[_Part]:
    path, tensor, merged = weight
    if isinstance(tensor, Offloaded):
        place = ("offloaded", id(tensor.weights), tensor.name)
        yield _Part(path, place, (_written(tensor.file), merged), (tensor.weights,), 0, partial(_loaded, tensor))
    elif hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts_of(Weight(f"{path}.{name}({context})", getattr(tensor, name), merged))
    else:
        _check_dense(path, tensor)
        kept = (_storage(tensor),)
        stamp = (_version(tensor), merged)
        yield _Part(path, _place(tensor), stamp, kept, tensor.nbytes, partial(_plain, tensor))


def _check_dense(path: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise RequestError(
            f"the tensor's memory is {'quantised by torch' if tensor.is_quantized else tensor.layout}",
            where=path,
            available="dense tensors",
            hint="use the model without the cache",
        )


def _written(file: str) -> tuple[int, ...] | None:
    """Return a value that changes when the file is written to or replaced; None for no file."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _storage(tensor: torch.Tensor) -> object:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _place(tensor: torch.Tensor) -> Place:
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _version(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the version, None for a tensor that does not count its changes."""
    return None if tensor.is_inference() else (tensor._version, *STEPS.of(tensor))


def _plain(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [("", tensor)]


def _loaded(offloaded: Offloaded) -> list[tuple[str, torch.Tensor]]:
    return [("", offloaded.weights[offloaded.name])]


def _packed(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the data that a module saves beside its parameters and buffers: scales of quantised weights and the
    like."""
    kept: dict[str, object] = {}
    module._save_to_state_dict(kept, path, keep_vars=True)
    own = {id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())}
    # Torch packs weight and bias into a pair.
    parts = [(name, part) for name, found in kept.items() for part in (found if isinstance(found, tuple) else (found,))]
    for name, value in parts:
        if isinstance(value, torch.Tensor):
            if id(value) not in own:
                _check_dense(name, value)
                yield name, value
        else:
            plain = isinstance(value, (bool, int, float, str, bytes, type(None)))
            yield f"{name}={value!r}" if plain else f"{name}: {type(value).__qualname__}", torch.empty(0)


def _digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    hasher = xxhash.xxh3_128()
    with torch.no_grad():
        for name, tensor in named:
            hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            for chunk in _chunks(tensor.detach()):
                hasher.update(chunk)
    return hasher.hexdigest()


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the elements in their order, as bytes in host memory, at most 64 MiB at a time where the tensor is
    contiguous or its rows are smaller."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        if tensor.nbytes > _CHUNK_BYTES and tensor.dim() > 1:
            for row in tensor.unbind(0):
                yield from _chunks(row)
            return
        tensor = tensor.contiguous()
    flat = tensor.reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        yield flat[start : start + _CHUNK_BYTES].cpu().numpy().data


_MANY = 1 << 16


class OptimizerSteps:
    """Thread-safe without a lock, which a forked child might find taken. Holds no memory of parameters."""

    def __init__(self) -> None:
        # By storage; the weak reference keeps its address from being reused.
        self._steps: dict[int, tuple[StorageWeakRef, int]] = {}
        # Steps of optimizers whose parameters' memory is not known: they may have written to any.
        self._elsewhere = 0
        self._purge_at = _MANY
        self._watched = False

    def watch(self) -> None:
        """Count from now on. Idempotent."""
        if not self._watched:
            self._watched = True
            # Before, too: a step that fails has written to some of its weights.
            register_optimizer_step_pre_hook(self._stepped)
            register_optimizer_step_post_hook(self._stepped)

    @property
    def begun(self) -> bool:
        return bool(self._steps or self._elsewhere)

    def of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return a value that changes when a step of an optimizer of this plain tensor's memory begins or ends."""
        _, steps = self._steps.get(tensor.untyped_storage()._cdata, (None, 0))
        return steps, self._elsewhere

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        try:
            for storage in [
                storage
                for group in optimizer.param_groups
                for parameter in group["params"]
                for storage in _storages(parameter)
            ]:
                self._count(storage)
        except Exception:  # noqa: BLE001 - a training step is not ended by what only names its weights
            self._elsewhere += 1

    def _count(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        known = self._steps.get(place)
        reference = known[0] if known else StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._steps[place] = (reference, known[1] + 1 if known else 1)
        if len(self._steps) > self._purge_at:
            for each, (kept, _) in list(self._steps.items()):
                if kept.expired():  # type: ignore[no-untyped-call]
                    self._steps.pop(each, None)
            self._purge_at = _MANY + 2 * len(self._steps)


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


STEPS = OptimizerSteps()
