#!/bin/sh
# What only a CUDA GPU can show, in under eight minutes: sh tests/gpu/run.sh [arguments for pytest]
# Traces go to minivllm/assets/traces/<gpu>/ (MINIVLLM_GPU_TRACES names another directory). Without a GPU each test says why it is skipped.
set -eu
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-python3}"
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "devices", torch.cuda.device_count())'
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec timeout 480 "$PYTHON" -m pytest -v -rs --durations=0 -p no:cacheprovider tests/gpu/test_gpu.py "$@"
