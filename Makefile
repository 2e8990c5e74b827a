# Baton. `make help` lists the targets; every one of them sets up what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV    := .venv
BIN     := $(VENV)/bin
PY      := $(BIN)/python
STAMP   := $(VENV)/.setup-stamp
KERNELS := $(VENV)/.kernels-stamp
PEERS   := $(VENV)/.peers-stamp
PIP     := $(PY) -m pip --disable-pip-version-check -qq

# Stops a hanging test run; the suite fits 25 minutes on two cores.
TEST_LIMIT := 30m
PYTEST     := $(PY) -m pytest -q

# torch's CPU wheels link libgomp, whose idle threads spin; two processes on two cores slow each other without this.
export GOMP_SPINCOUNT := 0
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help setup demo test acceptance check lint format types protos protos-check protos-release up down bench lock \
        prove chaos test-torch-free clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ------------------------------------------------------------------------------------------------------------- set-up

setup: $(STAMP) $(KERNELS)  ## make .venv with everything that runs and tests Baton

# The first interpreter that runs and fits wins; PYTHON=... chooses one. (A name on the PATH may be a shim that fails.)
$(STAMP): pyproject.toml requirements.lock
	@if [ ! -x $(PY) ]; then \
	  for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	      echo "setup: $(VENV) with $$($$python --version)"; \
	      $$python -m venv $(VENV); \
	      break; \
	    fi; \
	  done; \
	  [ -x $(PY) ] || { echo "setup: needs Python 3.11, 3.12 or 3.13; set PYTHON=/path/to/python" >&2; exit 1; }; \
	fi
	@echo "setup: torch"
	@$(PIP) install -c requirements.lock torch
	@echo "setup: baton and its tools"
	@$(PIP) install -c requirements.lock -e '.[dev]'
	@touch $@

# Without a C++ compiler the engine runs on torch alone, so a failed build is no failed set-up.
KERNEL_SOURCES := $(shell find baton/engine/native -name "*.cpp" -o -name "*.h" -o -name build.py)
$(KERNELS): $(STAMP) $(KERNEL_SOURCES)
	@echo "setup: native kernels"
	@$(PY) -m baton.engine.native.build > /dev/null || echo "setup: no native kernels; the engine computes with torch"
	@touch $@

# What the benchmarks measure Baton against.
$(PEERS): $(STAMP)
	@echo "setup: peers of the benchmark"
	@$(PIP) install -c requirements.lock -e '.[dev,bench]'
	@touch $@

lock: $(PEERS)  ## write requirements.lock from .venv, after a dependency changed
	@echo "lock: requirements.lock"
	@{ sed -n '/^#/p' requirements.lock; \
	   $(PY) -m pip freeze --exclude-editable | sed 's/^torch==\([0-9.]*\).*/torch==\1/'; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:  ## remove caches and the environment
	@rm -rf $(VENV) build ./*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# ------------------------------------------------------------------------------------------------------------- to run

demo: setup  ## start everything, ask it things through the gateway, print a table
	@$(PY) -m baton.cli.demo

up: setup  ## start all services on loopback, in the background
	@$(BIN)/baton up --detach

down: setup  ## stop what `make up` started
	@$(BIN)/baton down

bench: setup $(PEERS)  ## measure Baton beside transformers on this machine, into build/cpu_speed.json
	@echo "bench: CPU speed, takes minutes"
	@mkdir -p build
	@$(BIN)/baton bench cpu --output build/cpu_speed.json

# ------------------------------------------------------------------------------------------------------------ to test

test: setup  ## the whole suite but the slow tests, in series
	@echo "test: pytest"
	@timeout $(TEST_LIMIT) $(PYTEST)

# Row N of tests/faults/README.md; without it ten random rows.
prove: setup  ## make promise N's one-line change in a copy of the tree and expect its test to fail
	@$(PY) -m tests.faults.prove $(N)

SEED    ?= 1
MINUTES ?= 10
chaos: setup  ## break a whole deployment at random under load: SEED=1 MINUTES=10
	@$(PY) -m tests.faults.chaos --seed $(SEED) --minutes $(MINUTES)

acceptance: setup  ## everything that Baton promises on this machine: all tests, slow ones too, demo and benchmark
	@echo "acceptance: pytest with the slow tests"
	@$(PYTEST) -m "not gpu"
	@$(MAKE) demo bench

# What gateway and planner need must run without torch, and on every Python that we support.
TORCH_FREE_VENV := build/torch-free-$(notdir $(or $(PYTHON),python3))
test-torch-free:  ## unit tests of the torch-free part in an environment without torch: PYTHON=python3.13
	@echo "test-torch-free: $(TORCH_FREE_VENV)"
	@[ -x $(TORCH_FREE_VENV)/bin/python ] || $(or $(PYTHON),python3) -m venv $(TORCH_FREE_VENV)
	@$(TORCH_FREE_VENV)/bin/python tests/torch_free.py requirements > $(TORCH_FREE_VENV)/requirements.txt
	@$(TORCH_FREE_VENV)/bin/python -m pip --disable-pip-version-check -qq install \
	  -c requirements.lock -r $(TORCH_FREE_VENV)/requirements.txt
	@timeout $(TEST_LIMIT) $(TORCH_FREE_VENV)/bin/python tests/torch_free.py run

# ----------------------------------------------------------------------------------------------------------- to check

check: lint types protos-check  ## lint, types and protos; under a minute

lint: setup  ## ruff, and who may import whom
	@echo "lint: ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "lint: ruff format"
	@$(BIN)/ruff format --quiet --check . || { $(BIN)/ruff format --check . ; exit 1; }
	@echo "lint: import contracts"
	@$(BIN)/lint-imports > $(VENV)/lint-imports.log 2>&1 || { sed -n '/^Contracts/,$$p' $(VENV)/lint-imports.log; exit 1; }

format: setup  ## let ruff format and fix what it safely can
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .

types: setup  ## pyright, strict outside the engine
	@echo "types: pyright"
	@$(BIN)/pyright --warnings > $(VENV)/pyright.log 2>&1 || { cat $(VENV)/pyright.log; exit 1; }

# ------------------------------------------------------------------------------------------------------------- protos

PROTOS      := $(wildcard protos/baton/v1/*.proto)
PROTOC       = PATH="$(CURDIR)/$(BIN):$$PATH" $(PY) -m grpc_tools.protoc -I . $(PROTOS)
RELEASED    := protos/released.binpb

protos: setup  ## generate the stubs beside the .proto files
	@echo "protos: stubs"
	@$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=quiet:.

protos-check: setup  ## proto style, stubs up to date, and wire compatibility with the last release
	@echo "protos: buf lint"
	@$(BIN)/buf lint
	@echo "protos: stubs are those of the .proto files"
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	  $(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh --mypy_grpc_out=quiet:$$fresh; \
	  for stub in $$fresh/protos/baton/v1/* protos/baton/v1/*_pb2*; do \
	    name=$$(basename $$stub); \
	    cmp -s $$fresh/protos/baton/v1/$$name protos/baton/v1/$$name || \
	      { echo "protos/baton/v1/$$name differs from its .proto: run 'make protos'" >&2; exit 1; }; \
	  done
	@echo "protos: wire compatibility with $(RELEASED)"
	@$(BIN)/buf breaking --against $(RELEASED)

protos-release: setup  ## at a release: the wire format that later ones must stay compatible with
	@$(BIN)/buf build -o $(RELEASED)
