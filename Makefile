# `make` alone explains itself. The two commands to know: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# The PyTorch project's own index has builds for CPUs; where it can't be reached, pip's configuration decides.
TORCH := torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# Two at a time: what waits for containers, all in one process, and everything else beside it.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --durations=20
export PIP_NO_INPUT = 1

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

.PHONY: demo
demo: prerequisites .venv/with-local ## up, train, down on the embedded cloud: nothing bought, nothing left
	@set -e; \
	export SPR_CLUSTER_HOME="$(CURDIR)/.demo"; \
	clean() { trap - EXIT; $(BIN)/spr-cluster local reset --keep-base && rm -rf .demo; }; \
	trap clean EXIT; \
	run() { echo; echo "\$$ spr-cluster $$*"; $(BIN)/spr-cluster "$$@"; }; \
	run up --name demo --nodes 2 --cloud local; \
	rm -rf results/demo; \
	run train squad --name demo --demo --results results/demo; \
	run down --name demo; echo; \
	clean

.PHONY: prerequisites
prerequisites: ## what the embedded cloud needs from the system (Debian and Ubuntu, as root)
	@infra/local/prerequisites.sh

.PHONY: browser
browser: ## Chromium, in which the tests look at the report (Debian, as root)
	@tests/harness/browser.sh

.PHONY: lint
lint: .venv/with-dev ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: .venv/with-dev ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: test
test: prerequisites browser lint ## all checks: lint, types, units, and the product on the embedded cloud
	$(PYTEST) -m "not full"

.PHONY: test-quick
test-quick: lint ## the same without the embedded cloud
	$(PYTEST) -m "not full and not e2e"

.PHONY: test-full
test-full: prerequisites browser lint ## everything, the large downloads of stack intel included
	$(PYTEST)

.PHONY: clean
clean: ## remove what these commands made here
	rm -rf .venv .demo results .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }

.venv/with-local: .venv/bin/python pyproject.toml
	$(PIP) --editable '.[local]'
	@touch $@

.venv/with-dev: .venv/bin/python pyproject.toml
	$(PIP) $(TORCH)
	$(PIP) --editable '.[dev,job]'
	@touch $@
