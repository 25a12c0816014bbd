# Everything here works from a fresh checkout: `make test` makes what it needs.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
LINKS := $(addprefix .links/kvwitness/,patches tracer collectors)
PYTEST_ARGS ?=

.PHONY: venv stand lint format typecheck test test-quick clean

venv: $(VENV)/.installed

# Again only when pyproject.toml is newer than the stamp.
$(VENV)/.installed: pyproject.toml | $(LINKS)
	@test -n "$(PYTHON)" || { echo "kvwitness needs Python 3.11 or newer (make PYTHON=...)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvwitness needs Python 3.11 or newer, and $(PYTHON) is older (make PYTHON=...)" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[tool,dev]'
	touch $@

# setuptools maps kvwitness.tracer to tracer/ and so on; mypy does not follow that, and reads these links.
$(LINKS):
	mkdir -p $(@D)
	ln -sfn ../../$(@F) $@

# The CPU stand: about 3 GB to download, once for each machine, kept outside the checkout.
stand: venv
	$(BIN)/python -m kvwitness.tracer.stand.cli ensure

lint: venv typecheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: venv
	$(BIN)/mypy -p kvwitness.tracer -p kvwitness.patches -p kvwitness.collectors

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: venv stand
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Without a server: seconds.
test-quick: venv
	$(BIN)/python -m pytest -m 'not stand and not jaeger' $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) .links .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
