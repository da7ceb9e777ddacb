# The verbs: setup, demo, test, lint, bench. Each makes what it needs first.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SEED ?= 0
# Where the plain index has no CPU build of torch, PyTorch's own has.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
REQUIREMENTS := requirements/cpu.txt requirements/tests.txt
# Twice quiet: a warning for each place that lacks a package is no news.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps

export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export LITELLM_LOCAL_MODEL_COST_MAP := True
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: setup demo test test-fast lint format bench clean

setup: $(READY)

$(READY): $(REQUIREMENTS) pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info[:2] == (3, 11), "strop needs Python 3.11: make PYTHON=/path/to/python3.11"'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the packages of requirements/ into $(VENV) (about 3 minutes)"
	$(PIP_INSTALL) $(REQUIREMENTS:%=-r %) || $(PIP_INSTALL) --extra-index-url $(TORCH_INDEX) $(REQUIREMENTS:%=-r %)
	$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $(READY)

demo: $(READY)
	$(BIN)/python -m examples.email_search.demo --seed $(SEED)

test: $(READY)
	$(BIN)/python -m pytest

test-fast: $(READY)
	$(BIN)/python -m pytest -m "not vllm"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(PIP_INSTALL) -r requirements/bench.txt || echo "LiteLLM's proxy will be left out"
	$(BIN)/python -m benchmarks.storage
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.gateway --memory

clean:
	rm -rf .strop build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
