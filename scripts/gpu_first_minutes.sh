#!/usr/bin/env bash
# The first minutes on a GPU: what runs, whether its bytes are the CPU's, how fast it is.
#   bash scripts/gpu_first_minutes.sh [--budget 270] [--only contracts,speed] [--emulated]
#   bash scripts/gpu_first_minutes.sh --train --budget 200
# Prints a line of JSON for each step; files go to $OUT, if set. PYTHON: the one that has PyTorch.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-LAZY}
if [ -n "${OUT:-}" ]; then set -- --out "$OUT" "$@"; fi
exec timeout -k 10 580 "${PYTHON:-python3}" "$here/gpu_first_minutes.py" "$@"
