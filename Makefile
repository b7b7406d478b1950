# Everything runs in .venv, which `make setup` makes; every target below makes it first if need be.
# With TORCH=VERSION a target runs with that release of torch, in .venv-VERSION.
#
#   make test                         the suite
#   make test ARGS='-k vmap'          part of it, or any other options of pytest
#   make test TSFUNC_DEVICE=cuda      on another device
#   make test TORCH=2.14.1            with another release of torch
#   make handlers                     the compiled handlers of batched tensors
#   make test-compiled                the tests of eager calls, with the compiled handlers
#   make test-newest                  the part that depends most on torch, with the newest release
#   make browser                      chromium, for the tests of pages (Debian, as root)
#   make test-libraries               models of other libraries, which it installs
#   make test-all                     slow tests too, with the pinned and with the newest release
#   make fuzz                         random programs for a minute (SEED=N for those of a seed)
#   make soak HOURS=8                 random programs for hours; failures are in build/fuzz
#   make mutants                      300 random changes of the code, and the tests that notice them
#   make bench                        timings (docs/benchmarks.md)
#   make bench-check                  is something slower than the stored baseline?
#   make docs                         the site, in build/docs
#   make dist                         sdist and wheel, in dist
#   make setup PYTHON=python3.12      with another Python (3.10 to 3.13)

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
SEED ?=
HOURS ?= 8

PINNED := $(patsubst torch==%,%,$(shell grep '^torch==' constraints.txt))
NEWEST := 2.14.1
TORCH := $(PINNED)
VENV := $(if $(filter $(PINNED),$(TORCH)),.venv,.venv-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.up-to-date
# One torch thread a worker: the workers are the parallelism.
# The suite runs on the handlers in Python, which are the reference; `test-compiled` on the others.
PYTEST = OMP_NUM_THREADS=1 TSFUNC_COMPILED=$(COMPILED) $(BIN)/python -m pytest -n $(WORKERS)
COMPILED := 0

FUZZ := OMP_NUM_THREADS=1 $(BIN)/python -m tools.fuzz_programs $(if $(SEED),--seed $(SEED))

.PHONY: setup handlers setup-newest demo browser test test-compiled test-newest test-libraries test-one \
    test-releases test-all fuzz soak mutants lint format docs dist bench setup-bench \
    bench-check bench-baseline clean

setup: $(STAMP) $(VENV)/.handlers

# torch goes first and pinned: that way pip takes the build it is set up for (a CPU wheel, say),
# and the second install finds its requirement met.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 14) or sys.exit( \
	    "tsfunc needs Python 3.10 to 3.13, and $(PYTHON) is %d.%d: make PYTHON=..." % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==$(TORCH)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@

# The handlers of batched tensors, compiled for this torch: half a minute of CPU time, as part of
# `setup`. Without a C++ compiler this prints a message, and Python serves every call.
handlers: $(VENV)/.handlers

$(VENV)/.handlers: $(STAMP) $(wildcard tsfunc/bridge/compiled/*.h tsfunc/bridge/compiled/*.cpp)
	$(BIN)/python -m tsfunc build --if-possible
	touch $@

demo: setup
	$(BIN)/python examples/digits.py

test: setup
	$(PYTEST) -m 'not slow' $(ARGS)

# The tests of what releases of torch change: private names, autograd.Function, checkpoints, modes,
# control flow in torch's graphs, torch.func, torch.compile, export, backends, the catalogue.
NEWEST_TESTS := tests/bridge tests/ops/catalogue tests/ops/test_linalg.py \
    tests/programming_model/test_control_flow.py tests/program/test_files_rules.py \
    tests/test_doctor.py tests/test_releases.py tests/test_without_numpy.py \
    tests/transforms/control/test_dynamo_forms.py tests/transforms/control/test_torch_operators.py \
    tests/transforms/test_checkpoint.py tests/transforms/test_compile.py \
    tests/transforms/test_custom_function.py tests/transforms/test_dispatch_modes.py \
    tests/transforms/test_forward.py tests/transforms/test_torch_func.py

# After the pinned release, since both installations write the package's metadata.
setup-newest: setup
	$(MAKE) setup TORCH=$(NEWEST)

test-newest:
	$(MAKE) test TORCH=$(NEWEST) ARGS='$(NEWEST_TESTS) $(ARGS)'

# The tests of eager calls, with the compiled handlers: those of the handlers, of derivatives and
# ranks of every family of operators, of results in containers, of writes, threads and interrupts.
COMPILED_TESTS := tests/bridge/test_batch_checks.py tests/bridge/test_call_plans.py \
    tests/bridge/test_compiled.py tests/bridge/test_compiled_calls.py \
    tests/bridge/test_outside.py tests/bridge/test_recipes.py \
    tests/ops/test_coverage.py tests/ops/test_derivatives.py tests/ops/test_fixed.py \
    tests/ops/test_ranks.py tests/ops/test_shifts.py tests/transforms/test_backward.py \
    tests/transforms/test_batched_values.py tests/transforms/test_checkpoint.py \
    tests/transforms/test_chunks.py tests/transforms/test_dispatch_modes.py \
    tests/transforms/test_forward.py tests/transforms/test_inplace.py \
    tests/transforms/test_interrupts.py tests/transforms/test_jacobians.py \
    tests/transforms/test_nestings.py tests/transforms/test_optimizers.py \
    tests/transforms/test_reference_cycles.py tests/transforms/test_reshapes.py \
    tests/transforms/test_third_derivatives.py tests/transforms/test_threads.py \
    tests/transforms/test_torch_func.py tests/transforms/test_vmap_containers.py

test-compiled: COMPILED := 1
test-compiled: handlers
	$(PYTEST) -m 'not slow' $(COMPILED_TESTS) $(ARGS)

# Without a browser the tests of pages in a browser are skipped.
browser:
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq \
	    --no-install-recommends chromium >/dev/null; }

# The models of other libraries, in an environment of their own: they bring sixty packages.
test-libraries:
	$(MAKE) setup VENV=.venv-libraries
	.venv-libraries/bin/python -m pip install -c .venv-libraries/constraints.txt -e '.[libraries]'
	$(MAKE) test-one VENV=.venv-libraries ARGS='tests/libraries $(ARGS)'

# Every test with one release of torch.
test-one: setup
	$(PYTEST) $(ARGS)

# With TORCH=VERSION: with that release alone.
test-all: $(if $(filter command line,$(origin TORCH)),test-one,test-releases)
	$(if $(ARGS),,$(FUZZ) --seconds 900)

test-releases: test-one
	$(MAKE) test-one TORCH=$(NEWEST)

fuzz: setup handlers
	$(FUZZ) --seconds 60 $(ARGS)

soak: setup handlers
	$(FUZZ) --seconds $(shell expr $(HOURS) '*' 3600) --keep build/fuzz

# docs/mutants.md says how long it takes. SEED=N goes on with the sample of a seed.
mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutants $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A broken link, a name that is not there and a docstring that can't be read are warnings, and fail.
docs: setup
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

dist: setup
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

# JAX, transformers, torchvision and matplotlib, with which `bench` has more rows.
setup-bench: setup
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt -e '.[bench]'

# Fails if something is slower than benchmarks/baseline.json, which `bench-baseline` writes.
bench-check: setup
	$(BIN)/python -m benchmarks check $(ARGS)

bench-baseline: setup
	$(BIN)/python -m benchmarks check --renew $(ARGS)

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	rm -f tsfunc/bridge/compiled/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
