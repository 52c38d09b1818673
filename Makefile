# Every goal makes its own environment in .venv when there is none, so any of them can be the first command.
PYTHON ?= python3
# Test processes; the suite holds each to one thread.
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint check integration engines ci

help:
	@echo 'make demo         train medusa, eagle and eagle3 heads for SmolLM2 and measure them (11 minutes on 2 cores)'
	@echo 'make test         the default tests (minutes, no network)'
	@echo 'make lint         ruff, formatting, mypy, import contracts, spelling'
	@echo 'make check        lint and test: what a change must pass'
	@echo 'make integration  real processes, wheels and the real SmolLM2'
	@echo 'make engines      serving engines in environments of their own (5.4 GB, once), and exports run in them'
	@echo 'make ci           everything, as the build server runs it'

setup: .venv/.installed

# torch goes first and by its exact pin: pip then keeps that build instead of looking for the newest one.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'specdraft needs Python 3.10 or newer; name one with: make PYTHON=python3.11' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet -c constraints.txt '$(TORCH)'
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/.installed
	$(BIN)/python -m specdraft.cli.demo

test: .venv/.installed
	$(BIN)/python -m pytest -n $(WORKERS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

check: lint test

integration: .venv/.installed
	$(BIN)/python -m pytest -m integration tests/integration

engines: .venv/.installed
	PYTHON=$(PYTHON) scripts/engines.sh
	$(BIN)/python -m pytest -m engines tests/engines

ci:
	bash .ci/run
