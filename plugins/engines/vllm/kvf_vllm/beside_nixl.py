"""What is checked at the start of an engine whose MultiConnector has vLLM's NixlConnector, too: settings by which vLLM
would wait for ever, or move nothing, without a word."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from kvframework.errors import ConfigFieldError

NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


def nixl_of(engine: Any) -> Sequence[Mapping[str, Any]]:
    """The tables of NIXL among the connectors of an engine's `kv_transfer_config`."""
    connectors = engine.kv_connector_extra_config.get("connectors") or ()
    return [each for each in connectors if each.get("kv_connector") in NIXL]


def check_roles(engine: Any) -> None:
    """Raise `ConfigFieldError` where NIXL has another role than its engine: a prefiller whose NIXL only receives."""
    for each in nixl_of(engine):
        role = each.get("kv_role")
        if engine.kv_role not in ("kv_both", role):
            raise ConfigFieldError(
                f"kv_role is {role!r} in {each['kv_connector']}, but {engine.kv_role!r} in {engine.kv_connector}",
                where="kv_transfer_config",
                available="kv_producer in both for a prefiller, kv_consumer in both for a decoder",
            )


class SideChannel:
    """The claim of one engine on the TCP port of its NIXL, where another engine waits for ever: vLLM does not notice
    that it cannot listen. Ends with `close`, or with the process."""

    def __init__(self, host: str, port: int) -> None:
        """Raise `ConfigFieldError` if another engine has claimed the port, or somebody listens there."""
        # Engines that start together listen only later: the name says at once whose the port is.
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._claim.bind(f"\0kvf-nixl-{port}")
            _listen_once(host, port)
        except OSError as error:
            self.close()
            raise ConfigFieldError(
                f"port {port} at {host} cannot be used for NIXL's handshakes: {error.strerror or error}",
                where=_PORT,
                available="a port that no other engine of this machine uses",
                hint=f"set {_PORT} to another number in the environment of each engine",
            ) from None

    def close(self) -> None:
        self._claim.close()


def _listen_once(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
