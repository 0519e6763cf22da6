"""Owns the embedded default: what runs when no file is named, and what a file's missing tables fall back to."""

DEFAULT_SOURCE = "embedded default"

DEFAULT_TOML = """
[server]
# endpoint: a private ipc:// socket, see kvframework.config.endpoint

[l1]
use = "pinned"
capacity = "1GiB"

[l1.eviction]
use = "lru"

[hasher]
use = "sha256"

[[transport]]
use = "cpu_gather"

[[layout]]
use = "paged"

[[layout]]
use = "opaque"

[[layout]]
use = "dynamic_cache"
"""
