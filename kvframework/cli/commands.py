"""The commands: those of the core, and those of other distributions, found by the entry point group
`kvframework.commands`.

A command is a `typer.Typer`, of which a single command stands for itself; an entry point's name is the command, or
GROUP.COMMAND for one in a group of the core. Names and one-line helps come from this module and from metadata: a
command's module is imported when it runs, or for its own help or completion. A broken one is an error of that command
only. A command of the core cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand

from kvframework.api.command import QuickGroup
from kvframework.api.installing import install_command
from kvframework.errors import KVFrameworkError, PluginBroken, PluginConflict, PluginUnavailable
from kvframework.text import described

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "kvframework.commands"


class Core(NamedTuple):
    """A command of the core: its `typer.Typer`, and the first sentence of its help."""

    app: str
    summary: str


CORE = {
    "serve": Core("kvframework.cli.serve:serve_app", "Run the server of this node in the foreground."),
    "hold": Core(
        "kvframework.cli.serve:hold_app",
        "Run the server of this node in a child process, and keep its L1 over the server's end.",
    ),
    "status": Core("kvframework.cli.status:app", "Show the state of a running server."),
    "clear": Core("kvframework.cli.clear:app", "Drop what a running server caches. Engines compute it again."),
    "config": Core("kvframework.cli.config:app", "Check and show the configuration."),
    "keys": Core("kvframework.cli.keys:keys_app", "CURVE keys, for servers at tcp:// endpoints."),
    "tenants": Core("kvframework.cli.keys:tenants_app", "Tenants by name, with shares of L1."),
    "plugins": Core("kvframework.cli.plugins:app", "List, describe and check plugins."),
    "doctor": Core(
        "kvframework.cli.doctor:app",
        "Check this machine, this installation and a configuration, and give advice for each problem.",
    ),
}


class Known(NamedTuple):
    """A first-party command of a distribution of its own."""

    distribution: str
    summary: str


KNOWN = {
    "bench": Known("kvframework-bench", "Measure this machine, and kvframework next to it."),
    "demo": Known("kvframework-demo", "See it work: a second process skips the prefill."),
    "dump": Known("kvframework-observe", "Write what a bug report needs into one file."),
    "explain": Known("kvframework-observe", "Say what requests found in the cache, and why not more."),
    "new": Known("kvframework-dev", "Write a new plugin's distribution, which works as it is."),
    "observe": Known("kvframework-observe", "Serve metrics, health and a live page over HTTP."),
    "plan": Known("kvframework-plan", "Size a cache for a trace and a goal."),
    "plugins.check": Known("kvframework-dev", "Check a plugin before it is published."),
    "route": Known("kvframework-route", "Tell which node holds how much of a prompt."),
    "simulate": Known("kvframework-plan", "Replay a trace against a configuration, in virtual time."),
    "top": Known("kvframework-observe", "Show a live picture of the server in the terminal."),
    "trace": Known("kvframework-plan", "Record, check and describe traces of requests."),
}


class CommandGroup(QuickGroup):
    """A group of the core's commands, followed by those of other distributions."""

    # What the names of the group's entry points begin with.
    prefix: ClassVar[str] = ""

    @cached_property
    def _offers(self) -> dict[str, list[EntryPoint]]:
        """Every offer by name. Reads metadata files."""
        from importlib import metadata

        found: dict[str, list[EntryPoint]] = {}
        for offer in metadata.entry_points(group=GROUP):
            offers = found.setdefault(offer.name, [])
            if offer not in offers:
                offers.append(offer)
        return found

    def list_commands(self, ctx: Any) -> list[str]:
        own = [*(CORE if not self.prefix else ()), *super().list_commands(ctx)]
        found = {name.removeprefix(self.prefix) for name in {*self._offers, *KNOWN} if name.startswith(self.prefix)}
        return [*own, *(name for name in sorted(found) if name not in own and "." not in name)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. For an unknown name the error proposes near ones, those of other distributions included."""
        if args and self.get_command(ctx, args[0]) is None:
            near = get_close_matches(args[0], self.list_commands(ctx))
            if near:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own, full = super().get_command(ctx, cmd_name), self.prefix + cmd_name
        if own is not None or "." in cmd_name:
            return own
        if full in CORE:
            return FoundCommand(cmd_name, CORE[full].summary, partial(resolve_name, CORE[full].app))
        offers = self._offers.get(full, [])
        if offers or full in KNOWN:
            return FoundCommand(cmd_name, _summary(full, offers), partial(_load, full, offers))
        return None


class FoundCommand(TyperCommand):
    """A placeholder of a command; when the command is needed, it makes the context of the real one."""

    def __init__(self, name: str, summary: str, load: Callable[[], typer.Typer]) -> None:
        super().__init__(name, help=summary, rich_markup_mode=None)
        self._load = load

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent=parent, **extra)

    def load(self) -> Any:
        """Return the real command, as typer itself would: an app of one command and no callback is that command.
        Raises `PluginUnavailable`, `PluginConflict` or `PluginBroken`."""
        app, parent = self._load(), typer.Typer(rich_markup_mode=None)
        parent.add_typer(app, name=self.name)
        group: Any = typer.main.get_group(parent).commands[str(self.name)]
        if app.registered_callback is None and not app.registered_groups and len(group.commands) == 1:
            (only,) = group.commands.values()
            only.name = self.name
            return only
        return group


def _summary(name: str, offers: list[EntryPoint]) -> str:
    """Return the line for the command: of a first-party one the core's own, else the summary of the distribution."""
    if name in KNOWN:
        return KNOWN[name].summary if offers else f"Not installed: {KNOWN[name].distribution}."
    distribution = offers[0].dist
    return (distribution.metadata["Summary"] or "") if distribution else ""


def _load(name: str, offers: list[EntryPoint]) -> typer.Typer:
    where = f"kvframework {name.replace('.', ' ')}"
    if not offers:
        raise PluginUnavailable(
            "the command is not installed",
            where=where,
            hint=install_command(distribution=KNOWN[name].distribution),
        )
    if len(offers) > 1:
        raise PluginConflict(
            f"{len(offers)} distributions offer this command",
            where=where,
            available=", ".join(_origin(offer) for offer in offers),
            hint="uninstall all but one of them",
        )
    (offer,) = offers
    try:
        loaded = offer.load()
    except KVFrameworkError:
        raise
    except Exception as error:
        raise PluginBroken(
            f"the command cannot be loaded: {described(error)}",
            where=where,
            hint=f"install {_origin(offer)} again, or uninstall it",
        ) from error
    if not isinstance(loaded, typer.Typer):
        raise PluginBroken(f"{offer.value} is no typer.Typer", where=where, hint=f"a bug of {_origin(offer)}")
    return loaded


def _origin(offer: EntryPoint) -> str:
    return f"{offer.dist.name} {offer.dist.version}" if offer.dist else offer.value
