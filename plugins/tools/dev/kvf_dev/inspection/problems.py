"""The problems that an inspection reports: their stable ids, and the severity of each."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Line(Struct, omit_defaults=True):
    """One line of the report: the next step, a problem, or a note on a part that could not be inspected."""

    step: str = ""
    problem: Problem | None = None
    note: str = ""
    provider: str = ""


Severity = Literal["error", "warning"]

# Each id with its severity and its meaning.
PROBLEMS: dict[str, tuple[Severity, str]] = {
    "import-fails": ("error", "the module raises when it is imported"),
    "import-dies": ("error", "the module ends or hangs the interpreter that imports it"),
    "heavy-import": ("error", "the import is slow, needs much memory, or brings in a library of an accelerator"),
    "eager-import": ("warning", "the import brings in a distribution that only `create` needs"),
    "internal-import": ("warning", "the source imports modules outside the plugin API"),
    "misspelt-hook": ("error", "a hook implementation has a name that no hook has"),
    "unmarked-hook": ("error", "a function has a hook's name, or nearly, and no @hookimpl"),
    "async-hook": ("error", "a hook implementation is asynchronous or a generator"),
    "hook-arguments": ("error", "a hook implementation takes arguments"),
    "keyword-only-hook": ("error", "a hook implementation takes keyword-only arguments"),
    "no-hook": ("error", "nothing in the module is marked with @hookimpl"),
    "hook-fails": ("error", "a hook raises, or returns no list of providers"),
    "wrong-kind": ("error", "a hook or an entry point is of another kind than its provider"),
    "api-version": ("error", "the plugin is written for another plugin API, or its distribution for another release"),
    "name-conflict": ("error", "another distribution offers the same name"),
    "entry-point-name": ("error", "an entry point names no provider"),
    "plugin-name": ("error", "an entry point has a name that no plugin of its kind can have"),
    "no-entry-point": ("error", "a provider has no entry point, so no TOML can name it"),
    "not-installed": ("warning", "no installed distribution offers the module"),
    "no-requires-python": ("warning", "the distribution's metadata has no Requires-Python"),
    "no-dependency": ("warning", "the distribution's metadata does not depend on kvframework"),
    "no-summary": ("warning", "a provider's summary is empty"),
    "probe-fails": ("error", "a provider's probe raises, or returns neither None nor a text"),
    "undocumented-option": ("error", "an option has no Meta(description=...)"),
    "wrong-default": ("error", "TOML cannot express an option's default, or the default breaks the option's bounds"),
    "unreadable-option": ("error", "the framework cannot read an option's type from TOML"),
    "reserved-option": ("error", "an option has the name of a key of the core, and never receives a value"),
    "create-fails": ("error", "`create` raises with default options, or makes something else than the contract"),
    "options-refused": ("error", "the options that `--set` gives, or `create` with them, are refused"),
    "create-dies": ("error", "`create` ends or hangs the interpreter"),
    "missing-method": ("error", "what `create` makes lacks a method of the contract"),
    "missing-attribute": ("error", "what `create` makes lacks an attribute of the contract"),
    "wrong-signature": ("error", "a method, `create` or `diagnose` cannot be called as the core calls it"),
    "async-method": ("error", "a method of the contract is asynchronous: the core does not await it"),
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


def problem(name: str, where: str, fact: str, *, expected: str = "", hint: str = "") -> Problem:
    """A problem with the severity of its id. Raises `KeyError` for an id that is not in `PROBLEMS`."""
    return Problem(name, PROBLEMS[name][0], where, fact, expected, hint)
