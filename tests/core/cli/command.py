"""The `kvframework` command for tests: in this process, or as a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import kvframework.api.console  # noqa: F401  its consoles are made here, outside the environments of `run`
from kvframework.cli.main import main
from tests.core.registry.fake_distributions import install
from tests.support.processes import ran

COMMAND = [sys.executable, "-m", "kvframework.cli.main"]


def environment(site: Path | None = None, **variables: str) -> dict[str, str]:
    """`site` comes first on the path of modules and of distributions."""
    return os.environ | {"PYTHONPATH": str(site or ""), "KVFRAMEWORK_CONFIG": "", "COLUMNS": "80"} | variables


def run_process(
    *arguments: str, site: Path | None = None, config: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command as a process, to its end. `config` is the value of KVFRAMEWORK_CONFIG."""
    return ran(*COMMAND, *arguments, code=None, env=environment(site, KVFRAMEWORK_CONFIG=config, **variables))


def run(
    *arguments: str, site: Path | None = None, config: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command in this process, by the entry point, with an environment, a path and streams of its own.

    Modules of `site` and handlers of signals are forgotten afterwards. `serve`, signals, terminals, and what a process
    itself must prove need `run_process`."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    loaded = set(sys.modules)
    # A check of the doctor may take as long as a busy machine takes.
    doctor = (
        mock.patch("kvframework.doctor.checkup.CHECK_S", 60.0) if "doctor" in arguments else contextlib.nullcontext()
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        mock.patch.dict(os.environ, environment(site, KVFRAMEWORK_CONFIG=config, **variables), clear=True),
        mock.patch.object(tempfile, "tempdir", None),
        mock.patch.object(sys, "argv", ["kvframework", *arguments]),
        mock.patch.object(sys, "path", [str(site), *sys.path] if site else sys.path),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        doctor,
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            _forget(site, set(sys.modules) - loaded)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def _forget(site: Path | None, modules: Iterable[str]) -> None:
    for name in modules if site else ():
        if str(site) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
    importlib.invalidate_caches()


def install_config_plugins(site: Path) -> None:
    """A memory and a tier for configurations; the options of both hold all that can be shown of options."""
    source = """
        import enum
        from typing import Annotated
        from msgspec import Meta
        from kvframework.api.memory import MemoryProvider, hookimpl
        from kvframework.api.plugin import ByteSize, Options, Secret
        from kvframework.api.tier import TierProvider
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
