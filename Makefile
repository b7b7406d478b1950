# Everything runs in .venv, which `make setup` makes; every target below makes it first if need be.
#
#   make test                         the suite
#   make test ARGS='-k vmap'          part of it, or any other options of pytest
#   make test TSFUNC_DEVICE=cuda      on another device
#   make fuzz                         random programs for a minute (SEED=N for those of a seed)
#   make soak HOURS=8                 random programs for hours; failures are in build/fuzz
#   make setup PYTHON=python3.12      with another Python (3.10 to 3.13)

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
SEED ?=
HOURS ?= 8

BIN := .venv/bin
STAMP := .venv/.up-to-date
TORCH := $(shell grep '^torch==' constraints.txt)
# One torch thread a worker: the workers are the parallelism.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

FUZZ := OMP_NUM_THREADS=1 $(BIN)/python -m tools.fuzz_programs $(if $(SEED),--seed $(SEED))

.PHONY: setup demo test test-all fuzz soak lint format bench clean

setup: $(STAMP)

# torch goes first and pinned: that way pip takes the build it is set up for (a CPU wheel, say),
# and the second install finds its requirement met.
$(STAMP): pyproject.toml constraints.txt tsfunc/bridge/compiled/handlers.cpp
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 14) or sys.exit( \
	    "tsfunc needs Python 3.10 to 3.13, and $(PYTHON) is %d.%d: make PYTHON=..." % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	-$(BIN)/python -m tsfunc build # optional: needs a C++ compiler
	touch $@

demo: setup
	$(BIN)/python examples/digits.py

test: setup
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: setup
	$(PYTEST) $(ARGS)
	$(if $(ARGS),,$(FUZZ) --seconds 900)

fuzz: setup
	$(FUZZ) --seconds 60

soak: setup
	$(FUZZ) --seconds $(shell expr $(HOURS) '*' 3600) --keep build/fuzz

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
