"""A stand-in for PEFT's LoRA: layers with the attributes and the behaviour that `kvf_transformers` reads, for a default
test run without PEFT. What it stands for is checked against PEFT itself where that is installed."""

from __future__ import annotations

import torch


class LoraLayer(torch.nn.Module):
    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("scaling",)

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.ModuleDict()
        self.lora_B = torch.nn.ModuleDict()
        self.scaling = {}
        self.merged_adapters = []
        self._active_adapter = []
        self._disable_adapters = False

    @property
    def active_adapters(self):
        return self._active_adapter

    def add(self, name, seed):
        random = torch.Generator().manual_seed(seed)
        down = torch.nn.Linear(self.base_layer.in_features, 4, bias=False)
        up = torch.nn.Linear(4, self.base_layer.out_features, bias=False)
        for linear in (down, up):
            linear.weight.data = torch.randn(linear.weight.shape, generator=random)
        self.lora_A[name], self.lora_B[name], self.scaling[name] = down, up, 0.5
        self.eval()

    def change(self, name):
        return self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]

    def merge(self):
        """As PEFT: through `data`, so that no version is counted up."""
        for name in self._active_adapter:
            self.base_layer.weight.data += self.change(name)
            self.merged_adapters.append(name)

    def unmerge(self):
        while self.merged_adapters:
            self.base_layer.weight.data -= self.change(self.merged_adapters.pop())

    def forward(self, x):
        if self._disable_adapters:
            self.unmerge()
        result = self.base_layer(x)
        if not self._disable_adapters and not self.merged_adapters:
            for name in self._active_adapter:
                if name in self.lora_A:
                    result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


def add_adapters(model, **seeds):
    """LoRA at the values' and keys' projections of each layer, by name and seed; none is active. Returns the layers."""
    layers = []
    for layer in model.model.layers:
        for name in ("k_proj", "v_proj"):
            wrapped = getattr(layer.self_attn, name)
            if not isinstance(wrapped, LoraLayer):
                wrapped = LoraLayer(wrapped).requires_grad_(False)
                setattr(layer.self_attn, name, wrapped)
            for adapter, seed in seeds.items():
                wrapped.add(adapter, seed)
            layers.append(wrapped)
    return layers


def set_adapter(layers, *names):
    for layer in layers:
        layer._active_adapter, layer._disable_adapters = [*names], False


def disable_adapters(layers):
    for layer in layers:
        layer._disable_adapters = True
