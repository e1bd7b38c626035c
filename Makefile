# Two commands: `make train` and `make test`. The first to run installs everything into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help train test test-all test-gpu lint docs clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

train: .venv/installed  ## train the default tiny GPT; ARGS="attention=sdpa steps=100" changes it
	$(BIN)/python train.py $(ARGS)

test: .venv/installed  ## run the tests but the slow ones; ARGS="-k tiled" picks some
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

test-all: .venv/installed  ## run the slow ones too
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-gpu: .venv/installed  ## run the tests of a GPU on it, but the slow ones
	$(BIN)/python -m pytest --gpu -n 4 --dist worksteal -m "not slow" $(ARGS)

lint: .venv/installed  ## check style, formatting and the types of the public surface
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/basedpyright --pythonpath $(BIN)/python

docs: .venv/installed  ## build the pages as a site: build/site/index.html
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean:  ## remove the environment (runs in outputs/ and multirun/ stay)
	rm -rf .venv

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tilegpt needs Python >= 3.11; name one with make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e '.[test]'
	@touch $@
