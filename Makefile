# Everything that a developer types. `make` alone says what there is.
#
#   PYTHON       a Python of at least 3.11 (found by itself)
#   TORCH_INDEX  an index of CPU wheels for torch; empty takes the pinned version from where pip looks anyway
#   SEED, OVERRIDES  given to the demo's PPO run: make demo SEED=1 OVERRIDES="actor.optim.lr=0"

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,\
	$(shell $(name) -c 'import sys, shutil; print(shutil.which("$(name)")) if sys.version_info >= (3, 11) else 0' 2>/dev/null | grep /)))
TORCH_INDEX ?=
SEED ?= 0
OVERRIDES ?=

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints-cpu.txt
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
MEGAPPO := $(BIN)/python -m megappo
WARM_START := runs/demo-warm-start/hf/latest

.DEFAULT_GOAL := help
.PHONY: setup demo test test-slow test-gpu lint bench clean help

setup: $(INSTALLED)  ## make .venv with pinned versions (2 minutes the first time, then nothing)
	@:

$(INSTALLED): setup.py $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "make: no Python of at least 3.11 found; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing pinned versions"
	@$(PIP) install --constraint $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

demo: setup  ## teach a small model to add: data, warm start (both cached), PPO on two ranks (5 minutes on two cores)
	@$(BIN)/python tools/make_demo.py
	@test -f $(WARM_START)/config.json || $(MEGAPPO) train yaml/demo_warm_start.yaml
	@rm -rf runs/demo  # it starts anew
	@$(MEGAPPO) train yaml/demo_cpu.yaml trainer.seed=$(SEED) data.seed=$(SEED) $(OVERRIDES)

test: lint  ## lint, then every test that is neither slow nor needs a GPU, vLLM or Ray
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m "not slow and not gpu"

test-slow: setup  ## the tests that take minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m "slow and not gpu"

test-gpu: setup  ## the tests that need a CUDA GPU (one is enough)
	@$(BIN)/python -m pytest -q -rs -m gpu

lint: setup  ## ruff, mypy and the import rules
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary megappo
	@$(BIN)/lint-imports --no-logo > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }

bench: setup  ## times PPO steps on four layouts, and generation with and without the cache; needs the demo's assets
	@$(BIN)/python tools/bench_step.py actor.ppo_micro_batch_size_per_gpu=64
	@$(BIN)/python tools/bench_generate.py

clean:  ## remove .venv, caches and build files; runs/ stays
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */|/' | awk -F'|' '{ printf "make %-10s %s\n", $$1, $$2 }'
