"""The norms around Gated DeltaNet, which ask for a processor's AMX before they ask for the CPU's kernel, and the gate
of a shared expert, which exists for accelerators only. Imports SGLang."""

from __future__ import annotations

from typing import Any


def install() -> None:
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise

    fused_norm_gate._use_cpu = layernorm_gated._use_cpu = True
    elementwise._launch_fused_gate_sigmoid_mul = _gate


def _gate(hidden_states: Any, gate_weight: Any, shared_output: Any, output: Any, do_add: bool) -> None:
    gated = (hidden_states @ gate_weight).sigmoid()[:, None] * shared_output
    output.copy_(output + gated if do_add else gated)
