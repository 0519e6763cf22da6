"""The port of vLLM's NixlConnector beside a connector of ours: an engine that cannot listen there waits for ever."""

import socket

from kvframework.errors import ConfigFieldError


def claimed(port: int) -> socket.socket:
    """The claim on a port, by an abstract name: engines that start together listen later. Raises `ConfigFieldError`."""
    claim, where = socket.socket(socket.AF_UNIX), "VLLM_NIXL_SIDE_CHANNEL_PORT"
    try:
        claim.bind(f"\0kvf-nixl-{port}")
        socket.create_server(("localhost", port)).close()
    except OSError as error:
        raise ConfigFieldError(f"port {port} cannot be used: {error}", where=where, hint="set another") from None
    return claim
