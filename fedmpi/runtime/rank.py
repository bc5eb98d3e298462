"""A client rank: the parties that it was started for, and those that it took over from ranks that were lost.

Each block of parties is a `Client` of its own, with its own method and states; messages go to the block whose parties they are about.
What is taken over starts from the last checkpoint, on a disk that this rank can read, and does the local work of the rounds since then
once more, from the models of those rounds. Nothing leaves by that, so nothing is released; and local work is a function of the seed, so
the parties are where they would be had they only dropped out.
"""

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmpi.config import Config
from fedmpi.errors import DataError, FedmpiError, ProtocolError
from fedmpi.log import log, open_log
from fedmpi.runtime import build, checkpoint, floor
from fedmpi.runtime.client import SERVER, Client, Spent
from fedmpi.runtime.mirror import Mirror
from fedmpi.runtime.placement import named
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.secagg.party import Identity
from fedmpi.secagg.pki import read_identity, read_public
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.control import NOT_HEARD_OF, Adopt, Adopted, Nonces, Release
from fedmpi.wire.message import Message, speakers
from fedmpi.wire.messages import AskModel, Checkpoint, Delta, Evaluate, Model, Replay, Setup, Stop, Train
from fedmpi.wire.phases import Phase


def run_client(endpoint: Endpoint, own: Config) -> int:
    """The whole life of a client rank; returns its exit code. `own`: what this rank was started for, by its own command line."""
    open_log(own.run.log, endpoint.rank)
    endpoint.watch(own.run.rank_deadline)
    first = next_message(endpoint)
    if isinstance(first, Stop):
        return 0  # rank 0 has said what was wrong
    if not isinstance(first, Setup):
        raise ProtocolError(f"rank 0 sent {type(first).__name__}, expected Setup", phase=Phase.SETUP)
    watch = Stopwatch()
    with watch("setup"):
        orders = floor.agree(own, first, endpoint.rank, endpoint.size)
        endpoint.ledger.detailed = build.detailed_ledger(orders.config)
        identities = read_identities(orders.config, first.parties)
        spent = Spent(watch)

        def make(parties: tuple[int, ...]) -> Client:
            algorithm = build.algorithm(orders.config)
            algorithm.host(parties)
            mechanism = build.mechanism(orders, algorithm)
            return Client(endpoint, orders, parties, identities, algorithm, mechanism, spent)

        client = make(first.parties)
        mirror = Mirror(client.algorithm, client.mechanism)
        client.look_back(orders.resume_round)
    client.say_ready()
    if orders.config.run.resume:
        settled = next_message(endpoint)
        if isinstance(settled, Stop):
            return 0
        client.go_on(settled)
    return Rank(endpoint, client, mirror, make).serve()


def next_message(endpoint: Endpoint) -> Message:
    arrived = endpoint.poll()
    assert arrived is not None, "without a deadline something arrives"
    return arrived[1]


def read_identities(config: Config, parties: tuple[int, ...]) -> dict[int, Identity]:
    """The signing keys of this rank's parties, if the adversary is active, from the file that its own command line names."""
    if config.aggregation.adversary != "active" or config.aggregation.pki is None:
        return {}
    file = Path(config.aggregation.pki)
    public = read_public(file, config.run.parties)
    return {party: read_identity(file, party, public) for party in parties}


class Rank:
    def __init__(self, endpoint: Endpoint, home: Client, mirror: Mirror, make: Callable[[tuple[int, ...]], Client]):
        """`make`: a client for other parties, with nothing restored."""
        self._endpoint, self._home, self._mirror, self._make = endpoint, home, mirror, make
        # While it waits for a model that it has asked for: what came meanwhile, and what it asked for it.
        self._held: deque[Message] = deque()
        self._asked_for: Message | None = None
        self._clients = [home]
        self._trained: dict[
            int, int
        ] = {}  # party that it had taken over, and has no more -> the last round that it was asked for here
        self._arriving: Client | None = None  # who is being taken over, while rounds are still to be done once more ...
        self._replays = 0  # ... and how many

    def serve(self) -> int:
        handlers: dict[type[Message], Callable[[Any], None]] = {
            Nonces: self._home.meet,
            Adopt: self.adopt,
            Replay: self.replay,
            Release: self.release,
            Checkpoint: self.checkpoint,
            Delta: self._mirror.follow,
            Model: self._mirror.replace,
            Train: self.begin,
            Evaluate: self.begin,
        }
        waiting = False
        while True:
            message = self._held.popleft() if self._held and not waiting else next_message(self._endpoint)
            if isinstance(message, Stop) and not (waiting and self._keeps(message)):
                return self.stop(message)
            if waiting and isinstance(message, Adopt) and not message.parties:
                # Rank 0 had lost this rank, and threw away what it asked for; what it held is of rounds that are over.
                self._held.clear()
                self._asked_for = None
            elif waiting and not isinstance(message, Model):
                self._held.append(message)
                continue
            handlers.get(type(message), self.pass_on)(message)
            waiting = self._asked_for is not None and not isinstance(message, Model)

    def _keeps(self, message: Stop) -> bool:
        """Whether it leaves only with the model that it waits for: the last test, where metrics stay home, is not waited for."""
        return isinstance(self._asked_for, Evaluate) and self._home.config.run.keep_parties and not message.code

    def begin(self, task: Train | Evaluate) -> None:
        """A task, if this rank has the model that it is about. If not, and it is not the model of a round that is over, rank 0 is
        asked for all of it, once."""
        if self._mirror.is_of(task):
            self._asked_for = None
            return self.pass_on(task)
        if task is self._asked_for and self._mirror.version <= task.version:
            raise ProtocolError("rank 0 sent another model than the one that it speaks of", phase=task.PHASE)
        if self._mirror.version > task.version:
            self._asked_for = None
            return log.debug("%s of round %d came too late", type(task).__name__, task.round)
        self._asked_for = task
        self._held.appendleft(task)
        self._endpoint.send(SERVER, AskModel(task.version))

    def pass_on(self, message: Message) -> None:
        about = speakers(message)[:1]
        whose = next((client for client in self._clients if {*about} & {*client.parties}), self._home)
        whose.receive(message, self._mirror.theta)

    def stop(self, message: Stop) -> int:
        if message.code == NOT_HEARD_OF:
            print(
                f"fedmpi: rank {self._endpoint.rank}: rank 0 had not heard of it for too long, and went on without it",
                file=sys.stderr,
                flush=True,
            )
        else:
            for client in self._clients:
                client.keep_final()
        self._home.send_tally()
        self._endpoint.flush()
        self._endpoint.part(at_once=message.code == NOT_HEARD_OF)
        return 0

    def checkpoint(self, message: Checkpoint) -> None:
        for client in self._clients:
            client.keep(message)
        self._home.send_tally()

    # ---- parties of a rank that was lost ----

    def adopt(self, message: Adopt) -> None:
        config = self._home.config
        if config.run.on_loss != "adopt":
            raise ProtocolError(
                "rank 0 asked this rank to take parties over, without --on-loss adopt", phase=Phase.SETUP
            )
        if not message.parties:
            return self._answer("")
        if message.parties == self._home.parties:
            return self.come_home(message)
        if {*message.parties} & {party for client in self._clients for party in client.parties}:
            raise ProtocolError("rank 0 asked this rank to take over parties that it hosts", phase=Phase.SETUP)
        if not 0 <= message.parties[0] <= message.parties[-1] < config.run.parties:
            raise ProtocolError("rank 0 asked this rank to take over parties that there are none of", phase=Phase.SETUP)
        if any(message.round < self._trained.get(party, 0) for party in message.parties):
            raise ProtocolError(
                "rank 0 asked this rank to take parties over once more, from before what they did here",
                phase=Phase.SETUP,
            )
        try:
            client = self._make(message.parties)
            if message.round:
                checkpoint.load_parties(config, client.algorithm, message.parties, message.round, client.mark)
        except (DataError, OSError) as error:
            return self._answer(f"cannot take over {named(message.parties)}: {error}")
        client.trained, client.tested = message.round, message.round - 1
        self._arriving, self._replays = client, message.replays
        self._settle()

    def come_home(self, message: Adopt) -> None:
        """Rank 0 had given this rank up, and others had its parties; they are where these brought them."""
        client = self._home
        if message.round < client.trained:
            raise ProtocolError(
                f"rank 0 sent this rank's parties back to round {message.round} after round {client.trained}",
                phase=Phase.SETUP,
            )
        self._part_with(self._clients[1:])  # others have them now
        self._arriving = None
        try:
            checkpoint.load_parties(client.config, client.algorithm, client.present, message.round, client.mark)
        except (DataError, OSError) as error:
            return self._answer(f"cannot take back {named(client.parties)}: {error}")
        client.sessions.clear()
        client.trained, client.tested = message.round, message.round
        self._answer("")

    def release(self, message: Release) -> None:
        self._part_with([client for client in self._clients[1:] if {*client.parties} <= {*message.parties}])

    def _part_with(self, clients: list[Client]) -> None:
        self._clients = [client for client in self._clients if client not in clients]
        for client in clients:
            self._trained |= dict.fromkeys(client.parties, client.trained)

    def replay(self, message: Replay) -> None:
        """A round's local work once more; nothing of it leaves."""
        client = self._arriving
        if client is None:
            return  # it could not be taken over, as rank 0 was told
        client.check_asked(message)
        try:
            for _ in client.local_work(message, message.theta):
                pass
        except FedmpiError as error:
            self._arriving = None
            return self._answer(f"cannot take over {named(client.parties)}: {error}")
        client.trained, client.tested = message.round, message.round - 1
        self._replays -= 1
        self._settle()

    def _settle(self) -> None:
        if self._arriving is not None and self._replays == 0:
            self._clients.append(self._arriving)
            self._arriving = None
            self._answer("")

    def _answer(self, why: str) -> None:
        self._endpoint.send(SERVER, Adopted(why=why))
