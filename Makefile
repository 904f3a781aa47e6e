# Needs only make and a python3 (3.11 or later) on PATH; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.outgrow-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help venv demo test fuzz check docs docs-run format clean

help:  ## say what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

venv: $(STAMP)  ## set up .venv, once

# torch comes first and through the constraint, and the project is built with the setuptools of the
# constraint and without an isolated environment: so no step of this can pull another torch.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'outgrow needs Python 3.11 or later: make PYTHON=python3.11 ...' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt setuptools
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## train a ResNet-50 under half of its memory
	$(BIN)/outgrow demo

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

fuzz: $(STAMP)  ## train five times as many random networks under random plans as the tests do
	$(BIN)/python -m pytest tests/test_random_networks.py --hypothesis-profile fuzz

check: $(STAMP)  ## lint, formatting, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports --no-cache

docs: $(STAMP)  ## build the documentation in site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-run: $(STAMP)  ## run every shell command of README and docs as it is written; takes hours
	$(BIN)/python tests/run_pages.py

format: $(STAMP)  ## rewrite the code as `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv, caches and build leftovers
	rm -rf $(VENV) build dist site src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
