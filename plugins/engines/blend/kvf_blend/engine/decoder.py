"""The parts of a transformers decoder that blend uses: embeddings, single layers, the head; and the reason why a model
has none. Runs in the engine process and thread.

The only assumption about a model is that it is built like Llama. `check_decoder` proves the rest once per model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvf_blend.errors import BlendRefused

_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
_ATTENTION = ("eager", "sdpa")
_HINT = "use TransformersKV for this model: prefixes are found as always"


class KVSink(Protocol):
    """Receives the keys and values of a layer's attention, and returns those that it attends to."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_more: object, **_named: object
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Decoder:
    """One decoder, run layer by layer. Borrows the model. Raises `BlendRefused` for one that is not built like Llama,
    or has windows."""

    def __init__(self, model: Any) -> None:
        self.name = type(model).__name__
        self._model = model
        self._inner = model.base_model
        self._head = model.get_output_embeddings()
        lacking = [part for part in _PARTS if not hasattr(self._inner, part)]
        if lacking or self._head is None:
            self.refuse(
                f"it has no {', '.join(lacking) or 'output embeddings'}",
                available="decoders with embed_tokens, layers, norm, rotary_emb: Llama, Mistral, Qwen2, Qwen3",
            )
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
            self.refuse("some of its layers attend to a window only", available="layers that attend to every token")
        if config._attn_implementation not in _ATTENTION:
            self.refuse(f"it attends by {config._attn_implementation!r}", available=", ".join(_ATTENTION))

    @property
    def layers(self) -> int:
        return len(self._inner.layers)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Hidden states `[1, tokens, hidden]` before the first layer."""
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self.device)
        hidden: torch.Tensor = self._inner.embed_tokens(ids)
        return hidden

    def run_layer(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, sink: KVSink, visible: int
    ) -> torch.Tensor:
        """Hidden states behind the layer, of tokens at `positions`. `sink` returns the KV of the prompt's first
        `visible` tokens, of which each token attends to those up to its own position."""
        at = positions.unsqueeze(0)
        hidden = self._inner.layers[layer](
            hidden,
            attention_mask=_mask(positions, visible, hidden.dtype),
            position_ids=at,
            past_key_values=sink,
            use_cache=True,
            position_embeddings=self._inner.rotary_emb(hidden, position_ids=at),
        )
        return hidden[0] if isinstance(hidden, tuple) else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[1, vocabulary]` of the last token of `hidden`."""
        logits: torch.Tensor = self._head(self._inner.norm(hidden[:, -1:]))[:, -1]
        return logits

    def refuse(self, why: str, *, available: str = "") -> None:
        """Raises `BlendRefused`."""
        raise BlendRefused(why, where=self.name, available=available, hint=_HINT)


def _mask(positions: torch.Tensor, visible: int, dtype: torch.dtype) -> torch.Tensor:
    """The causal mask `[1, 1, positions, visible]`, which is added to the scores: no token attends to a later one."""
    later = torch.arange(visible, device=positions.device) > positions.unsqueeze(1)
    mask = torch.zeros(later.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(later, torch.finfo(dtype).min)[None, None]
