"""Bits of an encoded coordinate: by the rule, by the one before it, and with a randomised Hadamard rotation in front.

    python -m benchmarks.encoding_bits [--json FILE]

Formulas alone, nothing is run: seconds. `before` is the fewest power-of-two steps in C, at least 2^12, that rounding lengthens an
update by less than 1 % on, with a subgaussian tail over every coordinate. `now` is `fedmpi.privacy.encoding.choose_encoding`.

`rotated` is `--rotation hadamard`, padding counted (fedmpi.privacy.rotation). What it gives up: signals wrap with small probability, no
longer never, and not even that for updates that know the round's signs.
"""

from __future__ import annotations

import math

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.privacy.accountant import calibrate
from fedmpi.privacy.encoding import WRAP_BOUND, choose_encoding, rounding_cost
from fedmpi.privacy.noise import rounded_norm_bound
from fedmpi.privacy.rotation import block_of, padded

DELTA = 1e-5
# (what, coordinates, parties, epsilon, rounds)
SETTINGS = (
    ("demo-20", 7_870, 20, 8.0, 30),
    ("demo", 16_164, 200, 2.0, 5),
    ("demo, 2,000 parties", 16_164, 2_000, 2.0, 5),
    ("paper, 20 parties", 270_000, 20, 1.0, 100),
    ("paper, 200 parties", 270_000, 200, 1.0, 100),
    ("paper, 2,000 parties", 270_000, 2_000, 1.0, 100),
    ("paper, 2,000 parties, epsilon 8", 270_000, 2_000, 8.0, 100),
)


def bits_before(dimension: int, parties: int, multiplier: float, rounds: int) -> int:
    steps = max(1 << 12, 1 << math.ceil(math.log2(4 * math.sqrt(dimension))))
    tail = math.sqrt(2 * math.log(4 * dimension * rounds / WRAP_BOUND))
    return 1 + math.ceil(math.log2(parties * steps + tail * multiplier * rounded_norm_bound(steps, dimension) + 1))


def row(what: str, dimension: int, parties: int, epsilon: float, rounds: int) -> dict[str, object]:
    multiplier = calibrate(epsilon, DELTA, 1.0, rounds)
    before = bits_before(dimension, parties, multiplier, rounds)
    run = {"clip": 1.0, "parties": parties, "multiplier": multiplier, "rounds": rounds}
    now = choose_encoding(dimension=dimension, **run)
    rotated = choose_encoding(dimension=padded(dimension), **run, block=block_of(dimension))
    return {
        "what": what,
        "dimension": dimension,
        "parties": parties,
        "epsilon": epsilon,
        "rounds": rounds,
        "sigma": multiplier,
        "before": before,
        "now": now.bits,
        "steps": now.steps,
        "cost": rounding_cost(now.steps, dimension, parties, multiplier),
        "rotated": rotated.bits,
        "rotated_steps": rotated.steps,
        "padded": rotated.dimension,
        "bytes_before": math.ceil(dimension * before / 8),
        "bytes_now": math.ceil(dimension * now.bits / 8),
        "bytes_rotated": math.ceil(rotated.dimension * rotated.bits / 8),
    }


def main() -> None:
    options = arguments("encoding_bits", __doc__).parse_args()
    facts = machine("numpy")
    show_machine(facts)
    rows = [row(*setting) for setting in SETTINGS]
    print(
        "| setting | d | n | ε | T | σ | before | now | steps | added to σ | rotated (padded d) | kB up: before, now, rotated |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for found in rows:
        print(
            "| {what} | {dimension:,} | {parties:,} | {epsilon:g} | {rounds} | {sigma:.3g} | {before} | {now} | {steps} | {percent:.2g} % | "
            "{rotated} ({padded:,}) | {0:.1f}, {1:.1f}, {2:.1f} |".format(
                *(found[f"bytes_{which}"] / 1000 for which in ("before", "now", "rotated")),
                percent=100 * found["cost"],
                **found,
            )
        )
    save(options.json, facts, rows=rows)


if __name__ == "__main__":
    main()
