# Everything a fresh machine needs: Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv demo demo-private test test-slow check format bench claims docs clean

venv: $(STAMP)

# Installed again only when what is to be installed changed.
$(STAMP): pyproject.toml constraints.txt assets.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "subspan needs Python 3.11 or newer: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r assets.txt
	@touch $@

demo: venv
	$(BIN)/subspan tune examples/reviews.yaml --fresh

demo-private: venv
	$(BIN)/subspan tune examples/reviews_private.yaml --fresh

# The unit tests, in two processes of one thread each.
test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# What the unit tests leave out: the specs' checks at full size, real models, killed and shared runs.
test-slow: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	@for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file --quick || exit 1; done

claims: venv
	@for slug in $$($(BIN)/subspan claims list --names); do $(BIN)/subspan claims run $$slug || exit 1; done
	$(BIN)/subspan claims report

docs: venv
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site dist .pytest_cache .ruff_cache .hypothesis
