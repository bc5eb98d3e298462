"""What a DP-pFedDSU step costs beside a plain SGD step, on ResNet20.

    python -m benchmarks.step_cost [--json FILE] [--batch 64] [--repeats N] [--profile]

The plain step is CENTAUR's, on images laid out channels last, as parties hold them, in a process that keeps freed memory; beside
it the same on images laid out channels first, and in a second process whose memory glibc manages as it comes. Steps of all
kinds alternate within one run, one thread, so that whatever else the machine does falls on all of them; the ratio is that of
the medians. Bar: 1.05. --profile shows the operators behind the plain step with and without those two savings.
"""

import multiprocessing
import statistics
from time import process_time
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.algorithm import load_method
from fedmpi.cli import resolve
from fedmpi.vision import device
from fedmpi.vision.training import Head, PartyData

STEPS = 2  # of a call: the masks and the norm of a first step are special; a second one is not
KINDS = {
    "plain SGD": ("centaur", ""),
    "shared": ("dp-pfeddsu", "--support shared"),
    "own": ("dp-pfeddsu", "--aggregation plain --support own"),
    "dense": ("dp-pfeddsu", "--support dense"),
    "own, straight-through": ("dp-pfeddsu", "--aggregation plain --support own --gradient straight-through"),
    "plain SGD, channels first": ("centaur", ""),
    "plain SGD, memory as it comes": ("centaur", ""),
    "plain SGD, neither": ("centaur", ""),
}
AS_IT_COMES = ("plain SGD, memory as it comes", "plain SGD, neither")  # in a process that was told nothing
CHANNELS_FIRST = ("plain SGD, channels first", "plain SGD, neither")


class Steps:
    """Calls of `STEPS` steps of a kind, on the same images and weights for all."""

    def __init__(self, batch: int, kinds):
        load_method("centaur").pick_device("cpu", 1)  # one thread, and freed memory is kept, as on a rank
        store = SimpleNamespace(image_shape=(3, 32, 32), num_classes=10)
        rng = np.random.default_rng(0)
        images = torch.from_numpy(rng.standard_normal((STEPS * batch, 3, 32, 32)).astype(np.float32))
        labels = torch.from_numpy(rng.integers(0, 10, len(images)))
        self.first = PartyData(images, labels, images[:2], labels[:2])
        self.last = PartyData(images.contiguous(memory_format=torch.channels_last), labels, images[:2], labels[:2])
        common = ["--preset", "cifar10-s5", "--ext-epochs", "1", "--batch-size", str(batch)]
        self.methods = {
            kind: load_method(name)(resolve([*common, "--method", name, *flags.split()]), store)
            for kind, (name, flags) in KINDS.items()
            if kind in kinds
        }
        self.head = Head.new(64, 10, rng, torch.device("cpu"))
        self.theta = torch.from_numpy(next(iter(self.methods.values())).initial())

    def call(self, kind: str, repeat: int = 0) -> None:
        data = self.first if kind in CHANNELS_FIRST else self.last
        self.methods[kind].train_extractor(data, self.head, self.theta, np.random.default_rng(repeat))

    def seconds(self, kind: str, repeat: int) -> float:
        """CPU time of a step; the first call after a change pays for it."""
        self.call(kind, repeat)
        start = process_time()
        self.call(kind, repeat)
        return (process_time() - start) / STEPS


def memory_as_it_comes(batch: int, questions) -> None:
    """The second process: answers a kind and a repeat with its seconds, a kind alone with its profile."""
    device.keep_freed_memory = lambda: False
    steps = Steps(batch, AS_IT_COMES)
    for kind, repeat in iter(questions.recv, None):
        questions.send(profile(steps, kind) if repeat is None else steps.seconds(kind, repeat))


def profile(steps: Steps, kind: str) -> str:
    from torch.profiler import ProfilerActivity

    steps.call(kind)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as seen:
        steps.call(kind)
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_cpu_time_total)[:8]
    lines = [f"  {row.key:<40} {row.self_cpu_time_total / 1000 / STEPS:>8.1f}" for row in rows]
    return "\n".join([f"\n{kind}: operators [ms a step]", *lines])


def main() -> None:
    parser = arguments("step_cost", __doc__)
    parser.add_argument("--batch", type=int, default=64, help="samples a step (default 64)")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each kind (default 15)")
    parser.add_argument("--profile", action="store_true", help="the operators of a step, before and after")
    options = parser.parse_args()
    facts = machine("torch", "numpy")
    show_machine(facts)

    steps = Steps(options.batch, set(KINDS) - set(AS_IT_COMES))
    context = multiprocessing.get_context("spawn")
    other, theirs = context.Pipe()
    context.Process(target=memory_as_it_comes, args=(options.batch, theirs), daemon=True).start()

    def ask(kind: str, repeat: int | None):
        other.send((kind, repeat))
        return other.recv()

    times = {kind: [] for kind in KINDS}
    for repeat in range(options.repeats + 1):
        for kind in KINDS:
            taken = ask(kind, repeat) if kind in AS_IT_COMES else steps.seconds(kind, repeat)
            if repeat:  # the first pass warms up
                times[kind].append(taken)

    plain = statistics.median(times["plain SGD"])
    print(f"\n{'step':<30} {'median [ms CPU]':>16} {'ratio':>8}")
    for kind, values in times.items():
        middle = statistics.median(values)
        print(f"{kind:<30} {1000 * middle:>16.1f} {middle / plain:>8.3f}")
    if options.profile:
        print(ask("plain SGD, neither", None))
        print(profile(steps, "plain SGD"))
    other.send(None)
    save(options.json, facts, batch=options.batch, parameters=len(steps.theta), seconds=times)


if __name__ == "__main__":
    main()
