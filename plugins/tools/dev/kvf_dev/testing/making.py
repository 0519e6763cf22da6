"""How a kit makes the plugin that it tests: by name, as a server does, in this process and in another."""

from __future__ import annotations

import ast
import importlib
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest

from kvf_dev.testing.kit import Kit
from kvframework.api.plugin import Provider
from kvframework.config.schema import PluginTable
from kvframework.errors import PluginUnavailable
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import resolve_table

_BY_NAME = """
from kvframework.registry.registry import PluginRegistry
registry = PluginRegistry()
provider = registry.resolve({kind!r}, {use!r})
made = provider.create(registry.options(provider, {options!r}, where="the kit"))
"""
_BY_STATE = """
import importlib, operator
made = object.__new__(operator.attrgetter({qualname!r})(importlib.import_module({module!r})))
made.__dict__.update({state!r})
"""


class NamedKit(Kit):
    """Base class of the kits that an author configures by `use` and `options`, or by a fixture of a factory."""

    use: ClassVar[str] = ""
    """Name of the plugin; its entry point is `<kind>.<use>`."""

    options: ClassVar[Mapping[str, object]] = {}
    """Options of the plugin, as in its TOML table."""

    _descriptor: ClassVar[type[Provider[Any]]]

    _where: ClassVar[str] = "`options` of the kit"

    def resolve(self, options: Mapping[str, object] | None = None) -> tuple[Any, Any]:
        """Return the provider that `use` names, and its options as a server gets them, from `options` or those of the
        class. Skips the test if the plugin cannot run here."""
        if not self.use:
            pytest.fail(f"give `use`, the plugin's name, or a fixture `{self._fixture}`")
        table = PluginTable(self.use, dict(self.options if options is None else options), self._where)
        try:
            return resolve_table(PluginRegistry(), table, self._descriptor)
        except PluginUnavailable as error:
            pytest.skip(error.fact)

    def by_name(self, options: Mapping[str, object] | None = None) -> Callable[[], Any]:
        """Return a factory of the plugin that `use` names."""
        provider, checked = self.resolve(options)
        return partial(provider.create, checked)

    @property
    def _fixture(self) -> str:
        """The fixture that an author may give instead of `use`."""
        kind = self._descriptor.kind
        return {"eviction": "make_policy", "tier": "tier"}.get(kind, f"make_{kind}")

    def must_be_named(self, name: object) -> None:
        """Fail unless `name`, the name of the object under test, is the plugin's."""
        kind = self._descriptor.kind
        assert isinstance(name, str), f"`name` of a {kind} is a str, not {name!r}"
        assert name, f"`name` of a {kind} is empty"
        assert not self.use or name == self.use, f"`name` of what the plugin {self.use!r} makes is {name!r}"

    def elsewhere(self, made: object, program: str, *, seed: int = 1, without: str = "") -> bytes:
        """Run `program` in a process with `seed` as `PYTHONHASHSEED`, where `made` is the same plugin, and return its
        standard output. `without` names a module that cannot be imported there; the plugin is made without options
        then, as a server makes it. Without `use`, that process imports the plugin's class, and its attributes are
        written into the program; the test is skipped where that is impossible. Blocks up to 60 s.
        """
        lacking = f"sys.modules[{without!r}] = None\n" if without else ""
        if self.use:
            options = {} if without else dict(self.options)
            source = _BY_NAME.format(kind=self._descriptor.kind, use=self.use, options=options)
        else:
            source = _by_state(made)
        run = subprocess.run(
            [sys.executable, "-"],
            input=f"import sys; sys.path[:] = {sys.path!r}\n{lacking}{source}{program}".encode(),
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            timeout=60,
            check=False,
        )
        last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        assert run.returncode == 0, f"another process fails: {last or run.returncode}"
        return run.stdout


def _by_state(made: object) -> str:
    """Return source that makes a copy of `made` in another process. Skips the test where that is impossible."""
    kind = type(made)
    try:
        found = operator.attrgetter(kind.__qualname__)(importlib.import_module(kind.__module__))
        object.__new__(kind)
        goes = found is kind and ast.literal_eval(repr(vars(made))) == vars(made)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError):
        goes = False
    if not goes or any(getattr(each, "__slots__", ()) for each in kind.__mro__):
        why = f"{kind.__qualname__} cannot be imported there, or its attributes are no literals"
        pytest.skip(f"give `use`, so that another process can make it too: {why}")
    return _BY_STATE.format(module=kind.__module__, qualname=kind.__qualname__, state=vars(made))
