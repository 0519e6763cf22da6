"""`kvframework demo blend`: its errors, and what it shows. `tests/demo/test_variants.py` runs it."""

from __future__ import annotations

import json
import os

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvf_demo import blend as demo_blend_run
from kvf_demo.result import OWN_MODEL, BlendResult, WayResult
from kvf_demo.view import show_blend
from kvframework.cli.commands import app
from tests.core.cli.command import run
from tests.support.demo import left_behind


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["blend", "--text", "/nowhere"], "/nowhere"),
        (["blend", "--model", "/nowhere"], "/nowhere"),
        (["blend", "--question", ""], "--question"),
        (["blend", "--share", "1.5"], "--share"),
        (["blend", "--redis-url", "redis://localhost"], "--l2 redis"),
        (["--l2", "redis", "blend"], "give it behind 'blend'"),
    ],
)
def test_errors_have_status_2_and_say_what_to_do(temporary, arguments, text):
    done = run("demo", *arguments, TMPDIR=str(temporary))
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr
    assert left_behind(temporary) == []


def result_of(*, hit=40, naive=0.3, blend=0.01, model="mine"):
    def way(hit_tokens, distance, ttft_s=1.0):
        return WayResult(ttft_s, hit_tokens, hit_tokens // 10, distance, distance / 2, same_token=distance < 0.1)

    ways = {"full": way(0, 0.0, 4.0), "blend": way(hit, blend), "rotated": way(hit, 0.02), "naive": way(hit, naive)}
    return BlendResult(model=model, documents=[10] * 4, prompt_tokens=50, ways=ways)


@pytest.mark.parametrize(
    ("result", "status", "text"),
    [
        (result_of(), 0, "30.0 times nearer"),
        (result_of(naive=0.03, blend=0.01), 0, "3.0 times nearer"),
        (result_of(naive=0.02, blend=0.01), 1, "2.0 times nearer"),
        (result_of(hit=30), 1, "Not all documents were hit"),
    ],
)
def test_it_passes_only_with_every_document_hit_and_far_nearer(result, status, text):
    assert result.exit_status == status
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere)
        show_blend(result, console)
        shown = console.export_text()
    assert text in shown
    assert "4.0 times shorter" in shown
    assert "random weights" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_answers_of_a_trained_model_are_shown():
    result = result_of()
    result.question = "What do we pledge?"
    for name, way in result.ways.items():
        way.text = f" Our {name} Honor"
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere)
        show_blend(result, console)
        shown = console.export_text().splitlines()
    at = shown.index("What do we pledge?")
    assert shown[at + 1 : at + 5] == [
        "full: Our full Honor …",
        "blend: Our blend Honor …",
        "rotated only: Our rotated Honor …",
        "naive: Our naive Honor …",
    ]


def test_what_it_prints_is_the_table_or_the_document(monkeypatch):
    monkeypatch.setattr(demo_blend_run, "run_blend_demo", lambda *_given: result_of(model=OWN_MODEL + "x"))
    monkeypatch.setattr("signal.signal", lambda *_given: None)
    shown = CliRunner().invoke(app, ["demo", "blend"])
    assert shown.exit_code == 0
    (blend,) = [line.split() for line in shown.stdout.splitlines() if line.startswith("blend")]
    assert blend == ["blend", "1.00", "s", "40", "10%", "1.00%", "0.005", "same"]
    assert "random weights; attention falls with distance" in shown.stdout
    document = json.loads(CliRunner().invoke(app, ["demo", "blend", "--json"]).stdout)
    assert (document["ok"], document["times_nearer"], document["ttft_ratio"]) == (True, 30.0, 4.0)
