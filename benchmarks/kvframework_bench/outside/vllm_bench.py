"""vLLM's `bench serve`: shared beginnings, and the trace by its timestamps. Runs by vLLM's module: the `vllm` command
does not start in builds for CPUs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvframework_bench.errors import require_vllm
from kvframework_bench.outside.tools import Result, Target, Workload, version_of

_FILE = "bench_serve.json"
_RUN = (
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; "
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = Parser(); add_cli_args(parser); main(parser.parse_args())"
)
_LABELS = {"timestamp": "timestamp", "input-length": "input_length", "output-length": "output_length"}


class _Saved(msgspec.Struct):
    completed: int
    failed: int
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_e2el_ms: float
    output_throughput: float


class VllmBench:
    name = "vllm-bench"
    differs = "fewer and shorter prompts; timed_trace: prompts are a fourth, answers a sixteenth as long as the trace's"

    def version(self) -> str:
        require_vllm()
        return version_of([sys.executable, "-c", "import vllm; print(vllm.__version__)"], "")

    def environment(self, target: Target) -> Mapping[str, str]:
        # timed_trace takes its tokens from Python's hash of text.
        return {"PYTHONHASHSEED": str(target.seed + 1), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def workloads(self) -> Sequence[Workload]:
        return [
            Workload("prefix_repetition", _prefix_repetition, _read),
            Workload("timed_trace", _timed_trace, _read),
        ]


def _prefix_repetition(target: Target) -> Sequence[str]:
    sizes = target.sizes
    return [
        *_command(target, "prefix_repetition", sizes.prompts),
        *("--prefix-repetition-num-prefixes", str(sizes.prefixes)),
        *("--prefix-repetition-prefix-len", str(sizes.prefix_tokens)),
        *("--prefix-repetition-suffix-len", str(sizes.suffix_tokens)),
        *("--prefix-repetition-output-len", str(sizes.answer_tokens)),
        *("--request-rate", str(sizes.prompts / sizes.seconds), "--ignore-eos"),
    ]


def _timed_trace(target: Target) -> Sequence[str]:
    return [
        *_command(target, "timed_trace", target.trace.read_bytes().count(b"\n")),
        *("--dataset-path", str(target.trace), "--timed-trace-chunk-hash-size", str(target.chunk_tokens)),
        *("--timed-trace-sec-multiplier", "0.001", "--timed-trace-label-hash-ids", "hash_ids"),
        *(word for label, name in _LABELS.items() for word in (f"--timed-trace-label-{label}", name)),
    ]


def _command(target: Target, dataset: str, prompts: int) -> list[str]:
    return [
        *(sys.executable, "-c", _RUN, "--backend", "vllm", "--base-url", target.url),
        *("--model", target.served, "--tokenizer", str(target.model), "--dataset-name", dataset),
        *("--num-prompts", str(prompts), "--seed", str(target.seed), "--temperature", "0"),
        *("--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"),
        # The ready check would ask the first prompt twice.
        *("--ready-check-timeout-sec", "0"),
        *("--save-result", "--result-dir", str(target.folder), "--result-filename", _FILE),
    ]


def _read(folder: Path) -> Result:
    found = msgspec.json.decode((folder / _FILE).read_bytes(), type=_Saved)
    return Result(
        found.completed,
        found.failed,
        found.mean_ttft_ms,
        found.median_ttft_ms,
        found.p99_ttft_ms,
        found.mean_e2el_ms,
        found.output_throughput,
    )
