"""The registration of an engine that holds canonical objects itself, by eight numbers and names: no tensors, no torch.

Its stores and loads use `KVClient.prepare_store` and its siblings, into and out of the mapped arena.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvframework.api.keys import CacheKey
from kvframework.api.transport import Registration, Transfer
from kvframework.client.connection import KVClient
from kvframework.client.transfers import bare_transfer
from kvframework.kernels import warn_of_missing_kernels
from kvframework.wire import messages as m
from kvframework.wire.canonical_registration import non_gpu_layout


@dataclass(frozen=True)
class CanonicalInstance:
    """A registered instance as the server knows it: the namespace of its objects, and their shape, dtype and chunk."""

    registration: Registration

    @property
    def namespace(self) -> bytes:
        return self.registration.namespace

    def transfer(self, key: CacheKey) -> Transfer:
        """Return the transfer of the key's tokens, for `KVClient.prepare_store` and `prepare_load`: it has no blocks,
        the caller writes and reads whole objects itself. Raises `BadRange`."""
        return bare_transfer(self.registration, key)


def register_canonical(
    client: KVClient,
    *,
    instance_id: int,
    model_name: str,
    block_size: int,
    num_layers: int,
    hidden_dim_size: int,
    dtype: str,
    use_mla: bool = False,
    world_size: int = 1,
) -> CanonicalInstance:
    """Register one layer group whose objects are `[planes, layers, tokens, hidden]`, all ranks of `world_size` alike.

    `hidden_dim_size` is the elements of one token, one layer, one plane; `use_mla` means one latent plane instead of K
    and V; `dtype` is a name such as "bfloat16". The registration ends with the client, and is not renewed after a
    reconnect. Blocking. Raises `BadLayout`, `BadDtype`, `AlreadyRegistered`, `TransportMismatch` if the server has no
    engine-driven transport, and the errors of `KVClient.request`.
    """
    warn_of_missing_kernels()
    payload = m.RegisterNonGpuContextPayload(
        instance_id=instance_id,
        model_name=model_name,
        world_size=world_size,
        block_size=block_size,
        num_layers=num_layers,
        hidden_dim_size=hidden_dim_size,
        dtype_str=dtype,
        use_mla=use_mla,
    )
    registered = client.request("REGISTER_KV_CACHE_NON_GPU_CONTEXT", payload, m.Registered)
    return CanonicalInstance(
        Registration(
            instance_id,
            0,
            registered.namespace,
            non_gpu_layout(payload),
            registered.desc,
            since=time.monotonic(),
        )
    )
