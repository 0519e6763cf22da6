"""Operators of torchvision, whose wheel is built for CUDA: once they are declared its Python part can be imported,
which transformers and SGLang do."""

from __future__ import annotations

import contextlib

import torch

_OPERATORS = {"nms": "Tensor dets, Tensor scores, float iou_threshold", "qnms": "Tensor dets, Tensor scores, float iou"}


def install() -> None:
    """Idempotent in a process."""
    for name, parameters in _OPERATORS.items():
        with contextlib.suppress(RuntimeError):  # declared already
            torch.library.define(f"torchvision::{name}", f"({parameters}) -> Tensor")
