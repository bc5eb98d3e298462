"""A relay that shapes what passes between hosts to links of a given bandwidth and delay, since tc is not everywhere.

Every host of `three_hosts` has, in place of a cable, a TUN device as its eth0: what its kernel sends there comes out of a file as IP packets. One
process reads them all and writes each into the file of the host that it is for, when the links between the two would have delivered it:

    a token bucket of one packet   a packet leaves when the one before it has, and takes 8 x its bytes / rate, headers included
    a queue of bounded length      what finds it full is dropped, as a router does it
    latency                        a fixed time behind that
    jitter                         and an exponential one, drawn for each burst and way; packets do not overtake each other

`ShapedHosts(folder, links)` are such hosts; a host without a link is never the bottleneck. The relay ends with who started it, and the devices
with the relay.

Nothing here is faster than the link: a packet that the relay is late for leaves late, and what follows it as the link says.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

try:
    from three_hosts import NAMES, Hosts, Missing, do
except ModuleNotFoundError:  # python -m benchmarks.link_reality
    from tests.three_hosts import NAMES, Hosts, Missing, do

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000
PACKET = 1 << 16  # bytes, more than any
BATCH = 64  # packets of one host before others are looked at
WAITING = 10_000  # packets that a device keeps for a relay that is late
MTU = 1500
BUFFER = 0.2  # seconds of a link that its queue holds at least


@dataclass
class Way:
    """One direction of a link. What does not depend on a clock of its own, so that tests can say when a packet comes."""

    rate: float  # bits a second
    latency: float  # seconds
    jitter: float = 0.0  # seconds, the mean
    seed: int = 0
    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    longest: float = 0.0  # seconds in the queue
    _free: float = field(default=0.0, repr=False)  # when the last packet has left
    _last: float = field(default=0.0, repr=False)  # when it arrives
    _extra: float = field(default=0.0, repr=False)

    def __post_init__(self):
        self._random = random.Random(self.seed)
        # Thumb's rule for a router: what is under way in a round trip, and not less than a moment's worth.
        self.queue = self.rate / 8 * max(BUFFER, 2 * self.latency) + MTU
        self._pause = max(self.latency, 0.001)

    def deliver(self, size: int, now: float) -> float | None:
        """When a packet of so many bytes that comes now is at the other end; None: dropped."""
        waits = max(0.0, self._free - now)
        if waits * self.rate / 8 + size > self.queue:
            self.dropped += 1
            return None
        if self.jitter and now - self._free > self._pause:  # another burst
            self._extra = self._random.expovariate(1 / self.jitter)
        self.packets, self.bytes, self.longest = self.packets + 1, self.bytes + size, max(self.longest, waits)
        self._free = now + waits + 8 * size / self.rate
        self._last = max(self._last, self._free + self.latency + self._extra)
        return self._last


class Relay:
    """`doors`: of each host, its device's file and the last number of its address; `ways`: up and down of those that have a link."""

    def __init__(self, doors: dict[str, tuple[int, int]], ways: dict[str, tuple[Way, Way]]):
        self._door = {number: fd for fd, number in doors.values()}
        self._up = {doors[name][0]: [up] for name, (up, _) in ways.items()}
        self._down = {doors[name][1]: [down] for name, (_, down) in ways.items()}
        self._due: list[tuple[float, int, bytes, list[Way]]] = []
        self._count = 0

    def run(self, until: int) -> None:
        """As long as nothing can be read there."""
        files = [until, *self._door.values()]
        while True:
            timeout = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            ready = select.select(files, [], [], timeout)[0]
            if until in ready:
                return
            for fd in ready:
                self._read(fd)
            self._write()

    def _read(self, fd: int) -> None:
        for _ in range(BATCH):
            try:
                packet = os.read(fd, PACKET)
            except OSError:  # nothing more for now, or its host is down
                return
            if packet[0] >> 4 == 4 and packet[19] in self._door:
                self._forward(packet, time.monotonic(), [*self._up.get(fd, ()), *self._down.get(packet[19], ())])

    def _forward(self, packet: bytes, now: float, ways: list[Way]) -> None:
        due = ways[0].deliver(len(packet), now) if ways else now
        if due is not None:
            self._count += 1
            heapq.heappush(self._due, (due, self._count, packet, ways[1:]))

    def _write(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, _, packet, ways = heapq.heappop(self._due)
            if ways:
                self._forward(packet, due, ways)
                continue
            try:
                os.write(self._door[packet[19]], packet)
            except OSError:  # its host is down
                pass


def tun(pid: int) -> int:
    """A new TUN device eth0 in the network of this process, as a file; the device is there for as long as that is open."""
    made: list[int | OSError] = []

    def enter() -> None:  # a thread of its own: it does not come back
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            with open(f"/proc/{pid}/ns/net") as space:
                if libc.setns(space.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
            made.append(fd)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise Missing(f"no TUN device here: {made[0]}")
    return made[0]


class ShapedHosts(Hosts):
    """`links`: host -> a link with up, down (bits a second), latency and jitter (seconds), as fedmpi.bill.links has them."""

    def __init__(self, folder: Path, links: dict, names=NAMES, congestion: str = "cubic", seed: int = 0):
        """`congestion`: how TCP reacts to it, on every host; cubic is what Linux does unless told otherwise."""
        self._congestion = congestion
        self._doors: dict[str, tuple[int, int]] = {}
        self._open: list[int] = []
        self.relay: subprocess.Popen | None = None
        super().__init__(folder, names)
        ways = {
            name: [(link.up, link.latency, link.jitter), (link.down, link.latency, link.jitter)]
            for name, link in links.items()
        }
        self.relay = subprocess.Popen(
            [sys.executable, __file__, json.dumps([self._doors, ways, seed])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=self._open,
        )
        self._close()

    def _plug_in(self, name: str, init: int, number: int) -> None:
        if self.relay is not None:
            raise RuntimeError("a shaped host does not come back: its device went with it")
        self._open.append(tun(init))
        self._doors[name] = self._open[-1], number + 1
        do(*self._enter(name), "ip", "link", "set", "eth0", "txqueuelen", WAITING, "mtu", MTU)

    def start(self, name: str) -> None:
        super().start(name)
        # By route: a network of one's own may not choose among all that the kernel has.
        do(*self._enter(name), "ip", "route", "replace", "10.77.0.0/24", "dev", "eth0", "congctl", self._congestion)

    def stop(self) -> dict[str, dict]:
        """Ends everything; returns what has passed, by host and way. Again: nothing."""
        said, relay, self.relay = "", self.relay, None
        try:
            if relay is not None:
                relay.stdin.close()  # with which it ends
                relay.wait(10)
                said = relay.stdout.read()
        except subprocess.TimeoutExpired:
            relay.kill()
            relay.wait()
        finally:
            self._close()
            super().stop()
        return json.loads(said or "{}")

    def _close(self) -> None:
        """This process's ends of the devices: the relay has its own."""
        while self._open:
            os.close(self._open.pop())


def main() -> None:
    doors, links, seed = json.loads(sys.argv[1])
    ways = {}
    for name, (up, down) in links.items():
        ways[name] = tuple(Way(*way, seed=hash((seed, doors[name][1], n))) for n, way in enumerate((up, down)))
    Relay({name: tuple(door) for name, door in doors.items()}, ways).run(sys.stdin.fileno())
    print(json.dumps({name: {"up": asdict(up), "down": asdict(down)} for name, (up, down) in ways.items()}))


if __name__ == "__main__":
    main()
