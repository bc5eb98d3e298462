"""What a DP-pFedDSU step costs beside a plain SGD step, on ResNet20.

    python -m benchmarks.step_cost [--json FILE] [--batch 64] [--repeats N]

The plain step is CENTAUR's (torch.optim.SGD), on images laid out channels last, as parties hold them; beside it the same on
images laid out channels first. Steps of all kinds alternate within one run, one thread, so that whatever
else the machine does falls on all of them; the ratio is that of the medians. Bar: 1.05.
"""

import statistics
from time import process_time
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.algorithm import load_method
from fedmpi.cli import resolve
from fedmpi.vision.training import Head, PartyData

KINDS = {
    "plain SGD": ("centaur", ""),
    "shared": ("dp-pfeddsu", "--support shared"),
    "own": ("dp-pfeddsu", "--aggregation plain --support own"),
    "dense": ("dp-pfeddsu", "--support dense"),
    "own, straight-through": ("dp-pfeddsu", "--aggregation plain --support own --gradient straight-through"),
    "plain SGD, channels first": ("centaur", ""),
}


def main() -> None:
    parser = arguments("step_cost", __doc__)
    parser.add_argument("--batch", type=int, default=64, help="samples a step (default 64)")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each kind (default 15)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine("torch", "numpy")
    show_machine(facts)

    store = SimpleNamespace(image_shape=(3, 32, 32), num_classes=10)
    rng = np.random.default_rng(0)
    steps_per_call = 2  # the masks and the norm of a first step are special; a second one is not
    images = torch.from_numpy(rng.standard_normal((steps_per_call * options.batch, 3, 32, 32)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 10, len(images)))
    layouts = {
        "first": PartyData(images, labels, images[:2], labels[:2]),
        "last": PartyData(images.contiguous(memory_format=torch.channels_last), labels, images[:2], labels[:2]),
    }
    methods = {}
    for kind, (name, flags) in KINDS.items():
        config = resolve(
            ["--preset", "cifar10-s5", "--ext-epochs", "1", "--batch-size", str(options.batch), *flags.split()]
        )
        methods[kind] = load_method(name)(config, store)
    head = Head.new(64, 10, rng, torch.device("cpu"))
    theta = torch.from_numpy(methods["plain SGD"].initial())

    times = {kind: [] for kind in KINDS}
    for repeat in range(options.repeats + 1):
        for kind, method in methods.items():
            data = layouts["first" if kind.endswith("first") else "last"]
            start = process_time()
            method.train_extractor(data, head, theta, np.random.default_rng(repeat))
            if repeat:  # the first pass warms up
                times[kind].append((process_time() - start) / steps_per_call)

    plain = statistics.median(times["plain SGD"])
    print(f"\n{'step':<26} {'median [ms CPU]':>16} {'ratio':>8}")
    for kind, values in times.items():
        middle = statistics.median(values)
        print(f"{kind:<26} {1000 * middle:>16.1f} {middle / plain:>8.3f}")
    save(options.json, facts, batch=options.batch, parameters=len(theta), seconds=times)


if __name__ == "__main__":
    main()
