#!/usr/bin/env bash
# launch/local.sh [-n N] [fedmpi arguments]: starts N ranks (default 21) on this machine with the flags that its MPI needs.
# Ctrl-C, SIGTERM and SIGUSR1 end it after the round with a checkpoint, exit code 75; a second Ctrl-C at once.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${FEDMPI_VENV:-.venv}"

ranks=21
if [ "${1:-}" = "-n" ]; then
    case "${2:-}" in
        "" | *[!0-9]*) echo "local.sh: -n takes a number of ranks, got '${2:-}'" >&2; exit 2 ;;
    esac
    ranks="$2"
    shift 2
fi

# An activated environment comes first; without one, the project's own.
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f "$VENV/bin/activate" ]; then
    # shellcheck disable=SC1090
    . "$VENV/bin/activate"
fi
command -v mpirun > /dev/null || {
    echo "local.sh: no mpirun on PATH; ./launch/demo.sh installs one, or load your cluster's MPI module" >&2
    exit 2
}

# One thread a rank: results must not depend on placement, and ranks already outnumber the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}" OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"

# shellcheck disable=SC1091
. launch/job.sh
mpirun_flags "$ranks"
FEDMPI_LAUNCH="./launch/local.sh -n $ranks"
code=0
run_job mpirun ${flags[@]+"${flags[@]}"} -n "$ranks" python -m fedmpi.main "$@" || code=$?
exit "$code"
