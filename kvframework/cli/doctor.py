"""`kvframework doctor`: the problems of this machine and configuration that would impair a server."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvframework.cli.usage import EXIT_FOUND, AsJson, ConfigFile, Overrides, examples

_EPILOG = examples(
    "kvframework doctor --config kvf.toml",
    "kvframework doctor --set l2.0.use=redis --set l2.0.url=redis://cache:6379",
    "kvframework doctor --json                      a document of findings",
    "kvframework doctor --gpu-report gpu.tar.gz     all of a first run on a GPU",
)


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog=_EPILOG)(doctor)


def doctor(
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    gpu_report: Annotated[
        Path | None,
        typer.Option(help="Also try the transport cuda_ipc on this machine's GPU, and write all results to this file."),
    ] = None,
) -> None:
    """Check this machine, this installation and a configuration, and give advice for each problem.

    Run it as the server's user and with the server's limits, before the server starts or while it runs: it changes
    nothing. It checks the interpreter, torch and CUDA, memory, limits, NUMA, the socket, every configured plugin, and
    the tiers' stores. A check takes 5 seconds at most. The exit status is 1 if one fails; a warning leaves it 0.

    With --gpu-report: these checks, the conformance kit of cuda_ipc (in a checkout), `bench cuda --quick` and its sweep
    (where kvframework-bench is installed), each in a process with a bound of its own, and what the machine shows of its
    GPUs, without secrets. Some minutes; nothing else should use the GPU. The exit status is 1 where no GPU can be used,
    or a step failed; the file is written all the same.
    """
    if gpu_report is not None:
        _report_gpu(gpu_report, config, overrides or (), as_json)
        return
    from kvframework.cli.console import print_document
    from kvframework.cli.doctor_view import show_checkup
    from kvframework.doctor.checkup import examine

    checkup = examine(config, overrides or ())
    if as_json:
        print_document(checkup)
    else:
        show_checkup(checkup)
    if checkup.fail:
        raise typer.Exit(EXIT_FOUND)


def _report_gpu(place: Path, config: Path | None, overrides: Sequence[str], as_json: bool) -> None:
    from kvframework.cli.bundle.contents import secrets_in
    from kvframework.cli.bundle.file import BundleFile
    from kvframework.cli.console import print_document, print_text, stderr
    from kvframework.cli.gpu_report.contents import collect, line_of
    from kvframework.cli.gpu_report.steps import steps
    from kvframework.redaction import Redaction

    # A step runs in a session of its own: whoever ends this process has to end it, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with BundleFile(place, "kvframework-gpu-report") as file:
        redaction = Redaction(secrets_in(config, overrides))
        told = partial(stderr.print, markup=False)
        report, files = collect(steps(config, overrides), redaction, told=lambda result: told(line_of(result)))
        file.write(files)
    if as_json:
        print_document(report)
    else:
        print_text(report.gpu or ("a GPU can be used here" + ("" if report.ok else ", but not all worked")))
        print_text(f"{place}: read it before you send it")
    if not report.ok:
        raise typer.Exit(EXIT_FOUND)
