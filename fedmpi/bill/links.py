"""Networks by name, and how long a round would take on one.

A profile is an assumption, not a measurement: round figures of the kind that regulators and speed tests publish for such links, for a
party at the far end and a rank 0 that is never the bottleneck. Whoever knows better writes a file with the same fields.

    lan         1 Gbit/s both ways, 0.2 ms: a wired office or data centre
    wifi        20 Mbit/s up, 50 down, 5 ms: a shared home or office network
    4g          10 Mbit/s up, 30 down, 25 ms, and a phone whose cores take three times as long
    satellite   3 Mbit/s up, 25 down, 300 ms one way: a geostationary link

Seconds of one phase, of one party:

    ways x (latency + look)  +  moving(bytes up, up)  +  moving(bytes down, down)  +  device factor x CPU seconds

A way is a direction in which the phase has messages. A rank that waits for one looks every 5 ms, so that it finds it 2.5 ms late in the mean
(fedmpi.transport.endpoint). Beyond that messages need what one message of their length needs over TCP and Open
MPI, both as they are unless told otherwise:

    8 x bytes x 1500 / 1448 / bandwidth   of a packet's 1,500 bytes on the link 52 are headers (IP, TCP and its timestamps)
    some waits                            TCP sends ten packets, and then, with every round trip, twice as many as before, until answers come
                                          in before the link has run dry. After a pause it begins anew: its window is halved with each
                                          timeout, a round trip and 0.2 s or more, in which nothing was sent
    a round trip                          of a message above 64 kB Open MPI sends that much, and the rest when the receiver has asked for it

`benchmarks.link_reality` holds this against jobs whose traffic passes a relay that is shaped to the link. What is not in it: packets lost for
another reason than a full queue, windows that outlive a pause, as on a satellite, where the timeout is not much shorter than the second
between two heartbeats, and modems that answer for the far end; there the waits are shorter than these. Longer are they for who has missed
rounds and gets several long sums: each is asked for by itself, and they count as one message.

A phase is over when the slowest of n parties is: bytes and CPU are those of the party that has most of both together, and on every way the
delay of the slowest is added. Delays beyond the latency are taken as exponential with mean `jitter`, each party's for itself; the largest of
n is below

    jitter x -ln(1 - p^(1/n))

with probability p. p = 1/2 is taken, the median: half of the rounds wait longer. In a round trip that TCP or MPI waits for, both ways have the
mean. A phase that takes longer than its deadline ends there, without who is late.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from fedmpi.errors import ConfigError

QUANTILE = 0.5  # p above
PACKET, CARRIED = 1500, 1448  # bytes of a packet, and those of them that are a message's
FIRST = 10 * CARRIED  # bytes that TCP sends before it waits for an answer (RFC 6928)
LOOK = 0.0025  # seconds until a message that has come is found, in the mean
EAGER = 1 << 16  # bytes that Open MPI sends unasked (btl_tcp_eager_limit)
LEAST, MOST = 1e-9, 1e18  # of a number in a file: what follows from it is one as well


@dataclass(frozen=True)
class Link:
    name: str
    up: float  # bits a second, from a party
    down: float  # bits a second, to it
    latency: float  # seconds, one way
    jitter: float = 0.0  # seconds, the mean of what is added to the latency
    device: float = 1.0  # how many times as long as here a party's device computes

    def slowest(self, parties: float) -> float:
        """Seconds beyond the latency that the slowest of so many messages takes, in the median."""
        return -self.jitter * math.log(-math.expm1(math.log(QUANTILE) / max(1.0, parties)))

    def seconds(self, ways: int, up: float, down: float, cpu: float = 0.0) -> float:
        """Of one party in a phase, but for jitter; bytes and CPU seconds."""
        delays = ways * (self.latency + LOOK)
        return delays + self.moving(up, self.up) + self.moving(down, self.down) + self.device * cpu

    def moving(self, count: float, rate: float) -> float:
        """Seconds in which so many bytes pass at this rate, from the first bit to the last."""
        return 8 * count * PACKET / CARRIED / rate + self.waits(count, rate)

    def waits(self, count: float, rate: float) -> float:
        """Seconds of these in which nothing passes, because somebody waits for an answer."""
        trip = 2 * (self.latency + self.jitter)
        waited = sent = 0.0
        for end in (min(count, EAGER), count):
            while (window := FIRST + sent) < end - sent and (passing := 8 * window / rate) < trip:
                waited += trip - passing
                sent += window
            if end < count:
                waited += trip  # until the receiver has asked for the rest; by then all of this has been answered
                sent = end
        return waited

    def phase(self, ways: int, loads: Collection[tuple[float, float, float]], parties: float | None = None) -> float:
        """Until the slowest is through; of each party (bytes up, bytes down, CPU seconds). `parties`: how many there are, where one
        load stands for several."""
        if not loads:
            return 0.0
        slowest = max(self.seconds(ways, *load) for load in loads)
        return slowest + ways * self.slowest(len(loads) if parties is None else parties)

    def said(self) -> str:
        """The assumptions, in a line."""
        return (
            f"link {self.name}: {_rate(self.up)} up, {_rate(self.down)} down, {1000 * self.latency:g} ms one way, jitter "
            f"{1000 * self.jitter:g} ms, a device that computes {self.device:g} times as long as here (assumed)"
        )


PROFILES: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link("lan", up=1e9, down=1e9, latency=0.0002, jitter=0.0001, device=1.0),
        Link("wifi", up=20e6, down=50e6, latency=0.005, jitter=0.003, device=1.0),
        Link("4g", up=10e6, down=30e6, latency=0.025, jitter=0.015, device=3.0),
        Link("satellite", up=3e6, down=25e6, latency=0.3, jitter=0.02, device=1.0),
    )
}
NUMBERS = tuple(field.name for field in fields(Link) if field.name != "name")
NEEDED = ("up", "down", "latency")


def find(name: str) -> Link:
    """A profile, or a YAML or JSON file with its fields; ConfigError says what is wrong with it."""
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"link = {name}: must be one of {', '.join(PROFILES)}, or a file with {', '.join(NUMBERS)}")
    try:
        said = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise ConfigError(f"link = {name}: cannot be read as YAML or JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(said, dict):
        raise ConfigError(f"link = {name}: must hold named numbers: {', '.join(NUMBERS)}")
    return _from_file(path, said)


def _from_file(path: Path, said: dict) -> Link:
    for field in said:
        if field not in ("name", *NUMBERS):
            raise ConfigError(f"{path}: unknown field {field}, allowed: name, {', '.join(NUMBERS)}")
    for field in NEEDED:
        if field not in said:
            raise ConfigError(f"{path}: {field} is missing; a link needs {', '.join(NEEDED)} (bits a second, seconds)")
    numbers = {field: _number(path, field, said[field]) for field in NUMBERS if field in said}
    return Link(str(said.get("name", path.stem)), **numbers)


def _number(path: Path, field: str, value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    positive = field in ("up", "down", "device")
    if not (number >= 0 if not positive else number > 0):
        raise ConfigError(f"{path}: {field} = {value}: must be a number {'above 0' if positive else 'of 0 or more'}")
    if not (number == 0 or LEAST <= number <= MOST):
        raise ConfigError(f"{path}: {field} is out of range: must be from {LEAST:g} to {MOST:g}")
    return number


def _rate(bits: float) -> str:
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits < 1000:
            return f"{bits:g} {unit}"
        bits /= 1000
    return f"{bits:g} Gbit/s"
