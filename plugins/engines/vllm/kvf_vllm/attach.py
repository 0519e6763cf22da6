"""One worker's registration with the server: at the engine's start, or as soon as a server runs (`Attachment`). After a
restart of the server the adapter registers again by itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvf_vllm.canonical import BlockForm
from kvf_vllm.layouts import GroupFacts, group_of_each
from kvf_vllm.options import VllmOptions
from kvf_vllm.step_messages import GroupBlocks, Served, TransferOp
from kvframework.api.futures import Future, Promise
from kvframework.api.layout import NO_BLOCK, LayerTensors
from kvframework.api.transport import LoadOutcome, Registration, StoreOutcome
from kvframework.client import Attachment, KVClient, KvIdentity, ModelPart, RequestHashes, WorkerAdapter
from kvframework.errors import KVFrameworkError, NotRegistered

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class AttachedInstance:
    """This worker's registration, which may end and begin again during its life. The client and the tensors are
    borrowed until `close`."""

    def __init__(
        self,
        client: KVClient,
        options: VllmOptions,
        *,
        identity: KvIdentity,
        groups: Sequence[GroupFacts],
        form: BlockForm,
        rank: int,
        world_size: int,
        num_blocks: int,
        stage: int = 0,
        part: ModelPart | None = None,
    ) -> None:
        self._client = client
        self._identity = identity
        self._stage = stage
        self._form = form
        self._groups = tuple(groups)
        self._num_blocks = num_blocks
        self._timeout_s = options.connect_timeout_s
        self._rank, self._world_size, self._part = rank, world_size, part
        self._options = options
        self._adapter = self._adapter_of(identity)
        self._group_of_each: tuple[int, ...] = ()
        self._tensors: dict[str, LayerTensors] = {}
        self._attachment = Attachment(
            client, self._register, missing="no KV is loaded or stored until a server accepts this engine"
        )

    @property
    def served(self) -> Served | None:
        """The names of content, None as long as no server has accepted this worker."""
        return self._attachment.value

    def attach(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register. Without a server, or after its refusal, logs the reason and retries in the background. Blocks for
        at most the connect timeout. Raises `BadLayout` for tensors that are not as declared."""
        self._tensors = self._form.tensors(self._groups, kv_caches, self._num_blocks)
        self._attachment.begin(self._timeout_s)

    def detach(self) -> None:
        """Unregister while the engine sleeps: its memory is mapped nowhere afterwards. Waits for copies under way.
        Idempotent."""
        self._attachment.stop(self._timeout_s + 1.0)
        self._adapter.close()

    def attach_again(self) -> None:
        if self._attachment.stopped:
            self._attachment.begin(self._timeout_s)

    def rename(self, name: Callable[[], KvIdentity]) -> Future[bool]:
        """Register the same tensors by the name that `name` gives, in the background. The result is False if it
        raises: then the name stays. Until there is a result no transfer may begin. Never blocks."""
        naming: Promise[bool] = Promise()

        def take(stop: threading.Event) -> None:
            if naming.query():
                return
            try:
                identity = name()
                if identity != self._identity:
                    self._attachment.replace(stop, lambda: self._take_name(identity))
                naming.set_result(not stop.is_set())
            except Exception as error:
                known = isinstance(error, KVFrameworkError)
                what = "no other engine shares KV of the updated weights"
                log.warning("%s: %s", what, error, exc_info=None if known else error)
                naming.set_result(False)

        self._attachment.begin_in_background(take)
        return naming

    def _take_name(self, identity: KvIdentity) -> None:
        self._adapter.close()
        self._identity, self._adapter = identity, self._adapter_of(identity)

    def load(self, ops: Sequence[TransferOp], *, in_pieces: bool = False) -> list[Future[LoadOutcome]]:
        """Raise before the first is sent. `in_pieces`: what this thread has to copy waits for `Future.advance`."""
        return self._adapter.batched_submit_retrieve(
            [self._request(op) for op in ops],
            [(op.start, op.end) for op in ops],
            [self._by_layer_group(op.block_ids) for op in ops],
            skip_first_n_tokens=[op.skip for op in ops],
            in_pieces=in_pieces,
        )

    def store(self, ops: Sequence[TransferOp]) -> list[Future[StoreOutcome]]:
        """Raise before the first is sent."""
        return self._adapter.batched_submit_store(
            [self._request(op) for op in ops],
            [(op.start, op.end) for op in ops],
            [self._by_layer_group(op.block_ids) for op in ops],
        )

    def nbytes(self, op: TransferOp) -> int:
        """The bytes of its tokens, and of the state at the end if there is one."""
        registration = self._registration()
        chunk, tokens = registration.desc.chunk_tokens, op.end - op.start - op.skip
        return sum(
            (op.block_ids[index][-1] != NO_BLOCK) * desc.nbytes if group.state else tokens * desc.nbytes // chunk
            for index, group, desc in zip(
                self._group_of_each, registration.layout.groups, registration.desc.groups, strict=True
            )
        )

    def collect(self) -> None:
        """Drop transfers that have ended. Never blocks."""
        self._adapter.get_finished()
        self._adapter.take_failed_blocks()

    def close(self) -> None:
        """Unregister, if the server runs. No transfer may be in progress. Idempotent."""
        self.detach()

    def _adapter_of(self, identity: KvIdentity) -> WorkerAdapter:
        return WorkerAdapter(
            self._client,
            model_name=identity.model_name,
            world_size=self._world_size,
            rank=self._rank,
            transport=self._options.transport,
            transport_options=self._options.transport_options,
            layout=self._form.layout,
            layout_options=self._form.options(self._groups),
            revision=identity.revision,
            quantization=identity.quantization,
            model_dtype=identity.dtype,
            packing=self._form.packing,
            part=self._part,
        )

    def _register(self) -> Served:
        registration = self._adapter.register_kv_caches(self._tensors, block_size=self._groups[0].block_size)
        self._group_of_each = group_of_each(registration.layout, self._groups)
        return Served(
            self._adapter.model_name,
            registration.namespace,
            registration.desc.chunk_tokens,
            registration.world_size,
            # Shards of all stages have one namespace.
            0 if registration.shards else self._stage,
            (registration.instance_id,),
        )

    def _registration(self) -> Registration:
        registration = self._adapter.registration
        if registration is None:
            raise NotRegistered("this worker is not registered")
        return registration

    def _request(self, op: TransferOp) -> RequestHashes:
        chunk = self._registration().desc.chunk_tokens
        request = RequestHashes(
            self._client.hasher,
            chunk,
            request_id=op.request_id,
            cache_salt=op.salt,
            digests=op.digests,
            trace=op.trace,
            retain=op.retain,
            conversation=op.conversation,
            grants=op.grants,
        )
        # One stage's word is enough, as one rank's is.
        if op.content is not None and not self._stage:
            request.bring(op.start, op.end, op.content)
        return request

    def _by_layer_group(self, block_ids: GroupBlocks) -> list[Sequence[int]]:
        return [block_ids[group] for group in self._group_of_each]
