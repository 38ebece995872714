# Everything runs in .venv, which the first command makes (some minutes) and later ones
# reuse. Needed beforehand: Python 3.11 or newer, git and make. pip is left to its own
# configuration: choose an index or a build of torch there.
#
#   PYTHON=python3.12   the interpreter of a new .venv
#   ARGS='-k stale -x'  more arguments for pytest or a benchmark
#   GTSRB=file.npz      the traffic signs, where they need not be downloaded

PYTHON ?= python3
ARGS ?=
GTSRB ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# pdoc follows __all__, which names no subpackages.
PUBLIC := flower_sap flower_sap.errors flower_sap.events \
	$(subst /,.,$(patsubst %/__init__.py,%,$(wildcard flower_sap/*/__init__.py)))

# One thread per client: clients run side by side, and two threads each on a few cores
# take many times longer.
OMP_NUM_THREADS ?= 1
OPENBLAS_NUM_THREADS ?= 1
MKL_NUM_THREADS ?= 1
export OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS

# Flower reports nothing and installs nothing while it runs here.
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1

.DEFAULT_GOAL := help
.PHONY: help demo format check test build docs bench-engine bench-compare bench-payload \
	fuzz-payload

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | \
		awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

demo: $(VENV)/.dev  ## Compare strategies on the embedded data set
	$(BIN)/flower-sap compare

format: $(VENV)/.dev  ## Lay out the code and mend what can be mended
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

check: $(VENV)/.dev  ## Lint, layout and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.dev  ## Run the tests
	$(BIN)/python -m pytest $(ARGS)

build: $(VENV)/.dev  ## Make the sdist, and the wheel from it, in dist/
	rm -rf dist
	$(BIN)/python -m build

docs: $(VENV)/.docs  ## Make the API pages in site/
	rm -rf site
	$(BIN)/pdoc $(PUBLIC) --docformat numpy --math --output-directory site

bench-engine: $(VENV)/.dev  ## Measure what the engine itself costs
	$(BIN)/python benchmarks/engine.py $(ARGS)

bench-compare: $(VENV)/.dev  ## Compare strategies on both fleets: 5 seeds parking, 3 GTSRB
	$(BIN)/python benchmarks/compare.py --data parking --seeds 5 $(ARGS)
	$(BIN)/python benchmarks/compare.py --data gtsrb --seeds 3 \
		$(if $(GTSRB),--data-file '$(GTSRB)') $(ARGS)

bench-payload: $(VENV)/.dev  ## Measure error, time and memory of payloads
	$(BIN)/python benchmarks/payload.py $(ARGS)

fuzz-payload: $(VENV)/.dev  ## Decode 100,000 damaged and hostile payloads
	$(BIN)/python benchmarks/hostile.py $(ARGS)

# -- the environment --------------------------------------------------------------------
# A stamp is written after a step has succeeded, so a broken set-up is begun again.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"flower-sap needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.created
	@echo 'Installing flower-sap and its tools into $(VENV) (some minutes the first time)'
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@
