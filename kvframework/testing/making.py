"""Owns how a kit comes by the plugin that it tests: by name, as a server makes it, here and in another process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest

from kvframework.api import Provider
from kvframework.config import PluginTable
from kvframework.errors import PluginUnavailable
from kvframework.plugins import PluginRegistry, resolve_table

_BY_NAME = """
from kvframework.plugins import PluginRegistry
registry = PluginRegistry()
provider = registry.resolve({kind!r}, {use!r})
made = provider.create(registry.options(provider, {options!r}, where="the kit"))
"""
_PICKLED = "import pickle\nmade = pickle.loads(bytes.fromhex({pickled!r}))\n"


class NamedKit:
    """What an author gives: `use`, and `options` if there are any; or a fixture that returns a factory."""

    use: ClassVar[str] = ""
    """Name of the plugin: its entry point is `<kind>.<use>`."""

    options: ClassVar[Mapping[str, object]] = {}
    """Its options, as in its TOML table."""

    role: ClassVar[type[Provider[Any]]]

    def by_name(self) -> Callable[[], Any]:
        """What makes the plugin that `use` names, each time anew. Skips the test if it cannot run here."""
        if not self.use:
            pytest.fail(f"give `use`, the plugin's name, or a fixture `{self._fixture}`")
        table = PluginTable(self.use, dict(self.options), f"`options` of the kit for the {self.role.kind} {self.use}")
        try:
            provider, options = resolve_table(PluginRegistry(), table, self.role)
        except PluginUnavailable as error:
            pytest.skip(error.fact)
        return partial(provider.create, options)  # type: ignore[attr-defined]

    def must_be_named(self, name: object) -> None:
        """Fails unless `name`, that of what was made, is the plugin's."""
        assert isinstance(name, str)
        assert name
        assert not self.use or name == self.use, "the plugin's name and that of what it makes"

    def elsewhere(self, made: object, program: str, *, seed: int) -> bytes:
        """What `program` writes to its standard output in a process with `seed` as `PYTHONHASHSEED`, where `made` is
        the same plugin. Without `use` it is pickled, and the test skipped if that cannot be done. Blocks up to 60 s."""
        if self.use:
            source = _BY_NAME.format(kind=self.role.kind, use=self.use, options=dict(self.options))
        else:
            try:
                source = _PICKLED.format(pickled=pickle.dumps(made).hex())
            except Exception as error:  # noqa: BLE001  whatever an object says that will not be pickled
                pytest.skip(f"give `use`, so that another process can make it too: it cannot be pickled: {error}")
        run = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{source}{program}"],
            env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr.decode(errors="replace")
        return run.stdout

    def in_threads(self, *works: Callable[[], object], within_s: float = 60.0) -> None:
        """Runs `works` at the same time; raises what the first of them raised, fails if one does not end."""
        raised: list[BaseException] = []
        together = threading.Barrier(len(works), timeout=within_s)

        def run(work: Callable[[], object]) -> None:
            try:
                together.wait()
                work()
            except BaseException as error:  # noqa: BLE001  raised again in the test's own thread
                raised.append(error)

        threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # what is shared and should not be is then met half-way
        try:
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + within_s
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0.0))
        finally:
            sys.setswitchinterval(before)
        if raised:
            raise raised[0]
        assert not any(thread.is_alive() for thread in threads), "a call does not end"

    @property
    def _fixture(self) -> str:
        return {"eviction": "make_policy", "hasher": "make_hasher", "codec": "make_codec"}[self.role.kind]
