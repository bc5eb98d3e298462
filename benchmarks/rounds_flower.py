"""The Flower side of benchmarks.rounds, run under a Python that has flwr[simulation], torch and numpy.

    PYTHON -m benchmarks.rounds_flower DATA.npz ROUNDS plain|same

FedRep in Flower's simulation: `plain` as one would write it, the head trained through the frozen extractor; `same` with fedmpi's own
two savings inside the client, features computed once and images channels last. Prints the seconds of every round as a JSON list.
"""

import json
import os
import sys
import time

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fedmpi.vision.models import build_extractor  # noqa: E402

HEAD_EPOCHS, EXT_EPOCHS, BATCH, RATE = 15, 5, 64, 0.01


def epochs(x, y, count, step):
    for _ in range(count):
        order = torch.randperm(len(y))
        for start in range(0, len(y), BATCH):
            batch = order[start : start + BATCH]
            if len(batch) > 1:
                step(x[batch], y[batch])


def local_work(extractor, head, x, y, same: bool) -> None:
    """Phase 1, the head under a frozen extractor; phase 2, the extractor under a frozen head."""
    if same:
        x = x.contiguous(memory_format=torch.channels_last)
    tune, train = (torch.optim.SGD(part.parameters(), RATE) for part in (head, extractor))

    def step(optimiser, features, labels):
        optimiser.zero_grad()
        F.cross_entropy(head(features), labels).backward()
        optimiser.step()

    extractor.eval()
    with torch.no_grad():
        features = extractor(x) if same else None

    def through(images, labels):
        with torch.no_grad():
            features = extractor(images)
        step(tune, features, labels)

    if same:
        epochs(features, y, HEAD_EPOCHS, lambda f, labels: step(tune, f, labels))
    else:
        epochs(x, y, HEAD_EPOCHS, through)
    extractor.train()
    epochs(x, y, EXT_EPOCHS, lambda images, labels: step(train, extractor(images), labels))


def main() -> None:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    path, rounds, same = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "same"
    parties = int(np.load(path)["parties"])
    client, server, times = ClientApp(), ServerApp(), []

    @client.train()
    def train(message, context):
        torch.set_num_threads(1)
        party, data = context.node_config["partition-id"], np.load(path)
        x, y = torch.from_numpy(data[f"x{party}"]), torch.from_numpy(data[f"y{party}"])
        extractor, head = build_extractor("resnet20", x.shape[1], "batch"), nn.Linear(64, 10)
        extractor.load_state_dict(message.content["arrays"].to_torch_state_dict())
        if "head" in context.state:
            head.load_state_dict(context.state["head"].to_torch_state_dict())
        local_work(extractor, head, x, y, same)
        context.state["head"] = ArrayRecord(head.state_dict())
        counted = MetricRecord({"num-examples": len(y)})
        return Message(
            RecordDict({"arrays": ArrayRecord(extractor.state_dict()), "metrics": counted}), reply_to=message
        )

    @server.main()
    def serve(grid, context):
        initial = ArrayRecord(build_extractor("resnet20", 3, "batch").state_dict())

        def stamp(round, arrays):
            times.append(time.perf_counter())

        FedAvg(fraction_evaluate=0.0, min_train_nodes=parties, min_available_nodes=parties).start(
            grid, initial, num_rounds=rounds, evaluate_fn=stamp
        )

    run_simulation(server, client, parties, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    print(json.dumps([later - earlier for earlier, later in zip(times, times[1:])]))


if __name__ == "__main__":
    main()
