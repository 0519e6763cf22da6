"""Checks a prefiller and a decoder before they get requests: the settings that must agree, then two prompts, of which
one must come by NIXL and the other through the cache. Ends with status 1 and the reason, else with 0.

python check.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 [--wait 600]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

BY_NIXL, CACHED = "vllm:nixl_bytes_transferred_sum", "vllm:prompt_tokens_by_source_total"
# Of `vllm:cache_config_info`.
OF_CACHES = ("block_size", "cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo", "sliding_window")
PATIENCE_S = 20.0


class Wrong(Exception):
    """The reason, as it is printed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, help="URL of the engine with kv_role kv_producer")
    parser.add_argument("--decode", required=True, help="URL of the engine with kv_role kv_consumer")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds until both must answer")
    given = parser.parse_args()
    try:
        for url in (given.prefill, given.decode):
            wait_for(url, given.wait)
        print(checked(given.prefill, given.decode))
    except (Wrong, OSError, ValueError, LookupError) as error:
        sys.exit(f"this prefiller and this decoder do not fit: {error}")


def checked(prefill: str, decode: str) -> str:
    """What was seen. Raises `Wrong` with the first difference, or with the way that moves nothing."""
    here, there = settings(prefill), settings(decode)
    differ = [f"{name} is {here.get(name)} and {there.get(name)}" for name in here if here[name] != there.get(name)]
    if differ:
        raise Wrong("; ".join(differ))
    model, most = here["model"], int(here["max_model_len"])
    # More than a chunk, which has at most 256 tokens.
    length = min(600, most - 8)
    tokens = random.sample(range(5, 905), length)
    place = asked(prefill, model, tokens, {"do_remote_decode": True}).get("kv_transfer_params")
    if not place:
        raise Wrong("the prefiller answers without kv_transfer_params: its MultiConnector has no NixlConnector")
    before = counted(decode, BY_NIXL)
    asked(decode, model, tokens, place)
    if not grows(lambda: asked(decode, model, [7] * 9, {}), decode, BY_NIXL, before):
        raise Wrong("the decoder fetched nothing by NIXL; its log names what differs (kv_role, ports, UCX_TLS)")

    def stored_then_loaded() -> None:
        tokens = random.sample(range(5, 905), length)
        for url in (prefill, decode):
            asked(url, model, tokens, {})

    if not grows(stored_then_loaded, decode, CACHED, counted(decode, CACHED)):
        raise Wrong("the decoder finds nothing that the prefiller stored; compare namespaces in kvframework status")
    return f"prefiller and decoder fit: {length} tokens came by NIXL, others through the cache"


def settings(url: str) -> dict[str, str]:
    (first, *_) = fetched(f"{url}/v1/models")["data"]
    found = {"model": first["id"], "path of the model": first.get("root"), "max_model_len": first["max_model_len"]}
    found["release of vLLM"] = fetched(f"{url}/version")["version"]
    info = next((line for line in metrics(url) if line.startswith("vllm:cache_config_info{")), "")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info))
    return {name: str(each) for name, each in {**found, **{name: labels.get(name) for name in OF_CACHES}}.items()}


def grows(act: Callable[[], object], url: str, name: str, before: float) -> bool:
    """Whether a count of the engine grows. A store may be late, and counts come with a later step: so `act` again."""
    until = time.monotonic() + PATIENCE_S
    while counted(url, name) <= before:
        if time.monotonic() > until:
            return False
        act()
    return True


def counted(url: str, name: str) -> float:
    lines = (line for line in metrics(url) if line.startswith(name + "{"))
    return sum(float(line.split()[-1]) for line in lines if "source=" not in line or "external" in line)


def metrics(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        return str(reply.read().decode()).splitlines()


def asked(url: str, model: str, tokens: list[int], transfer: dict[str, Any]) -> dict[str, Any]:
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "kv_transfer_params": transfer or None}
    return fetched(f"{url}/v1/completions", json.dumps(body).encode())


def fetched(url: str, body: bytes | None = None) -> dict[str, Any]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def wait_for(url: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > until:
                raise Wrong(f"{url} does not answer: {error}") from error
            time.sleep(0.5)


if __name__ == "__main__":
    main()
