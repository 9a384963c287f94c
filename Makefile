# `make demo` and `make test` set themselves up: the first run creates .venv and installs the pinned
# set, later runs find it and start at once.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: help demo docs test lint format clean

help:
	@echo "make demo    train one module plain and accelerated, and compare (ARGS='--help' lists options)"
	@echo "make test    ruff, mypy and pytest"
	@echo "make docs    build the documentation into site/"
	@echo "make format  let ruff rewrite the sources"
	@echo "make clean   remove the environment and caches"

demo: $(STAMP)
	@$(BIN)/python examples/finetune.py $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# One torch thread per worker: two workers with a pool each would fight over the same cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not gpu" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist site demo_output

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than Python 3.10. Name a newer one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# Order-only: the interpreter behind the link may be older or newer than the stamp, which says nothing.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the pinned set into $(VENV) (only the first time) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
