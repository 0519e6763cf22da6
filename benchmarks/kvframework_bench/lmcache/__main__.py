"""The command `python -m kvframework_bench.lmcache`: its options and its output."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console

from kvframework.errors import KVFrameworkError
from kvframework_bench.console import bars
from kvframework_bench.lmcache.figures import Comparison, about, comparison_panels, comparison_tables
from kvframework_bench.lmcache.run import Contender, Setting, compare
from kvframework_bench.lmcache_server import prepare, running_lmcache
from kvframework_bench.machine import LoadMeter, describe_machine
from kvframework_bench.plot import check_plot, draw
from kvframework_bench.workload import BLOCK_TOKENS, SHAPES


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvframework_bench.lmcache")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="measure only this shape; repeatable")
    parser.add_argument(
        "--rounds", type=int, default=10, help="number of rounds over shared memory; over the wire at most 3"
    )
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes and few rounds, only to test the benchmark"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into this .png or .svg file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        run(options, console, command=" ".join(["python -m kvframework_bench.lmcache", *arguments]))
    except KVFrameworkError as error:
        console.print(f"error: {error}", markup=False, style="red")
        return 2
    return 0


def run(options: argparse.Namespace, console: Console, *, command: str) -> None:
    """Measure, print, write. Raises the errors of `compare`, and `BenchUnavailable` without LMCache."""
    prepare()
    if options.plot is not None:
        check_plot(options.plot)
    shapes = [SHAPES[name] for name in options.shape or SHAPES]
    quick = options.quick
    setting = Setting(
        serve=lambda directory, shared: running_lmcache(directory, shared=shared),
        connect=_connect,
        shapes=tuple(shape.quick() if quick else shape for shape in shapes),
        rounds=1 if quick else options.rounds,
        lookup_rounds=2 if quick else 30,
        lookup_calls=2 if quick else 10,
    )
    meter = LoadMeter()
    transfers, lookups = compare(setting, bars(console))
    document = Comparison(
        command=command,
        versions={"lmcache": metadata.version("lmcache")},
        quick=quick,
        machine=describe_machine(),
        load=meter.finish(),
        transfers=transfers,
        lookups=lookups,
    )
    if document.load.busy or quick:
        console.print(
            "warning: do not publish these figures: the machine is busy, or the run was quick", style="yellow"
        )
    if options.json is not None:
        options.json.write_text(document.as_json() + "\n")
    if options.plot is not None:
        title = "kvframework next to LMCache's server"
        draw(comparison_panels(document), options.plot, title=title, about=about(document))
    stdout = Console(width=200, highlight=False)
    stdout.print(about(document), markup=False, soft_wrap=True)
    for table in comparison_tables(document, markdown=options.markdown):
        stdout.print(table)


def _connect(
    endpoint: str, kv: dict[str, torch.Tensor], model: str, tokens: Sequence[int]
) -> AbstractContextManager[Contender]:
    from kvframework_bench.lmcache.peer import Peer

    return Peer(endpoint, kv, model=model, block_tokens=BLOCK_TOKENS, tokens=tokens)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
