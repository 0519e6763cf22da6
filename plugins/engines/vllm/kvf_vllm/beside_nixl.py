"""The port of vLLM's NixlConnector beside a connector of ours: an engine that cannot listen there waits for ever."""

import socket

from kvframework.errors import ConfigFieldError


def claimed(host: str, port: int) -> socket.socket:
    """The claim on a port, by an abstract name: engines that start together listen later. Raises `ConfigFieldError`."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0kvf-nixl-{port}")
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigFieldError(
            f"port {port} at {host} cannot be used for NIXL's handshakes: {error.strerror or error}",
            where="VLLM_NIXL_SIDE_CHANNEL_PORT",
            hint="set VLLM_NIXL_SIDE_CHANNEL_PORT to another number for each engine of this machine",
        ) from None
    return claim
