#!/usr/bin/env bash
# Sets everything up in .venv (once) and runs all tests: launch/check.sh with all its examples, the slow tests, then tests/mpi on
# 2, 3 and 5 ranks.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
set_up "test,images"
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export OMP_NUM_THREADS=1
FEDMPI_EXAMPLES="${CI:+ci}" run ./launch/check.sh
run python -m pytest -q -n auto --dist loadscope -m "slow and not launch" --ignore=tests/mpi
run python -m pytest -q -n 2 --dist loadscope -m launch --ignore=tests/mpi # two files at a time: most of it is waiting
for ranks in 2 3 5; do
    # Only rank 0 reports: five copies of the same lines help nobody.
    run mpirun -n "$ranks" python tests/mpi/run.py
done
