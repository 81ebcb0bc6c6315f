# One door for users, developers and CI. Needs Linux, Python >= 3.11 with venv, g++ >= 12 and make;
# the first call says what to install if one is missing. Everything else goes into .venv, set up
# once and again only when pyproject.toml, CMakeLists.txt or a native source changes.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
# Hundreds of tests start Python: each start would compile the package's modules anew.
unexport PYTHONDONTWRITEBYTECODE
# How long each native stress program runs, in seconds. It is a budget, not a limit.
export FLASHWARP_STRESS_SECONDS ?= 1
# Tests compile many policies for the CPU device, and run each for milliseconds.
test: export FLASHWARP_HOST_OPTIMIZATION ?= 0

# The demo computes on the GPU where there is one, so it then needs the CUDA extra as well.
comma := ,
DEMO_EXTRAS := demo$(if $(wildcard /dev/nvidiactl),$(comma)cuda)
DEV_EXTRAS := cuda,numba,demo,dev
TEST_PROCESSES ?= $(if $(wildcard /dev/nvidiactl),0,3)
TEST_HANG_S ?= 900

NATIVE := $(shell find native -name '*.cpp' -o -name '*.h') \
  $(shell find src/flashwarp -name '*.cuh' -o -name '*.cu')
NATIVE_TESTS := $(wildcard tests/native/*.cpp tests/native/*.h) \
  $(wildcard tests/simulator/*.cpp tests/simulator/*.h tests/simulator/scenarios/*.cpp) \
  $(wildcard tests/qemu/suites/*.cpp tests/qemu/suites/*.cu)
CXX_SOURCES = $(NATIVE) $(NATIVE_TESTS) $(shell find benchmarks demo -name "*.c*" ! -name "*.py*")

.PHONY: help demo test test-all check bench bench-test lint format native-test tsan asan \
  qemu-test models simulate cost wheel sdist docs clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

demo: $(VENV)/demo.stamp  ## Show what flashwarp does, on the GPU or the CPU
	$(BIN)/python -m demo $(ARGS)

# Side by side what waits for a disk, one core or a thread: the sanitizers' programs are compiled
# while lint runs, and run while others are compiled. Then pytest, alone, since some tests count on
# their turn: by three processes, because tests also wait for others; by one where tests share a
# GPU. A test that hangs where no signal reaches it ends its process, and the others go on.
test: $(VENV)/dev.stamp  ## Everything that CI runs: lint, sanitizers, tests
	$(MAKE) --no-print-directory --jobs=3 --output-sync=target lint tsan asan rewritten
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal \
	  -o faulthandler_timeout=$(TEST_HANG_S) -o faulthandler_exit_on_timeout=true \
	  --ignore=tests/benchmarks $(ARGS)

# In a fresh clone each process of pytest would compile all modules of tests for itself: one does
# so here. What it cannot collect, the tests report.
.PHONY: rewritten
rewritten: $(VENV)/dev.stamp
	@[ -e tests/__pycache__ ] || $(BIN)/python -m pytest --collect-only -qq >/dev/null || true

test-all: export FLASHWARP_ALL_TESTS := 1
test-all: export FLASHWARP_EDGES_SECONDS ?= 8
test-all: export FLASHWARP_EDGES_EXITS ?= 1980
test-all: export FLASHWARP_INDEXING_KEYS ?= 12000
test-all: export FLASHWARP_FUZZ_EXAMPLES ?= 2000
test-all: export FLASHWARP_SIMULATE_SEEDS ?= 1000
test-all: export FLASHWARP_RESHARD_KILLS ?= 100
test-all: export FLASHWARP_STRESS_SECONDS := 10
test-all: test bench-test  ## All of each long list, guests under QEMU, benchmarks' tests

# What most changes break first: the rules of the tree, arrays and what they stand on. What compiles
# kernels is left to `make test`.
CHECKED := tree ground storage nvme cache array edges/test_arguments_checked.py
UNCHECKED := tree/test_example_applications.py array/test_share_table.py array/test_kernel_api.py
check: lint  ## Lint, types and the fast tests, in a minute once all is built
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal \
	  $(UNCHECKED:%=--ignore=tests/%) $(CHECKED:%=tests/%) $(ARGS)

bench: $(VENV)/demo.stamp  ## Measure beside papers and rivals; NAME="kernels hits" ARGS="--json x"
	$(BIN)/python -m benchmarks $(or $(NAME),--list) $(ARGS)

bench-test: $(VENV)/dev.stamp  ## The tests of the benchmarks, which `make test` leaves out
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal tests/benchmarks $(ARGS)

lint: $(VENV)/dev.stamp  ## Formatters, linters and types, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)

format: $(VENV)/dev.stamp  ## Rewrite sources as the formatters want them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

native-test: tsan asan  ## The C++ programs of tests/native under both sanitizers

# ThreadSanitizer wants fixed address ranges, which collide with those that a kernel with 32 bits of
# address randomness chooses: it is off where that is permitted, which some containers do not.
tsan: LAUNCH = $(shell setarch --addr-no-randomize true 2>/dev/null && echo setarch -R)
tsan: export TSAN_OPTIONS ?= halt_on_error=1:second_deadlock_stack=1
asan: export ASAN_OPTIONS ?= detect_leaks=1
asan: export UBSAN_OPTIONS ?= print_stacktrace=1
tsan asan: export CTEST_OUTPUT_ON_FAILURE := 1
tsan: SANITIZER := thread
asan: SANITIZER := address
tsan asan: $(VENV)/dev.stamp  ## The same under one sanitizer
	$(BIN)/cmake -S . -B build/$@ -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DFLASHWARP_NATIVE_TESTS=ON -DFLASHWARP_SANITIZE=$(SANITIZER) >build/$@.log 2>&1 \
	  || { cat build/$@.log; exit 1; }
	$(BIN)/cmake --build build/$@
	$(LAUNCH) $(BIN)/ctest --test-dir build/$@ --no-tests=error --parallel 2

# The guest's processor is emulated, and takes two cores.
qemu-test: $(VENV)/dev.stamp  ## Suites on NVMe drives of guests under QEMU, in 5 to 7 minutes
	PYTHONPATH=tests $(BIN)/python -m qemu.image
	FLASHWARP_QEMU=1 $(BIN)/python -m pytest -s tests/qemu $(ARGS)

models: $(VENV)/dev.stamp  ## Model-check queue pair and cache, in sizes that take minutes and 3 GB
	@command -v spin >/dev/null \
	  || { echo 'spin is missing. On Debian or Ubuntu: sudo apt-get install spin' >&2; exit 1; }
	FLASHWARP_LARGE_MODELS=1 $(BIN)/python -m pytest tests/models/test_models.py $(ARGS)

cost: $(VENV)/dev.stamp  ## What single operations of the native parts cost here
	$(BIN)/cmake -S . -B build/$@ -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DFLASHWARP_NATIVE_TESTS=ON >/dev/null
	$(BIN)/cmake --build build/$@
	$(BIN)/ctest --test-dir build/$@ --no-tests=error --tests-regex _cost --verbose

simulate: ARGS ?= --schedules 100000
simulate: $(VENV)/dev.stamp  ## Explore schedules of the device code; ARGS="--help" for the options
	$(BIN)/python tests/simulator $(ARGS)

# By Python 3.12 or later, as PYTHON=python3.12 VENV=.venv-wheel, one wheel is for all of these.
wheel: $(VENV)/venv.stamp  ## A wheel with the built-in kernels for all GPUs, in dist/
	FLASHWARP_CUBINS=$${FLASHWARP_CUBINS:-all} $(BIN)/python -m pip wheel --disable-pip-version-check \
	  --no-deps --wheel-dir dist .

sdist: $(VENV)/package.stamp  ## The sources that a wheel is built of, in dist/
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; print(build_sdist("dist"))'

docs: $(VENV)/docs.stamp  ## Build the documentation into docs/_build
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:  ## Remove what these targets made, .venv included
	rm -rf $(VENV) build docs/_build
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src benchmarks demo tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. Three steps with a stamp each: the venv, the extension, the extras of a target.

# Python compiles the modules that are imported; pip would compile all of scipy, for 20 s.
install = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/venv.stamp:
	@command -v g++ >/dev/null \
	  || { echo 'g++ is missing. On Debian or Ubuntu: sudo apt-get install g++' >&2; exit 1; }
	@echo '#if __GNUC__ < 12 && !defined(__clang__)' \
	  | cat - <(echo '#error'; echo '#endif') | g++ -x c++ -fsyntax-only - 2>/dev/null \
	  || { echo "g++ >= 12 is needed, this is $$(g++ -dumpfullversion)" >&2; exit 1; }
	@python=; for each in \
	    $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	  if "$$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$each; break; fi; done; \
	[ -n "$$python" ] || { echo '$(or $(PYTHON),Python) >= 3.11 is missing.' \
	  'On Debian 12 or Ubuntu 24.04 or later:' \
	  'sudo apt-get install python3 python3-venv python3-dev' >&2; exit 1; }; \
	"$$python" -c 'import venv, ensurepip' 2>/dev/null || { echo "$$python has no venv." \
	  'On Debian or Ubuntu: sudo apt-get install python3-venv' >&2; exit 1; }; \
	"$$python" -c 'import pathlib, sys, sysconfig; \
	  sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' \
	  || { echo "$$python has no headers (Python.h)." \
	  'On Debian or Ubuntu: sudo apt-get install python3-dev' >&2; exit 1; }; \
	echo "Setting up $(VENV) with $$("$$python" --version), once."; \
	"$$python" -m venv $(VENV)
	touch $@

# No build isolation: the build directory then stays valid, and a rebuild compiles what changed.
$(VENV)/package.stamp: $(VENV)/venv.stamp pyproject.toml CMakeLists.txt $(NATIVE) \
  native/bind/stub_patterns.txt
	$(install) --upgrade pip 'scikit-build-core>=0.11' 'nanobind>=2.7' 'cmake>=3.20' ninja
	$(install) --no-build-isolation \
	  --config-settings=cmake.args=-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja --editable .
	mkdir -p build
	touch $@

install_extras = $(install) \
  $$($(BIN)/python -c 'import sys, tomllib; \
  extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
  print(*(r.replace(" ", "") for e in sys.argv[1].split(",") for r in extras[e]))' $(1))

$(VENV)/demo.stamp: $(VENV)/package.stamp
	$(call install_extras,$(DEMO_EXTRAS))
	touch $@

$(VENV)/dev.stamp: $(VENV)/package.stamp
	$(call install_extras,$(DEV_EXTRAS))
	touch $@

$(VENV)/docs.stamp: $(VENV)/package.stamp
	$(call install_extras,docs)
	touch $@
