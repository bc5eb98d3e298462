#!/usr/bin/env bash
# What to run before every commit, in at most 90 s: format, lint, types, and the tests that need no run of the engine.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
set_up "test,images"
export OMP_NUM_THREADS=1
run ruff format --check --quiet .
run ruff check --quiet .
run mypy
run python -m pytest -q -m "not slow" --ignore=tests/mpi
