# The commands of Shoal's developers. `make help` lists them.
# A target installs what it needs. Results that are slow to build are kept in ${XDG_CACHE_HOME:-~/.cache}/shoal.
.DEFAULT_GOAL := help
# Else each of the tests' many processes would compile Shoal and the tests anew.
unexport PYTHONDONTWRITEBYTECODE
SHELL := /bin/bash
PYTHON := .venv/bin/python
VENV := .venv/.locked-$(shell sha256sum lock/dev.txt | cut -c1-12)

.PHONY: help install possible demo demo-down images push test collected ready unit lint format docs generate lock bench bench-operator soak chaos nightly clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(VENV)  ## Install Shoal and its dependencies into .venv, from lock/dev.txt

$(VENV): lock/dev.txt pyproject.toml
	@dev/bootstrap.sh
	@touch $@

demo: possible install  ## Run a job on a local cluster while its nodes are reclaimed, or STORY=pools (as root on Linux; KEEP=1 keeps it)
	@$(PYTHON) -m dev demo

possible:
	@dev/demo/possible.sh

demo-down: install  ## Delete the cluster that KEEP=1 kept
	@$(PYTHON) -m dev down

images: install  ## Build and push all images: make images REGISTRY=registry.example.com/team
	@[ -n "$(REGISTRY)" ] || { echo "error: say where to: make images REGISTRY=registry.example.com/team" >&2; exit 2; }
	@$(PYTHON) -m dev images push $(REGISTRY)

push: images

test: install  ## Run the linters and all tests
	@$(MAKE) --no-print-directory --jobs 3 lint collected ready
	@$(PYTHON) -m pytest tests --numprocesses 3 --dist loadscope --no-loadscope-reorder $(ARGS)

unit: install  ## Run the unit tests
	@$(PYTHON) -m pytest tests/unit $(ARGS)

# While mypy has one core: each of the tests' processes would else rewrite all their assertions, and then find the error.
collected: install build/collected.log

build/collected.log: $(VENV) $(shell find tests operator trainer_image benchmarks dev examples -name '*.py')
	@mkdir -p build && { $(PYTHON) -m pytest tests --collect-only --quiet >$@.new 2>&1 || { tail -60 $@.new; exit 1; }; mv $@.new $@; }

# Tools and images, made beside the linters: much of the time is the disk's.
ready: install
	@$(PYTHON) -m dev setup

lint: install  ## Run ruff, mypy and import-linter
	@.venv/bin/ruff format --check --quiet . && .venv/bin/ruff check --quiet . && .venv/bin/mypy && mkdir -p build && { .venv/bin/lint-imports --no-cache >build/imports.log 2>&1 || { cat build/imports.log; exit 1; }; }

format: install  ## Format the code and apply ruff's fixes
	@.venv/bin/ruff check --quiet --fix . ; .venv/bin/ruff format --quiet .

docs: install  ## Build the documentation site into build/site/html; broken links are errors
	@$(PYTHON) -m dev docs

generate: install  ## Generate the CRDs and docs/api.md
	@$(PYTHON) -m dev.generate

lock: install  ## Update the lock files
	@$(PYTHON) -m dev.lock

bench: install  ## Run the benchmarks, write build/bench.json
	@$(PYTHON) -m benchmarks

bench-operator: ready  ## Measure the operator on a real control plane
	@$(PYTHON) -m benchmarks operator $(ARGS)

soak: install  ## Train for SECONDS_TO_RUN=3600 with a process killed every 20 s
	@$(PYTHON) -m benchmarks.soak

chaos: install  ## Run the operator through random faults from SHOAL_CHAOS_FIRST=0: 200 seeds in virtual time, 200 short and 3 long storms on a real control plane
	@SHOAL_CHAOS_SEEDS=200 $(PYTHON) -m pytest tests/virtual/test_chaos.py --numprocesses auto
	@$(PYTHON) -m dev setup
	@SHOAL_NIGHTLY=1 SHOAL_CHAOS_SHORT=200 $(PYTHON) -m pytest tests/control_plane/test_chaos.py --numprocesses 0

NIGHT ?= $(shell date +%u)

nightly: ready  ## Run what is slow and rarely fails; of what takes longest the seventh of NIGHT=1 to 7, the weekday (NIGHT= runs all)
	@failed="" told=""; export SHOAL_NIGHT=$(NIGHT); \
	step() { local began=$$SECONDS; echo "== $$(date +%H:%M) $$*"; env "$$@" || failed="$$failed\n  $$*"; \
	  told="$$told\n$$(((SECONDS - began) / 60)) min  $$*"; }; \
	step SHOAL_NIGHTLY=1 SHOAL_HOSTILE_SECONDS=60 $(PYTHON) -m pytest tests -m nightly --ignore tests/virtual --numprocesses 3 --dist loadscope --no-loadscope-reorder $(ARGS); \
	step SHOAL_NIGHTLY=1 $(PYTHON) -m pytest tests/unit -m "not nightly" --ignore tests/unit/trainer/simulation --numprocesses 2; \
	step SHOAL_NIGHTLY=1 $(PYTHON) -m pytest tests/virtual --numprocesses 2 --dist loadscope $(ARGS); \
	step SHOAL_NIGHTLY=1 SHOAL_SEEDS=10000 $(PYTHON) -m pytest tests/unit/trainer/simulation --numprocesses auto; \
	step $(PYTHON) -m dev.mutants; \
	step $(PYTHON) -m dev.mutants seeds fence: boot: claims: ledger: journal:; \
	step $(PYTHON) -m benchmarks.operator started reaction lone lost-of-one lost-of-two --quick; \
	printf "$$told\n"; [ -z "$$failed" ] || { printf "these failed:$$failed\n" >&2; exit 1; }

clean:  ## Delete .venv and build outputs; the cache is kept
	@rm -rf .venv build dist .mypy_cache .ruff_cache .hypothesis
