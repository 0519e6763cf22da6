"""What a server imports for blend: no torch and nothing of the engine's half, also where those are installed."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
import sys
import kvf_blend
first = set(sys.modules)
from kvf_dev.inspection.creation import no_services
(provider,) = kvf_blend.kvf_request_handlers()
handlers = provider.create(provider.options(), no_services())
print(*sorted(handler.spec.name for handler in handlers))
print(*sorted(name for name in first if name.startswith("kvf_")))
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "transformers",
    "kvf_transformers") or name.startswith("kvframework.client")))
print(*sorted(name.partition(".")[2] for name in sys.modules if name.startswith("kvf_blend.")))
"""


def test_it_starts_without_torch_and_client() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=240, check=True)
    requests, listed, foreign, modules = done.stdout.split("\n")[:4]
    assert requests.split() == [
        "blend.CB_LOOKUP_PRE_COMPUTED",
        "blend.CB_REGISTER_KV_CACHE",
        "blend.CB_RETRIEVE_PRE_COMPUTED",
        "blend.CB_STORE_FINAL",
        "blend.CB_STORE_PRE_COMPUTED",
        "blend.CB_UNREGISTER_KV_CACHE",
    ]
    assert listed.split() == ["kvf_blend"], "a list of plugins loads no more"
    assert foreign.split() == []
    assert modules.split() == [
        "errors",
        "messages",
        "rotary",
        "server",
        "server.handlers",
        "server.instances",
        "server.lookup",
        "server.matcher",
        "server.segments",
    ], "the contract in pyproject.toml names the same"
