"""The current state of a model that decides its KV, from its modules: their classes, settings and weights, and the
active adapters. Engine side; reads no weight's content, so that it can run before every request.

Adapters are recognised by the common attributes of PEFT's layers, so that nothing here imports PEFT. A layer whose
adapters are disabled or merged computes by its base layer alone and counts as that one: with its adapters off a model
has the name that it had before it got any. Of LoRA only the active adapters count, under any name; of other methods,
which may share weights between adapters, all count.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module

from kvframework.errors import RequestError

# Settings that may differ between two loads of the same weights, of a configuration and of a module.
_NOT_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "architectures", "use_cache"})
_NOT_STATE = frozenset(
    {
        "all_tied_weights_keys",
        "call_super_init",
        "dump_patches",
        "generation_config",
        "gradient_checkpointing",
        "hf_device_map",
        "hf_quantizer",
        "kernel_config",
        "loss_type",
        "model_tags",
        "name_or_path",
        "peft_config",
        "training",
        "warnings_issued",
    }
)
# Ways to compute the same attention, which differ only in rounding.
_SAME_ATTENTION = frozenset(
    {None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"}
)
# The libraries whose hooks move data and record outputs, and do not change them.
_TRUSTED_HOOKS = ("accelerate.", "kvf_transformers.", "peft.", "torch.", "transformers.")
_RANDOM = ("drop", "jitter")
# Methods where the KV of a prefix depends on later tokens, or on more than tokens.
_REFUSED_METHODS = frozenset({"XLORA", "POLY"})
_MERGE = "merge the adapter into the weights (merge_and_unload), or use the model without the cache"


class Merges(list[str]):
    """The merged adapters of a layer, in place of its own list. PEFT writes to weights through `data` whenever it
    changes this list: `number` is another one after each change, of any layer."""

    numbers = itertools.count()

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.number = next(self.numbers)

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _numbered(change: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def numbered(merges: Merges, *args: Any) -> Any:
        merges.number = next(merges.numbers)
        return change(merges, *args)

    return numbered


for _name in ("append", "extend", "insert", "pop", "remove", "clear", "__setitem__", "__delitem__", "__iadd__"):
    setattr(Merges, _name, _numbered(getattr(list, _name)))


def at_work(tuners: Sequence[Any]) -> tuple[object, ...]:
    """Return which adapters of these modules are at work, quickly enough for every forward pass."""
    return tuple(
        (
            bool(vars(each)["_disable_adapters"]),
            tuple(each.active_adapters),
            tuple(getattr(each, "merged_adapters", ())),
        )
        for each in tuners
    )


def by_request(tuners: Sequence[Any]) -> bool:
    """Return whether each request of the pass under way has an adapter of its own, by PEFT's `adapter_names`."""
    hooks = (hook for each in tuners for hook in vars(each)["_forward_pre_hooks"].values())
    return any("adapter_names" in getattr(getattr(hook, "func", hook), "__name__", "") for hook in hooks)


class Offloaded(NamedTuple):
    """A weight that accelerate's map loads, from `file` if there is one."""

    weights: Mapping[str, torch.Tensor]
    name: str
    file: str


class Weight(NamedTuple):
    """`tensor` is borrowed. `merged` tells which adapters were added to it in place, and changes with each merge."""

    path: str
    tensor: torch.Tensor | Offloaded
    merged: tuple[object, ...] = ()


@dataclasses.dataclass
class Section:
    """The findings, in the order of the modules. `packed` are modules that keep more than their tensors show."""

    facts: list[str] = dataclasses.field(default_factory=list)
    weights: list[Weight] = dataclasses.field(default_factory=list)
    packed: list[tuple[str, torch.nn.Module]] = dataclasses.field(default_factory=list)


class ModelState(NamedTuple):
    """The state of a model. `adapters` is empty unless one is active; `tuners` are the modules that have any."""

    model: Section
    adapters: Section
    tuners: tuple[Any, ...] = ()


def read_state(model: Any) -> ModelState:
    """Walk over all modules. Raises `RequestError` for a model whose KV no name can stand for: it draws random numbers,
    runs hooks of foreign code, or has an adapter that makes KV depend on more than the tokens before."""
    walk = _Walk()
    inner = unwrapped(model)
    if inner.training:
        # Some modules read the configuration at each forward pass.
        _check_not_random(inner.config.to_dict(), "the configuration")
    walk.module(inner, "", walk.model)
    walk.active.update(_names(model) if model is not inner else ())
    _check_methods(model, inner, walk.active)
    _check_hooks("every module", torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    device = next((at.tensor.device.type for at in walk.model.weights if isinstance(at.tensor, torch.Tensor)), "cpu")
    if torch.is_autocast_enabled(device):
        walk.model.facts.append(f"autocast={torch.get_autocast_dtype(device)}")
    return ModelState(walk.model, walk.adapters, tuple(walk.tuners))


class _Walk:
    def __init__(self) -> None:
        self.model = Section()
        self.adapters = Section()
        self.active: set[str] = set()
        self.tuners: list[torch.nn.Module] = []
        # The visited modules, and configurations, which most modules of a model share.
        self._met: set[int] = set()
        self._configs: dict[int, int] = {}

    def module(self, module: torch.nn.Module, path: str, into: Section, merged: tuple[object, ...] = ()) -> None:
        own = vars(module)
        self._met.add(id(module))
        if own["_forward_pre_hooks"] or own["_forward_hooks"]:
            _check_hooks(path or "the model", own["_forward_pre_hooks"], own["_forward_hooks"])
        if own["training"]:
            _check_not_random(own, path)
        if "_disable_adapters" in own:
            self.tuners.append(module)
            if "base_layer" in own["_modules"]:
                self._tuner(module, own, path, into, merged)
                return
            if "original_module" in own["_modules"]:
                self._wrapper(module, own, path, into)
                return
        self._own(module, own, path, into, merged)
        for name, child in own["_modules"].items():
            if child is not None:
                self.module(child, f"{path}{name}.", into, merged)

    def _own(
        self, module: torch.nn.Module, own: Mapping[str, Any], path: str, into: Section, merged: tuple[object, ...] = ()
    ) -> None:
        """Read the module itself, without its children."""
        facts = [_called(type(module))]
        for key, value in own.items():
            if key[0] != "_" and key not in _NOT_STATE:
                facts.append(f"{key}={self._plain(value, f'{path}{key}', into)}")
        into.facts.append(f"{path}: {', '.join(facts)}")
        for kind in ("_parameters", "_buffers"):
            for name, tensor in own[kind].items():
                if tensor is not None:
                    into.weights.append(Weight(path + name, _present(tensor, name, own, path), merged))
        if type(module)._save_to_state_dict is not torch.nn.Module._save_to_state_dict:
            into.packed.append((path, module))

    def _tuner(
        self, module: Any, own: Mapping[str, Any], path: str, into: Section, merged_around: tuple[object, ...]
    ) -> None:
        """Read a layer that adds adapters to its base layer, or has them merged into it."""
        if type(module.merged_adapters) is list:
            module.merged_adapters = Merges(module.merged_adapters)
        merged = tuple(module.merged_adapters or ())
        number = getattr(module.merged_adapters, "number", 0)
        if merged and own["_disable_adapters"]:
            raise RequestError(
                f"adapters {', '.join(merged)} are merged and disabled: the next forward pass removes them",
                where=path,
                hint="call unmerge_adapter() before adapters are disabled",
            )
        self.module(own["_modules"]["base_layer"], path, into, (*merged_around, *merged, number))
        if merged or own["_disable_adapters"]:
            return
        lora = any(each.__name__ == "LoraLayer" for each in type(module).__mro__) and not hasattr(module, "lora_arrow")
        active = list(module.active_adapters)
        here = _adapters_of(module)
        at_work = [name for name in active if name in here] if lora else active
        if not at_work:
            return
        self.active.update(at_work)
        # An adapter's name changes nothing, its place among the active ones may.
        places = {name: str(place) for place, name in enumerate(at_work)} if lora else {name: name for name in here}
        facts = [_called(type(module)), *(() if lora else at_work)]
        for key, value in own.items():
            if key[0] == "_" or key in _NOT_STATE or key == "merged_adapters":
                continue
            if isinstance(value, dict) and value.keys() <= here:
                value = {places[name]: each for name, each in value.items() if name in places}
            facts.append(f"{key}={self._plain(value, f'{path}{key}', self.adapters)}")
        self.adapters.facts.append(f"{path}: {', '.join(facts)}")
        for kind in ("_parameters", "_buffers"):
            for name, tensor in own[kind].items():
                if tensor is not None:
                    self.adapters.weights.append(Weight(path + name, _present(tensor, name, own, path)))
        for name, child in own["_modules"].items():
            if name != "base_layer" and child is not None:
                self._by_adapter(child, f"{path}{name}.", places if lora else None)

    def _by_adapter(self, child: Any, path: str, places: Mapping[str, str] | None) -> None:
        """Read a dictionary of modules or tensors by adapter; of those in `places`, or of all."""
        items = getattr(child, "items", None)
        if places is None or items is None:
            self.module(child, path, self.adapters)
            return
        for name, each in items():
            if name not in places:
                continue
            if isinstance(each, torch.nn.Module):
                self.module(each, f"{path}{places[name]}.", self.adapters)
            else:
                self.adapters.weights.append(Weight(path + places[name], each))

    def _wrapper(self, module: Any, own: Mapping[str, Any], path: str, into: Section) -> None:
        """Read a module that PEFT replaces whole by one of an adapter, or changes in a way of its own."""
        active = [name for name in module.active_adapters if name in own["_adapters"] and not own["_disable_adapters"]]
        replacements = own["_modules"].get("modules_to_save")
        if active and replacements is not None:
            self.active.update(active)
            self.module(replacements[active[0]], path, into)
            return
        self.module(own["_modules"]["original_module"], path, into)
        if active:
            self.active.update(active)
            self._own(module, own, path, self.adapters)
            self.adapters.facts.append(f"{path}: {active}")
            for name, child in own["_modules"].items():
                if name != "original_module" and child is not None:
                    self.module(child, f"{path}{name}.", self.adapters)

    def _plain(self, value: object, path: str, into: Section, depth: int = 0) -> str:
        """Return a simple value's text, and the class of other objects. Tensors and modules in it count as weights."""
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return repr(value)
        if isinstance(value, torch.Tensor):
            into.weights.append(Weight(path, value))
            return "tensor"
        if isinstance(value, torch.nn.Module):
            if id(value) not in self._met:
                self.module(value, f"{path}.", into)
            return "module"
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            return self._config(value, into)
        if depth > 5 or isinstance(value, torch.device):
            return ""
        if isinstance(value, functools.partial):
            value = [value.func, *value.args, value.keywords]
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(map(repr, value)))}}}"
        if isinstance(value, (torch.dtype, enum.Enum)):
            return str(value)
        if isinstance(value, Mapping):
            return self._pairs(sorted((str(key), each) for key, each in value.items()), path, into, depth)
        if isinstance(value, (list, tuple)):
            return self._pairs([(str(at), each) for at, each in enumerate(value)], path, into, depth)
        if dataclasses.is_dataclass(value):
            return _called(type(value)) + self._pairs([*vars(value).items()], path, into, depth)
        return _called(value if callable(value) else type(value))

    def _pairs(self, pairs: Sequence[tuple[str, object]], path: str, into: Section, depth: int) -> str:
        return repr([f"{key}: {self._plain(each, f'{path}.{key}', into, depth + 1)}" for key, each in pairs])

    def _config(self, config: Any, into: Section) -> str:
        """Return a configuration's number as text; its content is a fact of the first module that has it."""
        if id(config) not in self._configs:
            self._configs[id(config)] = len(self._configs)
            described = {key: each for key, each in config.to_dict().items() if key not in _NOT_CONFIG}
            attention = getattr(config, "_attn_implementation", None)
            if not isinstance(attention, (str, type(None))) or attention not in _SAME_ATTENTION:
                described["attention"] = attention
            into.facts.append(f"configuration: {json.dumps(described, sort_keys=True, default=str)}")
        return f"configuration {self._configs[id(config)]}"


def _called(code: object) -> str:
    """Return the name of a class or function, which is all of it that can be compared."""
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"


def unwrapped(model: Any) -> Any:
    """Return the model inside `torch.compile` and PEFT's wrapper."""
    while True:
        if "_orig_mod" in vars(model).get("_modules", {}):
            model = model._orig_mod
        elif hasattr(type(model), "get_base_model"):
            for config in _methods(model, set(_names(model))):
                if getattr(config, "is_prompt_learning", False):
                    raise RequestError(
                        f"the adapter puts {_method(config)} before the prompt, which no token names",
                        where=type(model).__name__,
                        hint="merge the adapter into the weights, or use the model without the cache",
                    )
            model = model.get_base_model()
        else:
            return model


def _check_methods(model: Any, inner: Any, active: set[str]) -> None:
    for config in [*_methods(model, active), *_methods(inner, active)]:
        if _method(config) in _REFUSED_METHODS or getattr(config, "alora_invocation_tokens", None):
            raise RequestError(
                f"the KV of a prefix under an adapter of type {_method(config)} depends on later tokens",
                where=type(inner).__name__,
                available="adapters that add to weights: LoRA and its like",
                hint=_MERGE,
            )


def _names(model: Any) -> list[str]:
    active = getattr(model, "active_adapters", None) or []
    if callable(active):  # transformers' own, through a compiled wrapper
        return []
    return [active] if isinstance(active, str) else list(active)


def _methods(model: Any, names: set[str]) -> list[Any]:
    configs = getattr(model, "peft_config", None)
    return [configs[name] for name in names if name in configs] if isinstance(configs, Mapping) else []


def _method(config: Any) -> str:
    kind = getattr(config, "peft_type", "")
    return str(getattr(kind, "value", kind))


def _adapters_of(module: Any) -> set[str]:
    names: set[str] = set()
    for attribute in (*module.adapter_layer_names, *module.other_param_names):
        keys = getattr(getattr(module, attribute, None), "keys", None)
        names.update(keys() if keys is not None else ())
    return names


def _check_not_random(own: Mapping[str, Any], path: str) -> None:
    for key, value in own.items():
        named = key == "p" or any(part in key for part in _RANDOM)
        if named and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            raise RequestError(
                f"the model is in training mode and draws random numbers: {key} is {value}",
                where=path or "the model",
                hint="call model.eval()",
            )


def _check_hooks(where: str, *hooks: Mapping[int, Any]) -> None:
    for each in hooks:
        for hook in each.values():
            called = _called(getattr(hook, "func", hook))
            if not called.startswith(_TRUSTED_HOOKS):
                raise RequestError(
                    f"the forward hook {called} may change KV, but is not part of the KV's name",
                    where=where,
                    hint="remove the hook, or use the model without the cache",
                )


def _present(tensor: torch.Tensor, name: str, own: Mapping[str, Any], path: str) -> torch.Tensor | Offloaded:
    if tensor.device.type != "meta":
        return tensor
    hook = own.get("_hf_hook")
    for each in (hook, *getattr(hook, "hooks", ())):
        weights = getattr(each, "weights_map", None)
        if weights is not None:
            return _offloaded(weights, name)
    raise RequestError(
        "the weight is on the meta device: it has no content", where=path + name, hint="load the model's weights first"
    )


def _offloaded(weights: Any, name: str) -> torch.Tensor | Offloaded:
    """Return a weight of accelerate's maps: the tensor itself if it lies in host memory."""
    while hasattr(weights, "dataset"):
        weights, name = weights.dataset, f"{weights.prefix}{name}"
    held = getattr(weights, "state_dict", weights)
    if isinstance(held, dict) and name in held:
        tensor: torch.Tensor = held[name]
        return tensor
    about = getattr(weights, "index", {}).get(name, {})
    file = about.get("safetensors_file") or os.path.join(getattr(weights, "save_folder", None) or "", f"{name}.dat")
    return Offloaded(weights, name, file)
