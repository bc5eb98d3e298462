#!/usr/bin/env bash
# What to run before every commit, in at most 90 s on two cores: format, lint, types, and the quick tests with few examples.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
set_up "test,images"
export OMP_NUM_THREADS=1
run ruff format --check --quiet .
run ruff check --quiet .
run mypy
export FEDMPI_EXAMPLES="${FEDMPI_EXAMPLES-quick}" # how many examples of a property, see tests/conftest.py
run python -m pytest -q -n auto -m "not slow" --ignore=tests/mpi
