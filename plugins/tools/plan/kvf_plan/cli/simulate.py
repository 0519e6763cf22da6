"""`kvframework simulate`: what a trace of requests would find in a server that is configured like that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvf_plan.cli.amounts import count_of, size_of
from kvframework.api.command import AsJson, ConfigFile, Overrides, examples

if TYPE_CHECKING:
    from kvf_plan.simulation import Engines

_EPILOG = examples(
    "kvframework simulate trace.jsonl --set l1.capacity=64GiB",
    "kvframework simulate trace.jsonl --config kvf.toml --tier redis=1GB/s",
    "kvframework simulate trace.jsonl --engines 3 --prefill 25000",
    "kvframework simulate t.jsonl --tier redis=3GB/s,slow=0.2@600s-1200s --json",
)


app = typer.Typer()


@app.command("simulate", epilog=_EPILOG)
def simulate(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A trace of `kvframework trace record` or of Mooncake.")
    ],
    config: ConfigFile = None,
    overrides: Overrides = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="NAME=RATE[,...]",
            help="The read rate of an [[l2]] table, by its `use`; one for each. Options after the rate: write=RATE"
            " (a separate rate of writes; write=free: no time), latency=TIME, capacity=SIZE, slow=FACTOR@FROM-TO.",
        ),
    ] = None,
    bytes_per_token: Annotated[
        int, typer.Option(metavar="SIZE", parser=size_of, help="KV bytes of a token, of all layers and ranks.")
    ] = "128KiB",  # type: ignore[assignment]  # noqa: S107  of KV; parsed, too
    engines: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Engines at this server; without engines no times are simulated."),
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS",
            parser=count_of,
            help="Tokens per second that one engine computes at the start of a prompt, such as 25k.",
        ),
    ] = None,
    attention: Annotated[
        float,
        typer.Option(
            metavar="TOKENS", help="Context length, in tokens, at which a token takes twice as long; 0: never."
        ),
    ] = 0.0,
    lookahead: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="PROMPTS",
            help="Prompts per engine that are looked up ahead; default: each prompt on arrival.",
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens per chunk of the trace, if the file does not say; 0: 512.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Simulate which tokens the requests of a trace would find in the cache of a server.

    The server's own code runs, with its eviction, write policies and tiers' queues, on a virtual clock: nothing is
    stored, read or sent, and no tier is connected to. An hour of requests takes seconds, with tiers up to a minute. It
    says what L1 and each tier give, what is written and read, and with --engines and --prefill the time to the first
    token.
    """
    from kvf_plan.cli.simulate_view import outcome_view
    from kvf_plan.cli.speeds import parse_tier
    from kvf_plan.simulation import Settings
    from kvf_plan.simulation import simulate as run
    from kvf_plan.trace.reading import open_trace
    from kvframework.api.console import print_document, print_view
    from kvframework.config.load import load_config

    settings = Settings(
        load_config(config, overrides or ()),
        bytes_per_token=bytes_per_token,
        engines=_engines(engines, prefill, attention, lookahead),
        tiers=[parse_tier(text) for text in tier or ()],
    )
    read = open_trace(trace, chunk_tokens=chunk_tokens)
    outcome = run(read, settings)
    if as_json:
        import msgspec

        print_document(msgspec.structs.asdict(outcome))
    else:
        print_view(outcome_view(outcome, read.header.name))


def _engines(count: int | None, prefill: float | None, attention: float, lookahead: int | None) -> Engines | None:
    from kvf_plan.errors import SimulationError
    from kvf_plan.simulation import Engines

    if count is None and prefill is None:
        return None
    if prefill is None:
        raise SimulationError(
            "the speed of the engines is missing",
            where="--engines",
            available="tokens per second",
            hint="add --prefill 25000",
        )
    return Engines(count or 1, prefill, attention, lookahead)
