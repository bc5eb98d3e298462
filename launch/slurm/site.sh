# Sourced by fedmpi.sbatch: all that differs from one cluster to the next. Edit it, or export a variable before sbatch.

# module load python/3.11 openmpi/5        # whatever your cluster calls them

# The environment that ./launch/demo.sh made (FEDMPI_MPI=system for the cluster's own MPI); an activated one comes first.
FEDMPI_VENV="${FEDMPI_VENV:-.venv}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f "$FEDMPI_VENV/bin/activate" ]; then
    # shellcheck disable=SC1091
    . "$FEDMPI_VENV/bin/activate"
fi

# How ranks are started: mpirun (either MPI), or srun with --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH); `srun --mpi=list` has them.
FEDMPI_START="${FEDMPI_START:-mpirun}"

# Where runs go: a file system that every node sees. Prepared data may lie on a disk of each node's own, if it is large and slow to read.
FEDMPI_RUNS="${FEDMPI_RUNS:-runs}"
# export FEDMPI_CACHE="${SCRATCH:-$TMPDIR}/fedmpi"

# 1: a job that a signal ended before its time limit is queued again, and goes on. 0: it ends with exit code 75.
FEDMPI_REQUEUE="${FEDMPI_REQUEUE:-1}"

# A thread a rank: results must not depend on placement.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}" OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
