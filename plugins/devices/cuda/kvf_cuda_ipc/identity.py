"""The identity of a GPU: the UUID by which two processes mean the same one, independent of the devices each sees and
their numbers."""

from __future__ import annotations

import os
import re

from kvframework.errors import DeviceError

_NAME = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def name_of(uuid: bytes, model: str) -> str:
    """Return the name that CUDA_VISIBLE_DEVICES takes; `model` is the device's name, which distinguishes a MIG instance
    from a whole GPU."""
    digits = uuid.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return ("MIG-" if " MIG " in f"{model} " else "GPU-") + "-".join(parts)


def same(one: str, other: str) -> bool:
    """Return whether both names mean one device: by their UUIDs, since what tells an instance of a divided GPU from a
    whole one is only the model's name."""
    return one[4:] == other[4:]


def show_only(device: str) -> None:
    """Hide all other GPUs from this process, also those that the server sees; before CUDA is initialised. Raises
    `DeviceError` for an invalid name of a GPU."""
    if not _NAME.fullmatch(device):
        raise DeviceError(
            f"{device!r} is no name of a GPU", where="cuda_ipc", available="GPU- or MIG- and a UUID, in small letters"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = device
