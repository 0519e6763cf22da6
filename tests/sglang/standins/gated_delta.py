"""The kernels of Gated DeltaNet, token by token in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit


def causal_conv1d_fn(
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: Any = "silu",
    conv_states: Any = None,
    has_initial_state: Any = None,
    cache_indices: Any = None,
    query_start_loc: Any = None,
    **_rest: object,
) -> Any:
    width, out = weight.shape[-1], torch.empty_like(x)
    kernel = weight.reshape(-1, 1, width).to(x.dtype)
    for number in range(len(query_start_loc) - 1):
        start, end = int(query_start_loc[number]), int(query_start_loc[number + 1])
        slot = int(cache_indices[number])
        known = has_initial_state is not None and bool(has_initial_state[number])
        before = conv_states[slot].to(x.dtype) if known else x.new_zeros(x.shape[0], width - 1)
        line = torch.cat([before, x[:, start:end]], dim=-1)
        result = F.conv1d(line[None], kernel, _as(bias, x), groups=x.shape[0])[0]
        out[:, start:end] = _activated(result, activation)
        conv_states[slot] = line[:, line.shape[-1] - width + 1 :].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x: Any,
    conv_states: Any,
    weight: Any,
    bias: Any = None,
    activation: Any = "silu",
    cache_seqlens: Any = None,
    conv_state_indices: Any = None,
    **_rest: object,
) -> Any:
    out = torch.empty_like(x)
    for number in range(x.shape[0]):
        slot = int(conv_state_indices[number])
        line = torch.cat([conv_states[slot].to(x.dtype), x[number].reshape(-1, 1)], dim=-1)
        result = (line * weight.reshape(line.shape).to(x.dtype)).sum(-1) + (0 if bias is None else _as(bias, x))
        out[number] = _activated(result, activation)
        conv_states[slot] = line[:, 1:].to(conv_states.dtype)
    return out


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    initial_state_indices: Any = None,
    **_rest: object,
) -> Any:
    out = _scan(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel)
    return out[None].to(v.dtype), None, None


def fused_gdn_gating(a_log: Any, a: Any, b: Any, dt_bias: Any, *_rest: object) -> Any:
    return (-a_log.float().exp() * F.softplus(a.float() + dt_bias.float()))[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update(
    A_log: Any,  # noqa: N803 - SGLang calls it by name
    dt_bias: Any,
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    initial_state_source: Any = None,
    initial_state_indices: Any = None,
    cu_seqlens: Any = None,
    use_qk_l2norm_in_kernel: bool = True,
    **_rest: object,
) -> Any:
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    normal = use_qk_l2norm_in_kernel
    return _scan(q, k, v, g, beta, initial_state_source, initial_state_indices, cu_seqlens, normal)[None].to(v.dtype)


def fused_rmsnorm_gated(x: Any, weight: Any, z: Any, eps: float) -> Any:
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (normal * F.silu(z.float())).to(x.dtype)


# Those that SGLang imports from `sgl_kernel.mamba`, and those that it calls as operators of torch.
KERNELS = (causal_conv1d_fn, causal_conv1d_update, chunk_gated_delta_rule)
OPERATORS = (fused_gdn_gating, fused_sigmoid_gating_delta_rule_update, fused_rmsnorm_gated)


def _scan(q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, indices: Any, cu_seqlens: Any, normal: bool) -> Any:
    repeat = v.shape[2] // q.shape[2]
    q, k, v = (each[0].float() for each in (q, k, v))
    if normal:
        q, k = F.normalize(q, dim=-1, eps=1e-6), F.normalize(k, dim=-1, eps=1e-6)
    q, k = (each.repeat_interleave(repeat, dim=1) for each in (q * q.shape[-1] ** -0.5, k))
    out = torch.empty_like(v)
    for number in range(len(cu_seqlens) - 1):
        slot = int(indices[number])
        state = states[slot].float()  # [heads, V, K]
        for at in range(int(cu_seqlens[number]), int(cu_seqlens[number + 1])):
            state = state * g[0, at, :, None, None].exp()
            change = (v[at] - (state @ k[at][..., None])[..., 0]) * beta[0, at, :, None]
            state = state + change[..., None] * k[at][:, None, :]
            out[at] = (state @ q[at][..., None])[..., 0]
        states[slot] = state.to(states.dtype)
    return out


def _as(bias: Any, x: Any) -> Any:
    return None if bias is None else bias.to(x.dtype)


def _activated(x: Any, activation: Any) -> Any:
    return F.silu(x) if activation in ("silu", "swish", True) else x
