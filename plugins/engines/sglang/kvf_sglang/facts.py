"""Facts from SGLang's configuration: the model, its weights, its settings that change KV, and the name of an engine's
KV out of them. Imports SGLang when it is called.

SGLang tells a storage backend a served name only: not the weights, not the dtype. An adapter it names by its name and
path, in the page hashes: so the bytes of all adapters that the engine was started with are in the name of its KV.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvframework.client import EngineKind, KvIdentity, ModelFacts, model_files, model_identity, process_started

# Options of SGLang's that change what the same weights and adapters compute: quantisation while they are loaded, images
# before the model sees them, hooks around its layers, modules that adapters are kept from. At their defaults they are
# falsy.
CHANGING = (
    "decrypted_config_file",
    "enable_precise_embedding_interpolation",
    "experts_shared_outer_loras",
    "forward_hooks",
    "kt_weight_path",
    "lora_target_modules",
    "mm_process_config",
    "modelopt_checkpoint_restore_path",
    "modelopt_quant",
    "quantize_and_serve",
    "rl_quant_profile",
)
# Those with separate weights, in forms that are not known here.
_OTHER_WEIGHTS = ("kt_weight_path", "modelopt_checkpoint_restore_path", "rl_quant_profile")


def model_facts(engine: str) -> ModelFacts:
    """The model of this process's engine. `engine` names the engine."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    resolved = resolving_view(args)
    draft = getattr(resolved, "speculative_draft_model_path", None)
    return _facts(
        args, resolved, engine, draft=_facts(args, resolved, engine, draft_path=str(draft)) if draft else None
    )


def kv_heads() -> int:
    """The KV heads of the whole model of this process's engine; 0 if SGLang does not say."""
    try:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import get_server_args

        return int(ModelConfig.from_server_args(get_server_args()).get_total_num_kv_heads())
    except Exception:  # noqa: BLE001 - then only engines of equal sizes share KV
        return 0


def _facts(
    args: Any, resolved: Any, engine: str, *, draft: ModelFacts | None = None, draft_path: str = ""
) -> ModelFacts:
    from sglang.srt.configs.model_config import ModelConfig

    if draft_path:
        revision = str(getattr(resolved, "speculative_draft_model_revision", None) or "")
        config = ModelConfig.from_server_args(
            args, model_path=draft_path, model_revision=revision or None, is_draft_model=True
        )
    else:
        revision = str(resolved.revision or "")
        config = ModelConfig.from_server_args(args)
    path = draft_path or str(resolved.model_path)
    load_format = getattr(resolved, "speculative_draft_load_format", None) if draft_path else None
    load_format = load_format or resolved.load_format
    return ModelFacts(
        name=path,
        revision=revision,
        quantization=str(config.quantization or ""),
        load_format=str(getattr(load_format, "value", load_format)),
        seed=int(resolved.random_seed or 0),
        config=_config(path, revision, resolved) or config.hf_config.to_dict(),
        dtype=str(config.dtype),
        settings={} if draft_path else _settings(resolved),
        files=_files(path, revision, resolved),
        draft=draft,
        adapters=None if draft_path else _adapters(resolved),
        engine=engine,
        started=process_started(),
    )


def _files(path: str, revision: str, resolved: Any) -> tuple[Path, ...]:
    """The files that hold all weights, () if there are none."""
    if any(getattr(resolved, name, None) for name in _OTHER_WEIGHTS):
        return ()
    return model_files(path, revision or None, resolved.download_dir, code=bool(resolved.trust_remote_code))


def _config(path: str, revision: str, resolved: Any) -> dict[str, Any]:
    """The model's configuration as it is for every engine: SGLang adds to its own. {} if transformers has no class for
    it, as for some that only SGLang knows."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(
            path,
            revision=revision or None,
            cache_dir=resolved.download_dir,
            trust_remote_code=bool(resolved.trust_remote_code),
            local_files_only=True,
        )
        return dict(found.to_dict())
    except Exception:  # noqa: BLE001 - whatever it is, SGLang's own is there
        return {}


def _settings(resolved: Any) -> dict[str, object]:
    """What changes the content of KV beside the model. What is at its default is falsy, as for other engines."""
    kv_dtype = str(resolved.kv_cache_dtype)
    scales = getattr(resolved, "quantization_param_path", None)
    return {
        "kv_cache_dtype": "" if kv_dtype == "auto" else kv_dtype,
        "kv_scales": Path(scales).read_text() if scales else "",
        "overrides": "" if resolved.json_model_override_args == "{}" else str(resolved.json_model_override_args),
        "speculative": str(getattr(resolved, "speculative_algorithm", None) or ""),
        **{name: _text(getattr(resolved, name, None)) for name in CHANGING},
    }


def _text(value: object) -> str:
    """The value as text, "" for one that is falsy; of a set, whose order differs between processes, sorted."""
    return str(sorted(value) if isinstance(value, (set, frozenset)) else value) if value else ""


def _adapters(resolved: Any) -> dict[str, tuple[Path, ...]]:
    """The files of the adapters that the engine was started with; those loaded later have ids that never come again."""
    return {
        str(each.lora_name): model_files(str(each.lora_path)) for each in getattr(resolved, "lora_paths", None) or ()
    }


SGLANG = EngineKind(
    b"kvf-sgl-config",
    frozenset(
        {
            "auto",
            "bitsandbytes",
            "fastsafetensors",
            "flash_rl",
            "gguf",
            "instanttensor",
            "layered",
            "mistral",
            "npcache",
            "pt",
            "safetensors",
        }
    ),
    "SGLang's extra configuration, see https://github.com/kvframework/kvframework/tree/main/docs/engines/sglang.md#options",
)


def identify(facts: ModelFacts, *, model: str = "", weights: str = "") -> KvIdentity:
    return model_identity(SGLANG, facts, model=model, weights=weights)
