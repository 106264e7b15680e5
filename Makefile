# Everything a developer of Shoal runs. `make help` lists it.
# A target sets up what it needs by itself; what is slow to build lives in ${XDG_CACHE_HOME:-~/.cache}/shoal.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON := .venv/bin/python
LOCKS := dev ps worker worker-gpu operator
VENV := .venv/.locked-$(shell sha256sum lock/dev.txt | cut -c1-12)

.PHONY: help install possible demo demo-down test unit lint format generate lock bench soak nightly clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(VENV)  ## Make .venv with .venv/bin/shoal, from the lock file

$(VENV): lock/dev.txt pyproject.toml
	@dev/bootstrap.sh
	@touch $@

demo: possible install  ## Run the main job on a real local cluster while its nodes are taken away (CLUSTER=kind|local, KEEP=1)
	@$(PYTHON) -m dev demo

possible:
	@dev/demo/possible.sh

demo-down: install  ## Take down the cluster that KEEP=1 left
	@$(PYTHON) -m dev down

test: install lint  ## Run every test of every tier
	@$(PYTHON) -m dev setup
	@$(PYTHON) -m pytest tests --numprocesses 2 --dist loadscope --no-loadscope-reorder $(ARGS)

unit: install  ## Run the tests that need no cluster
	@$(PYTHON) -m pytest tests/unit $(ARGS)

lint: install  ## ruff, mypy --strict, import arrows
	@.venv/bin/ruff format --check --quiet . && .venv/bin/ruff check --quiet . && .venv/bin/mypy && { .venv/bin/lint-imports --no-cache >build/imports.log 2>&1 || { cat build/imports.log; exit 1; }; }

format: install  ## Format, and mend what can be mended
	@.venv/bin/ruff check --quiet --fix . ; .venv/bin/ruff format --quiet .

generate: install  ## Write the generated files (CRDs)
	@$(PYTHON) -m dev.generate

lock: install  ## Resolve the dependencies again into lock/
	@$(PYTHON) -m dev.lock

bench: install  ## Print the tables of docs/benchmarks and write build/bench.json
	@$(PYTHON) -m benchmarks

soak: install  ## One hour of training with a process killed every 20 s (SECONDS_TO_RUN=3600)
	@$(PYTHON) -m benchmarks.soak

nightly: install  ## 10,000 seeds of the simulation
	@SHOAL_SEEDS=10000 $(PYTHON) -m pytest tests/unit/trainer/simulation --numprocesses auto

clean:  ## Remove what was built in the checkout (the cache outside stays)
	@rm -rf .venv build dist .mypy_cache .ruff_cache .hypothesis
