"""All stand-ins in one: SGLang then runs Llama and Qwen3-Next with torch alone."""

from __future__ import annotations

import os

from tests.sglang.standins import kernels, vision


def install() -> None:
    """Comes before any other import of SGLang, in each of its processes. Idempotent in a process."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    vision.install()
    kernels.install()
    # These import SGLang.
    from tests.sglang.standins import gated_delta_norms, transfers

    transfers.install()
    gated_delta_norms.install()
