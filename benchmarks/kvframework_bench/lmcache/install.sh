#!/usr/bin/env bash
# install.sh DIRECTORY: an environment with LMCache's server for CPUs and this checkout, for kvframework_bench.lmcache.
# That of kvframework_bench/vllm/install.sh, with `pip install "ROOT/benchmarks[plot]"`, serves as well.
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
python3.11 -m venv "$1"
# PIP_INDEX_URL or PIP_EXTRA_INDEX_URL may name an index with builds of torch for CPUs, which are smaller.
"$1/bin/pip" install "$root" "$root/benchmarks[torch,plot]" torch==2.13.0
# LMCache names CUDA packages as requirements; this is what its server and its client need on a CPU.
"$1/bin/pip" install --no-deps lmcache==0.5.6
"$1/bin/pip" install psutil blake3 aiofile aiofiles aiohttp cachetools fastapi httpx uvicorn httptools pyyaml \
    prometheus_client sortedcontainers redis nvtx py-cpuinfo safetensors numba 'setuptools<81' requests cryptography \
    opentelemetry-api==1.40.0 opentelemetry-sdk==1.40.0 opentelemetry-exporter-otlp==1.40.0 \
    opentelemetry-exporter-prometheus==0.61b0 async-timeout
