# The README's commands. Each creates the environment it needs in .venv, and requires only Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# one worker per core, as long as they fit into memory; each file's tests run in one worker, which shares its fixtures
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

# To use a Python that already has torch: make gpu-check GPU_PYTHON=python3. BUDGET: total time in seconds.
GPU_PYTHON ?= $(BIN)/python
BUDGET ?= 600
gpu-check: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.gpu_check --budget $(BUDGET)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch is pinned: an open range may install a build with gigabytes of CUDA libraries
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt -e '.[report]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.demo
