# Two commands matter: `make demo` (the whole chain on the built-in case) and `make test`.
# PYTHON= names the interpreter that makes .venv; TORCH= names another torch than the one tried here.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(subst =,_,$(TORCH))

.PHONY: help setup demo test test-slow check lint types layers format clean serve-check sglang-check

help:
	@echo "make demo       set up, then run the whole chain on the built-in small model (about 15 minutes, 2 cores)"
	@echo "make test       set up, then run the tests (under 10 minutes)"
	@echo "make test-slow  the long trials (under 45 minutes)"
	@echo "make check      lint, types, layering and the tests"
	@echo "make serve-check  HEAD=run/ in vLLM on the CPU beside our loop (fetches 2 GB once; part of a release)"
	@echo "make sglang-check  HEAD=run/ in SGLang's model classes on the CPU (fetches 1 GB once; part of a release)"
	@echo "make setup      only set up .venv"

setup: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev,wandb,deepspeed]"
	rm -f $(VENV)/.ready-*
	touch "$@"

demo: setup
	$(BIN)/eagle demo

test: setup
	$(BIN)/python -m pytest -n auto -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -n auto -m slow

check: lint types layers test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache

# Exported heads in a real engine: HEAD= names runs or head directories, ENGINE_ENV= the engine's environment.
HEAD ?= eagle-demo/run
ENGINE_ENV ?= .venv-vllm
serve-check: setup
	$(BIN)/python scripts/serve_check.py $(HEAD) --engine-env $(ENGINE_ENV)

SGLANG_ENV ?= .venv-sglang
sglang-check: setup
	$(BIN)/python scripts/sglang_check.py $(HEAD) --engine-env $(SGLANG_ENV)
