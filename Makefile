# minivllm's commands. `make help` lists them. Works with GNU make 3.81 (macOS) and newer.
#
#   make demo                          set up .venv and run the main job
#   make test TORCH=torch==2.13.0      choose the torch build by a pip requirement
#   make demo PYTHON=/path/to/python   choose the interpreter that .venv is made from
#   make test JOBS=0                   the suite in one process (for a debugger, or on one core), not in two
#
# Stamp files inside .venv record what is installed, so that a second call goes straight to work.

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip install --disable-pip-version-check

TORCH ?= torch>=2.6
ARGS ?=
JOBS ?= 2

# Container images like to forbid bytecode, and then each of the thousand processes that the suite starts compiles the
# package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-crash bench lint docs docs-serve docs-assets clean force
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@echo "make demo         set up and run the main job: three prompts on two worker processes, with timelines"
	@echo "make test         set up and run the test suite (ARGS='tests/test_project.py -x' narrows it)"
	@echo "make test-crash   the whole crash matrix: every step, on every process, killed there; writes docs/crash_matrix.md"
	@echo "make bench        the benchmarks (queue, collective_rpc, spans, steps); BENCH=mq runs one of them"
	@echo "make lint         ruff check, ruff format --check, mypy"
	@echo "make docs         build the site into site/ (strict); make docs-serve shows it on port 8000"
	@echo "make docs-assets  record again what the site's pages show: runs, and what the walkthroughs print"
	@echo "make clean        remove what builds and tests leave (the environment: rm -r $(VENV))"
	@echo "TORCH=torch==X    which torch to install; default: $(TORCH)"

# --- environment ------------------------------------------------------------------------------------

$(VENV)/.stamp-venv:
	@python=""; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11 python3.10 python); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then \
	    python="$$candidate"; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  found=$$($(if $(PYTHON),"$(PYTHON)",python3) --version 2>/dev/null || echo "no $(if $(PYTHON),$(PYTHON),python3)"); \
	  echo "minivllm needs Python 3.10 or newer; found: $$found" >&2; \
	  echo "Install one, or name it: make demo PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	echo "==> $(VENV) from $$("$$python" --version)"; \
	if ! log=$$("$$python" -m venv $(VENV) 2>&1); then \
	  rm -rf $(VENV); \
	  echo "$$log" >&2; \
	  echo "Could not make $(VENV). On Debian and Ubuntu the package python3-venv has what is missing." >&2; \
	  exit 1; \
	fi
	@touch $@

# A torch that is already there stays, unless TORCH was given and asks for another one.
ifneq ($(origin TORCH),file)
ifneq ($(shell cat $(VENV)/.stamp-torch 2>/dev/null),$(TORCH))
$(VENV)/.stamp-torch: force
endif
endif

$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	@$(PY) -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null \
	  || echo "==> torch ($(TORCH)): a large download the first time; TORCH=... chooses another build"
	@$(PIP) $$([ -t 1 ] || echo -qq) "$(TORCH)" || { echo "Could not install $(TORCH): see pip's message above" >&2; exit 1; }
	@printf '%s\n' '$(TORCH)' > $@

$(VENV)/.stamp-core: $(VENV)/.stamp-torch pyproject.toml
	@echo "==> minivllm and what it needs"
	@$(PIP) -qq -e . || { echo "Could not install minivllm: see pip's message above" >&2; exit 1; }
	@touch $@

# TORCH once more, so that no extra brings another torch than the one chosen.
$(VENV)/.stamp-dev: $(VENV)/.stamp-core
	@echo "==> tools for tests, lint and docs"
	@$(PIP) -qq -e '.[test,docs,otlp]' "$$(cat $(VENV)/.stamp-torch)" \
	  || { echo "Could not install the development tools: see pip's message above" >&2; exit 1; }
	@touch $@

force:

# --- work -------------------------------------------------------------------------------------------

demo: $(VENV)/.stamp-core
	@$(BIN)/minivllm demo $(ARGS)

test: $(VENV)/.stamp-dev
	@$(PY) -m pytest -n $(JOBS) $(ARGS)

test-crash: $(VENV)/.stamp-dev
	@CRASH_MATRIX=write $(PY) -m pytest tests/crash -m crash $(ARGS)

bench: $(VENV)/.stamp-dev
	@for script in $(if $(BENCH),tests/benchmarks/bench_$(BENCH).py,tests/benchmarks/bench_*.py); do \
	  echo "==> $$script"; $(PY) $$script $(ARGS) || exit 1; \
	done

lint: $(VENV)/.stamp-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

docs: $(VENV)/.stamp-dev
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "site/index.html"

docs-serve: $(VENV)/.stamp-dev
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

docs-assets: $(VENV)/.stamp-dev
	@$(PY) docs/_hooks/record.py $(ARGS)

clean:
	rm -rf site build dist minivllm-trace* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find minivllm tests docs walkthroughs -name __pycache__ -type d -prune -exec rm -rf {} +
