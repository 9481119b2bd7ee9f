#!/bin/sh
# What only a CUDA GPU can show, in under eight minutes: sh tests/gpu/run.sh [arguments for pytest]
# Traces go to minivllm/assets/traces/<gpu>/ (MINIVLLM_GPU_TRACES names another directory). Without a GPU it runs what
# a CPU can show of it, and each test says why it is skipped.
set -eu
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-python3}"
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "devices", torch.cuda.device_count())'
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "No usable GPU. What a CPU can show of this: tokens in float32, padding to the sizes of graphs, gloo groups."
  "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_cudagraph.py tests/test_parallel_state.py tests/test_end_to_end.py -k "not tp4"
  echo "What is skipped, and why:"
fi
exec timeout 480 "$PYTHON" -m pytest -v -rs --durations=0 -p no:cacheprovider tests/gpu/test_gpu.py "$@"
