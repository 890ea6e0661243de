# Every target sets up what it needs: `make demo` and `make test` work from a fresh clone.

SHELL := /bin/bash
PYTHON := .venv/bin/python
# What to install: `make setup EXTRAS=all,cuda UV_TORCH_BACKEND=cpu` on a GPU machine.
EXTRAS ?= all
# More for pytest: `make test ARGS="-k round_trip -x"`.
ARGS ?=
# Seconds of `make fuzz`, and how often `make soak` kills each kind of work.
FUZZ_SECONDS ?= 60
KILLS ?= 100
# Test files that run side by side; JOBS=0 runs all in one process, as `-s` and a debugger need.
JOBS ?= 2
# The size of a benchmark: `make bench SIZE=8b`.
SIZE ?=
export EXTRAS

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak fuzz check format bench golden clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: ## make .venv with pinned, tested versions (quick when nothing changed)
	@scripts/setup.sh

demo: setup ## fine-tune a real small Llama end to end: convert, train, export, verify
	.venv/bin/bridge demo

test: setup ## run the tests
	$(PYTHON) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

soak: setup ## kill conversions and exports at many more random moments
	BRIDGE_KILLS=$(KILLS) BRIDGE_EXAMPLES=500 $(PYTHON) -m pytest tests/functional/test_kill.py tests/functional/test_any_bytes.py --timeout 3600 $(ARGS)

fuzz: EXTRAS := all,fuzz
fuzz: setup ## coverage-guided fuzzing of every reader (FUZZ_SECONDS=60)
	$(PYTHON) fuzz/fuzz.py --seconds $(FUZZ_SECONDS)

check: setup ## ruff, ruff format, mypy strict
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: setup ## let ruff fix and format what it can
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: setup ## run the benchmarks of benchmarks/ (SIZE=tiny, 1b, 8b, 70b, 405b)
	@test -f benchmarks/run.py || { echo "bench: benchmarks/run.py, which holds the benchmarks, is not in this checkout" >&2; exit 1; }
	$(PYTHON) benchmarks/run.py $(if $(SIZE),--size $(SIZE)) $(ARGS)

golden: setup ## write the golden files anew; read the diff before committing it
	$(PYTHON) -m pytest tests/golden --update-golden $(ARGS)

clean: ## remove what builds, tests and checks left (not .venv, not the demo)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov bridge_llama.egg-info
