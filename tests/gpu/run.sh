#!/usr/bin/env bash
# Installs flashwarp from this checkout, without network, and runs every test that needs a GPU.
#
#   tests/gpu/run.sh [pytest arguments]
#
# Needs an NVIDIA GPU, its driver, g++, and a Python with numpy, nanobind, scikit-build-core, cmake,
# ninja, cuda-bindings, cuda-core, NVRTC and pytest; torch, cupy and compute-sanitizer are used where
# they are found. FLASHWARP_SANITIZE_GPU=0 leaves the sanitizer out.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --target "$site" .
# The tests of a GPU share models with those beside them.
export PYTHONPATH="$site:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"

# Kernels must not need eager loading: the default, lazy, is what users have.
unset CUDA_MODULE_LOADING
# --import-mode: the installed package is tested, not the sources beside the tests.
"$python" -m pytest tests/gpu tests/test_kernel_api.py tests/test_programs.py -m gpu \
  --import-mode=importlib -q -p no:cacheprovider "$@"

sanitizer=$(command -v compute-sanitizer || true)
if [[ -n $sanitizer && ${FLASHWARP_SANITIZE_GPU:-1} != 0 ]]; then
  for tool in memcheck racecheck synccheck; do
    echo "compute-sanitizer $tool"
    # Ten minutes: an instrumented kernel polls slowly, and its time limit would pass.
    FLASHWARP_TIMEOUT_S=600 "$sanitizer" --tool "$tool" --error-exitcode 7 \
      "$python" tests/gpu/sanitized.py
  done
fi
