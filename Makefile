# Every target does its own set-up; a second call finds the stamp and starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := .venv-oldest
# The oldest torch that setup.cfg allows, and the newest setuptools that it allows. All else is as in constraints.txt.
OLDEST_PINS := -e 's/^torch==.*/torch==2.11.0/' -e 's/^setuptools==.*/setuptools==81.0.0/'
# Without a GPU this shows that the script runs; with one: make bench GPU_DAY=
GPU_DAY ?= --emulated --minutes 4
# The benchmarks that write figures, and the setting of the simulated GPU's bound.
MEASURED := selection scaling ablation overhead predictions host_optimizer dram scheduler simulator imports elasticity adaptive
BOUND := --models 4 --tokens 8192 --dram 200 --link 50

# The tests that answer in a minute on two cores: decisions, tasks, the host's weights and optimizers, partitions, readers,
# imports, overlap, and calls that are refused.
CHECK := $(addprefix tests/,schedule tasks host partitioners pictures test_imports.py test_package.py test_trace.py \
	$(addprefix data/test_,indices.py reader.py streams.py) promises/test_overlap.py promises/test_wrong_calls.py)

PARTS := 1/8 2/8 3/8 4/8 5/8 6/8 7/8 8/8

.PHONY: demo check test test-all test-oldest exact lint docs pictures bench gpu-wheels dist clean

demo: $(STAMP)
	$(BIN)/hydra-engine demo

check: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not rest or net" $(CHECK)

# The net: every fact once. Marked `rest` is what takes long, or is one more case of what these tests cover.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=5 -m "not rest or net"

# Everything else, in parts. PART=3/8 runs one part. Without PART, a second call continues where the first was stopped: parts
# that have passed at this commit are left out.
test-all: $(STAMP)
	@set -e; for part in $(or $(PART),$(PARTS)); do \
		stamp=build/test-all/$$(git rev-parse --short HEAD 2>/dev/null)/$$(echo $$part | tr / -); \
		if [ -z "$(PART)" ] && [ -e $$stamp ]; then echo "part $$part has passed"; continue; fi; \
		echo "== part $$part"; \
		$(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=5 -m "rest and not net" --part $$part; \
		mkdir -p $$(dirname $$stamp); touch $$stamp; done

# Also runs the tests of a GPU, on the stand-in. pip's torch for Linux comes with CUDA, which takes 4.5 GiB of disk; an
# index with CPU builds (PIP_INDEX_URL) saves most of that.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -q -n 2 --dist worksteal
	HYDRA_ENGINE_FAKE_CUDA=1 $(OLDEST)/bin/python -m pytest -q -n 2 tests/devices/test_gpu.py

# The whole product of factors behind tests/promises/test_exact.py, where `make test` covers every pair of them.
exact: $(STAMP)
	$(BIN)/python -m tests.exact

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, in build/docs; any warning ends it. NO_MKDOCS_2_WARNING silences an advertisement of the theme.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Those in docs/screens and docs/pictures: of the live display, of timelines, and of the site's first page, which needs
# Chromium. Some 4 minutes.
pictures: docs
	$(BIN)/python -m tests.screens
	$(BIN)/python -m tests.timelines
	$(BIN)/python docs/site/picture.py

# What compares bits comes first, and ends this where it says no. The others write figures and all have their turn. Then
# comes which figures moved, are beyond their limit, or are missing, and who ended with another exit code than 0.
bench: $(STAMP)
	$(BIN)/python benchmarks/durability/main.py
	$(BIN)/python benchmarks/sweep/main.py
	$(BIN)/python benchmarks/gpu_day/main.py $(GPU_DAY)
	rm -rf build/bench
	$(BIN)/python benchmarks/simulator/main.py bound $(BOUND) --json build/bench/simulator-bound.json
	failed=; for name in $(MEASURED); do echo "== $$name"; \
		$(BIN)/python benchmarks/$$name/main.py --json build/bench/$$name.json || failed="$$failed $$name"; done; \
	$(BIN)/python benchmarks/regressions.py build/bench --only $(MEASURED) || failed="$$failed regressions"; \
	test -z "$$failed" || { echo "not good:$$failed"; exit 1; }

# A wheel and a source distribution, in dist/.
dist: $(STAMP)
	$(BIN)/python -c "from setuptools import build_meta as build; build.build_sdist('dist'); build.build_wheel('dist')"

# What the machine of benchmarks/gpu_day lacks, gathered where there is a network. Needs only pip.
gpu-wheels:
	$(PYTHON) benchmarks/gpu_day/wheels.py

$(STAMP): setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt setuptools
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

$(OLDEST)/.installed: setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	sed $(OLDEST_PINS) constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet -c $(OLDEST)/constraints.txt setuptools
	$(OLDEST)/bin/pip install --quiet -c $(OLDEST)/constraints.txt --no-build-isolation -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) benchmarks/gpu_day/wheels build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
