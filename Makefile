# Everything here works from a fresh checkout: `make test` makes what it needs.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
LINKS := $(addprefix .links/kvwitness/,patches tracer collectors)
PYTEST_ARGS ?=

.PHONY: venv stand gdb demo demo-jaeger matrix jaeger browser bench lint format typecheck test test-browser test-quick test-slow soundness soundness-model mutants soak matrix-settings test-releases wheels support rules clean

venv: $(VENV)/.installed

# Again only when pyproject.toml is newer than the stamp.
$(VENV)/.installed: pyproject.toml | $(LINKS)
	@test -n "$(PYTHON)" || { echo "kvwitness needs Python 3.11 or newer (make PYTHON=...)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvwitness needs Python 3.11 or newer, and $(PYTHON) is older (make PYTHON=...)" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "Installing kvwitness and what it needs into $(VENV) (a minute or two)"
	@(while sleep 30 >/dev/null 2>&1; do echo "Installing into $(VENV): still going on"; done) & \
	  trap "kill $$!" EXIT; $(BIN)/python -m pip install --quiet -e '.[tool,dev]'
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

# The whole job on this machine: SGLANG's server on the CPU, A, B, eviction, C, bundle, table.
# make demo SGLANG=0.5.17, make demo FAULT=load-too-short, make demo DEMO_ARGS='--tree-core python'
demo: venv
	$(BIN)/kvwitness demo $(if $(SGLANG),--sglang $(SGLANG)) $(if $(FAULT),--fault $(FAULT)) $(DEMO_ARGS)

# The same, and its traces in a real Jaeger until Ctrl-C.
demo-jaeger: demo
	$(BIN)/kvwitness jaeger out/demo

# A, B, C on every release that the stand runs: one line each.
matrix: venv
	$(BIN)/kvwitness matrix $(MATRIX_ARGS)

jaeger: venv
	$(BIN)/python -c "from pathlib import Path; from kvwitness.tracer.spans.jaeger import find_or_build_jaeger as f; \
	  print(f(lambda line: print(line, flush=True), Path('tests/jaeger')))"

# A Chromium for the tests of the report's page: KVWITNESS_CHROMIUM, else one on PATH, else Debian's package.
browser:
	@test -n "$$KVWITNESS_CHROMIUM" || command -v chromium >/dev/null || \
	  { echo "Installing chromium (half a minute)"; apt-get install --yes --quiet chromium >/dev/null; } || \
	  { echo "No Chromium: name one in KVWITNESS_CHROMIUM" >&2; exit 1; }

# gdb for attaching to Python 3.11 to 3.13, which is part of the environment: says which one is taken.
gdb: venv
	@$(BIN)/python -c 'from kvwitness.collectors.live.preflight import look_for_gdb; found = look_for_gdb(); \
	  print(found.gdb if not found.problem else f"Tests of gdb are skipped: {found.problem}; {found.what_to_do}")'

bench: venv stand
	$(BIN)/python tests/bench/bench.py $(BENCH_ARGS)

# Everything but the slow suites, of which a fixed sample is in it.
test: venv stand
	-@$(MAKE) --no-print-directory jaeger
	-@$(MAKE) --no-print-directory gdb
	$(BIN)/python -m pytest -m 'not slow and not releases and not browser' $(PYTEST_ARGS)

# The report's page in a headless Chromium.
test-browser: venv browser
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

test-slow: venv stand
	-@$(MAKE) --no-print-directory gdb
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# A real server of every older SGLang release that the stand runs: about 1.5 GB more, and many minutes.
test-releases: venv stand
	$(BIN)/python -m pytest -m releases $(PYTEST_ARGS)

# Without a server: seconds.
test-quick: venv
	-@$(MAKE) --no-print-directory gdb
	$(BIN)/python -m pytest -m 'not stand and not jaeger and not browser' $(PYTEST_ARGS)

# Looks for false confirmations: mutated journals, the product against an independent checker of the chain. A new seed
# every time: make soundness SOUNDNESS_ARGS='--seeds 10 --mutants 20000', --exhaustive, --resume
soundness: venv
	$(BIN)/python tests/soundness/run.py --mutants 100000 $(SOUNDNESS_ARGS)

# Of random changes of the code that decides, how many do the tests notice? MUTANTS_ARGS='--count 300 --seed 7'
mutants: $(VENV)/.mutants
	$(BIN)/python -m pytest -q tests/mutants
	$(BIN)/python tests/mutants/run.py $(MUTANTS_ARGS)

$(VENV)/.mutants: tests/mutants/requirements.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -r $<
	touch $@

# Random load on a real server for an hour: do ledger and pools agree at its end? SOAK_ARGS='--minutes 5'
soak: venv stand
	$(BIN)/python tests/soundness/soak.py $(SOAK_ARGS)
# Random workloads on SGLang's own caches, the ledger against the bytes in the pools: about a quarter of an hour.
soundness-model: venv stand
	$(BIN)/python tests/model/start.py --workloads 60 $(MODEL_ARGS)

# A, B, C under every setting that the stand runs, each row judged by the independent checker, too.
matrix-settings: venv stand
	$(BIN)/python tests/soundness/settings.py $(SETTINGS_ARGS)

# Wheels of the SGLang releases that docs/support.md is made from (about 300 MB), kept outside the checkout.
wheels: venv
	$(BIN)/python -m kvwitness.tracer.contracts wheels

# The page of all rules, made from their declaration: again after every change to tracer/rules.
rules: venv
	$(BIN)/python -m kvwitness.tracer.rules.page docs/rules.md

# What each release lets kvwitness prove: again after every change to a hook.
support: wheels
	$(BIN)/python -m kvwitness.tracer.contracts support --signatures tests/contracts/signatures --page docs/support.md

clean:
	rm -rf $(VENV) .links .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
