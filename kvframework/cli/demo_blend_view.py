"""Owns the table that `kvframework demo blend` ends with."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvframework.cli.demo_blend_result import FAR_NEARER, OWN_MODEL, BlendResult, WayResult

_NAMES = {"full": "full", "blend": "blend", "rotated": "rotated only", "naive": "naive"}
_COLUMNS = ("first token", "loaded", "recomputed", "logits off", "KL", "token")
_LEGEND = (
    "full: the whole prompt is computed, as without a cache",
    "naive: the stored KV one behind the other as it is",
    "logits off: how far they are from those of full, by their length (relative L2)",
    "KL: divergence of the next token's distribution from that of full, in nats",
)
_OWN_MODEL = "model: random weights; attention falls with distance, as in trained ones"


def show_blend(result: BlendResult, console: Console) -> None:
    """One line a way, and the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", style="bold", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for way, name in _NAMES.items():
        done = result.ways[way]
        off = ("-", "-", "-") if way == "full" else _off(done)
        table.add_row(name, f"{done.ttft_s:.2f} s", str(done.hit_tokens), _recomputed(done), *off)
    console.print()
    console.print(table, soft_wrap=False)
    console.print()
    sooner = f"with blend the first token came {result.ttft_ratio:.1f} times sooner."
    console.print(Text(f"{len(result.documents)} documents in another order: {sooner}"))
    legend = [*_LEGEND, _OWN_MODEL] if result.model.startswith(OWN_MODEL) else _LEGEND
    for line in legend:
        console.print(Text(line, style="dim"))
    if not result.all_hit:
        console.print(Text("Not all documents were hit.", style="bold red"))
        return
    style = "bold green" if result.times_nearer >= FAR_NEARER else "bold red"
    console.print(Text(f"Blend is {result.times_nearer:.1f} times nearer to full than naive.", style=style))


def _off(done: WayResult) -> tuple[str, str, str]:
    return f"{done.distance:.2%}", f"{done.divergence:.2g}", "same" if done.same_token else "other"


def _recomputed(done: WayResult) -> str:
    return f"{done.recomputed / done.hit_tokens:.0%}" if done.hit_tokens else "100%"
