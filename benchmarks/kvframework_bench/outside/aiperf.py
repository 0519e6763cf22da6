"""NVIDIA's AIPerf, which has an environment of its own: the trace by its timestamps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.outside.tools import Result, Target, Workload, version_of

_INSTALL = "python3.11 -m venv ENV; ENV/bin/pip install aiperf==0.13.0; --aiperf ENV/bin/aiperf"
# Packages that this process's PYTHONPATH names are of another environment. Where HF_HUB_OFFLINE is set, AIPerf 0.13
# takes the folder of a tokenizer for a name on the hub.
_ENVIRONMENT = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}


class _Metric(msgspec.Struct):
    avg: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


class _Export(msgspec.Struct):
    time_to_first_token: _Metric
    request_latency: _Metric
    output_token_throughput: _Metric
    request_count: _Metric
    error_request_count: _Metric | None = None


class AIPerf:
    name = "aiperf"
    differs = "the trace's prompts are a fourth, its answers a sixteenth as long, and its time is compressed"

    def __init__(self, executable: Path | None) -> None:
        self._executable = str(executable or shutil.which("aiperf") or "")

    def version(self) -> str:
        if not self._executable:
            raise BenchUnavailable("AIPerf is not installed", hint=_INSTALL)
        return version_of([self._executable, "--version"], _INSTALL, os.environ | _ENVIRONMENT)

    def environment(self, target: Target) -> Mapping[str, str]:
        return _ENVIRONMENT

    def workloads(self) -> Sequence[Workload]:
        return [Workload("mooncake_trace", self._command, self._read)]

    def _command(self, target: Target) -> Sequence[str]:
        return [
            *(self._executable, "profile", "--model", target.served, "--tokenizer", str(target.model)),
            *("--url", target.url, "--endpoint-type", "completions", "--streaming"),
            *("--custom-dataset-type", "mooncake_trace", "--input-file", str(target.trace), "--fixed-schedule"),
            *("--prompt-input-tokens-block-size", str(target.chunk_tokens), "--random-seed", str(target.seed)),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
            *("--ui", "none", "--no-server-metrics", "--no-gpu-telemetry", "--export-level", "summary"),
            *("--workers-max", "1", "--record-processor-service-count", "1"),
            *("--output-artifact-dir", str(target.folder)),
        ]

    def _read(self, folder: Path) -> Result:
        found = msgspec.json.decode((folder / "profile_export_aiperf.json").read_bytes(), type=_Export)
        failed = found.error_request_count
        return Result(
            round(found.request_count.avg),
            round(failed.avg) if failed is not None else 0,
            found.time_to_first_token.avg,
            found.time_to_first_token.p50,
            found.time_to_first_token.p99,
            found.request_latency.avg,
            found.output_token_throughput.avg,
        )
