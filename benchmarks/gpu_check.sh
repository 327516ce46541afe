#!/usr/bin/env bash
# Measure on one GPU (two, where there are two) in at most four minutes, with nothing but torch and transformers.
#   bash benchmarks/gpu_check.sh [--output gpu_check.json] [--sections kernels steps guard] [--model 1b] …
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec timeout --kill-after=5 240 "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
