"""The problems that an inspection reports: their stable ids, and the severity of each; and what its processes tell each
other."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from msgspec import Struct

from kvframework.registry.discovery import EntryPointInfo

Severity = Literal["error", "warning"]


class Line(Struct, omit_defaults=True):
    """One line of the report: the next step, a problem, or a note on a part that could not be inspected."""

    step: str = ""
    problem: Problem | None = None
    note: str = ""
    provider: str = ""


class Target(Struct, frozen=True):
    """One inspection. `module` is imported, `attribute` of it holds the hooks ("" for the module itself). `offers` are
    its entry points; `rivals` those of other distributions for the same names. `chosen` limits the inspection to one
    provider, and `options` are passed to its `create`."""

    module: str
    attribute: str
    offers: list[EntryPointInfo]
    rivals: list[EntryPointInfo]
    chosen: str = ""
    options: dict[str, Any] = {}

    @property
    def value(self) -> str:
        """The value of the entry point."""
        return f"{self.module}:{self.attribute}" if self.attribute else self.module


class Kind(NamedTuple):
    """What all problems of one id have in common, as far as they do."""

    severity: Severity
    fact: str = ""
    expected: str = ""
    hint: str = ""


_IMPORT_LATER = "import it inside `create`, or in a module that only `create` imports"
PROBLEMS = {
    "import-fails": Kind("error", "", "", _IMPORT_LATER),
    "import-dies": Kind("error", "", "an import that ends", _IMPORT_LATER),
    "heavy-import": Kind("error", "", "", _IMPORT_LATER),
    "eager-import": Kind("warning", "", "", _IMPORT_LATER),
    "internal-import": Kind("warning", "", "", "the rest changes without notice"),
    "misspelt-hook": Kind("error"),
    "unmarked-hook": Kind(
        "error", "it looks like a hook but is not marked", "", "mark it with @kvframework.api.plugin.hookimpl"
    ),
    "async-hook": Kind(
        "error",
        "it is a coroutine function or a generator",
        "def that returns a list",
        "hooks run once, at startup, in a process without an event loop",
    ),
    "hook-arguments": Kind("error", "", "no parameter", "hooks are called without arguments; options come to `create`"),
    "no-hook": Kind(
        "error",
        "nothing in it is marked with @hookimpl",
        "",
        "mark the function that returns the providers with @kvframework.api.plugin.hookimpl",
    ),
    "hook-fails": Kind("error"),
    "wrong-kind": Kind("error"),
    "api-version": Kind("error"),
    "name-conflict": Kind("error", "", "a name of its own", "choose another name, or uninstall the other one"),
    "entry-point-name": Kind("error"),
    "plugin-name": Kind("error"),
    "no-entry-point": Kind("error", "no entry point names this provider"),
    "not-installed": Kind(
        "warning", "no installed distribution has an entry point for it", "", "install the plugin: pip install -e ."
    ),
    "no-requires-python": Kind(
        "warning",
        "its metadata has no Requires-Python",
        'requires-python = ">=3.10"',
        "write it into [project] of pyproject.toml",
    ),
    "no-dependency": Kind(
        "warning",
        "its metadata does not depend on kvframework",
        'dependencies = ["kvframework>=..."]',
        "write it into [project] of pyproject.toml",
    ),
    "no-summary": Kind("warning", "its summary is empty", "a line of text", "`kvframework plugins info` shows it"),
    "probe-fails": Kind(
        "error", "", "None, or why it cannot run here", "find out with importlib.util.find_spec, without an import"
    ),
    "undocumented-option": Kind("error", "the option has no description", "", "`kvframework plugins info` shows it"),
    "wrong-default": Kind(
        "error",
        "",
        "a value that TOML can express, within the option's bounds",
        "take a text, number, boolean, array, table or None, and make the rest of it in `create`",
    ),
    "unreadable-option": Kind(
        "error",
        "",
        "a type that msgspec reads by itself, or ByteSize",
        "take a string, and build the rest from it in `create`",
    ),
    "reserved-option": Kind("error", "", "", "rename the option"),
    "create-fails": Kind(
        "error", "", "", "raise a KVFrameworkError for what is not available here, or report it in the probe"
    ),
    "options-refused": Kind("error"),
    "create-dies": Kind("error"),
    "missing-method": Kind("error"),
    "missing-attribute": Kind("error", "", "", "set it in the class or in __init__"),
    "wrong-signature": Kind("error"),
    "async-method": Kind(
        "error", "it is asynchronous", "def", "write def; a handler returns a Future for what takes time"
    ),
}


class Problem(Struct, frozen=True):
    """One thing that an author should correct. `where` is the module, class, field or metadata it is in, `expected` the
    correct form."""

    id: str
    severity: Severity
    where: str
    fact: str
    expected: str = ""
    hint: str = ""


def problem(name: str, where: str, fact: str = "", *, expected: str = "", hint: str = "") -> Problem:
    """A problem, with what its id says of all such. Raises `KeyError` for an id that is not in `PROBLEMS`."""
    known = PROBLEMS[name]
    return Problem(name, known.severity, where, fact or known.fact, expected or known.expected, hint or known.hint)
