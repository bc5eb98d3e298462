"""What a DP-pFedDSU step costs beside a plain SGD step, on ResNet20.

    python -m benchmarks.step_cost [--json FILE] [--batch 64] [--repeats N] [--profile]

The plain step is CENTAUR's, on images laid out channels last, as parties hold them, in a process that keeps freed memory; beside
it the same on images laid out channels first, and with memory given back to the system as glibc does by default. Steps of all
kinds alternate within one run, one thread, so that whatever else the machine does falls on all of them; the ratio is that of
the medians. Bar: 1.05. --profile shows the operators behind the plain step with and without those two savings.
"""

import ctypes
import statistics
from time import process_time
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.algorithm import load_method
from fedmpi.cli import resolve
from fedmpi.vision.device import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, keep_freed_memory
from fedmpi.vision.training import Head, PartyData

STEPS = 2  # of a call: the masks and the norm of a first step are special; a second one is not
KINDS = {
    "plain SGD": ("centaur", ""),
    "shared": ("dp-pfeddsu", "--support shared"),
    "own": ("dp-pfeddsu", "--aggregation plain --support own"),
    "dense": ("dp-pfeddsu", "--support dense"),
    "own, straight-through": ("dp-pfeddsu", "--aggregation plain --support own --gradient straight-through"),
    "plain SGD, channels first": ("centaur", ""),
    "plain SGD, memory given back": ("centaur", ""),
    "plain SGD, neither": ("centaur", ""),
}


def set_memory(kept: bool) -> None:
    """As fedmpi sets glibc's malloc, or as it comes."""
    if kept:
        keep_freed_memory()
    else:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
        libc.mallopt(M_TRIM_THRESHOLD, 128 * 1024)
        libc.malloc_trim(0)


def profile(step, kind: str) -> None:
    from torch.profiler import ProfilerActivity

    step()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_cpu_time_total)[:8]
    print(f"\n{kind}: operators [ms a step]")
    for row in rows:
        print(f"  {row.key:<40} {row.self_cpu_time_total / 1000 / STEPS:>8.1f}")


def main() -> None:
    parser = arguments("step_cost", __doc__)
    parser.add_argument("--batch", type=int, default=64, help="samples a step (default 64)")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each kind (default 15)")
    parser.add_argument("--profile", action="store_true", help="the operators of a step, before and after")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine("torch", "numpy")
    show_machine(facts)

    store = SimpleNamespace(image_shape=(3, 32, 32), num_classes=10)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.standard_normal((STEPS * options.batch, 3, 32, 32)).astype(np.float32))
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

    def prepared(kind: str):
        """A call of this kind, the process set for it."""
        neither = kind.endswith("neither")
        set_memory(not (neither or kind.endswith("given back")))
        data = layouts["first" if neither or kind.endswith("first") else "last"]
        return lambda repeat=0: methods[kind].train_extractor(data, head, theta, np.random.default_rng(repeat))

    times = {kind: [] for kind in KINDS}
    for repeat in range(options.repeats + 1):
        for kind in KINDS:
            call = prepared(kind)
            call(repeat)  # the first one after a change pays for it
            start = process_time()
            call(repeat)
            if repeat:  # the first pass warms up
                times[kind].append((process_time() - start) / STEPS)

    plain = statistics.median(times["plain SGD"])
    print(f"\n{'step':<30} {'median [ms CPU]':>16} {'ratio':>8}")
    for kind, values in times.items():
        middle = statistics.median(values)
        print(f"{kind:<30} {1000 * middle:>16.1f} {middle / plain:>8.3f}")
    for kind in ("plain SGD, neither", "plain SGD") if options.profile else ():
        profile(prepared(kind), kind)
    save(options.json, facts, batch=options.batch, parameters=len(theta), seconds=times)


if __name__ == "__main__":
    main()
