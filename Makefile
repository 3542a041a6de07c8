# Every target does its own set-up; a second call finds the stamp and starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Without a GPU this shows that the script runs; with one: make bench GPU_DAY=
GPU_DAY ?= --emulated --minutes 4

.PHONY: demo test exact lint bench clean

demo: $(STAMP)
	$(BIN)/python examples/multi_task_lm.py --verify

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=5

# The whole product of factors behind tests/test_exact.py, where `make test` covers every pair of them.
exact: $(STAMP)
	$(BIN)/python -m tests.exact

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead/main.py
	$(BIN)/python benchmarks/partitioners/main.py
	$(BIN)/python benchmarks/host_optimizer/main.py
	$(BIN)/python benchmarks/scheduler/main.py
	$(BIN)/python benchmarks/simulator/main.py
	$(BIN)/python benchmarks/durability/main.py
	$(BIN)/python benchmarks/gpu_day/main.py $(GPU_DAY)

$(STAMP): setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt setuptools
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
