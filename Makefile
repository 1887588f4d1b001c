# Commands for a fresh machine: `make demo`, `make which`, `make test`. Each makes .venv on first use and skips that afterwards.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --disable-pip-version-check
# Test workers: one more than there are cores, as many a test waits for a process that it has started; but no more than 8: each
# imports torch, six seconds of a core, and 64 of them would only fight over memory.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")

.PHONY: help install demo which test lint docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small model on this machine: prepare text, train a tokenizer, pack, train, compare (4 to 6 minutes, no GPU)"
	@echo "make which   after that: which precision a smaller model trains in, FP8 emulated, with an answer in 3 to 5 minutes"
	@echo "make test    install what the tests need, and run them (3 to 6 minutes on 2 cores)"
	@echo "make install make .venv, and nothing else (for FP8 on a GPU, see docs/b200.md)"
	@echo "make lint    check style and formatting with ruff"
	@echo "make docs    write docs/settings.md from the classes that check recipes, docs/recipes.md from the recipes"
	@echo "make clean   remove the results of the demo and all caches; .venv and your own runs stay"
	@echo
	@echo ".venv is made with python3; to use another Python (3.11 or newer): make PYTHON=python3.12 ..."

install: $(VENV)/.installed

demo: $(VENV)/.installed
	@$(RUN) -m demo

# One thread: more would only wait for each other in a model so small. Status 1 is an answer too: more seeds are needed to tell.
which: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN) -m pretrain which demo/which.yaml --precisions fp32,delayed+head --seeds 3 --hours 0.1 --margin 1 \
		|| test $$? -eq 1

# Tests start some dozens of processes: what Python has compiled is kept for the next one, whatever the user has set.
test: $(VENV)/.installed-dev $(VENV)/.installed-references
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# docs/settings.md lists every key; the classes that check recipes say what each one means. docs/recipes.md lists the recipes.
docs: $(VENV)/.installed
	$(RUN) -m docs.settings_page > docs/.settings.md && mv docs/.settings.md docs/settings.md
	$(RUN) -m docs.recipes_page > docs/.recipes.md && mv docs/.recipes.md docs/recipes.md

clean:
	rm -rf demo/work runs/smoke runs/demo runs/which/which .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A stamp appears only after pip has succeeded, so an interrupted installation is taken up again.
$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; PYTHON=... names one")'
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' requirements.txt)"
	$(PIP) -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(PIP) -r requirements-dev.txt
	@touch $@

# Only what is written in Python is read; compiled kernels, 350 MB of them, go. Where the packages are not to be had, the tests that
# need them are skipped and say so.
$(VENV)/.installed-references: requirements-references.txt $(VENV)/.installed
	@$(PIP) --no-deps --no-compile --upgrade --target $(VENV)/references -r requirements-references.txt \
		&& find $(VENV)/references -name '*.so*' -delete && touch $@ \
		|| echo "make: $(VENV)/references could not be installed; comparisons with published references are skipped"
