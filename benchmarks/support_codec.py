"""Size and speed of the support codec and of the bit packer, on one core.

    python -m benchmarks.support_codec [--json FILE] [--repeats N]

Every row is a uniformly random support with a fixed seed. A time is the best of several calls after one warm-up call.
Speeds of the codec count the coordinates of the dimension, not the indices of the support. With --json the raw rows,
all times included, are written under a temporary name and renamed, so that a reader never finds half a file.
"""

from __future__ import annotations

import numpy as np

from benchmarks.common import arguments, machine, save, seconds, show_machine
from fedmpi.wire.bits import pack, packed_size, unpack
from fedmpi.wire.support import decode_support, encode_support, entropy_bits, expected_support_bits

DIMENSIONS = (270_000, 10_000_000)
DENSITIES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.38, 0.4, 0.5, 0.9)
PACKED_BITS = 21
PACKED_COUNTS = (270_000, 10_000_000)


def support_row(dimension: int, density: float, repeats: int) -> dict[str, object]:
    rng = np.random.default_rng((dimension, round(density * 1000)))
    count = round(density * dimension)
    indices = np.sort(rng.choice(dimension, count, replace=False))
    data = encode_support(indices, dimension)
    if not np.array_equal(decode_support(data, dimension), indices):
        raise SystemExit(f"round trip failed at d = {dimension}, k = {count}")
    return {
        "dimension": dimension,
        "count": count,
        "coded_bits": 8 * len(data),
        "expected_bits": expected_support_bits(count, dimension),
        "entropy_bits": entropy_bits(count, dimension),
        "encode_seconds": seconds(lambda: encode_support(indices, dimension), repeats),
        "decode_seconds": seconds(lambda: decode_support(data, dimension), repeats),
    }


def packing_row(count: int, repeats: int) -> dict[str, object]:
    values = np.random.default_rng(count).integers(0, 1 << PACKED_BITS, count, dtype=np.uint64)
    data = pack(values, PACKED_BITS)
    if not np.array_equal(unpack(data, count, PACKED_BITS), values):
        raise SystemExit(f"round trip failed at {count} values of {PACKED_BITS} bits")
    return {
        "bits": PACKED_BITS,
        "count": count,
        "bytes": packed_size(count, PACKED_BITS),
        "pack_seconds": seconds(lambda: pack(values, PACKED_BITS), repeats),
        "unpack_seconds": seconds(lambda: unpack(data, count, PACKED_BITS), repeats),
    }


def millions_per_second(items: int, times: list[float]) -> float:
    return items / min(times) / 1e6


def main() -> None:
    parser = arguments("support_codec", __doc__)
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="timed calls per figure (default 7)")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: expected 1 or more")

    host = machine("numpy")
    show_machine(host)
    print(f"\n{'d':>10} {'k/d':>6} {'coded [bit]':>12} {'entropy [bit]':>14} {'coded/entropy':>14}", end="")
    print(f" {'encode [Mcoord/s]':>18} {'decode [Mcoord/s]':>18}")
    supports = []
    for dimension in DIMENSIONS:
        for density in DENSITIES:
            row = support_row(dimension, density, options.repeats)
            supports.append(row)
            coded, entropy = row["coded_bits"], row["entropy_bits"]
            print(f"{dimension:>10} {density:>6} {coded:>12} {entropy:>14.0f} {coded / entropy:>14.4f}", end="")
            print(f" {millions_per_second(dimension, row['encode_seconds']):>18.0f}", end="")
            print(f" {millions_per_second(dimension, row['decode_seconds']):>18.0f}", flush=True)

    print(f"\n{'values':>10} {'bits':>6} {'packed [byte]':>14} {'pack [Mvalue/s]':>16} {'unpack [Mvalue/s]':>18}")
    packings = []
    for count in PACKED_COUNTS:
        row = packing_row(count, options.repeats)
        packings.append(row)
        print(f"{count:>10} {PACKED_BITS:>6} {row['bytes']:>14}", end="")
        print(f" {millions_per_second(count, row['pack_seconds']):>16.0f}", end="")
        print(f" {millions_per_second(count, row['unpack_seconds']):>18.0f}", flush=True)

    save(options.json, host, supports=supports, packings=packings)


if __name__ == "__main__":
    main()
