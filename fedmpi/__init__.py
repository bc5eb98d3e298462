"""fedmpi: federated learning on real MPI processes, with its privacy and its bytes measured."""

__version__ = "0.1.0"
HOW = (
    "start it as: mpirun -n 21 python -m fedmpi.main [OPTIONS] (rank 0 serves, 20 clients), or ./launch/local.sh -n 21"
)
