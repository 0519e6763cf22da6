"""Keyrings for tests: made by the command itself, in a folder of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvf_crypto import AeadOptions
from kvf_crypto.codec import AeadCodec
from kvf_crypto.command import app
from kvframework.api.codec import ValueName, ValueRefused
from kvframework.api.toml import convert


class Keyrings:
    """A folder with one keyring, its root key and a configuration that names them."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        self.options: dict[str, object] = {"keyring": str(folder / "keyring.json"), **options}
        self.config = folder / "kvf.toml"
        self.config.write_text("[codecs.aead]\n" + "".join(f"{k} = {v!r}\n" for k, v in self.options.items()))

    def run(self, *arguments: str, fails: bool = False) -> str:
        ran = CliRunner().invoke(app, [*arguments, "--config", str(self.config)])
        assert bool(ran.exit_code or ran.exception) == fails, (ran.output, ran.exception)
        if ran.exception is not None and not isinstance(ran.exception, SystemExit):
            return str(ran.exception)
        return ran.output

    def codec(self, **more: object) -> AeadCodec:
        return AeadCodec(convert({**self.options, **more}, AeadOptions, where="test"))


def sealed(codec: AeadCodec, name: ValueName, data: bytes) -> bytes:
    return b"".join(codec.encode_named(memoryview(data), "", name))


def opened(codec: AeadCodec, name: ValueName, packed: bytes, nbytes: int) -> bytes:
    place = bytearray(nbytes)
    codec.decode_named(memoryview(packed), memoryview(place), name)
    return bytes(place)


def refused(codec: AeadCodec, name: ValueName, packed: bytes, nbytes: int) -> str:
    """The reason for which the codec does not open the value."""
    with pytest.raises(ValueRefused) as caught:
        opened(codec, name, packed, nbytes)
    return caught.value.reason
