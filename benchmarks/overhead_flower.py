"""The Flower side of benchmarks.round_overhead, run under a Python that has flwr[simulation] and numpy.

    PYTHON -m benchmarks.overhead_flower PARTIES PARAMETERS ROUNDS

FedAvg in Flower's simulation, whose clients send back what they got. Prints the seconds of every round as a JSON list.
"""

import json
import os
import sys
import time

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np  # noqa: E402


def main() -> None:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    parties, parameters, rounds = map(int, sys.argv[1:])
    client, server, times = ClientApp(), ServerApp(), []

    @client.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    @server.main()
    def serve(grid, context):
        def stamp(round, arrays):
            times.append(time.perf_counter())

        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=parties, min_available_nodes=parties)
        initial = ArrayRecord([np.zeros(parameters, np.float32)])
        strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=stamp)

    run_simulation(server, client, parties, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    print(json.dumps([later - earlier for earlier, later in zip(times, times[1:])]))


if __name__ == "__main__":
    main()
