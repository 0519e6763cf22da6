"""vLLM as an engine, through its own KV connector interface. Two connectors share this package: `KvFrameworkConnector`
(`kvf_vllm.connector`) copies KV itself, `KvFrameworkOffloading` (`kvf_vllm.offloading`) lets vLLM copy."""

from __future__ import annotations

from collections.abc import Mapping

# The connector that the docs, the examples and the benchmarks recommend. It is chosen here alone.
RECOMMENDED = "KvFrameworkConnector"


def transfer_config(
    options: Mapping[str, object] | None = None, *, connector: str = RECOMMENDED, role: str = "kv_both"
) -> dict[str, object]:
    """Return vLLM's `kv_transfer_config` for one of the connectors, with `options` of its own (`kvframework.*`)."""
    return {
        "kv_connector": connector,
        "kv_role": role,
        # With vLLM's default, "fail", a request would fail because its KV was lost.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(options or {}),
    }
