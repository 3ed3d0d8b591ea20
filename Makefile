# make test   everything that CI runs: lint, types, tests, doctests (two cores, minutes)
# make demo   the paper's MLP by eight algorithms, on MNIST or digits; a table and two pictures (three minutes)
# make slow   the tests that are too long for CI
# make clean  remove what make made

PYTHON ?= python3
JOBS ?= 2
BIN = .venv/bin
READY = .venv/.ready

.PHONY: test lint slow demo clean

test: lint
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) -m slow -q

demo: $(READY)
	$(BIN)/python examples/demo.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv demo-output .mypy_cache .ruff_cache dist
	find . -name __pycache__ -prune -exec rm -rf {} +
