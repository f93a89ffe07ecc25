# `make` alone lists the targets. Start with `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# PyTorch's own index has CPU builds; if it is unreachable, pip's configuration decides.
TORCH := torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
# To compile each module of each package takes two minutes; Python compiles those that it imports.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# uv is much faster than pip, which takes over where only pip knows the network's package index.
define INSTALL
$(PIP) 'uv>=0.9,<1'
$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[$(EXTRAS)]' || $(PIP) --editable '.[$(EXTRAS)]'
endef
# Four processes on two cores: those with the end-to-end tests mostly wait. tests/conftest.py distributes the
# files. If one test breaks a cluster that others share, dozens of them would wait for it in vain.
PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadscope --no-loadscope-reorder --durations=20 --maxfail=10
export PIP_NO_INPUT = 1
# Otherwise each of some hundred processes compiles all modules that it imports, for a second or more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

.PHONY: demo
demo: prerequisites .venv/with-local ## up, train, and down on the embedded cloud; buys nothing, leaves nothing
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
prerequisites: ## install the system packages of the embedded cloud (Debian and Ubuntu, as root)
	@infra/local/machines/prerequisites.sh

.PHONY: browser
browser: ## install Chromium, with which the tests inspect the report (Debian, as root)
	@tests/harness/browser.sh

.PHONY: lint
lint: .venv/with-dev ## run ruff, mypy, and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: .venv/with-dev ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: reference
reference: .venv/with-dev ## write docs/commands.md from the parsers
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/jobs/cli/test_commands_page.py

.PHONY: docs
docs: .venv-docs/ready ## build the site of the documentation, build/site/index.html; fails for a broken link
	.venv-docs/bin/sphinx-build --fail-on-warning --keep-going --quiet -c docs/site -d build/doctrees . build/site

.PHONY: size
size: .venv/with-dev ## count commands, options, words, and lines, beside the project's limits
	@$(BIN)/python -m tests.harness.size

.PHONY: test
test: prerequisites ## run all checks: lint, types, unit tests, and the product on the embedded cloud
	@$(MAKE) --no-print-directory --jobs=2 browser .venv/with-dev
	@$(MAKE) --no-print-directory --jobs=2 lint collect
	$(PYTEST) -m "not full"

.PHONY: collect
collect: .venv/with-dev # compiles the tests, so that not each of the test processes does
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true

.PHONY: test-quick
test-quick: lint ## run the same checks without the embedded cloud
	$(PYTEST) -m "not full and not e2e"

.PHONY: test-full
test-full: prerequisites browser lint ## run everything, including large downloads and a real Kubernetes
	@tests/e2e/kubernetes/build.sh
	$(PYTEST)
	$(PYTEST) tests/e2e --ignore=tests/e2e/kubernetes --base debian13

.PHONY: test-next
test-next: ## run the tests of jobs/worker/fast with pre-releases of torch and transformers
	$(PYTHON) -m venv .venv-next
	.venv-next/bin/pip install --quiet --upgrade --pre torch transformers accelerate datasets scikit-learn \
		--extra-index-url https://download.pytorch.org/whl/nightly/cpu --retries 1
	.venv-next/bin/pip install --quiet --editable '.[local]' 'pytest>=8.3,<9.2' hypothesis pytest-timeout pytest-xdist
	.venv-next/bin/python -c 'import torch, transformers as t; print("torch", torch.__version__, "transformers", t.__version__)'
	.venv-next/bin/python -m pytest --numprocesses 2 -m "not full" tests/jobs/worker/fast

.PHONY: recording
recording: .venv/with-dev ## record up, train, top, and down on the embedded cloud as docs/recording.svg
	@rm -rf .demo; mkdir .demo; SPR_CLUSTER_HOME=$$PWD/.demo/home $(BIN)/python -m tests.harness.recording docs/recording.svg .demo; \
	SPR_CLUSTER_HOME=$$PWD/.demo/home $(BIN)/spr-cluster local reset --keep-base; rm -rf .demo

.PHONY: aws-check
aws-check: .venv/with-check ## compare the embedded cloud with real AWS, without cost: ARGS='--region us-east-1'
	$(BIN)/python -m tests.aws_check $(ARGS)

.PHONY: release
release: ## write wheel, sdist, locked requirements, SBOM, and notes to dist/, checked on Python 3.10 to 3.13
	@.ci/release

.PHONY: clean
clean: ## remove everything that these targets created here
	rm -rf .venv .venv-docs .venv-next .demo results build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }

.venv/with-local: EXTRAS := local
.venv/with-local: .venv/bin/python pyproject.toml
	$(INSTALL)
	@touch $@

.venv/with-check: .venv/bin/python pyproject.toml
	$(PIP) --editable '.[local]' 'pytest>=8.3,<9.2'
	@touch $@

.venv/with-dev: EXTRAS := dev,job
.venv/with-dev: .venv/bin/python pyproject.toml
	$(PIP) $(TORCH)
	$(INSTALL)
	@touch $@

.venv-docs/ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check 'pip>=25.1'
	.venv-docs/bin/pip install --quiet --group docs
	@touch $@
