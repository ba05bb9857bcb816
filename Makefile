# `make` lists the targets. Each needs only GNU make, a shell and Python 3.11 or newer.
PYTHON ?= python3
VENV   ?= .venv
OUT    ?= runs/cartpole
JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); if [ $$n -gt 8 ]; then n=8; fi; echo $$n)

BIN    := $(VENV)/bin
BASE   := $(VENV)/.base
TESTS  := $(VENV)/.tests
READY  := $(VENV)/.ready
PEERS  := $(VENV)/.peers
GAMES  := $(VENV)/.games
FAKES  := .fakes

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-ray test-fakes lowest export docs dist bench evidence clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY)  ## make .venv and install everything into it that a change to the project needs

# Each of these files says that .venv holds what its targets need: the library alone, what `make test` needs, everything, and so on
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is not Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(BASE) $(TESTS) $(READY) $(PEERS) $(GAMES): pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(BIN)/python tools/install.py $(EXTRAS)
	@touch $@ $(ALSO)

$(TESTS): EXTRAS = test
$(TESTS): ALSO = $(BASE)
$(READY): EXTRAS = dev
$(READY): ALSO = $(BASE) $(TESTS)
$(PEERS): EXTRAS = dev bench
$(PEERS): ALSO = $(BASE) $(TESTS) $(READY)
$(GAMES): EXTRAS = dev evidence
$(GAMES): ALSO = $(BASE) $(TESTS) $(READY)

# Compiled kernels and the fonts of plots are kept in .venv, too: nothing is written elsewhere, but by pip into its own cache
train: $(BASE)  ## train an agent on CartPole, evaluate it, draw its learning curve
	@XDG_CACHE_HOME="$(abspath $(VENV))/cache" $(BIN)/fastrl_replay train CartPole-v1 --memory prioritized --seed 0 --out $(OUT) --force

# The tests start without any cache, as on a fresh machine. More processes than cores, since many tests wait for processes of their
# own, which all read the bytecode that the first has written; networks this small are slower on two threads than on one.
RUN_TESTS = cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && \
  XDG_CACHE_HOME="$$cache" NUMBA_CACHE_DIR="$$cache/numba" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
  $(BIN)/python -m pytest -n $$(($(JOBS)*2))

test: $(TESTS)  ## run the notebooks of parts 1 to 3, and the quick tests: a few minutes
	@$(RUN_TESTS) --suite test $(ARGS)

test-all: $(READY)  ## run every notebook and every test (CONTRIBUTING.md has a table)
	@$(RUN_TESTS) $(ARGS)

# Two clusters at a time, each with a file of tests. Once a week: make test-ray ARGS="--kills 100 -o faulthandler_timeout=0"
test-ray: $(READY)  ## run the tests on Ray clusters, the long ones too: at most 12 minutes on two cores
	@$(subst $$(($(JOBS)*2)),2,$(RUN_TESTS)) -k test_ray --nbflags slow $(ARGS)

# Neither a GPU nor a driver is needed. FAKES_TORCH: a PyTorch whose file for this platform is built with CUDA
FAKES_TORCH ?= torch==2.14.1
$(FAKES)/.ready: pyproject.toml constraints.txt
	@echo "making $(FAKES) with $(FAKES_TORCH) for CUDA, 5.8 GB; no GPU is needed"
	@$(PYTHON) -m venv $(FAKES)
	@grep -v '^torch==' constraints.txt > $(FAKES)/constraints.txt
	@$(FAKES)/bin/python -m pip install -q --disable-pip-version-check -c $(FAKES)/constraints.txt '$(FAKES_TORCH)' pytest pytest-xdist -e .
	@$(FAKES)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
	  { echo "$(FAKES_TORCH) has no CUDA in it on this platform: make test-fakes FAKES_TORCH=..." >&2; exit 1; }
	@touch $@

test-fakes: $(FAKES)/.ready  ## run the device memory on fake CUDA tensors, in .fakes, an environment of its own of 5.8 GB
	@$(subst $(BIN),$(FAKES)/bin,$(RUN_TESTS)) tests/test_device_fakes.py $(ARGS)

# TORCH=2.13.0 takes this PyTorch in place of the lowest, which is a download of gigabytes where it comes with CUDA
lowest:  ## install the lowest versions allowed into .lowest, and use the library with them
	@$(PYTHON) tools/lowest.py --venv .lowest $(if $(TORCH),--torch $(TORCH)) $(ARGS)

export: $(READY)  ## notebooks to package, cleaned, README from nbs/index.ipynb
	@$(BIN)/nbdev_export
	@$(BIN)/nbdev_clean
	@$(BIN)/python tools/readme.py

docs: $(READY)  ## build the site into _docs/
	@$(BIN)/python tools/docs.py

dist: $(READY)  ## build dist/ with a wheel and a source archive, check both, and use the library from each in an empty environment
	@$(BIN)/python tools/dist.py $(ARGS)

bench: $(PEERS)  ## measure against other replay buffers: all figures in runs/bench/results.csv, and a plot
	@mkdir -p runs/bench
	@$(BIN)/python benchmarks/compare.py --out runs/bench
	@for f in draw insert growth priority sequences hindsight cold frames disk stepper actors updates loops tensordicts sb3 cluster; do \
	  echo "== benchmarks/$$f.py"; BENCH_CSV=runs/bench/results.csv $(BIN)/python benchmarks/$$f.py || exit 1; done

# What is stored is not run again: interrupt it, and start it again another night
evidence: $(GAMES)  ## run the trainings behind the tutorials' figures that are missing, one night on two cores; draw the pages
	@$(BIN)/python benchmarks/evidence/run.py --jobs $(JOBS) $(ARGS)
	@$(BIN)/python tools/run_nbs.py --flags slow nbs/tutorials/blind_cliffwalk.ipynb
	@$(BIN)/python tools/run_nbs.py nbs/tutorials/minatar.ipynb nbs/tutorials/beside_learners.ipynb

clean:  ## remove what make made, .venv included
	rm -rf $(VENV) .lowest $(FAKES) _docs _proc runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
