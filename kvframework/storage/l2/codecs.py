"""Owns the codecs that this server may use, made when first needed. Thread-safe: called from the storage threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from kvframework.api import Codec
from kvframework.storage.envelope import NO_CODEC

log = logging.getLogger(__name__)


class CodecTable:
    """`makers` by name; what values in L2 name decides nothing but which of these is asked."""

    def __init__(self, makers: Mapping[str, Callable[[], Codec]] | None = None) -> None:
        self._makers = dict(makers or {})
        self._codecs: dict[str, Codec | None] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Codec | None:
        """The codec, None if it is not allowed here or does not work (told once in the log)."""
        with self._lock:
            if name not in self._makers:
                return None
            if name not in self._codecs:
                try:
                    self._codecs[name] = self._makers[name]()
                except Exception as error:  # noqa: BLE001  whatever a plugin raises, its values are misses
                    log.error("codec %s cannot be used: %s", name, error)
                    self._codecs[name] = None
            return self._codecs[name]

    def pack(self, name: str, data: memoryview) -> tuple[str, Sequence[memoryview]]:
        """The packed form and the codec's name; as it is, and `none`, where packing does not make it smaller."""
        codec = None if name == NO_CODEC else self.get(name)
        packed = self._encoded(name, codec, data) if codec is not None else None
        if packed is not None and sum(part.nbytes for part in packed) < data.nbytes:
            return name, packed
        return NO_CODEC, [data]

    def _encoded(self, name: str, codec: Codec, data: memoryview) -> Sequence[memoryview] | None:
        """None if the codec fails: the value goes as it is, and keeps back none of those beside it."""
        try:
            # Tiers count on flat bytes.
            return [part if part.format == "B" and part.ndim == 1 else part.cast("B") for part in codec.encode(data)]
        except Exception as error:  # noqa: BLE001  whatever a plugin raises
            log.error("codec %s failed on %d bytes, which are stored unpacked: %r", name, data.nbytes, error)
            return None
