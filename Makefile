# Optimal ablation. `make` alone lists the commands.
#
# make notebooks FRESH=1 first moves all that is stored for the model (.oa/<model>, and .oa/known for
# notebook 10) to .oa/aside/, so that everything is computed anew. When such a run was stopped, start
# it again without FRESH: it goes on where it was.
MODEL  ?= tiny
BUDGET ?= default
NB     ?=
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
RECENT := import sys; sys.exit(sys.version_info < (3, 11))
SPREAD := -n auto --dist loadfile
JOBS    = $(if $(NB),$(wildcard notebooks/$(NB)*.ipynb),$(sort $(wildcard notebooks/[0-9]*.ipynb)))
export OA_MODEL = $(MODEL)
export OA_BUDGET = $(BUDGET)
# glibc hands large blocks back at once and gets them anew, page by page; keeping them halves the
# time of steps that work on whole vocabularies
export MALLOC_MMAP_THRESHOLD_ = 2000000000
export MALLOC_TRIM_THRESHOLD_ = 8000000000
export THP_MEM_ALLOC_ENABLE = 1

.DEFAULT_GOAL := help
.PHONY: help setup notebooks test test-real test-gpt2 lint lab claims claim publish restore readme bench bench-peers lock clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv and install the tested set of packages

$(READY): requirements.lock pyproject.toml
	@$(BIN)/python -c "import pip; $(RECENT)" 2>/dev/null || { \
	  $(PYTHON) -c "$(RECENT)" || { echo "$(PYTHON) is missing or older than 3.11: name another one, such as PYTHON=python3.12"; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV) || { echo "$(PYTHON) has no whole venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }; }
	@echo "installing packages into $(VENV) (3 to 5 minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(READY)

notebooks: $(READY) ## run the notebooks top to bottom [MODEL=tiny BUDGET=default NB=02 FRESH=1]
	@test -n "$(JOBS)" || { echo "no notebook matches NB=$(NB)"; exit 1; }
	@FRESH=$(FRESH) $(BIN)/python -m oa_utils.paper.notebooks $(JOBS)

test: $(READY) ## lint, unit tests, and every notebook at the test budget
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && echo "ruff: clean"
	@OMP_NUM_THREADS=1 OA_BUDGET=test $(BIN)/python -m pytest tests -m "not real and not gpt2" $(SPREAD)
	@OMP_NUM_THREADS=1 OA_MODEL=tiny OA_BUDGET=test $(BIN)/python -m pytest --nbval-lax --nbval-current-env \
	  --nbval-cell-timeout=600 -p no:cacheprovider $(SPREAD) notebooks

test-real: $(READY) ## the tests that need SmolLM2-135M (from PyPI, 93 MB, once)
	@OA_BUDGET=test $(BIN)/python -m pytest tests -m real

test-gpt2: $(READY) ## the tests that need GPT-2's weights [GPT2=folder]
	@test -d "$(GPT2)" || { echo "say where GPT-2's folder is: make test-gpt2 GPT2=folder"; exit 1; }
	@OA_BUDGET=test OA_GPT2=$(GPT2) $(BIN)/python -m pytest tests -m gpt2

lint: $(READY) ## ruff on code and notebooks: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

lab: $(READY) ## open the notebooks in JupyterLab
	@$(BIN)/jupyter lab notebooks

claims: $(READY) ## the paper's claims beside what was measured here, by chapter
	@$(BIN)/python -m oa_utils.paper.claims

claim: $(READY) ## measure one claim anew [ID=single.median_ratio.mean MODEL=tiny, or another column of claims]; without ID: list them
	@$(BIN)/python -m oa_utils.paper.claims $(ID) --model "$(MODEL)"

publish: $(READY) ## copy what a model's notebooks stand on from .oa/ to data/ [MODEL=tiny]
	@$(BIN)/python -c "from oa_utils.paper import publishing; from oa_utils.paper.notebooks import name_of; \
	  print(len(publishing.publish(name_of('$(MODEL)'))), 'files published')"

restore: $(READY) ## put what is published for a model into .oa/, so that runs go on from it [MODEL=tiny]
	@$(BIN)/python -c "from oa_utils.paper import publishing; from oa_utils.paper.notebooks import name_of; \
	  print(len(publishing.restore(name_of('$(MODEL)'))), 'files restored')"

readme: $(READY) ## write the README's tables anew: of claims from what is published, of families and costs
	@$(BIN)/python scripts/readme.py && $(BIN)/python scripts/families.py

bench: $(READY) ## what everything costs, into benchmarks/*.json and the README (a quiet machine, please)
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/run.py

bench-peers: $(READY) ## the same beside other packages, in venvs of their own in the user's cache
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/peers/run.py
	@$(BIN)/python scripts/readme.py

lock: ## write requirements.lock anew from pyproject.toml (maintainers)
	@$(PYTHON) -m venv $(VENV)-lock && $(VENV)-lock/bin/pip install --quiet torch==2.13.0
	@$(VENV)-lock/bin/pip install --quiet ".[dev,dask]"
	@$(VENV)-lock/bin/pip freeze --all --exclude optimal-ablation --exclude pip --exclude wheel \
	  | sed 's/+cpu//' > requirements.lock
	@rm -rf $(VENV)-lock build optimal_ablation.egg-info

clean: ## remove .venv, stored runs and caches (published results stay)
	@rm -rf $(VENV) .oa .pytest_cache .ruff_cache build *.egg-info
	@find . -name __pycache__ -prune -exec rm -rf {} +
