"""The connector's name in vLLM's factory, so that `"kv_connector": "KvFrameworkConnector"` is enough, also for vLLM's
MultiConnector, which finds the classes of statistics by that name.

`register` is an entry point of vLLM's group `vllm.general_plugins`: each of its processes calls it, also in engines
that do not use the connector. So it imports nothing that vLLM would not, and any failure is a line at debug level.
"""

from __future__ import annotations

import logging

NAME = "KvFrameworkConnector"
# The connectors and their modules.
CONNECTORS = {NAME: "kvf_vllm.connector", "KvFrameworkOffloading": "kvf_vllm.offloading.connector"}

log = logging.getLogger(__name__)


def register() -> None:
    """Register the connector, which is imported on first use. Idempotent. Never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name, module in CONNECTORS.items():
            if name not in KVConnectorFactory._registry:
                KVConnectorFactory.register_connector(name, module, name)
    # vLLM's caller does not catch: an exception would end an engine that may not even use the connector.
    except Exception as error:  # noqa: BLE001
        log.debug("%s is not registered with this vLLM: %r", NAME, error)


_OURS = ("kvf_vllm", "kvframework", "kvf_cpu_gather")


def join_log(engine: str) -> None:
    """Give the framework's loggers the handlers and the level of the logger `engine`, unless the application has
    configured logging itself."""
    theirs = logging.getLogger(engine)
    if logging.getLogger().handlers or not theirs.handlers:
        return
    for name in _OURS:
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.getEffectiveLevel())
            ours.propagate = False
