"""The token ids of an order that names its prompt by a text, as the engine's tokenizer makes them.

The text is the prompt that the engine sees, after its chat template. A tokenizer is read once, at its first text."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvf_control.orders import MOST_TOKENS
from kvframework.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)


class Texts:
    """`files` are those of tokenizers, by model. Thread-safe; blocks for the first read of a tokenizer."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._read: dict[str, Any] = {}
        self._lock = threading.Lock()

    def tokenized(self, order: T) -> T:
        """Return an order with `tokens` for its `text`. Raises `RequestError`."""
        text, model = getattr(order, "text", ""), getattr(order, "model", "")
        if not text:
            return order
        if getattr(order, "tokens", ()) or getattr(order, "digests", ()):
            raise RequestError("the order has a text, and tokens or digests", available="one of them")
        if model not in self._files:
            known = ", ".join(sorted(self._files)) or "no model"
            fact = f"there is no tokenizer for a text of the model {model[:64]!r}"
            raise RequestError(fact, available=known, hint="name the model, or the tokens")
        tokens = tuple(self._tokenizer(model).encode(text).ids)
        if len(tokens) > MOST_TOKENS:
            raise RequestError(f"the text has {len(tokens)} tokens", available=f"at most {MOST_TOKENS}")
        return msgspec.structs.replace(order, text="", tokens=tokens)

    def _tokenizer(self, model: str) -> Any:
        with self._lock:
            if model not in self._read:
                from tokenizers import Tokenizer

                try:
                    self._read[model] = Tokenizer.from_file(self._files[model])
                except Exception as error:  # noqa: BLE001  the library raises bare ones
                    raise RequestError(f"the tokenizer of {model} cannot be read", hint=str(error)[:200]) from None
            return self._read[model]
