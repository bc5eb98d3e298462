"""The APPFL side of benchmarks.round_overhead, under the mpirun and a Python that have appfl 1.12, torch and mpi4py.

    mpirun -n 21 PYTHON -m benchmarks.overhead_appfl PARTIES PARAMETERS ROUNDS

FedAvg through APPFL's own communicators, a client a rank, which sends back what it got; its memory option is off, with which a round
takes a hundred times as long. Prints the seconds of every round, as the first client sees them, as a JSON list. Written after the
source of 1.12.0 and not run yet: it could not be installed where this was written.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

MODEL = """
import torch

class Flat(torch.nn.Module):
    def __init__(self, parameters):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.zeros(parameters))
"""


def settings(parties: int, parameters: int, rounds: int, folder: Path) -> dict:
    (folder / "flat.py").write_text(MODEL)
    model = {"model_path": str(folder / "flat.py"), "model_name": "Flat", "model_kwargs": {"parameters": parameters}}
    server = {
        "num_clients": parties,
        "num_global_epochs": rounds,
        "scheduler": "SyncScheduler",
        "scheduler_kwargs": {"same_init_model": True},
        "aggregator": "FedAvgAggregator",
        "aggregator_kwargs": {"client_weights_mode": "equal"},
        "optimize_memory": False,
        "logging_output_dirname": str(folder),
    }
    return {
        "client_configs": {"train_configs": {}, "model_configs": model, "comm_configs": {}},
        "server_configs": server,
    }


def main() -> None:
    from appfl.agent import ServerAgent
    from appfl.comm.mpi import MPIClientCommunicator, MPIServerCommunicator
    from mpi4py import MPI
    from omegaconf import OmegaConf

    parties, parameters, rounds = map(int, sys.argv[1:])
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            agent = ServerAgent(OmegaConf.create(settings(parties, parameters, rounds, Path(folder))))
            MPIServerCommunicator(comm, agent, logger=agent.logger, optimize_memory=False).serve()
        return
    client = MPIClientCommunicator(comm, server_rank=0, client_id=f"party {comm.rank}", optimize_memory=False)
    model, times = client.get_global_model(init_model=True), [time.perf_counter()]
    model = model[0] if isinstance(model, tuple) else model
    for _ in range(rounds):
        model, _ = client.update_global_model(model)
        times.append(time.perf_counter())
    if comm.rank == 1:
        print(json.dumps([later - earlier for earlier, later in zip(times, times[1:])]), flush=True)


if __name__ == "__main__":
    main()
