"""`kvframework plan`: what to buy for a trace, and the configuration for it."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvf_plan.cli.amounts import count_of, seconds_of, size_of
from kvframework.api.command import EXIT_FOUND, AsJson, examples

if TYPE_CHECKING:
    from kvf_plan.planning.plan import Wanted

_EPILOG = examples(
    "kvframework plan trace.jsonl --engine llama-3-8b --gpu h100 --ttft 1.5",
    "kvframework plan t.jsonl --engine llama-3-8b --gpu h100 --tier disk=3GB/s",
    "kvframework plan t.jsonl --prefill 25000 --bytes-per-token 128KiB",
    "kvframework plan --catalogue      models and GPUs that the planner knows",
)
app = typer.Typer()
# Between two lines on the progress, where that is no terminal.
_SAY_EVERY_S = 10.0


class At(str, enum.Enum):
    mean = "mean"
    p50 = "p50"
    p90 = "p90"
    p99 = "p99"


class WritePolicy(str, enum.Enum):
    write_through = "write_through"
    write_through_selective = "write_through_selective"
    write_back = "write_back"


@app.command("plan", epilog=_EPILOG)
def plan(
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="A trace of `kvframework trace record` or of Mooncake.")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="MODEL", help="A model of the catalogue.")] = "",
    gpu: Annotated[str, typer.Option(metavar="GPU", help="A GPU of the catalogue.")] = "",
    gpus: Annotated[int, typer.Option(min=0, max=1024, help="GPUs per engine; 0: as published.")] = 0,
    engines: Annotated[
        int,
        typer.Option(min=0, max=1024, help="Engines at this server; 0: as many as the trace needs without a cache."),
    ] = 0,
    prefill: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS/S",
            parser=count_of,
            help="The engine's prefill speed for short prompts, in tokens per second, such as 25k.",
        ),
    ] = None,
    attention: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS", help="Context length, in tokens, at which a token takes twice as long; 0: never."
        ),
    ] = None,
    bytes_per_token: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=size_of,
            help="KV bytes per token on all ranks, such as 128KiB; see `kvframework status`.",
        ),
    ] = None,
    ttft: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=seconds_of,
            help="The goal: time to the first token, such as 500ms; a plain number is seconds.",
        ),
    ] = None,
    at: Annotated[At, typer.Option(help="The statistic of the time that must meet the goal.")] = At.mean,
    budget: Annotated[
        str,
        typer.Option(
            metavar="COST", help="The largest allowed cost, in the unit of --price; without --price in GiB of DRAM."
        ),
    ] = "",
    drive_writes: Annotated[
        float | None, typer.Option(metavar="N", help="How many times a day the tier's capacity may be written.")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=RATE[,...]",
            help="A tier to consider: disk, redis or s3, with its read rate; repeatable. Options after the rate:"
            " write=RATE (a separate rate of writes), latency=TIME, capacity=SIZE.",
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PRICE", help="The price of a GiB of dram, disk, redis or s3, in any unit; repeatable."
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens per chunk of the trace, if the file does not say; 0: 512.")
    ] = 0,
    eviction: Annotated[
        list[str] | None, typer.Option(help="An eviction policy to try; repeatable. Default: lru and two_queues.")
    ] = None,
    write_policy: Annotated[
        list[WritePolicy] | None, typer.Option(help="A write policy of tiers to try; repeatable. Default: all.")
    ] = None,
    l1: Annotated[
        list[int] | None,
        typer.Option(
            metavar="SIZE", parser=size_of, help="A capacity of L1 to try; repeatable. Default: 2^n and 3 x 2^n."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The file for the chosen configuration.")
    ] = None,
    catalogue: Annotated[
        bool, typer.Option("--catalogue", help="Show models and GPUs that the planner knows.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan memory, tiers and policies for a trace: their effect on the time to the first token, and the cheapest
    configuration that meets a goal.

    The tables show the size of the reused KV, the hit rate of LRU at each capacity, and simulated servers: the
    server's code under a virtual clock. If no configuration meets the goal, the closest one is shown, no file is
    written, and the exit status is 1.
    """
    if catalogue:
        from kvf_plan.cli.plan_view import print_catalogue

        print_catalogue(as_json=as_json)
        return
    if trace is None:
        raise typer.BadParameter("give a trace, or --catalogue", param_hint="TRACE")
    from kvf_plan.cli.plan_view import check_out, print_plan, write_out
    from kvf_plan.cli.speeds import parse_tier
    from kvf_plan.errors import PlanError
    from kvf_plan.planning.catalogue import engine_of
    from kvf_plan.planning.goal import goal_of
    from kvf_plan.planning.offers import parse_budget, parse_prices, tier_offers
    from kvf_plan.planning.plan import EVICTIONS, WRITE_POLICIES, Wanted, make_plan
    from kvf_plan.trace.reading import open_trace
    from kvframework.api.console import stderr

    if out is not None:
        if ttft is None:
            raise PlanError(
                "--out needs a goal, which chooses the configuration",
                where=f"--out {out}",
                hint="add the goal: --ttft 1.5",
            )
        check_out(out)
    tiers = tier_offers(parse_tier(each) for each in tier or ())
    wanted: Wanted = Wanted(
        engine=engine_of(engine, gpu, gpus, prefill, attention, bytes_per_token),
        engines=engines,
        tiers=tiers,
        prices=parse_prices(price or (), [each.name for each in tiers]),
        goal=goal_of(ttft, at.value, parse_budget(budget) if budget else None, drive_writes),
        evictions=tuple(dict.fromkeys(eviction or EVICTIONS)),
        write_policies=tuple(dict.fromkeys(each.value for each in write_policy)) if write_policy else WRITE_POLICIES,
        l1_bytes=tuple(l1 or ()),
    )
    with stderr.status("reading") as status:
        tell = status.update if stderr.is_terminal else _seldom(stderr.print)
        made = make_plan(open_trace(trace, chunk_tokens=chunk_tokens), wanted, tell)
    print_plan(made, as_json=as_json)
    if made.chosen is not None and out is not None:
        write_out(made, out)
    if made.chosen is None and ttft is not None:
        raise typer.Exit(EXIT_FOUND)


def _seldom(say: Callable[[str], object]) -> Callable[[str], None]:
    said = -math.inf

    def tell(text: str) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            say(text)

    return tell
