# Only Python and make are needed: every target first installs its dependencies into .venv.

PYTHON ?= python3
VENV   ?= .venv
# The version for the tests. The package supports 2.11 to 2.15.
# To test with another version in a second environment: make test VENV=.venv-2.11 TORCH=torch==2.11.0
TORCH  ?= torch==2.13.0

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

# uv does not read pip's settings, so a folder of wheels for pip is passed on to uv.
ifdef PIP_FIND_LINKS
empty :=
comma := ,
export UV_FIND_LINKS ?= $(subst $(empty) $(empty),$(comma),$(strip $(PIP_FIND_LINKS)))
endif

.PHONY: help quick test test-all lint bench demo docs clean

help:
	@echo "make demo      train and evaluate a translation model, and draw its attention"
	@echo "make quick     lint, type check, and the tests that take little time"
	@echo "make test      lint, type check, and all tests except the slow ones"
	@echo "make test-all  the slow tests too"
	@echo "make bench     run the benchmarks"
	@echo "make docs      run the lessons and build the site: build/docs/html/index.html"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove the environment and the caches, but not runs/"

# One process per core. Each runs whole files, so that the fixtures of a file are set up once. tests/conftest.py sorts
# the files.
PARALLEL = --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder

quick: lint
	$(BIN)/python -m pytest -q -m "not slow and not long" $(PARALLEL)

test: lint
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-all: lint
	$(BIN)/python -m pytest $(PARALLEL)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python bench/attention.py
	$(BIN)/python bench/training.py
	$(BIN)/python bench/decoding.py
	$(BIN)/python bench/bert.py
	$(BIN)/python bench/classify.py
	$(BIN)/python bench/serving.py
	$(BIN)/python bench/speech.py
	$(BIN)/python bench/look.py
	$(BIN)/python bench/look_browser.py
	$(BIN)/python bench/watch_coverage.py

demo: $(STAMP)
	$(BIN)/jumok train bahdanau/demo --out runs/demo
	$(BIN)/jumok eval runs/demo
	$(BIN)/jumok run runs/demo "this is an example sentence" --alignments --attention-map runs/demo/figures/example.png

# The outputs of the lessons are cached: the second build takes seconds.
docs: $(STAMP)
	$(BIN)/python docs/build.py

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples bench docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last, so a failed or interrupted install is repeated. torch is installed first and alone, so
# that no other package selects another version or build of it. uv is used if it is installed. If it fails, pip
# starts from an empty environment.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("jumok needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@rm -f $@
	@set -e; \
	with_uv() { \
	    uv venv --quiet --allow-existing --python "$(PYTHON)" $(VENV) && \
	    uv pip install --python $(BIN)/python "$(TORCH)" && \
	    uv pip install --python $(BIN)/python --editable ".[test]"; \
	}; \
	with_pip() { \
	    $(PYTHON) -m venv $$1 $(VENV) && \
	    $(BIN)/python -m pip install "$(TORCH)" && \
	    $(BIN)/python -m pip install --editable ".[test]"; \
	}; \
	if ! command -v uv >/dev/null; then echo "Installing into $(VENV) with pip ..."; with_pip; \
	elif ! with_uv; then echo "uv failed to install the packages. Installing with pip ..."; with_pip --clear; fi
	@touch $@
