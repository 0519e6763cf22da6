"""The commands of `kvframework tiers`: their options and what they print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvf_plan.cli.amounts import seconds_of
from kvframework.api.command import EXIT_ERROR, AsJson, ConfigFile, Overrides, QuickGroup, examples

if TYPE_CHECKING:
    from kvf_plan.retired import Contents

app = typer.Typer(cls=QuickGroup, no_args_is_help=True)


@app.callback()
def _tiers() -> None:
    """The values in the L2 tiers of a configuration."""


@app.command(
    "gc",
    epilog=examples(
        "kvframework tiers gc --config kvf.toml                            what the tiers hold, by model",
        "kvframework tiers gc --config kvf.toml --older-than 30d           what would be deleted",
        "kvframework tiers gc --config kvf.toml --older-than 30d --delete",
        "kvframework tiers gc --config kvf.toml --model Qwen/Qwen3-8B --delete",
    ),
)
def gc(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A model, or the first 8 or more digits of a namespace as listed; repeatable."
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(metavar="TIME", parser=seconds_of, help="Only KV unused for this time, such as 30d."),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the listed KV; else only list it.")] = False,
    timeout: Annotated[float, typer.Option(min=1, max=86400, help="Seconds for each listing of a tier.")] = 3600.0,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find the KV of retired models in the L2 tiers, and delete it.

    It lists every namespace (a model with one revision, layout and world size) with its values and its last use, and
    marks those that --model and --older-than choose. Servers renew the time of a namespace while an engine of it is
    registered. What a server writes meanwhile is kept, or becomes a miss. Where no last use is known, as of values of
    older releases in Redis, only --model chooses. A tier of the filesystem that is not shared is refused while its
    server runs; use `kvframework clear --l2` there. Exit status 2: a tier failed; the others are done.
    """
    import time

    from kvf_plan.retired import choose, open_tier
    from kvframework.api.console import print_document, print_error, print_text
    from kvframework.api.toml import closest
    from kvframework.config.load import load_config
    from kvframework.errors import KVFrameworkError, RequestError

    if delete and not model and older_than is None:
        raise typer.BadParameter("choose the KV to delete: --model, --older-than or both", param_hint="--delete")
    loaded, names = load_config(config, overrides or ()), model or ()
    found: list[Contents] = []
    failures: list[KVFrameworkError] = []
    unlisted: list[str] = []
    for table in loaded.l2:
        try:
            with open_tier(loaded, table) as tier:
                if not tier.lists:
                    unlisted.append(tier.title)
                    continue
                tier.read(time.monotonic() + timeout)
                found += tier.found.values()
                choose(tier.found.values(), names, older_than)
                if delete:
                    tier.delete(time.monotonic() + timeout)
        except KVFrameworkError as error:
            failures.append(error)
    known = {contents.model for contents in found}
    for name in names:
        if not failures and not any(contents.named([name]) for contents in found):
            fact, available = f"no tier holds values of the model {name!r}", ", ".join(sorted(known - {""}))
            failures.append(RequestError(fact, where="--model", available=available, hint=closest(name, known)))
    if as_json:
        print_document({"namespaces": found, "unlisted": unlisted})
    else:
        _show(found, deleted=delete)
        for title in unlisted:
            print_text(f"{title} cannot list its values, which stay until the store drops them")
    for failure in failures:
        print_error(failure)
    if failures:
        raise typer.Exit(EXIT_ERROR)


def _show(found: list[Contents], *, deleted: bool) -> None:
    import time

    from kvframework.api.console import counted, print_rows, print_text
    from kvframework.api.plugin import ByteSize

    rows = [
        (
            each.tier,
            each.model or "unknown",
            each.namespace[:12],
            str(each.values),
            str(ByteSize(each.nbytes)),
            f"{(time.time() - each.used_at) / 86400:.1f} days ago" if each.used_at else "unknown",
            f"{each.deleted} deleted, other values are in use" if each.in_use else "retired" if each.retired else "",
        )
        for each in sorted(found, key=lambda each: (each.model, each.namespace, each.tier))
    ]
    if rows:
        print_rows(("TIER", "MODEL", "NAMESPACE", "VALUES", "SIZE", "LAST USE", ""), rows, whole=("NAMESPACE",))
    chosen = [each for each in found if each.retired]
    values = sum(each.deleted if deleted else each.values for each in chosen)
    nbytes = ByteSize(sum(each.deleted_bytes if deleted else each.nbytes for each in chosen))
    what = f"{counted(values, 'values')}, {nbytes}, of {counted(len(chosen), 'namespaces')}"
    none = "no KV is selected: use --model or --older-than" if not chosen else ""
    print_text(none or (f"deleted {what}" if deleted else f"a dry run: --delete would delete {what}"))
