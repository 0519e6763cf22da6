"""LMCache's `bench engine`: chats of several rounds, and questions about long documents. Its prompts are the same in
every run, and its lengths count words: of the bench's tokenizer a word is as many tokens as it has characters."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvframework_bench.lmcache_server import prepare
from kvframework_bench.outside.tools import Result, Target, Workload, version_of

_RUN = "from lmcache.cli.main import main; main()"
_FILE = "bench_summary.json"
# Its filler words: "help ", "hi " and "tell ".
_PROMPT_WORD, _HISTORY_WORD, _QUERY_WORD = 5, 3, 5
_QUERY_WORDS = 10


class _Final(msgspec.Struct):
    successful_requests: int
    failed_requests: int
    mean_ttft_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    mean_request_latency_ms: float
    output_throughput: float


class _Summary(msgspec.Struct):
    results: _Final


class LmcacheBench:
    name = "lmcache-bench"
    differs = "fewer and shorter prompts, answers of 16 tokens"

    def version(self) -> str:
        prepare()
        return version_of([sys.executable, "-c", "import importlib.metadata as m; print(m.version('lmcache'))"], "")

    def environment(self, target: Target) -> Mapping[str, str]:
        return {
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "WARNING",
            "LMCACHE_DISABLE_BANNER": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def workloads(self) -> Sequence[Workload]:
        return [
            Workload("multi-round-chat", _multi_round_chat, _read),
            Workload("long-doc-qa", _long_doc_qa, _read),
        ]


def _multi_round_chat(target: Target) -> Sequence[str]:
    sizes = target.sizes
    shared = sizes.prefix_tokens // 4 // _PROMPT_WORD
    history = sizes.prefix_tokens * 3 // 4 // _HISTORY_WORD
    return [
        *_command(target, "multi-round-chat", sizes.prefixes * (shared + history)),
        *("--mrc-shared-prompt-length", str(shared), "--mrc-chat-history-length", str(history)),
        *("--mrc-user-input-length", str(_QUERY_WORDS), "--mrc-output-length", str(sizes.answer_tokens)),
        *("--mrc-qps", str(sizes.prompts / sizes.seconds), "--mrc-duration", str(sizes.seconds)),
    ]


def _long_doc_qa(target: Target) -> Sequence[str]:
    sizes = target.sizes
    words = sizes.prefix_tokens // _HISTORY_WORD
    queries = max(sizes.prompts // sizes.prefixes, 1)
    return [
        *_command(target, "long-doc-qa", sizes.prefixes * words),
        *("--ldqa-document-length", str(words), "--ldqa-query-per-document", str(queries)),
        *("--ldqa-num-inflight-requests", "1", "--ldqa-max-output-length", str(sizes.answer_tokens)),
    ]


def _command(target: Target, workload: str, words: int) -> list[str]:
    """`words` of all prompts are what it takes for a GB of KV."""
    return [
        *(sys.executable, "-c", _RUN, "bench", "engine", "--engine-url", target.url, "--model", target.served),
        *("--workload", workload, "--kv-cache-volume", "1", "--tokens-per-gb-kvcache", str(words)),
        *("--seed", str(target.seed), "--ignore-eos", "--no-interactive", "--quiet", "--no-csv", "--json"),
        *("--output-dir", str(target.folder)),
    ]


def _read(folder: Path) -> Result:
    found = msgspec.json.decode((folder / _FILE).read_bytes(), type=_Summary).results
    return Result(
        found.successful_requests,
        found.failed_requests,
        found.mean_ttft_ms,
        found.p50_ttft_ms,
        found.p99_ttft_ms,
        found.mean_request_latency_ms,
        found.output_throughput,
    )
