"""The codecs that this server may use, created on first use. Thread-safe: called from the storage threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from kvframework.api.codec import NO_CODEC, Codec

log = logging.getLogger(__name__)


class CodecTable:
    """Codecs by name. A name stored in L2 only selects among `makers`."""

    def __init__(self, makers: Mapping[str, Callable[[], Codec]] | None = None) -> None:
        self._makers = dict(makers or {})
        self._codecs: dict[str, Codec | None] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Codec | None:
        """Return the codec, None if it is not allowed here or fails to start (logged once)."""
        with self._lock:
            if name not in self._makers:
                return None
            if name not in self._codecs:
                try:
                    self._codecs[name] = self._makers[name]()
                except Exception as error:  # noqa: BLE001  any error of a plugin turns its values into misses
                    log.error("codec %s cannot be used: %s", name, error)
                    self._codecs[name] = None
            return self._codecs[name]

    def pack(self, name: str, data: memoryview, dtype: str = "") -> tuple[str, Sequence[memoryview]]:
        """Return the codec's name and the packed form of elements of `dtype` ("" for unknown ones); `none` and the
        unchanged data where packing does not make it smaller."""
        codec = None if name == NO_CODEC else self.get(name)
        packed = self._encoded(name, codec, data, dtype) if codec is not None else None
        if packed is not None and sum(part.nbytes for part in packed) < data.nbytes:
            return name, packed
        return NO_CODEC, [data]

    def _encoded(self, name: str, codec: Codec, data: memoryview, dtype: str) -> Sequence[memoryview] | None:
        """Pack; None if the codec fails: this value is then stored unpacked, and other values are unaffected."""
        try:
            parts = codec.encode_elements(data, dtype)
            # Tiers rely on flat bytes.
            return [part if part.format == "B" and part.ndim == 1 else part.cast("B") for part in parts]
        except Exception as error:  # noqa: BLE001  any error of a plugin
            log.error("codec %s failed on %d bytes, which are stored unpacked: %r", name, data.nbytes, error)
            return None
