"""The whole inspection of a plugin: what is inspected, its metadata and source, which is not run, the results of other
processes, and the report. Runs in the process of a command; blocks for seconds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from kvf_dev.inspection.problems import FORKED, MOST_S, Line, Problem, Target, cost_problems, name_fault, problem
from kvframework.api.plugin import API_VERSION, ENTRY_POINT_GROUP
from kvframework.errors import ConfigFieldError, PluginNotFound, PluginWrongApi
from kvframework.registry.discovery import KINDS, EntryPointInfo, discover
from kvframework.registry.plugin_check import check_release
from kvframework.registry.registry import PluginRegistry, conflict
from kvframework.supervise.child import run_isolated

DEADLINE_S = 20.0
_PUBLIC = ("kvframework.api", "kvframework.client", "kvframework.status", "kvframework.errors", "kvf_dev.testing")
_MOST_FILES = 500
# Of an import that takes long: the first may be that of a cold disk.
_ATTEMPTS = 3


class Report(msgspec.Struct, frozen=True):
    """The result. `checked` are the inspected providers; `notes` name what could not be inspected, and why."""

    target: str
    checked: list[str]
    problems: list[Problem]
    notes: list[str]

    @property
    def errors(self) -> int:
        return sum(each.severity == "error" for each in self.problems)


def inspect_plugin(text: str, options: Mapping[str, object] | None = None, *, deadline_s: float = DEADLINE_S) -> Report:
    """Inspects MODULE or KIND.NAME; the latter may be given `options` for its `create`. No plugin code is imported into
    this process; a step that takes longer than `deadline_s` is ended and reported. Raises `PluginNotFound` and
    `PluginWrongKind` if there is no such plugin, `ConfigFieldError` for options of a module."""
    checked: list[str] = []
    problems: list[Problem] = []
    notes: list[str] = []
    for target in find_targets(text, options or {}):
        for line in _inspect(target, deadline_s):
            problems += [line.problem] if line.problem else []
            notes += [line.note] if line.note else []
            checked += [line.provider] if line.provider else []
    return Report(text, list(dict.fromkeys(checked)), list(dict.fromkeys(problems)), list(dict.fromkeys(notes)))


def _inspect(target: Target, deadline_s: float) -> Iterator[Line]:
    for each in (*metadata_problems(target), *import_problems(target.module)):
        yield Line(problem=each)
    for _ in range(_ATTEMPTS):
        ran = run_isolated("kvf_dev.inspection.process", msgspec.json.encode(target), deadline_s=deadline_s)
        lines = [msgspec.json.decode(line, type=Line) for line in ran.lines]
        cost = next((line.cost for line in lines if line.cost), None)
        if cost is None or cost.seconds <= MOST_S:
            break
    for each in cost_problems(target.module, {offer.distribution for offer in target.offers}, cost) if cost else ():
        yield Line(problem=each)
    yield from lines
    forked = {each.removesuffix(FORKED) for each in ran.printed.splitlines() if each.endswith(FORKED)}
    for line in (line for line in lines if line.step in forked):
        yield Line(problem=problem(line.dies, line.where, f"{line.step}{FORKED}", "a call that returns once"))
    if ran.ended:
        start = Line(step="the start of the inspection", dies="import-dies", where=target.module)
        last = [start, *(line for line in lines if line.step)][-1]
        said = ran.printed.strip().rpartition("\n")[2]
        fact = f"{last.step}: the process {ran.ended}: {said}".removesuffix(": ")
        yield Line(problem=problem(last.dies, last.where, fact, "a call that returns"))


def find_targets(text: str, options: Mapping[str, object]) -> list[Target]:
    """One for each distribution that offers KIND.NAME, or for each object that entry points name in MODULE. Blocking:
    reads metadata. Raises `PluginNotFound`, `PluginWrongKind`, and `ConfigFieldError` for `options` of no plugin."""
    installed = discover()
    kind, _, name = text.partition(".")
    if options and not (kind in KINDS and name):
        where = f"--set {next(iter(options))}"
        raise ConfigFieldError("--set needs one plugin", where=where, available="KIND.NAME")
    if kind in KINDS and name:
        named = [offer for offer in installed if (offer.kind, offer.name) == (kind, name)]
        if not named:
            PluginRegistry(installed).resolve(kind, name)  # the error names the available ones
        return [_target(offer.value, installed, offer.title, options) for offer in named]
    values = dict.fromkeys(offer.value for offer in installed if _module(offer.value) == text)
    if values:
        return [_target(value, installed) for value in values]
    if not _exists(text):
        available = ", ".join(sorted({offer.title for offer in installed}))
        hint = "give KIND.NAME as `kvframework plugins list` shows it, or a module that this Python can import"
        raise PluginNotFound(f"{text!r} is not an installed plugin and not a module", available=available, hint=hint)
    return [Target(text, "", [], [])]


def _target(
    value: str, installed: list[EntryPointInfo], chosen: str = "", options: Mapping[str, object] | None = None
) -> Target:
    offers = [offer for offer in installed if offer.value == value]
    titles = {offer.title for offer in offers if not chosen or offer.title == chosen}
    owners = {offer.distribution for offer in offers}
    rivals = [offer for offer in installed if offer.title in titles and offer.distribution not in owners]
    attribute = value.partition(":")[2].partition("[")[0].strip()
    return Target(_module(value), attribute, offers, rivals, chosen, dict(options or {}))


def _module(value: str) -> str:
    return value.partition(":")[0].partition("[")[0].strip()


def _exists(module: str) -> bool:
    """Check the first part of the name only: checking further parts would import it."""
    root = module.partition(".")[0]
    return root.isidentifier() and find_spec(root) is not None


def metadata_problems(target: Target) -> Iterator[Problem]:
    """Problems of the metadata. Blocking: reads metadata files."""
    if not target.offers:
        fact = "no installed distribution has an entry point for the plugin"
        yield problem("not-installed", target.module, fact, f'[project.entry-points."{ENTRY_POINT_GROUP}"]')
    for title in dict.fromkeys(rival.title for rival in target.rivals):
        told = conflict([offer for offer in discover() if offer.title == title])
        yield problem("name-conflict", title, told.fact, "a name that no other distribution offers", told.hint)
    ours = {each.title for each in target.offers if each.api_major == API_VERSION[0]}
    for offer in target.offers:
        if offer.title not in ours:
            fact = f"the plugin's entry point asks for plugin API {offer.api_major}"
            hint = "offer it in this group as well"
            yield problem("api-version", offer.title, fact, f"the group {ENTRY_POINT_GROUP}", hint)
        if offer.kind not in KINDS:
            fact = "the plugin's entry point names no kind of plugin"
            yield problem("entry-point-name", offer.title, fact, f"KIND.NAME, with one of {', '.join(KINDS)}")
        elif fault := name_fault(offer.kind, offer.name):
            hint = f"call it {offer.kind}.{fault.nearest}" if fault.nearest else ""
            yield problem("plugin-name", offer.title, fault.fact, fault.available, hint)
    for name, offer in {offer.distribution: offer for offer in target.offers}.items():
        yield from _distribution_problems(name, str(offer))


def _distribution_problems(name: str, title: str) -> Iterator[Problem]:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    if not found.metadata["Requires-Python"]:
        fact = "the distribution's metadata has no Requires-Python"
        yield problem("no-requires-python", name, fact, 'requires-python = ">=3.10"')
    try:
        check_release(name, title)
    except PluginWrongApi as error:
        yield problem("api-version", name, error.fact, error.available, error.hint)
    needed = {re.split(r"[^A-Za-z0-9._-]", each.strip(), maxsplit=1)[0].lower() for each in found.requires or ()}
    if "kvframework" not in {*needed, name.lower()}:
        fact = "the distribution's metadata does not depend on kvframework"
        yield problem("no-dependency", name, fact, 'dependencies = ["kvframework>=..."]')


def _sources(module: str) -> Iterator[tuple[str, Path]]:
    """Name for an import, and path, of each file of the package that `module` belongs to; none without source."""
    root = module.partition(".")[0]
    spec = find_spec(root)
    if spec is None:
        return
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py"))[:_MOST_FILES]:
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((root, *(part for part in parts if part != "__init__"))), path
    if not spec.submodule_search_locations and spec.origin and spec.origin.endswith(".py"):
        yield root, Path(spec.origin)


def import_problems(module: str) -> Iterator[Problem]:
    """Import of modules that a release may change without notice. Blocking: reads the source."""
    for name, path in _sources(module):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # not a source file of this Python: the import reports more
        for node in ast.walk(tree):
            for imported in filter(_internal, _imported(node)):
                where = f"{name}, line {getattr(node, 'lineno', 0)}"
                yield problem("internal-import", where, f"the plugin imports {imported}", f"only {', '.join(_PUBLIC)}")


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        if node.module == "kvframework":
            yield from (f"kvframework.{alias.name}" for alias in node.names)
        else:
            yield node.module


def _internal(name: str) -> bool:
    public = ("kvframework.__version__", *_PUBLIC)
    return name.startswith("kvframework.") and not any(f"{name}.".startswith(f"{each}.") for each in public)
