"""Owns a GPU's identity: the UUID by which two processes mean the same one, whatever each of them sees and numbers."""

from __future__ import annotations

import os
import re

from kvframework.errors import DeviceError

_NAME = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def name_of(uuid: bytes, model: str) -> str:
    """As CUDA_VISIBLE_DEVICES takes it; `model` is the device's name, which tells a MIG instance from a whole GPU."""
    digits = uuid.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return ("MIG-" if " MIG " in f"{model} " else "GPU-") + "-".join(parts)


def show_only(device: str) -> None:
    """Has this process see no other GPU, whatever the server sees; before CUDA is initialised. Raises `DeviceError` for
    what is no name of a GPU."""
    if not _NAME.fullmatch(device):
        raise DeviceError(
            f"{device!r} is no name of a GPU", where="cuda_ipc", available="GPU- or MIG- and a UUID, in small letters"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = device
