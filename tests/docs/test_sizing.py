"""The numbers of docs/sizing.md follow from the parameters that stand beside them, and its commands run.

Those of Mooncake's conversation trace need it: `KVFRAMEWORK_TRACE=FILE pytest tests/docs/test_sizing.py`. What was
simulated takes minutes and is not repeated here."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from kvf_plan.planning.catalogue import catalogue
from kvf_plan.planning.lru_curve import lru_curve
from kvf_plan.planning.prompts import prompts_of
from kvf_plan.trace.reading import open_trace
from kvframework.api.options import ByteSize
from tests.core.cli.command import run
from tests.docs.test_command_lines import lines
from tests.plan.planning.traces import conversations
from tests.support.doc_tables import rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sizing.md").read_text()
GIB = 1 << 30
MIB = 1 << 20
BF16 = 2
# Of the conversation trace: chunks of 512 tokens in its live set, and all that it has.
CHUNK, LIVE, EVER = 512, 8131, 170_899
TRACE = os.environ.get("KVFRAMEWORK_TRACE", "")
PLANNED = {
    "Llama-3.1-8B": "llama-3-8b",
    "Llama-3.1-70B": "llama-3-70b",
    "Qwen3-32B": "qwen3-32b",
    "DeepSeek-V3 (MLA)": "deepseek-v3",
}


class Model(NamedTuple):
    """A row of the table: its parameters give `nbytes` a token, `said` are its other cells."""

    name: str
    nbytes: int
    said: list[str]


def models() -> list[Model]:
    found = []
    for name, layers, heads, head_dim, *said in rows(PAGE, "Four models, in bfloat16"):
        if head_dim:
            elements = 2 * int(heads) * int(head_dim)
        else:  # MLA: a latent vector and a rotary key
            rank, rope = re.findall(r"\d+", heads)
            elements = int(rank) + int(rope)
        found.append(Model(name, int(layers) * elements * BF16, said))
    return found


def test_there_are_four() -> None:
    assert [model.name for model in models()] == ["Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-32B", "DeepSeek-V3 (MLA)"]


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_a_row_follows_from_its_parameters(model: Model) -> None:
    token, chunk, long_prompt, fits = model.said
    assert int(token) == model.nbytes
    assert chunk == f"{round(256 * model.nbytes / MIB, 1):g} MiB"
    assert long_prompt == f"{round(32768 * model.nbytes / GIB, 1):g} GiB"
    assert int(fits) == 100 * GIB // model.nbytes


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_the_bandwidth_follows_from_its_parameters(model: Model) -> None:
    said = dict(rows(PAGE, "Time and bandwidth"))
    assert said[model.name] == f"{10_000 * model.nbytes / 1e9:.1f} GB/s"


def test_the_examples_are_worked_right() -> None:
    llama = models()[0].nbytes
    assert 8 * 32768 * llama == 32 * GIB
    assert 200 * 8192 == 1638400
    assert 1638400 * llama == 200 * GIB


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_the_catalogue_has_the_same_bytes(model: Model) -> None:
    assert catalogue().models[PLANNED[model.name]].bytes_per_token == model.nbytes


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_what_is_worth_keeping_follows_from_the_chunks_of_the_trace(model: Model) -> None:
    live, ever, *_ = {name: cells for name, *cells in rows(PAGE, "How much L1")}[model.name]
    for said, chunks in ((live, LIVE), (ever, EVER)):
        nbytes = chunks * CHUNK * model.nbytes
        assert said in (f"{nbytes / GIB:.0f} GiB", f"{nbytes / GIB / 1024:.1f} TiB")


@pytest.mark.skipif(not TRACE, reason="KVFRAMEWORK_TRACE names no trace")
def test_the_curve_is_that_of_the_trace() -> None:
    prompts = prompts_of(open_trace(TRACE), CHUNK)
    found, curve = prompts.live_set(), lru_curve(prompts)
    assert (found.most, found.stored) == (LIVE, EVER)
    for name, _, _, *shares in rows(PAGE, "How much L1"):
        chunk_bytes = CHUNK * {model.name: model.nbytes for model in models()}[name]
        sizes = [256 * GIB, 1024 * GIB, 2048 * GIB]
        assert shares == [f"{curve.token_hit_rate(size // chunk_bytes):.1%}".replace("%", " %") for size in sizes]
    for join, said in {1: "37.3", 2: "34.0", 4: "32.1", 8: "29.1", 16: "24.0"}.items():
        made = prompts_of(open_trace(TRACE), CHUNK, join)
        assert f"{100 * lru_curve(made).token_hit_rate(made.nodes):.1f}" == said
        assert f"{said} %" in PAGE


def test_its_plans_run(tmp_path: Path) -> None:
    """Each command of the page on a made trace: its options are understood together, and it ends as it should."""
    trace = tmp_path / "made.jsonl"
    trace.write_text(conversations(60, chunk_tokens=512).lines())
    found = [shlex.split(line) for line in lines(PAGE) if line.startswith("plan ")]
    assert len(found) > 4
    for index, words in enumerate(found):
        words = [str(trace) if word.endswith(".jsonl") else word for word in words]
        words = [str(tmp_path / f"{index}.toml") if word == "kvf.toml" else word for word in words]
        done = run(*words)
        assert done.returncode in (0, 1), done.stderr
        assert not done.stderr.startswith("error"), done.stderr


def test_sizes_are_shown_as_the_command_shows_them() -> None:
    assert str(ByteSize(LIVE * CHUNK * 131072)) == "508.2 GiB"
