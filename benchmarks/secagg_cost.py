"""What secure aggregation costs a client and the server, beside what the hardware asks for and beside Flower's SecAgg+.

    python -m benchmarks.secagg_cost [--json FILE] [--n 20 100 500 1000] [--d 100000 1000000] [--dropout 0 0.1 0.3]
                                     [--graph complete regular] [--against flwr] [--quick] [--budget SECONDS]

Both state machines are driven with plain calls in one process: no MPI, no training. Times are CPU time of one thread,
medians; what is compared alternates within the run, and a ratio is the median of the ratios of neighbours. Parties drop
out after ShareKeys, before MaskedInput.

The floor of masking is the AES-128 key stream that the masks take, at the rate of the faster library measured next to
the figure it is compared with, and one addition a mask at numpy's rate; for the server also one addition an input. It
leaves out what is no mask: sharing, agreements, packing. The floor of a client's set-up (its keys, shares and bundles,
wherever in the round) is two X25519 agreements a neighbour.

Bytes are frames as `wire.messages.encode` writes them, headers included. `checked`: `sum`, every party was played in
full and the unmasked sum is the plain sum; `keys`, that would exceed the budget: a few clients are played in full, the
others deal real keys and shares but send random vectors, which cost the server the same and leave no sum to compare.
"""

import gc
import itertools
import os
import statistics
from importlib.util import find_spec
from time import process_time

import numpy as np
from Crypto.Cipher import AES
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.secagg_flower import Flower
from benchmarks.secagg_round import BITS, PHASES, Cell, Rates, Round

BAR_CELL = ("complete", 100, 1_000_000, 0.1)
MS = 1000


class Floor:
    """Rates of this machine, sampled again and again next to what is measured against them."""

    def __init__(self):
        chunks = (1 << 17, 1 << 18, 1 << 19, 1 << 20)
        streams = [make(chunk) for chunk in chunks for make in (self._pycryptodome, self._cryptography)]
        self._stream, self._add = self._fastest(streams), self._fastest([self._addition(chunk) for chunk in chunks])
        self._peers = [os.urandom(32) for _ in range(100)]
        self._private = X25519PrivateKey.generate()

    @staticmethod
    def _pycryptodome(chunk):
        encrypt, source, target = AES.new(os.urandom(16), AES.MODE_ECB).encrypt, bytes(chunk), bytearray(chunk)
        return chunk, lambda: encrypt(source, target)

    @staticmethod
    def _cryptography(chunk):
        cipher = Cipher(algorithms.AES(os.urandom(16)), modes.CTR(bytes(16))).encryptor()
        source, target = bytes(chunk), bytearray(chunk + 16)
        return chunk, lambda: cipher.update_into(source, target)

    @staticmethod
    def _addition(chunk):
        total, mask = np.ones((2, chunk // 4), np.uint32)
        return chunk, lambda: np.add(total, mask, out=total)

    @staticmethod
    def _per_byte(work, volume=1 << 25) -> float:
        chunk, call = work
        call()  # its buffers are in the cache from here on
        start = process_time()
        for _ in range(volume // chunk):
            call()
        return (process_time() - start) / volume

    def _fastest(self, candidates):
        return min(candidates, key=lambda work: min(self._per_byte(work) for _ in range(3)))

    def _agreement(self) -> float:
        start = process_time()
        for peer in self._peers:
            self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        return (process_time() - start) / len(self._peers)

    def sample(self) -> Rates:
        return self._per_byte(self._stream), self._per_byte(self._add), self._agreement()


def measure(cell: Cell, floor: Floor, in_full: bool, repeats: int) -> tuple[dict, Round]:
    gc.collect()
    gc.disable()  # a collector that walks through the objects of all parties would be no cost of any one of them
    round = Round(cell, in_full, floor.sample)
    served, floors = [round.play()], []
    for _ in range(repeats):
        before = floor.sample()
        served.append(round.replay()[0])
        floors.append(cell.server_floor(*_between(before, floor.sample())))
    gc.enable()
    clients = [(clock.seconds, round.rates[party]) for party, clock in round.clocks.items()]
    masks = [cell.client_floor(*rates["MaskedInput"]) for _, rates in clients]
    keys = [2 * cell.graph.degree * _between(*rates.values())[2] for _, rates in clients]
    # Each figure is divided by the floor sampled next to it, and only then is the middle one taken: the machine's speed
    # wanders by more than the differences of interest.
    ratios = {
        "masks": _middle(
            seconds["MaskedInput/PRG"] / least for (seconds, _), least in zip(clients, masks, strict=True)
        ),
        "set-up": _middle(set_up(seconds) / least for (seconds, _), least in zip(clients, keys, strict=True)),
        "unmask": _middle(run["finish"] / least for run, least in zip(served[1:], floors, strict=True)),
    }
    return cell.row() | {
        "client": {name: _middle(seconds[name] for seconds, _ in clients) for name in clients[0][0]},
        "server": {name: _middle(run[name] for run in served) for name in served[0]},
        "floor": {"masks": _middle(masks), "set-up": _middle(keys), "unmask": _middle(floors)},
        "ratio": ratios,
        "bytes": dict(round.bytes),
        "checked": "sum" if in_full else "keys",
    }, round


def _between(*rates: Rates) -> Rates:
    return tuple(map(statistics.mean, zip(*rates, strict=True)))


_middle = statistics.median


def within(budget: float, cell: Cell, floor: Floor) -> tuple[dict, Round | None]:
    """The cell measured in full, in part, or not at all."""
    server, in_full, in_part = cell.estimates(*floor.sample())
    if in_part > budget:
        return cell.row() | {"skipped": f"about {in_part:.0f} s, the budget is {budget:g} s"}, None
    return measure(cell, floor, in_full <= budget, 3 if 10 * server < budget else 1)


def set_up(client: dict) -> float:
    """Everything a client does with keys and shares: the two phases, and the agreements and bundles of the third."""
    return sum(client[name] for name in ("AdvertiseKeys", "ShareKeys", "MaskedInput/DH", "MaskedInput/AEAD"))


# (group, column, width, format)
COLUMNS = (
    ("", "graph", 9, ""),
    ("", "n", 5, ""),
    ("", "degree", 7, ""),
    ("", "t", 5, ""),
    ("", "d", 8, ""),
    ("", "lost %", 7, ".0f"),
    ("client [CPU ms]", "keys", 6, ".2f"),
    ("client [CPU ms]", "shares", 8, ".2f"),
    ("client [CPU ms]", "masked", 8, ".1f"),
    ("client [CPU ms]", "unmask", 7, ".2f"),
    ("its masks [CPU ms]", "masks", 7, ".1f"),
    ("its masks [CPU ms]", "floor", 7, ".1f"),
    ("its masks [CPU ms]", "ratio", 6, ".2f"),
    ("set-up [CPU ms]", "keys", 7, ".1f"),
    ("set-up [CPU ms]", "floor", 7, ".1f"),
    ("set-up [CPU ms]", "ratio", 6, ".2f"),
    ("a client's bytes", "up", 9, ""),
    ("a client's bytes", "down", 9, ""),
    ("server [CPU ms]", "routing", 8, ".0f"),
    ("server [CPU ms]", "unmask", 9, ".0f"),
    ("server [CPU ms]", "floor", 9, ".0f"),
    ("server [CPU ms]", "ratio", 6, ".2f"),
    ("", "checked", 8, ""),
)


def show_head() -> None:
    groups = itertools.groupby(COLUMNS, key=lambda column: column[0])
    print(" |".join(f"{name:^{sum(column[2] for column in columns)}}" for name, columns in groups))
    print(_line([column[1] for column in COLUMNS], [""] * len(COLUMNS)))


def _line(values: list, formats: list[str]) -> str:
    """A bar between groups; fewer values than columns: the last one runs on."""
    text = ""
    for i, (value, form) in enumerate(zip(values, formats, strict=False)):
        text += " |" if i and COLUMNS[i][0] != COLUMNS[i - 1][0] else ""
        text += f"{value:>{COLUMNS[i][2]}{form}}"
    return text


def show(row: dict) -> None:
    values = [row["graph"], row["n"], row["degree"], row["threshold"], row["d"], 100 * row["dropout"]]
    if "skipped" in row:
        values.append(f" - ({row['skipped']})")
        print(_line(values, [*(column[3] for column in COLUMNS[: len(values) - 1]), ""]), flush=True)
        return
    client, server = row["client"], row["server"]
    floor, ratio = row["floor"], row["ratio"]
    values += [MS * client[phase] for phase in PHASES]
    values += [MS * client["MaskedInput/PRG"], MS * floor["masks"], ratio["masks"]]
    values += [MS * set_up(client), MS * floor["set-up"], ratio["set-up"]]
    values += [row["bytes"]["up"], row["bytes"]["down"], MS * sum(server[phase] for phase in PHASES)]
    values += [MS * server["finish"], MS * floor["unmask"], ratio["unmask"], row["checked"]]
    print(_line(values, [column[3] for column in COLUMNS]), flush=True)


def report(row: dict, round: Round) -> dict[str, float]:
    """The bars' cell in detail: where the time goes, bytes, and what a second core brings."""
    print("\nwhere it goes [CPU ms]")
    for side in ("client", "server"):
        parts = {name: seconds for name, seconds in row[side].items() if "/" in name}
        print(f"  {side}: " + ", ".join(f"{name} {MS * seconds:.1f}" for name, seconds in parts.items()))
    ratio, law = row["ratio"], BITS * row["d"] / 8
    walls = {1: [], 2: []}
    for _ in range(3):
        for threads, times in walls.items():
            times.append(round.replay(threads)[1])
    figures = {
        "client masks / floor (at most 1.3)": ratio["masks"],
        "client MaskedInput, whole / floor": row["client"]["MaskedInput"] / row["floor"]["masks"],
        "client set-up / agreements (at most 1.5)": ratio["set-up"],
        "server unmasking / floor (at most 1.5)": ratio["unmask"],
        "bytes of a masked input / (b d / 8) (at most 1.01)": row["bytes"]["MaskedInput"] / law,
        "server unmasking, wall, 2 threads / 1": min(walls[2]) / min(walls[1]),
    }
    print("\nbars, n = 100, d = 10^6, 10 % dropped, complete")
    for name, figure in figures.items():
        print(f"  {name:<52} {figure:>8.4f}")
    return figures


def against_flower(floor: Floor, sizes: list[int], dimensions: list[int]) -> list[dict]:
    print("\nFlower's SecAgg+ beside it, complete graph, 10 % dropped; quantisation is not counted on either side")
    print(f"{'n':>5}{'d':>9}  {'':<32}{'fedmpi [CPU ms]':>16}{'Flower [CPU ms]':>16}{'ratio':>8}")
    rows = []
    for n, d in itertools.product(sizes, dimensions):
        cell = Cell("complete", n, d, 0.1)
        flower, ours = Flower(n, d, cell.rules.threshold, len(cell.dropped)), []
        for _ in range(3):
            ours.append(measure(cell, floor, False, 1)[0])
            flower.run()
        pairs = {
            "set-up: keys, shares, sealing": (
                _median(ours, "client", "AdvertiseKeys") + _median(ours, "client", "ShareKeys"),
                flower.set_up(),
            ),
            "masked vector, the whole stage": (_median(ours, "client", "MaskedInput"), flower.masking()),
            "server: sum and unmasking": (_median(ours, "server", "finish"), flower.unmasking()),
        }
        for what, (own, theirs) in pairs.items():
            print(f"{n:>5}{d:>9}  {what:<32}{MS * own:>16.1f}{MS * theirs:>16.1f}{theirs / own:>8.1f}", flush=True)
        rows.append({"n": n, "d": d, "seconds": pairs, "Flower's pieces": flower.best})
    return rows


def _median(rows: list[dict], side: str, name: str) -> float:
    return _middle(row[side][name] for row in rows)


def main() -> None:
    parser = arguments("secagg_cost", __doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[20, 100, 500, 1000], help="parties")
    parser.add_argument("--d", type=int, nargs="+", default=[100_000, 1_000_000], help="coordinates")
    parser.add_argument(
        "--dropout", type=float, nargs="+", default=[0.0, 0.1, 0.3], help="share lost before MaskedInput"
    )
    parser.add_argument("--graph", nargs="+", choices=["complete", "regular"], default=["complete", "regular"])
    parser.add_argument("--budget", type=float, default=90, metavar="SECONDS", help="most for one cell (default 90)")
    parser.add_argument("--against", choices=["flwr"], help="run Flower's SecAgg+ functions beside it")
    parser.add_argument("--quick", action="store_true", help="20 and 100 parties, 10^6 coordinates, 10 %% dropped")
    options = parser.parse_args()
    if options.against and not find_spec(options.against):
        parser.error(
            f"{options.against} is not installed; it pins its own versions, so give it an environment of its own"
        )
    if options.quick:
        options.n, options.d, options.dropout = [20, 100], [1_000_000], [0.1]
    facts = machine("numpy", "pycryptodome", "cryptography", *([options.against] if options.against else []))
    show_machine(facts)
    floor = Floor()
    stream, add, agreement = floor.sample()
    print(f"key stream {1e-9 / stream:.1f} GB/s, addition {1e-9 / add:.1f} GB/s", end=", ")
    print(f"X25519 {1e6 * agreement:.0f} us, b = {BITS}\n")
    show_head()
    rows, bars, figures, beside = [], None, {}, []
    for kind, n, d, dropout in itertools.product(options.graph, options.n, options.d, options.dropout):
        row, round = within(options.budget, Cell(kind, n, d, dropout), floor)
        show(row)
        rows.append(row)
        if round and (kind, n, d, dropout) == BAR_CELL:
            bars = row, round
        del round  # a thousand vectors of the last cell, before those of the next
    if bars:
        figures = report(*bars)
    if options.against:
        beside = against_flower(floor, [n for n in options.n if n <= 100], options.d)
    save(options.json, facts, bits=BITS, rows=rows, bars=figures, flower=beside)


if __name__ == "__main__":
    main()
