"""Damaged frames into both ends of a run: no crash, no hang, no memory, and the honest parties' sum to the last bit.

    python -m benchmarks.mutated_frames [--json FILE] [--frames 1000000] [--client-frames 100000]

Whole runs over the in-memory transport, secure aggregation among six parties on three ranks. In each a frame is one that was really
sent, changed in one to three places.

flood    a rank that sends nothing else. Rank 0 benches it, and the model is that of the same run with its parties dropped by plan
judged   nobody is benched, so that every frame is decoded, held to its limit and judged: each comes to a copy of rank 0's session as it
         is at that moment, and the run itself must not notice
client   the other way round: each frame comes to a copy of a client in the state in which it waits for such a message. It may take it,
         or refuse it in one line
"""

import collections
import contextlib
import copy
import io
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks import toy
from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.algorithm import LocalUpdate
from fedmpi.cli import resolve
from fedmpi.errors import FedmpiError, TransportError
from fedmpi.randomness.words import SeededWords
from fedmpi.report.terminal import Terminal
from fedmpi.runtime import rank as clients
from fedmpi.runtime import server as servers
from fedmpi.runtime.client import Client
from fedmpi.runtime.conduct import Conduct
from fedmpi.runtime.evaluate import add_reports
from fedmpi.runtime.gather import Gathering
from fedmpi.runtime.mailbox import Mailbox, Out
from fedmpi.runtime.start import start_run
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.runtime.tallies import Tallies
from fedmpi.transport.memory import Hub, run_ranks
from fedmpi.wire.frame import FRAMING
from fedmpi.wire.messages import Checkpoint, Ready, Stop, Tally, encode

RANKS, PARTIES, COORDINATES, LIAR = 4, 6, 64, 1
LIARS = (0, 1)  # parties of rank 1
WAITING = 10_000  # frames on their way to rank 0 at any moment: the transport's own memory is not what is measured


class Small(toy.Method):
    """As benchmarks.toy, over few coordinates: it is messages that are to be many."""

    dimension = COORDINATES

    def initial(self):
        return np.zeros(COORDINATES, np.float32)

    def support_size(self):
        return COORDINATES

    def work(self, party, theta, round):
        rng = SeededWords(self.seed, "toy", party, round).generator()
        return LocalUpdate(
            party, rng.standard_normal(COORDINATES), None, {"loss": 0.0, "head_loss": 0.0, "penalty": 0.0}
        )


def mutate(rng: random.Random, frame: bytes) -> bytes:
    """One to three changes: a flipped bit, a byte, a cut, a repeat, a swap of two stretches."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind, at = rng.randrange(5), rng.randrange(len(data))
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            del data[max(FRAMING, at) if rng.random() < 0.9 else at + 1 :]
        elif kind == 3:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        else:
            other = rng.randrange(len(data))
            size = min(rng.randrange(1, 33), len(data) - max(at, other))
            data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
    # Half the time the length is put right, or nearly every change would stop at the header.
    if rng.random() < 0.5 and len(data) >= FRAMING:
        data[13:20] = (len(data) - FRAMING).to_bytes(7, "little")
    return bytes(data)


def clone(thing):
    """A copy of a session or of a machine, with those inside it: whatever happens to it does not happen to the other."""
    twin = copy.copy(thing)
    for name, value in vars(thing).items():
        if name in ("_inner", "_machine", "_plain", "_proposals", "_unmasking") and value is not None:
            setattr(twin, name, clone(value))
        elif isinstance(value, (dict, set, list, np.ndarray)):
            setattr(twin, name, copy.copy(value))
    return twin


def run(folder: str, flags: str = "", client=clients.run_client) -> dict:
    """A whole run in this process; its summary."""
    out = tempfile.mkdtemp(dir=folder)
    settings = (
        f"--method benchmarks.mutated_frames:Small --dataset none --support dense --parties {PARTIES} --rounds 10 "
        f"--aggregation secure --graph complete --threshold 4 --eval-every 1 --checkpoint-every 3 --threads 1 {flags}"
    )
    with contextlib.redirect_stdout(io.StringIO()):
        config = resolve([*settings.split(), "--out", f"{out}/run"])
        start = start_run(config, RANKS, "in memory", Terminal())

        def rank(endpoint):
            return client(endpoint, config) if endpoint.rank else servers.run_server(endpoint, *start)

        try:
            return run_ranks(RANKS, rank)[0]
        finally:
            start.record.close()


class Pool:
    """Frames that were really sent, by type, with their senders; and how much memory this process took while they were changed."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.kinds: dict[type, collections.deque] = {}
        self.sent = 0
        self._least = self.most = psutil.Process().memory_info().rss

    def note(self, source: int, message) -> None:
        of_kind = self.kinds.setdefault(type(message), collections.deque(maxlen=20))
        of_kind.append((source, bytes(encode(message))))

    def draw(self, session: tuple[int, int] | None = None) -> tuple[int, bytes]:
        """(the rank that sent it, what became of it). `session`: the round and purpose that most are moved into, because what is of
        another one is let go of unread."""
        source, frame = self.rng.choice(self.kinds[self.rng.choice(list(self.kinds))])
        if session is not None and self.rng.random() < 0.9:
            round, purpose = session
            frame = frame[:4] + round.to_bytes(4, "little") + frame[8:12] + bytes([purpose]) + frame[13:]
        self.sent += 1
        if self.sent % 5000 == 0:
            self.most = max(self.most, psutil.Process().memory_info().rss)
        return source, mutate(self.rng, frame)

    @property
    def grown(self) -> int:
        return self.most - self._least


@contextlib.contextmanager
def replaced(owner, **values):
    kept = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


# ---- rank 0, flooded ----


def flood(pool: Pool, frames: int, folder: str, wanted: str) -> dict:
    """Runs with a rank that sends damaged frames and nothing else, until so many were sent."""
    runs = 0

    def liar(endpoint, own):
        if endpoint.rank != LIAR:
            return clients.run_client(endpoint, own)
        endpoint.poll()  # Setup
        endpoint.send(0, Ready(0, -1, COORDINATES, 0))
        while pool.sent < frames:
            for _ in range(100):
                endpoint._post(0, memoryview(pool.draw()[1]))
            while endpoint._hub.queues[0].qsize() > WAITING:
                time.sleep(0.001)
            if (arrived := endpoint.poll(0)) is not None and isinstance(arrived[1], Stop):
                return 0
        while not isinstance(endpoint.poll()[1], Stop):
            pass
        return 0

    while pool.sent < frames:
        summary = run(folder, client=liar)
        runs += 1
        assert summary["model_sha256"] == wanted, "the honest parties' sums are exact"
        assert summary["dropouts"]["benched"] == list(LIARS) and summary["untallied_ranks"] == [LIAR]
        assert summary["dropouts"]["failed_rounds"] == 0
    return {"runs": runs}


# ---- rank 0, every frame judged ----


class Judge:
    """Beside the real mailbox a second one of the same limits, whose offenders are forgiven after every frame."""

    def __init__(self, pool: Pool, mailbox: Mailbox, at_once: int):
        self.pool, self.mailbox, self.at_once = pool, mailbox, at_once
        self.verdicts: collections.Counter[str] = collections.Counter()
        self.lines: list[str] = []
        self.hub = Hub(RANKS)
        self.hub.endpoints[0].limits = mailbox.endpoint.limits

    def side(self, session: tuple[int, int] | None = None) -> Mailbox:
        """A mailbox with one damaged frame in it."""
        source, frame = self.pool.draw(session)
        self.hub.queues[0].put((source, frame))
        endpoint = self.hub.endpoints[0]
        endpoint.muted.clear()
        conduct = Conduct(self.mailbox.placement, bench_at=1 << 60, messages=1 << 60)
        conduct.begin("judged")
        side = Mailbox(endpoint, self.mailbox.placement, 0.0, conduct, self.lines.append)
        side.answer = lambda answers: None
        return side

    def verdict(self, side: Mailbox, taken: bool) -> None:
        held = sum(self.hub.endpoints[0].held(rank) for rank in range(1, RANKS))
        assert held == 0 and self.hub.queues[0].empty()
        assert all("\n" not in line for line in self.lines) and len(self.lines) <= 1, self.lines
        self.verdicts["refused" if self.lines else "taken" if taken else "let go of"] += 1
        self.lines.clear()

    def session(self, gathering: Gathering, session, round, purpose) -> None:
        for _ in range(self.at_once):
            side = self.side((round, purpose))
            arrived = side.take_of(round, purpose, time.monotonic())
            taken = arrived is not None and not isinstance(arrived, Out)
            if taken:
                twin = Gathering(side, Stopwatch(), 1.0, None, gathering._columns)
                twin._cohort, twin._clear = gathering._cohort, gathering._clear
                twin._receive(clone(session), *arrived)
            self.verdict(side, taken)

    def reports(self, round, asked, columns, plausible) -> None:
        for _ in range(self.at_once):
            side, total = self.side((round, 0)), None
            with contextlib.suppress(TransportError):  # nobody else answers here
                total, _ = add_reports(side, round, asked, columns, plausible)
            assert total is None or np.isfinite(total).all()
            self.verdict(side, total is not None)

    def tallies(self) -> None:
        for _ in range(self.at_once):
            side = self.side()
            with replaced(side.endpoint, ledger=copy.deepcopy(side.endpoint.ledger)):
                tallies = Tallies(side.endpoint, side.placement, Stopwatch())
                lacking = side.collect("judged", Tally, tallies.take)
                tallies.check()
            self.verdict(side, len(lacking) < RANKS - 1)


def judged(pool: Pool, frames: int, folder: str, wanted: str, flags: str) -> dict:
    """A run into which nothing is sent, and beside it so many frames that are judged as if they were."""
    judge: list[Judge] = []
    moments = 10 * 5 * PARTIES  # about as often somebody is waited for
    take_of, collect, poll = Mailbox.take_of, Mailbox.collect, servers.Endpoint.poll

    class Judged(Gathering):
        def run(self, session, round, cohort, clear=(), purpose=servers.Purpose.TRAINING):
            real = self._mailbox
            if not judge:
                judge.append(Judge(pool, real, max(1, frames // moments)))

            def watched(*arguments):
                if pool.kinds and pool.sent < frames:
                    judge[0].session(self, session, round, purpose)
                return take_of(real, *arguments)

            with replaced(real, take_of=watched):
                return super().run(session, round, cohort, clear, purpose)

    def adding(mailbox, *arguments):
        if judge and pool.sent < frames:
            judge[0].reports(*arguments)
        return add_reports(mailbox, *arguments)

    def collecting(self, session, kind, take, strict=False):
        if kind is Tally and judge and self is judge[0].mailbox and pool.sent < frames:
            judge[0].tallies()
        return collect(self, session, kind, take, strict)

    def polling(self, timeout=None):
        arrived = poll(self, timeout)
        if self.rank == 0 and arrived is not None and not (judge and self is judge[0].hub.endpoints[0]):
            pool.note(*arrived)
        return arrived

    with (
        replaced(servers, Gathering=Judged, add_reports=adding),
        replaced(Mailbox, collect=collecting),
        replaced(servers.Endpoint, poll=polling),
    ):
        summary = run(folder, flags)
    assert summary["model_sha256"] == wanted, "the run did not notice"
    assert summary["dropouts"]["caught"] == 0 and not summary["untallied_ranks"]
    return dict(judge[0].verdicts) | {"kinds": sorted(kind.__name__ for kind in pool.kinds)}


# ---- a client ----


def recorded(folder: str, flags: str) -> list[tuple[Client, clients.Mirror, object]]:
    """(a client and its rank's model as they were, the message that came to them then), the first of every kind."""
    seen: dict[type, tuple[Client, clients.Mirror, object]] = {}
    serve = clients.Rank.serve

    def watched(self):
        poll = self._endpoint.poll

        def polled(timeout=None):
            arrived = poll(timeout)
            if self._endpoint.rank == LIAR and arrived is not None and not isinstance(arrived[1], (Stop, Checkpoint)):
                seen.setdefault(type(arrived[1]), (twin_of(self._home), copy.copy(self._mirror), arrived[1]))
            return arrived

        self._endpoint.poll = polled
        return serve(self)

    with replaced(clients.Rank, serve=watched):
        run(folder, flags)
    return list(seen.values())


def twin_of(client: Client) -> Client:
    """A client in the same state, at an endpoint of its own."""
    twin = copy.copy(client)
    twin.sessions = {party: clone(session) for party, session in client.sessions.items()}
    twin.endpoint = Hub(2).endpoints[1]
    twin.send_tally = lambda: None  # which takes milliseconds, for the memory in it
    return twin


def client(pool: Pool, frames: int, folder: str) -> dict:
    verdicts: collections.Counter[str] = collections.Counter()
    states = recorded(folder, "") + recorded(folder, "--metrics securesum")
    stop = bytes(encode(Stop()))
    for number in range(frames):
        snapshot, mirror, message = states[number % len(states)]
        pool.kinds = {type(message): collections.deque([(0, bytes(encode(message)))])}
        twin = twin_of(snapshot)
        for frame in (pool.draw()[1], stop):
            twin.endpoint._hub.queues[1].put((0, frame))
        try:
            clients.Rank(twin.endpoint, twin, copy.copy(mirror), None).serve()
            verdicts["taken"] += 1
        except FedmpiError as error:
            assert "\n" not in str(error), str(error)
            verdicts["refused"] += 1
    return dict(verdicts) | {"kinds": sorted({type(message).__name__ for *_, message in states})}


def main() -> None:
    parser = arguments("mutated_frames", __doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="into rank 0, by each of the two ways")
    parser.add_argument("--client-frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    facts = machine("numpy")
    show_machine(facts)
    rows = []

    def measure(name: str, pool: Pool, work) -> None:
        started = time.monotonic()
        found = work()
        seconds = time.monotonic() - started
        rows.append({"into": name, "frames": pool.sent, "seconds": round(seconds, 1), "grown": pool.grown, **found})
        print(
            f"{name:20} {pool.sent:>9,} frames  {seconds:7.1f} s  memory +{pool.grown / 1e6:.0f} MB  {found}",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).mkdir(exist_ok=True)
        honest = run(folder)["model_sha256"]
        plan = ",".join(f"{round}:{party}:advertise" for round in range(1, 11) for party in LIARS)
        dropped = run(folder, f"--dropout {plan}")["model_sha256"]
        pool = Pool(options.seed)
        for flags in ("", "--metrics securesum"):
            beside = Pool(options.seed + 1)
            measure(
                f"judged {flags}".strip(),
                beside,
                lambda beside=beside, flags=flags: judged(beside, options.frames // 2, folder, honest, flags),
            )
            pool.kinds |= beside.kinds
        measure("flood", pool, lambda: flood(pool, options.frames, folder, dropped))
        clients_pool = Pool(options.seed + 2)
        measure("client", clients_pool, lambda: client(clients_pool, options.client_frames, folder))
    save(options.json, facts, rows=rows)


if __name__ == "__main__":
    main()
