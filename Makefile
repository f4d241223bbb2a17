# The one front door to the tree. `make help` lists the targets.
#
# The tiers: `make demo` (under 2 minutes), `make test` (5 to 15), `make soak` (long). A fresh
# machine needs Python 3.11 or newer and make; the first target that needs it sets up .venv.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Three test processes for two processors: much of what a test does is to wait for processes that
# it has started. 0 runs all tests in one.
TEST_PROCESSES ?= $(shell $(PYTHON) -c 'import os; print(-(-3 * os.cpu_count() // 2))')
PYTEST_NOTHING_RAN := 5

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

START := $(shell date +%s)
export PATH := $(CURDIR)/.tools/bin:$(PATH)
py := $(VENV)/bin/python
run_stamp := $(VENV)/.stamp-run
dev_stamp := $(VENV)/.stamp-dev
pip_install := $(py) -m pip install --quiet --disable-pip-version-check -c constraints.txt

# What an installation compiles.
built := hatch_build.py $(wildcard worker/mlxd_worker/machine/native/*.[ch])

# Metal comes with `mlx` on macOS; Linux needs one backend of its own.
ifeq ($(shell uname -s),Darwin)
run_extras := worker
else
run_extras := worker,cpu
endif

scripts := .ci/run examples/go/build tools/languages/install tools/node/install tools/page/check \
  tools/refresh_constraints

took = @echo "make $@: $$(( $$(date +%s) - $(START) )) s, set-up included"

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
	  printf '  %-15s %s\n' "$$name" "$$text"; done

.PHONY: demo
demo: $(run_stamp) ## stream text from the built-in model through a real controller and worker
	$(py) -m mlxd_controller.demo
	$(took)

# Compiled files are kept whatever the environment says: tests start hundreds of processes.
.PHONY: test
test: $(dev_stamp) ## every test but the long ones (5 minutes on 16 cores, some 15 on two)
	env -u PYTHONDONTWRITEBYTECODE $(py) -m pytest -n $(TEST_PROCESSES) --maxprocesses 8 \
	  --dist worksteal $(PYTEST_ARGS)
	$(took)

.PHONY: soak
soak: $(dev_stamp) ## the long tests
	@$(py) -m pytest -m soak $(PYTEST_ARGS) || { code=$$?; \
	  [ "$$code" -eq $(PYTEST_NOTHING_RAN) ] || exit "$$code"; echo "there are no long tests yet"; }
	$(took)

.PHONY: check
check: lint types imports proto-check ## everything that needs no running code
	$(took)

.PHONY: lint
lint: $(dev_stamp) ## ruff: rules and format; shellcheck; the page's syntax where there is Node
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(VENV)/bin/shellcheck $(scripts)
	@if command -v node >/dev/null; then tools/page/check; else echo "skipped: no node"; fi
	$(py) tools/vendor_page.py --check

.PHONY: types
types: $(dev_stamp) ## mypy, strict
	$(py) -m mypy

.PHONY: imports
imports: $(dev_stamp) ## the import laws
	$(VENV)/bin/lint-imports

.PHONY: proto
proto: $(dev_stamp) ## make the committed stubs from proto/
	$(py) tools/generate_protos.py

# A developer without buf is told so; CI has it, and its absence there is an error.
.PHONY: proto-check
proto-check: $(dev_stamp) ## stubs are fresh; buf lint; no break against proto/baseline.binpb
	$(py) tools/generate_protos.py --check
	@if command -v buf >/dev/null; then \
	  set -x; buf lint; buf breaking --against proto/baseline.binpb; \
	elif [ -n "$${CI:-}" ]; then \
	  echo "buf is missing: run make tools" >&2; exit 1; \
	else \
	  echo "skipped buf lint and buf breaking: no buf on PATH (make tools installs it)"; \
	fi

.PHONY: proto-baseline
proto-baseline: tools ## at a release: promise clients the wire as it is now
	buf build --as-file-descriptor-set --exclude-source-info -o proto/baseline.binpb

.PHONY: bench
bench: $(dev_stamp) ## measure against mlx-lm on this machine; curves go to build/bench
	$(py) -m tests.bench --pictures build/bench
	$(took)

.PHONY: setup
setup: $(dev_stamp) ## the development environment in .venv, and nothing else

.PHONY: tools
tools: $(VENV)/bin/python ## buf, and Node if need be, into .tools; Go, Java and Chromium from apt
	tools/node/install $(py)
	tools/languages/install

.PHONY: constraints
constraints: ## the newest versions that pyproject allows, resolved afresh and written down
	PYTHON="$(PYTHON)" tools/refresh_constraints "$(run_extras),dev"

.PHONY: clean
clean: ## remove what the targets above have made
	rm -rf $(VENV) .tools build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache examples/*/node_modules examples/go/bin examples/go/gen
	rm -f worker/mlxd_worker/machine/native/*.so
	find . -name __pycache__ -type d -not -path '*/node_modules/*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "mlxd needs Python 3.11 or newer; '$(PYTHON)' is not:" \
	    "$$($(PYTHON) --version 2>&1 || true)." \
	    "Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "cannot make $(VENV): install the venv module of $(PYTHON)" \
	    "(on Debian: apt install python3-venv)" >&2; exit 1; }

$(run_stamp): pyproject.toml constraints.txt $(built) | $(VENV)/bin/python
	$(pip_install) -e '.[$(run_extras)]'
	@touch $@

# Of mlx-vlm models alone are imported: its programs need half a gigabyte that nothing here does.
$(dev_stamp): pyproject.toml constraints.txt $(built) | $(VENV)/bin/python
	$(pip_install) -e '.[$(run_extras),dev]'
	$(pip_install) --no-deps mlx-vlm
	@touch $(run_stamp) $@
