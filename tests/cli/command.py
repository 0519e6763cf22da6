"""The `kvframework` command as a process of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.registry.fake_distributions import install

COMMAND = [sys.executable, "-m", "kvframework.cli.main"]


def environment(site: Path | None = None, **variables: str) -> dict[str, str]:
    """`site` comes first on the path of modules and of distributions."""
    return os.environ | {"PYTHONPATH": str(site or ""), "KVFRAMEWORK_CONFIG": "", "COLUMNS": "80"} | variables


def run(
    *arguments: str, site: Path | None = None, config: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end. `config` is the value of KVFRAMEWORK_CONFIG."""
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        env=environment(site, KVFRAMEWORK_CONFIG=config, **variables),
        timeout=240,
        check=False,
    )


def install_config_plugins(site: Path) -> None:
    """A memory and a tier for configurations; the options of both hold all that can be shown of options."""
    source = """
        import enum
        from typing import Annotated
        from msgspec import Meta
        from kvframework.api import ByteSize, MemoryProvider, Options, Secret, TierProvider, hookimpl
        class Mode(enum.Enum):
            fast = "fast"
        class Memory(Options, frozen=True):
            size: Annotated[ByteSize, Meta(description="how big")] = ByteSize(1)
        class Store(Options, frozen=True):
            url: str
            token: Secret = ""
            pin: Annotated[Secret | None, Meta(description="of the door")] = None
            mirrors: tuple[str, ...] = ()
            mode: Mode = Mode.fast
            depth: Annotated[int, Meta(ge=1, le=9)] | None = None
        @hookimpl
        def kvf_memories():
            return [MemoryProvider(name="memory", summary="", create=print, options=Memory)]
        @hookimpl
        def kvf_tiers():
            return [
                TierProvider(
                    name="store", summary="keeps [red]things", create=print, options=Store,
                    shared=True, writes=3,
                ),
            ]
    """
    install(site, "acme-kvf", {"memory.memory": "acme_tiers", "tier.store": "acme_tiers"}, {"acme_tiers": source})
