# Everything a new checkout needs: `make demo`, `make test`. Both set up .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test thorough frameworks browser test-gpu slow mutants docs lint clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per extra: the demo needs neither linters nor test frameworks.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[$*]'
	@touch $@

demo: $(VENV)/.installed-cli
	$(BIN)/dualfluence demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The full tables of which `make test` runs a few rows, and processes that start many others. TESTS="…" takes some of them.
thorough: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'thorough and not slow and not frameworks and not browser' $(TESTS)

# Models of every framework that has an adapter; installs Haiku, Keras, PyTorch and scikit-learn.
frameworks: $(VENV)/.installed-frameworks
	$(BIN)/python -m pytest tests/adapters -m 'frameworks and not slow'

# The explore page in Chromium, which must be on the machine (Debian: apt install chromium).
browser: $(VENV)/.installed-browser
	$(BIN)/python -m pytest tests/apps/explore -m 'browser and not slow'

# The numerical tests on an accelerator, in float64; JAX must see one.
test-gpu: $(VENV)/.installed-dev
	DUALFLUENCE_TEST_PLATFORM=gpu $(BIN)/python -m pytest -m 'not slow and not host and not frameworks and not browser'

slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m 'slow and not gpu'

# Which small bugs `make test` sees: build/mutants/mutants.txt. ARGS="--room dual --count 20" takes some; hours for many.
mutants: $(VENV)/.installed-dev
	$(BIN)/python scripts/mutants.py $(ARGS)

# Pages in docs/_build/html; tutorials run once and again where they or the library change.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV) dualfluence-report
