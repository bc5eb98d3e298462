"""Bits of an encoded coordinate: by the rule, by the one before it, and with a randomised Hadamard rotation in front.

    python -m benchmarks.encoding_bits [--json FILE]

Formulas alone, nothing is run: seconds. `before` is the fewest power-of-two steps in C, at least 2^12, that rounding lengthens an
update by less than 1 % on, with a subgaussian tail over every coordinate. `now` is `fedmpi.privacy.encoding.choose_encoding`.

`rotated` is what Kairouz, Liu, Steinke (2021) do, in blocks of a power of two so that little is padded: signs that everybody knows and
that are fresh in each round, then a Walsh-Hadamard transform of each block. The sum's signal, of norm n s at most, then is subgaussian
in every coordinate with deviation n s / sqrt(block) over the signs, independent of the noise, and rounding is off by less than n. So
b is the fewest bits with half = 2^(b-1) and

    4 d T exp(-(half - n)^2 / (2 ((n s)^2 / block + (sigma c')^2))) <= 2^-40

and the block is the one that sends the fewest bits. What it gives up: signals wrap with small probability, no longer never, and not
even that for updates that know the signs.
"""

from __future__ import annotations

import math

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.privacy.accountant import calibrate
from fedmpi.privacy.encoding import NARROWEST, WRAP_BOUND, choose_encoding, least_steps, rounding_cost
from fedmpi.privacy.noise import rounded_norm_bound

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
BLOCKS = tuple(1 << power for power in range(8, 20))


def bits_before(dimension: int, parties: int, multiplier: float, rounds: int) -> int:
    steps = max(1 << 12, 1 << math.ceil(math.log2(4 * math.sqrt(dimension))))
    tail = math.sqrt(2 * math.log(4 * dimension * rounds / WRAP_BOUND))
    return 1 + math.ceil(math.log2(parties * steps + tail * multiplier * rounded_norm_bound(steps, dimension) + 1))


def bits_rotated(dimension: int, parties: int, multiplier: float, rounds: int, block: int) -> tuple[int, int]:
    """(bits, coordinates with the padding)"""
    padded = block * math.ceil(dimension / block)
    steps = least_steps(padded, parties, multiplier)
    signal, noise = parties * steps / math.sqrt(block), multiplier * rounded_norm_bound(steps, padded)
    reach = parties + math.sqrt(2 * math.log(4 * padded * rounds / WRAP_BOUND)) * math.hypot(signal, noise)
    return max(NARROWEST, 1 + math.ceil(math.log2(reach))), padded


def row(what: str, dimension: int, parties: int, epsilon: float, rounds: int) -> dict[str, object]:
    multiplier = calibrate(epsilon, DELTA, 1.0, rounds)
    run = dimension, parties, multiplier, rounds
    now = choose_encoding(clip=1.0, dimension=dimension, parties=parties, multiplier=multiplier, rounds=rounds)
    rotated = {block: bits_rotated(*run, block) for block in BLOCKS}
    block = min(rotated, key=lambda block: math.prod(rotated[block]))
    bits, padded = rotated[block]
    return {
        "what": what,
        "dimension": dimension,
        "parties": parties,
        "epsilon": epsilon,
        "rounds": rounds,
        "sigma": multiplier,
        "before": bits_before(*run),
        "now": now.bits,
        "steps": now.steps,
        "cost": rounding_cost(now.steps, dimension, parties, multiplier),
        "rotated": bits,
        "block": block,
        "padded": padded,
        "bytes_before": math.ceil(dimension * bits_before(*run) / 8),
        "bytes_now": math.ceil(dimension * now.bits / 8),
        "bytes_rotated": math.ceil(padded * bits / 8),
    }


def main() -> None:
    options = arguments("encoding_bits", __doc__).parse_args()
    facts = machine("numpy")
    show_machine(facts)
    rows = [row(*setting) for setting in SETTINGS]
    print(
        "| setting | d | n | ε | T | σ | before | now | steps | added to σ | rotated (block) | kB up: before, now, rotated |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for found in rows:
        print(
            "| {what} | {dimension:,} | {parties:,} | {epsilon:g} | {rounds} | {sigma:.3g} | {before} | {now} | {steps} | {percent:.2g} % | "
            "{rotated} ({block:,}) | {0:.1f}, {1:.1f}, {2:.1f} |".format(
                *(found[f"bytes_{which}"] / 1000 for which in ("before", "now", "rotated")),
                percent=100 * found["cost"],
                **found,
            )
        )
    save(options.json, facts, rows=rows)


if __name__ == "__main__":
    main()
