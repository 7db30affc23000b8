#!/bin/sh
# Correctness, then speed, of every kernel on the GPU at hand: at most 6 minutes, one process.
# Prints a short table last; writes bench/gpu.json and bench/gpu.md. Options go to bench/gpu.py
# (--dry-run: tiny shapes under Triton's interpreter, nothing written).
set -eu
cd "$(dirname "$0")/.."
exec timeout 360 "${PYTHON:-python3}" -m bench.gpu "$@"
