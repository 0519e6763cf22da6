"""The codec `aead`: values of L2 tiers, sealed under their names with keys per tenant. Runs in storage threads.

Importing this module does not import `cryptography`, so that a list of plugins stays cheap."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.codec import Codec, CodecProvider, hookimpl
from kvframework.api.installing import install_command
from kvframework.api.plugin import Options

DEFAULT_KEYRING = "~/.config/kvframework/keyring.json"


class AeadOptions(Options, frozen=True):
    """Options of `[codecs.aead]`. At most one of `key_file`, `key_env`, `key_command`, `aws_key` and `vault_key` names
    the root key, which wraps all keys of the keyring; without one it is the file beside the keyring, `*.key`."""

    keyring: Annotated[
        str, Meta(min_length=1, description="file of the wrapped keys, made by `kvframework crypto rotate`")
    ] = DEFAULT_KEYRING
    key_file: Annotated[
        str, Meta(description="file of the root key: 32 bytes, or 64 hexadecimal digits, for its owner only")
    ] = ""
    key_env: Annotated[
        str, Meta(description="name of the environment variable with the root key, 64 hexadecimal digits")
    ] = ""
    key_command: Annotated[
        list[str], Meta(max_length=64, description="command that prints the root key, 64 hexadecimal digits")
    ] = []  # noqa: RUF012  msgspec gives each its own
    aws_key: Annotated[str, Meta(description="key of AWS KMS that wraps the root key: id, ARN or alias")] = ""
    aws_region: Annotated[str, Meta(description="region of `aws_key`; empty: as AWS's own settings say")] = ""
    aws_endpoint: Annotated[str, Meta(description="another endpoint of KMS; empty: AWS's")] = ""
    vault_key: Annotated[str, Meta(description="key of Vault's transit engine that wraps the root key")] = ""
    vault_url: Annotated[str, Meta(description="address of Vault; empty: VAULT_ADDR")] = ""
    vault_mount: Annotated[str, Meta(description="mount of the transit engine")] = "transit"
    vault_token_file: Annotated[str, Meta(description="file of Vault's token; empty: VAULT_TOKEN")] = ""
    root_timeout_s: Annotated[
        float, Meta(ge=0.1, le=60, description="seconds that a command or a KMS may take for the root key")
    ] = 5.0
    cipher: Annotated[
        Literal["auto", "aes-256-gcm", "chacha20-poly1305"],
        Meta(description="cipher of new values; auto: AES where the processor has instructions for it"),
    ] = "auto"
    compress: Annotated[
        Literal["none", "zstd"], Meta(description="packing before sealing; sizes then tell something of the content")
    ] = "none"

    def __post_init__(self) -> None:
        given = [self.key_file, self.key_env, self.key_command, self.aws_key, self.vault_key]
        if sum(map(bool, given)) > 1:
            raise ValueError("the root key has one source: key_file, key_env, key_command, aws_key or vault_key")


def _probe() -> str | None:
    if find_spec("cryptography") is None:
        return f"cryptography is not installed: {install_command(distribution='kvframework-crypto')}"
    return None


def _create(options: AeadOptions) -> Codec:
    from kvf_crypto.codec import AeadCodec

    return AeadCodec(options)


@hookimpl
def kvf_codecs() -> list[CodecProvider[AeadOptions]]:
    return [
        CodecProvider(
            name="aead",
            summary="seals values under their names, with keys per tenant",
            options=AeadOptions,
            probe=_probe,
            create=_create,
            required=True,
        )
    ]
