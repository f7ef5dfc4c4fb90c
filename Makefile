# make serve   serve the bundled model (PORT=8000)        make setup   only make .venv
# make test    what CI runs: lint, types, tests           make check   lint and types alone
# make quick   lint, types, and the tests that compile little; with TESTS=tests/... these too
# make toolchains DIR=/elsewhere     kernels and steps compiled with each supported jax and ptxas (.ci/toolchains)
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup serve test quick check lint types suite toolchains clean

setup: $(VENV)/.runtime

serve: $(VENV)/.runtime
	@$(BIN)/python -m launch.serve --port $(PORT)

# mypy runs beside the first tests: alone it would leave all cores but one idle.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 types suite

suite: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder -rs

QUICK := tests/test_architecture.py tests/test_docs.py tests/dsv3/scheduler tests/dsv3/kv_cache tests/dsv3/text \
    tests/dsv3/processes tests/dsv3/test_options.py tests/dsv3/test_hf_config.py tests/dsv3/test_speculative.py \
    tests/router/test_policy.py tests/router/test_cached_pages.py tests/router/test_gather.py

quick: check
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal $(QUICK) $(TESTS)

check: lint types

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

toolchains: $(VENV)/.dev
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.toolchains $(DIR)

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	@python=$$(./.ci/find-python) && echo "making $(VENV) with $$($$python --version)" && $$python -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the runtime into $(VENV)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing what the tests need"
	@$(PIP_INSTALL) --editable '.[dev]'
	@$(PIP_INSTALL) --no-deps --only-binary :all: nixl nixl-cu13 \
	    || echo "NIXL has no wheel for this machine: the tests of its own agent are skipped"
	@$(PIP_INSTALL) --no-deps --only-binary :all: nccl-extensions \
	    || echo "NCCL EP has no wheel for this machine: the tests of its own library are skipped"
	@touch $@
