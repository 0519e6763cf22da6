"""`kvframework plugins check`: the problems of a plugin that its author should fix, before it is published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvframework.api.command import EXIT_FOUND, AsJson, examples

if TYPE_CHECKING:
    from kvf_dev.inspection import Report

_SEVERITY_STYLES = {"error": "bold red", "warning": "yellow"}

app = typer.Typer()


@app.command(
    "check",
    epilog=examples(
        "kvframework plugins check tier.mystore",
        "kvframework plugins check tier.mystore --set path=/tmp/store",
        "kvframework plugins check kvf_mystore --json",
    ),
)
def check(
    plugin: Annotated[
        str, typer.Argument(metavar="MODULE|KIND.NAME", help="The plugin, KIND.NAME, or the module to check.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option for creating the plugin KIND.NAME; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a plugin before its release: metadata, source, import, hooks, options, and the objects that it creates.

    The plugin is imported and called in separate processes, each with a deadline. The exit status is 1 if there is an
    error; warnings alone leave it 0. The conformance kits of kvf_dev.testing check its behaviour.
    """
    from kvf_dev.inspection import inspect_plugin
    from kvframework.api.console import print_document
    from kvframework.config.load import apply_override

    options: dict[str, object] = {}
    for setting in settings or ():
        apply_override(options, setting)
    report = inspect_plugin(plugin, options)
    if as_json:
        print_document(report)
    else:
        _show_report(report)
    if report.errors:
        raise typer.Exit(EXIT_FOUND)


def _show_report(report: Report) -> None:
    from rich.text import Text

    from kvframework.api.console import print_text, stdout

    for each in sorted(report.problems, key=lambda each: each.severity):
        stdout.print(Text.assemble((each.severity, _SEVERITY_STYLES[each.severity]), f" [{each.id}] {each.where}"))
        for label, text in (("", each.fact), ("expected: ", each.expected), ("hint: ", each.hint)):
            if text:
                print_text(f"  {label}{text}")
    for note in report.notes:
        print_text(f"note: {note}")
    what = ", ".join(report.checked) or report.target
    if not report.problems:
        print_text(Text.assemble(("ok", "bold green"), f": {what}"))
    else:
        warnings = len(report.problems) - report.errors
        print_text(Text(f"{what}: {_count(report.errors, 'error')}, {_count(warnings, 'warning')}"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
