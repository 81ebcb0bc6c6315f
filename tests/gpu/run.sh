#!/usr/bin/env bash
# Installs flashwarp from this checkout, without network, and runs every test that needs a GPU.
#
#   tests/gpu/run.sh [pytest arguments]
#
# Needs an NVIDIA GPU, its driver, g++, and a Python with numpy, nanobind, scikit-build-core, cmake,
# ninja, cuda-bindings, cuda-core, NVRTC and pytest; pytest-xdist, torch, cupy and compute-sanitizer
# are used where they are found. TEST_PROCESSES says how many processes share the GPU (8, and no
# more than half of the cores); FLASHWARP_SANITIZE_GPU=0 leaves the sanitizer out.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
# Users of wheels have the built-in kernels compiled for their GPU.
gpus=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d . | sort -u | paste -sd ';')
FLASHWARP_CUBINS=${FLASHWARP_CUBINS-$gpus} "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --target "$site" .
# The tests of a GPU share models with those beside them, and kernels with the demo.
export PYTHONPATH="$site:$PWD/tests:$PWD${PYTHONPATH:+:$PYTHONPATH}"

half=$(($(nproc) / 2))
processes=${TEST_PROCESSES:-$((half < 8 ? half : 8))}
spread=()
if ((processes > 1)) && "$python" -c 'import xdist' 2> /dev/null; then
  # Kernels are compiled for most of the time, on one core each. A benchmark plugin that happens to
  # be installed refuses several processes.
  spread=(-n "$processes" --dist worksteal -p no:benchmark)
fi
# Kernels must not need eager loading: the default, lazy, is what users have.
unset CUDA_MODULE_LOADING
# --import-mode: the installed package is tested, not the sources beside the tests.
failed=0
"$python" -m pytest tests/gpu tests/array/test_kernel_api.py tests/program/test_programs.py tests/file \
  tests/pipeline -m gpu \
  --import-mode=importlib -q -p no:cacheprovider "${spread[@]}" "$@" || failed=$?

sanitizer=$(command -v compute-sanitizer || true)
if [[ -n $sanitizer && ${FLASHWARP_SANITIZE_GPU:-1} != 0 ]]; then
  declare -A running=()
  for tool in memcheck racecheck synccheck; do
    # Ten minutes for a command: an instrumented kernel polls slowly, and its limit would pass.
    FLASHWARP_TIMEOUT_S=2400 "$sanitizer" --tool "$tool" --error-exitcode 7 \
      "$python" tests/gpu/sanitized.py "$tool" > "$site/$tool.log" 2>&1 &
    running[$tool]=$!
  done
  for tool in "${!running[@]}"; do
    wait "${running[$tool]}" || failed=$?
    echo "compute-sanitizer $tool"
    cat "$site/$tool.log"
  done
fi
exit "$failed"
