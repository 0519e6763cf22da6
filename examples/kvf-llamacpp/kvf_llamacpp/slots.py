"""Slots of a llama.cpp server with kvframework behind them: a prompt begins with what any process has computed of it.

Runs beside `llama-server` with `--slot-save-path`, on the same node. Every call blocks. After any failure the server
computes: it is never worse off than without.
"""

from __future__ import annotations

import json
import logging
import secrets
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvf_llamacpp.slot_file import TYPES, Planes, SlotForm, built, parsed
from kvframework.client import (
    KVClient,
    RequestHashes,
    SchedulerAdapter,
    WorkerAdapter,
    fingerprint,
    model_files,
)
from kvframework.errors import KVFrameworkError, RequestError

log = logging.getLogger(__name__)

BLOCK = 16


class Slots:
    """One slot of one server, for one request at a time. Not thread-safe.

    `url` is the server's address, `folder` its `--slot-save-path`, `gguf` the model's file, or the first of its shards,
    whose content names the KV. `settings` names whatever of the server's command changes KV besides: rope options, a
    control vector. Adapters that are on are refused at each call, as a miss. The constructor waits `connect_timeout_s`
    for a missing server of kvframework, which is tried again at each prompt. Raises `OSError` for a llama.cpp server or
    a file that is not there.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        gguf: Path,
        *,
        slot: int = 0,
        settings: str = "",
        endpoint: str | None = None,
        connect_timeout_s: float = 5.0,
        timeout_s: float = 600.0,
        **client: Any,
    ) -> None:
        self._url, self._folder, self._slot, self._timeout_s = url, folder, slot, timeout_s
        self._file = folder / f"kvframework-{secrets.token_hex(8)}.bin"
        self._digest = fingerprint(model_files(str(gguf)) if gguf.is_file() else (gguf,))
        self._settings = settings
        self._cells = int(self._called("/slots")[slot]["n_ctx"])
        self._client = KVClient(endpoint, name="llama.cpp", connect_timeout_s=connect_timeout_s, **client)
        self._worker: WorkerAdapter | None = None
        self._scheduler: SchedulerAdapter | None = None
        self._form: SlotForm | None = None
        self._memory: dict[str, Planes] = {}
        self._held: list[int] = []  # by the slot, as far as is known
        self._adapted = True  # as what the slot holds from before may be
        if not self._client.wait_up(connect_timeout_s):
            log.warning("no server of kvframework yet, prompts are computed")

    def complete(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        """Answer `/completion` with a restore before and a store after it. `options` are those of the request; with
        adapters of its own (`lora`) it goes past the cache."""
        restored = 0 if options.get("lora") else self.restore(prompt)
        self._held, self._adapted = [], self._adapted or bool(options.get("lora"))
        body = {
            **options,
            "prompt": list(prompt),
            "id_slot": self._slot,
            "cache_prompt": True,
            "n_cache_reuse": 0,  # parts that are moved to other positions are not what a computation gives
            "return_tokens": True,
        }
        answer: dict[str, Any] = self._called("/completion", body)
        answer["kvframework"] = {"restored": restored, "stored": self.store()}
        return answer

    def restore(self, prompt: Sequence[int]) -> int:
        """Put into the slot what the server has of the prompt, one token less at most; return how many tokens."""
        try:
            return self._restore(prompt)
        except (KVFrameworkError, OSError) as error:
            log.warning("the prompt is computed, nothing was restored: %s", error)
            return 0
        finally:
            self._file.unlink(missing_ok=True)

    def store(self) -> int:
        """Store the whole chunks of what the slot holds; return how many tokens that is."""
        try:
            return self._store()
        except (KVFrameworkError, OSError) as error:
            log.warning("the slot was not stored: %s", error)
            return 0
        finally:
            self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Unregister and disconnect. The server goes on."""
        if self._worker is not None:
            self._worker.close()
        self._client.close()

    def _restore(self, prompt: Sequence[int]) -> int:
        self._check_adapters()
        if self._adapted:
            self._called(f"/slots/{self._slot}?action=erase", {})
            self._adapted, self._held = False, []
        if self._form is None:  # only a slot that has computed something tells the form of its files
            self._called("/completion", {"prompt": list(prompt[:1]), "n_predict": 0, "id_slot": self._slot})
            self._register(self._saved().form)
        worker, scheduler, form = self._registered()
        request = self._request(prompt)
        found = scheduler.lookup(request, 0, len(prompt) - 1)
        try:
            found = scheduler.wait(found, 10.0)
            hit = found.hit_tokens
            if not hit or self._held[:hit] == list(prompt[:hit]):
                return 0
            future = worker.submit_retrieve(request, 0, hit, self._blocks(hit))
            if not future.result(self._timeout_s).ok:
                return 0
        finally:
            worker.get_finished()
            scheduler.free(found)
            scheduler.end_request(request.request_id)
        self._held = []
        self._file.write_bytes(built(form, prompt[:hit], list(self._memory.values())))
        restored: int = self._called(f"/slots/{self._slot}?action=restore", {"filename": self._file.name})["n_restored"]
        return restored

    def _store(self) -> int:
        self._check_adapters()
        if self._adapted:
            raise RequestError("an adapter was on", hint="what the slot holds is erased before the next prompt")
        saved = self._saved()
        self._held = saved.tokens
        if self._form != saved.form:
            self._register(saved.form)
        worker, _scheduler, _form = self._registered()
        request = self._request(saved.tokens)
        end = min(request.hashed_tokens, self._cells // BLOCK * BLOCK)
        if not end:
            return 0
        for planes, found in zip(self._memory.values(), saved.layers, strict=True):
            for memory, tensor in zip(planes, found, strict=True):
                memory[:end].copy_(tensor[:end])
        outcome = worker.submit_store(request, 0, end, self._blocks(end)).result(self._timeout_s)
        worker.get_finished()
        return end if outcome.ok else 0

    def _saved(self) -> Any:
        """The slot's file, parsed. Raises `BadLayout`."""
        self._called(f"/slots/{self._slot}?action=save", {"filename": self._file.name})
        return parsed(bytearray(self._file.read_bytes()))

    def _check_adapters(self) -> None:
        """Raise `RequestError` while an adapter is on: what the slot holds is not the model's own from then on."""
        adapters = [each for each in self._called("/lora-adapters") if each.get("scale")]
        if adapters:
            self._adapted = True
            raise RequestError(f"{len(adapters)} adapters are on", hint="their KV has no name here")

    def _register(self, form: SlotForm) -> None:
        """Declare memory of the form of the slot. A slot's cells lie one after the other, heads apart or not."""
        if not self._client.wait_up(0.0):
            self._client.raise_down()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._memory = {
            f"l{at}": tuple(  # type: ignore[misc]
                torch.zeros(self._cells, hidden[plane], dtype=TYPES[types[plane]]) for plane in (0, 1)
            )
            for at, (types, hidden) in enumerate(zip(form.types, form.hidden, strict=True))
        }
        worker = WorkerAdapter(
            self._client,
            instance_id=secrets.randbits(62),
            model_name="gguf",
            revision=f"{self._digest}+{self._settings}",
            layout_options={"axes": ["token", "dim"]},
        )
        registered = worker.register_kv_caches(self._memory, block_size=BLOCK)
        self._worker, self._form, self._scheduler = worker, form, worker.scheduler()
        self._chunk = registered.desc.chunk_tokens

    def _registered(self) -> tuple[WorkerAdapter, SchedulerAdapter, SlotForm]:
        if self._worker is None or self._scheduler is None or self._form is None:
            raise RequestError("the slot is not registered")
        return self._worker, self._scheduler, self._form

    def _request(self, tokens: Sequence[int]) -> RequestHashes:
        request = RequestHashes(self._client.hasher, self._chunk, request_id=secrets.token_hex(8))
        request.extend(tokens[: self._cells])
        return request

    def _blocks(self, tokens: int) -> list[range]:
        registration = self._registered()[0].registration
        groups = registration.layout.groups if registration else ()
        return [range(tokens // group.block_size) for group in groups]

    def _called(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The server's answer. Raises `OSError`."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(  # noqa: S310 - the address is the caller's own server
            self._url + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:  # noqa: S310
            return json.loads(answer.read())
