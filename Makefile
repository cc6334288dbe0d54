# Two commands do everything on a fresh machine:  make serve  and  make test
PYTHON ?= python3
VENV   := .venv
OTHERS := .venv-clients
BIN    := $(VENV)/bin
CONFIG ?= configs/llama.yaml
MINUTES ?= 10
# LOCKED=1 installs the packages that serving needs in the versions of requirements.lock, and pip checks their hashes. torch
# is not locked, because its builds for CPUs and for CUDA have different files. pyproject.toml selects the tests' packages.
LOCKED ?=
PINS   := $(VENV)/pins.txt

.DEFAULT_GOAL := help
.PHONY: help serve test test-all software check conformance clients long fuzz sanitizers lock wheel docs format figures pictures boards clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

serve: $(VENV)/.serve  ## install what serving needs, then serve the embedded model on :8000
	@exec $(BIN)/raylm serve $(CONFIG)

test: $(VENV)/.dev  ## install what testing needs, then run all tests but the long ones, in four processes
	@$(BIN)/python -m tests.side_by_side

test-all: check software test long conformance clients  ## everything, also what takes long or needs other software

software: $(VENV)/.dev  ## the programs that tests drive, as Chromium and Postgres: installed as root, else named
	@$(BIN)/python -m tests.software

long: $(VENV)/.dev  ## the tests that take minutes
	@$(BIN)/pytest -m long

check: $(VENV)/.dev  ## format, lint, types, import rules, size figures and licences
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python tests/house.py
	@$(BIN)/reuse lint --quiet

conformance: $(VENV)/.dev  ## check every endpoint's answers against the specifications (URL=… for a running server)
	@$(BIN)/python -m tests.conformance $(URL)

clients: $(VENV)/.dev $(OTHERS)/.installed  ## try other clients: litellm and its proxy, openai 2.x, inspect-ai, the benches of vLLM and SGLang, three agents in JavaScript, Codex and Claude Code
	@LITELLM_LOCAL_MODEL_COST_MAP=True $(BIN)/python -m tests.conformance.with_server \
		$(OTHERS)/bin/python -m tests.conformance.clients {url} openai litellm inspect_ai vllm sglang \
		$$(test ! -d $(OTHERS)/js || echo javascript)
	@test ! -d $(OTHERS)/js || $(BIN)/python -m tests.conformance.scripted_engine \
		$(OTHERS)/bin/python -m tests.conformance.coding_agents {url} {url}
	@test ! -d $(OTHERS)/js || $(BIN)/python -m tests.conformance.scripted_worker \
		$(OTHERS)/bin/python -m tests.conformance.coding_agents {url} {played}

fuzz: $(VENV)/.dev  ## attack a server at random, beside an honest client, for MINUTES=10, and read 3,000 mutated files
	@$(BIN)/python -m tests.hostile.fuzz $(MINUTES)
	@$(BIN)/pytest tests/hostile/test_files.py

sanitizers: $(VENV)/.dev  ## the native kernels under Address- and UndefinedBehaviorSanitizer, their threads under ThreadSanitizer
	@$(BIN)/python -m tests.native.sanitizers

lock: $(VENV)/.dev  ## write requirements.lock anew: exact versions and hashes of what serving needs
	@$(BIN)/python -m pip install --quiet uv
	@head -5 requirements.lock > requirements.lock.new
	@$(BIN)/uv pip compile pyproject.toml --quiet --generate-hashes --no-emit-package torch --no-header --no-annotate \
		--no-emit-index-url --no-emit-find-links --python-version 3.11 --python-platform linux | grep -v '^#' >> requirements.lock.new
	@mv requirements.lock.new requirements.lock

wheel: $(VENV)/.dev  ## build the sdist and a wheel for each machine type into dist/; needs g++ and Debian's g++-aarch64-linux-gnu
	@$(BIN)/python -m deploy.wheels

docs: $(VENV)/.dev  ## build the pages of docs/ and the Python interface as a site into build/site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: $(VENV)/.dev  ## write the format, fix what the linter can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

figures: $(VENV)/.dev  ## print the size figures over raylm/ and the lines by part
	@$(BIN)/python tests/house.py

pictures: $(VENV)/.dev  ## draw what docs show of the console and the commands; needs the distribution's chromium
	@$(BIN)/python -m tests.command_pictures
	@$(BIN)/python -m tests.console_pictures

boards: $(VENV)/.dev  ## write the Prometheus rules and Grafana dashboards of deploy/monitoring anew
	@$(BIN)/python -m deploy.monitoring.boards

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(OTHERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

$(BIN)/python:
	@echo "make: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

ifdef LOCKED
$(PINS): requirements.lock | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements.lock
	@sed --quiet 's/ \\$$//; /^[^ #]/p' requirements.lock > $@
else
$(PINS): | $(BIN)/python
	@touch $@
endif

$(VENV)/.serve: pyproject.toml $(PINS)
	@echo "make: installing RayLM (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml $(PINS)
	@echo "make: installing RayLM with its tests' needs (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable '.[dev]'
	@touch $@ $(VENV)/.serve

$(OTHERS)/.installed: tests/conformance/clients.txt tests/conformance/benches.txt $(wildcard tests/conformance/js/*)
	@echo "make: installing other clients into $(OTHERS)"
	@$(PYTHON) -m venv --clear $(OTHERS)
	@$(OTHERS)/bin/python -m pip install --quiet --requirement $<
	@$(OTHERS)/bin/python -m pip install --quiet --no-deps --requirement tests/conformance/benches.txt
	@if command -v npm > /dev/null; then \
		cp -r tests/conformance/js $(OTHERS)/js && npm install --silent --no-audit --no-fund --prefix $(OTHERS)/js; \
	else echo "make: npm is not installed, so clients in JavaScript are left out"; fi
	@touch $@
