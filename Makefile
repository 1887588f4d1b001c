# Commands for a new checkout: `make demo`, `make which`, `make test`. The first command that you run
# creates .venv.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# `make gpu` writes .gpu. The other targets then keep the versions of the measurements.
REQUIREMENTS := $(if $(wildcard $(VENV)/.gpu),requirements-measured.txt,requirements.txt)
PIP := $(RUN) -m pip install --disable-pip-version-check
# Number of test workers: one more than the number of cores, because many tests wait for a process
# that they have started. `make test` starts at most 8, because each worker spends six seconds on
# importing torch, and more workers would compete for memory.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")

.PHONY: help install gpu demo which check lint types test nightly speed-table docs site clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train a small model without a GPU: tokenizer, packs, training, comparison (5 to 10 minutes)"
	@echo "make which    after make demo: compare the losses of FP32 and emulated FP8 for a smaller model (1.5 to 4 minutes); a recommendation needs a GPU"
	@echo "make test     install the test requirements and run the tests (4 to 8 minutes on 2 cores)"
	@echo "make nightly  run the slow tests, and inject every fault in every precision (half an hour on 2 cores)"
	@echo "make install  create .venv only"
	@echo "make gpu      create .venv for NVIDIA GPUs with Python 3.12, compile Transformer Engine, check each precision"
	@echo "make speed-table  on a GPU, after make gpu: measure this launcher beside other trainers, pinned in PEERS"
	@echo "make lint     check style and formatting with ruff"
	@echo "make types    check the type hints with mypy"
	@echo "make site     build the site of the docs in site/; links that lead nowhere are errors"
	@echo "make check    run lint, types, site and test, as continuous integration does"
	@echo "make docs     write the generated pages, tables and pictures of the documentation, and recipes/schema.json"
	@echo "make clean    remove the results of the demo and all caches; keep .venv and your own runs"
	@echo
	@echo ".venv uses python3. To use another Python (3.11 or newer): make PYTHON=python3.12 ..."

install: $(VENV)/.installed

# The script explains its options, which are environment variables.
gpu:
	bash cluster/gpu_install.sh
	$(PIP) --no-deps --no-build-isolation -e .

demo: $(VENV)/.installed
	@$(RUN) -m demo

# Exit status 1 is not an error. It means that more seeds are needed for a verdict.
which: $(VENV)/.installed
	$(RUN) -m pretrain which demo/which.yaml --precisions fp32,delayed+head --seeds 3 --hours 0.1 --margin 1 \
		|| test $$? -eq 1

# The tests start dozens of processes. An empty PYTHONDONTWRITEBYTECODE makes Python keep bytecode
# for the next process, whatever the user's environment says.
test: $(VENV)/.installed-dev $(VENV)/.installed-references
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

# FAULTS has a line for each fault and precision. Write docs/developers/faults.md from it, never by hand:
#   .venv/bin/python -m tests.pretrain.verify.mutations --results runs/nightly/faults.jsonl --write
# An interrupted `make nightly` continues FAULTS. Another commit or torch needs a new file.
FAULTS ?= runs/nightly/faults.jsonl
nightly: $(VENV)/.installed-dev $(VENV)/.installed-references
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -m nightly -n $(WORKERS) --maxprocesses 8 --dist worksteal
	OMP_NUM_THREADS=1 $(RUN) -m tests.pretrain.verify.mutations --jobs $(WORKERS) --results $(FAULTS)

# The table of the README on this machine. An interrupted measurement continues SPEEDS.
PEERS ?= .venv/peers
SPEEDS ?= runs/speed_table.json
speed-table: $(VENV)/.installed
	PYTHON=$(RUN) bash benchmarks/speed/programs/measure.sh $(PEERS) $(SPEEDS) $(OPTIONS)

check: lint types site test

types: $(VENV)/.installed-dev
	$(RUN) -m mypy

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# docs/generate.py lists what is generated: from the settings classes, the recipes, the cards and the
# files in benchmarks/results/.
docs: $(VENV)/.installed-dev
	$(RUN) -m docs.generate

site: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean:
	rm -rf site demo/work runs/smoke runs/demo runs/which/which .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The stamp file is created after pip succeeds. The next `make` repeats an interrupted installation.
$(VENV)/.installed: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required: make PYTHON=python3.12 ...")'
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' $(REQUIREMENTS))"
	$(PIP) -r $(REQUIREMENTS)
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(PIP) -r requirements-dev.txt
	@touch $@

# The tests read only the Python files of the packages in requirements-references.txt, so the
# compiled kernels (350 MB) are deleted. If the packages cannot be installed, the tests that need them are skipped with a message.
$(VENV)/.installed-references: requirements-references.txt $(VENV)/.installed
	@$(PIP) --no-deps --no-compile --upgrade --target $(VENV)/references -r requirements-references.txt \
		&& find $(VENV)/references -name '*.so*' -delete && touch $@ \
		|| echo "make: $(VENV)/references could not be installed; the comparisons with published references are skipped"
