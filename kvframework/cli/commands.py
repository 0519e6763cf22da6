"""The tree of commands: those of the core, and of other distributions by the entry point group `kvframework.commands`.

A command is a `typer.Typer`, of which a single command stands for itself; an entry point's name is the command, or
GROUP.COMMAND for one in a group of the core. Names and one-line helps come from this module and from metadata: a
command's module is imported when it runs, or for its own help or completion. A broken one is an error of that command
only. A command of the core cannot be replaced."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from kvframework import __version__
from kvframework.api.command import QuickGroup, examples
from kvframework.api.installing import install_command
from kvframework.errors import KVFrameworkError, PluginBroken, PluginConflict, PluginUnavailable
from kvframework.text import described

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NAME = "kvframework"
GROUP = "kvframework.commands"

# The commands by what they are for, in the order of the help, each with its first sentence: those of the core with
# the place of their `typer.Typer`, other first-party ones with their distribution. Those of third parties come last.
SECTIONS = {
    "Use": {
        "run": ("kvframework-run", "Run an engine with the cache, and start the server if none runs."),
        "serve": ("kvframework.cli.serve:serve_app", "Run the server of this node in the foreground."),
        "hold": ("kvframework.cli.serve:hold_app", "Run the server in a child process, and keep its memory."),
        "stop": ("kvframework-run", "Stop the server that `kvframework run` started."),
        "restart": ("kvframework-run", "Replace the server of `kvframework run` by the installed release."),
        "try": ("kvframework-run", "Verify a deployment through its OpenAI API."),
        "demo": ("kvframework-demo", "Demonstrate the cache: a second process skips the prefill."),
    },
    "Look": {
        "stats": ("kvframework-run", "Show the prefill that the cache has saved, on one screen."),
        "status": ("kvframework-observe", "Show the state of a running server."),
        "top": ("kvframework-observe", "Show a live picture of the server in the terminal."),
        "explain": ("kvframework-observe", "Show the hits of finished requests, and the reasons of their misses."),
        "logs": ("kvframework-run", "Show the log of the server that `kvframework run` started."),
        "observe": ("kvframework-observe", "Serve metrics, health and a live web page over HTTP."),
    },
    "Operate": {
        "doctor": ("kvframework.doctor.checkup:app", "Check machine, installation and configuration, with advice."),
        "config": ("kvframework.cli.config:app", "Check and show the configuration."),
        "plugins": ("kvframework.cli.plugins:app", "List, describe and check plugins."),
        "clear": ("kvframework-observe", "Delete KV that a running server caches, all or a tenant's or a prompt's."),
        "prefetch": ("kvframework-control", "Load the KV of a prompt from the tiers into L1, before its request."),
        "pin": ("kvframework-control", "Keep the KV of a prompt in L1 for a while."),
        "control": ("kvframework-control", "Accept orders over HTTP to prefetch, pin, hint and delete KV."),
        "drain": ("kvframework-observe", "Make a running server write all of L1 to its tiers, and end."),
        "dump": ("kvframework-observe", "Write the data for a bug report into one file."),
        "crypto": ("kvframework-crypto", "Show, rotate and destroy the keys of sealed values."),
        "keys": ("kvframework-observe", "Make CURVE keys, which protect tcp:// connections."),
        "tenants": ("kvframework-observe", "Show tenants, and make digests of their salts."),
        "tiers": ("kvframework-plan", "Find the KV of retired models in the L2 tiers, and delete it."),
        "plan": ("kvframework-plan", "Find the cache size that reaches a goal for a trace."),
        "simulate": ("kvframework-plan", "Simulate a configuration on a recorded trace, in virtual time."),
        "trace": ("kvframework-plan", "Record, check and describe traces of requests."),
        "route": ("kvframework-route", "Show how much of a prompt each node has cached."),
    },
    "Develop": {
        "new": ("kvframework-dev", "Write a new plugin's distribution that works at once."),
        "bench": ("kvframework-bench", "Benchmark kvframework and the machine that it runs on."),
    },
}
_ALL = {name: row for section in SECTIONS.values() for name, row in section.items()}
CORE = {name: row for name, row in _ALL.items() if ":" in row[0]}
KNOWN = {name: row for name, row in _ALL.items() if name not in CORE}
KNOWN["plugins.check"] = ("kvframework-dev", "Check a plugin before it is published.")


class CommandGroup(QuickGroup):
    """A group of the core's commands, followed by those of other distributions."""

    # The prefix of the names of the group's entry points.
    prefix: ClassVar[str] = ""

    @cached_property
    def _offers(self) -> dict[str, list[EntryPoint]]:
        """Every offer by name. Reads metadata files."""
        from importlib import metadata

        found: dict[str, list[EntryPoint]] = {}
        for offer in dict.fromkeys(metadata.entry_points(group=GROUP)):
            found.setdefault(offer.name, []).append(offer)
        return found

    def list_commands(self, ctx: Any) -> list[str]:
        own = [*(CORE if not self.prefix else ()), *super().list_commands(ctx)]
        found = {name.removeprefix(self.prefix) for name in {*self._offers, *KNOWN} if name.startswith(self.prefix)}
        return [*own, *(name for name in sorted(found) if name not in own and "." not in name)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by what they are for; those of a group as one list."""
        if self.prefix:
            super().format_commands(ctx, formatter)
            return
        others = [name for name in self.list_commands(ctx) if name not in _ALL]
        for title, names in {**SECTIONS, "Commands of other distributions": others}.items():
            helps = [(name, self.get_command(ctx, name).get_short_help_str(formatter.width - 14)) for name in names]
            if helps:
                with formatter.section(title):
                    formatter.write_dl(helps, col_max=10)

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
            place, summary = CORE[full]
            return FoundCommand(cmd_name, summary, partial(resolve_name, place))
        offers = self._offers.get(full, [])
        if full in KNOWN:
            distribution, summary = KNOWN[full]
            summary = summary if offers else f"Not installed: {distribution}."
        elif offers:
            summary = (offers[0].dist and offers[0].dist.metadata["Summary"]) or ""
        else:
            return None
        return FoundCommand(cmd_name, summary, partial(_load, full, offers))


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


def _load(name: str, offers: list[EntryPoint]) -> typer.Typer:
    where = f"kvframework {name.replace('.', ' ')}"
    if not offers:
        hint = install_command(distribution=KNOWN[name][0])
        raise PluginUnavailable("the command is not installed", where=where, hint=hint)
    origins = [f"{each.dist.name} {each.dist.version}" if each.dist else each.value for each in offers]
    if len(offers) > 1:
        raise PluginConflict(
            f"{len(offers)} distributions offer this command",
            where=where,
            available=", ".join(origins),
            hint="uninstall all but one of these distributions",
        )
    (offer,), (origin,) = offers, origins
    try:
        loaded = offer.load()
    except KVFrameworkError:
        raise
    except Exception as error:
        fact, hint = f"the command cannot be loaded: {described(error)}", f"reinstall or uninstall {origin}"
        raise PluginBroken(fact, where=where, hint=hint) from error
    if not isinstance(loaded, typer.Typer):
        raise PluginBroken(f"{offer.value} is not a typer.Typer", where=where, hint=f"report the error to {origin}")
    return loaded


app = typer.Typer(
    cls=CommandGroup,
    help="A server that keeps the KV cache of LLM inference engines.",
    epilog=examples(
        "kvframework run -- vllm serve MODEL       an engine with the cache",
        "kvframework serve --config kvf.toml       the server alone, in the foreground",
        "kvframework stats                         the saved prefill",
        "kvframework COMMAND --help                options and examples of a command",
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(flags: dict[str, bool]) -> None:
    """Run the command line. Ends by `SystemExit`, or raises. `flags` gets the values of the global options."""
    app(obj=flags, prog_name=NAME)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.ensure_object(dict)["debug"] = debug
