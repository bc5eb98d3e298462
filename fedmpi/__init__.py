"""fedmpi: federated learning on real MPI processes, with its privacy and its bytes measured."""

__version__ = "0.1.0"
