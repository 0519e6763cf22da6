"""The command; its tables are Markdown."""

from __future__ import annotations

from typing import Annotated

import typer

from kvframework_bench.peers.lending import lending_rows
from kvframework_bench.peers.transfer import transfer_rows


def main(
    mib: Annotated[str, typer.Option(help="Sizes of the values in MiB, with commas; empty: no transfers.")] = "4,32",
    rounds: Annotated[int, typer.Option(help="Number of rounds of the transfers.")] = 9,
    lookups: Annotated[int, typer.Option(help="Number of rounds of LOOKUPs while another node loads; 0: none.")] = 20,
    gb_s: Annotated[float, typer.Option(help="GB per second that the other node loads meanwhile.")] = 1.0,
) -> None:
    """Print the tables. Blocks for minutes."""
    sizes = [int(each) << 20 for each in mib.split(",") if each]
    if sizes:
        _table(
            (
                "value",
                "bare TCP, GB/s",
                "tier, GB/s",
                "tier and checksum, GB/s",
                "tier to TCP",
                "tier and checksum to TCP",
            )
        )
        for row in transfer_rows(sizes, rounds):
            _line(row)
        typer.echo()
    if lookups:
        _table(
            (
                "LOOKUP of",
                "alone: p50, p99 in µs",
                "beside bare TCP",
                "beside loads of another node",
                "p99 ratio to alone",
                "p99 ratio to bare TCP",
            )
        )
        for row in lending_rows(gb_s, lookups):
            _line(row)


def _table(heads: tuple[str, ...]) -> None:
    _line(heads)
    typer.echo(f"|{'---|' * len(heads)}")


def _line(cells: tuple[str, ...]) -> None:
    typer.echo(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)
