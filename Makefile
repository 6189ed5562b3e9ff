# The README's commands. Each makes the environment that it needs, in .venv, from nothing but Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# one worker a core, up to a number that fits into memory; a file stays with one worker, which shares its fixtures
PYTEST := $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile

.PHONY: demo test test-all check bench gpu-check clean

demo: $(VENV)/.demo
	$(BIN)/megalith demo

test: $(VENV)/.dev
	$(PYTEST)

test-all: $(VENV)/.dev
	$(PYTEST) -m "slow or not slow"

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

# With a python that has torch already: make gpu-check GPU_PYTHON=python3. BUDGET is in seconds, for all of it.
GPU_PYTHON ?= $(BIN)/python
BUDGET ?= 600
gpu-check: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.gpu_check --budget $(BUDGET)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch by its pinned version: an open range may bring a build with gigabytes of CUDA libraries
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt -e '.[report]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.demo
