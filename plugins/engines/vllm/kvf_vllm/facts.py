"""Facts from vLLM's configuration: the KV cache groups, the order of bytes inside a block, the model's name. vLLM's
classes are recognised by their names, so that nothing here imports vLLM."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvf_vllm.canonical import LayerForm, layer_numbers
from kvf_vllm.layouts import GroupFacts, packing_name
from kvframework.client import ModelFacts, ModelPart, model_files, process_started
from kvframework.errors import BadLayout, ConfigFieldError, TransportMismatch

# Attention that needs all tokens before a position, as far as the choice of blocks to keep is concerned.
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOW = frozenset({"SlidingWindowSpec"})
_STATE = "MambaSpec"
# Recurrent layers, by vLLM's names, whose whole state lies in one block. A plugin's own ("CUSTOM") may keep more.
_STATES = frozenset({"MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN"})
# The fields of a layer's cache spec and of the layer that determine the order of bytes in a block.
_SPEC_FACTS = (
    "num_kv_heads",
    "num_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "kv_quant_mode",
    "cache_dtype_str",
    "state_content_bytes",
    "tokens_per_state",
    "page_size_bytes",
    "model_version",
    "alignment",
    "mamba_type",
    "shapes",
    "dtypes",
)
# Those of them that differ with the number of workers.
_OF_A_WORKER = ("num_kv_heads", "num_heads", "page_size_bytes")
# The fields of a cache that holds keys and values unchanged.
_PLAIN = {"kv_quant_mode": 0, "num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1}


def groups_of(kv_cache_config: Any) -> tuple[GroupFacts, ...]:
    """The KV cache groups, in vLLM's order. Raises `BadLayout` for a kind of cache that cannot be kept yet."""
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = layer_specs(group.kv_cache_spec)
        names = {type(spec).__name__ for spec in specs.values()} or {type(group.kv_cache_spec).__name__}
        if names == {_STATE} and getattr(group, "enable_kv_transfer", True):
            check_states(index, specs.values())
            groups.append(GroupFacts(tuple(group.layer_names), int(group.kv_cache_spec.block_size), state=True))
            continue
        windows = (
            {int(getattr(spec, "sliding_window", None) or 0) for spec in specs.values()} if names <= _WINDOW else {0}
        )
        if (
            not (names <= _FULL or names <= _WINDOW)
            or len(windows) != 1
            or not getattr(group, "enable_kv_transfer", True)
        ):
            raise BadLayout(
                f"KV cache group {index} holds {', '.join(sorted(names))}",
                where="kvf_vllm",
                available=", ".join(sorted(_FULL | _WINDOW | {_STATE})),
                hint="run this model without the connector",
            )
        # vLLM's window counts the position itself.
        window = max(windows.pop() - 1, 0)
        groups.append(GroupFacts(tuple(group.layer_names), int(group.kv_cache_spec.block_size), window))
    return tuple(groups)


def check_states(index: int, specs: Iterable[Any]) -> None:
    """Raise `BadLayout` for recurrent states that cannot be kept."""
    for spec in specs:
        kind = str(getattr(spec.mamba_type, "name", spec.mamba_type))
        if kind not in _STATES:
            raise BadLayout(
                f"KV cache group {index} holds recurrent states of the kind {kind}",
                where="kvf_vllm",
                available=", ".join(sorted(_STATES)),
                hint="run this model without the connector",
            )
        if spec.mamba_cache_mode != "align":
            raise BadLayout(
                f"KV cache group {index} holds recurrent states, of which vLLM keeps none (mamba_cache_mode is "
                f"{spec.mamba_cache_mode!r})",
                where="kvf_vllm",
                available='mamba_cache_mode "align", vLLM\'s default with prefix caching',
                hint="start the engine with --enable-prefix-caching",
            )


def why_unread(vllm_config: Any, *, invariant: bool = False) -> str:
    """Return why this engine must not compute prompts behind loaded KV, "" where it may.

    Its own prefix cache decides, which vLLM switches off where hits would be wrong. If the user alone has switched it
    off, two facts show that hits are right: vLLM computes the later chunks of a prompt behind the KV of earlier ones,
    and it supports prefix caching for the model. `invariant`: vLLM is to give the same tokens in every batch.
    """
    if vllm_config.cache_config.enable_prefix_caching:
        return ""
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return (
            "this engine has neither prefix caching nor chunked prefill, so its prefill does not read earlier KV (if "
            "you disabled both, enable chunked prefill)"
        )
    if not getattr(vllm_config.model_config, "is_prefix_caching_supported", True):
        return "vLLM does not support prefix caching for this model"
    return "this engine is batch-invariant, and its prefix caching is off" if invariant else ""


def check_parallel(parallel: Any) -> None:
    """Raise `TransportMismatch` for ways of splitting a model whose blocks do not hold consecutive tokens."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise TransportMismatch(
                f"{name} is {getattr(parallel, name)}",
                where="kvf_vllm",
                available="1; tensor, pipeline and data parallelism",
                hint="run without the connector, or split the model in another way",
            )


def check_sleep(model: Any, *, tells: bool, transport: str) -> None:
    """Raise `ConfigFieldError` for an engine that may sleep without a call of its connector (`tells` False), if the
    server might go on using its memory, which lies elsewhere afterwards."""
    if getattr(model, "enable_sleep_mode", False) and not tells and transport != "cpu_gather":
        raise ConfigFieldError(
            "the engine may sleep, but this vLLM does not tell its connector when",
            where="kvframework.transport",
            available="cpu_gather, whose copies the engine makes by itself",
            hint='set "kvframework.transport": "cpu_gather", or use vLLM 0.33',
        )


class Place(NamedTuple):
    """A worker's place among those with KV of their own. `rank` and `world_size` count within its pipeline `stage`;
    `stores`: it is the one that stores what several hold alike."""

    rank: int
    world_size: int
    stores: bool
    stage: int = 0


def place_of(parallel: Any, kv_cache_config: Any) -> Place:
    """Tensor-parallel workers that hold the same KV (MLA) are one rank: the first of them stores, all of them load. The
    workers of a pipeline stage come one behind the other."""
    stages = max(int(getattr(parallel, "pipeline_parallel_size", 1)), 1)
    width = max(parallel.world_size // stages, 1)
    replicas = max(int(getattr(kv_cache_config, "kv_tp_replicas", 1)), 1)
    stage, rank = divmod(parallel.rank, width)
    return Place(rank // replicas, max(width // replicas, 1), rank % replicas == 0, stage)


def part_of(model: Any, parallel: Any, place: Place, groups: Sequence[GroupFacts]) -> ModelPart:
    """The part of the model that a worker holds. Its `stage` names the layers of a pipeline stage, whose numbers are
    given only if all stages hold as many."""
    stages = int(getattr(parallel, "pipeline_parallel_size", 1))
    part = ModelPart(int(model.get_total_num_kv_heads()), place.rank, place.world_size)
    if stages <= 1:
        return part
    text = json.dumps([group.layers for group in groups])
    names = hashlib.blake2b(text.encode(), digest_size=8, person=b"kvf-vllm-stage").hexdigest()
    part = replace(part, stage=f"+pp{stages}-{names}")
    if len(groups) > 1:
        return part  # of several groups a stage may hold one, and another stage another
    layers, total = groups[0].layers, int(model.get_total_num_hidden_layers())
    first = place.stage * len(layers)
    # Of equal stages all are whole shards, or none.
    if len(layers) * stages != total or layer_numbers(layers) != list(range(first, first + len(layers))):
        return part
    return replace(part, first_layer=first, layers=total)


def packing_of(
    vllm_config: Any,
    kv_cache_config: Any,
    num_blocks_on_first_axis: Mapping[str, int],
    *,
    release: str = "",
    canonical: str = "",
) -> str:
    """The packing of a worker's blocks, according to its attention layers; `release` as in `packing_name`. `canonical`
    names vLLM's form of pages that have the heads of all workers: how many are this worker's then does not count.
    Raises `BadLayout` if layers are missing."""
    layers = vllm_config.compilation_config.static_forward_context
    facts: dict[str, object] = {"layout": kv_cache_config.kv_cache_layout}
    counted: tuple[str, ...] = _SPEC_FACTS
    if canonical:
        facts["canonical"] = canonical
        counted = tuple(each for each in _SPEC_FACTS if each not in _OF_A_WORKER)
    backends, isas, sizes = set(), set(), set()
    dtypes: set[str] = set()
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in _specs_by_layer(group).items():
            backend, layer = _backend(layers, name), layers[name]
            # Layers count by their index: their names belong to the model.
            facts[f"{index}.{len(facts)}"] = [
                backend,
                str(getattr(layer, "isa", "")),
                str(getattr(layer, "kv_cache_dtype", "")),
                num_blocks_on_first_axis[name] // kv_cache_config.num_blocks if name in num_blocks_on_first_axis else 1,
                *(str(getattr(spec, each, "")) for each in counted),
                *([_release_of(layer)] if type(spec).__name__ == _STATE else []),
            ]
            backends.add(backend)
            isas.add(str(getattr(layer, "isa", "")))
            dtypes.update(str(each).removeprefix("torch.") for each in getattr(spec, "dtypes", None) or (spec.dtype,))
            sizes.add(int(spec.block_size))
    return packing_name(
        "+".join(sorted(backends)), "+".join(sorted(isas)), "+".join(sorted(dtypes)), min(sizes), facts, release=release
    )


def forms_of(vllm_config: Any, kv_cache_config: Any) -> dict[str, LayerForm]:
    """The form of each layer's cache. Raises `BadLayout` for a layer that names no attention backend."""
    layers = vllm_config.compilation_config.static_forward_context
    forms = {}
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in _specs_by_layer(group).items():
            heads = int(getattr(spec, "num_kv_heads", 0))
            head_size = int(getattr(spec, "head_size", 0))
            forms[name] = LayerForm(
                backend=_backend(layers, name),
                isa=str(getattr(layers[name], "isa", "")),
                cache_layout=str(kv_cache_config.kv_cache_layout),
                spec=type(spec).__name__,
                dtype=str(getattr(spec, "dtype", "")).removeprefix("torch."),
                model_dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
                kv_dtype=str(getattr(layers[name], "kv_cache_dtype", "")),
                heads=heads,
                head_size=head_size,
                head_size_v=int(getattr(spec, "head_size_v", None) or head_size),
                block_size=int(spec.block_size),
                packed=any(getattr(spec, each, plain) != plain for each, plain in _PLAIN.items()),
            )
    return forms


def _backend(layers: Mapping[str, Any], name: str) -> str:
    layer: Any = layers.get(name)
    backend = getattr(layer, "attn_backend", None)
    if backend is None and hasattr(layer, "get_attn_backend"):
        # Recurrent layers only have the method.
        backend = layer.get_attn_backend()
    if backend is None:
        raise BadLayout(f"layer {name} has no attention backend, so its layout is unknown", where="kvf_vllm")
    return str(backend.get_name())


def _release_of(layer: Any) -> str:
    """The release of the package that a layer's class is from. Only its code knows how the numbers of a state lie,
    whose shape may stay the same when they are turned round."""
    return str(getattr(sys.modules.get(type(layer).__module__.partition(".")[0]), "__version__", ""))


def model_of(vllm_config: Any) -> ModelFacts:
    """The facts that identify the model. Looks for its files in the local cache; downloads nothing."""
    # All workers of an engine have one parent.
    engine = f"{getattr(vllm_config, 'instance_id', '') or uuid.uuid4().hex}-{os.getppid()}"
    started = process_started()
    facts = _facts(vllm_config.model_config, vllm_config.load_config, engine, started)
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    # Speculative methods without a draft model name the target model here.
    if draft is None or draft is vllm_config.model_config:
        return facts
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    return replace(facts, draft=_facts(draft, load, engine, started))


def _facts(model: Any, load: Any, engine: str, started: float) -> ModelFacts:
    multimodal = getattr(model, "multimodal_config", None)
    return ModelFacts(
        name=str(model.model),
        revision=str(model.revision or ""),
        quantization=str(model.quantization or ""),
        load_format=str(getattr(load.load_format, "value", load.load_format)),
        seed=int(model.seed or 0),
        config=model.hf_config.to_dict(),
        dtype=str(model.dtype),
        settings={
            "code_revision": model.code_revision or "",
            "disable_sliding_window": bool(getattr(model, "disable_sliding_window", False)),
            "long_rope": _long_rope(model),
            "mm_processor_kwargs": getattr(multimodal, "mm_processor_kwargs", None) or {},
            "quantization_config": str(getattr(model, "quantization_config", None) or ""),
            "video_pruning_rate": getattr(multimodal, "video_pruning_rate", None) or 0,
        },
        files=model_files(
            str(model.model), model.revision, load.download_dir, code=bool(getattr(model, "trust_remote_code", 0))
        ),
        engine=engine,
        started=started,
    )


def _long_rope(model: Any) -> bool:
    """True if rotary embeddings of type `longrope` use their long factors, for every prompt: vLLM does so when the
    longest prompt may exceed the training length."""
    config = getattr(model, "hf_text_config", model.hf_config)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One for all layers, or one for each type of them.
    each = [scaling, *(value for value in scaling.values() if isinstance(value, Mapping))]
    lengths = [
        entry.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", 0)
        for entry in each
        if entry.get("rope_type", entry.get("type")) in ("longrope", "su")
    ]
    return any(int(model.max_model_len) > int(length or 0) for length in lengths)


def layer_specs(spec: Any) -> dict[str, Any]:
    """Cache specs by layer; a spec for a whole group is under ""."""
    inner = getattr(spec, "kv_cache_specs", None)
    return dict(inner) if inner is not None else {"": spec}


def _specs_by_layer(group: Any) -> dict[str, Any]:
    specs = layer_specs(group.kv_cache_spec)
    return {name: specs.get(name, specs.get("")) for name in group.layer_names}
