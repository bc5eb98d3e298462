"""A client rank: it hosts parties, and answers the server until it is told to stop."""

from fedmpi.aggregation.plain import PlainParty
from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.errors import ProtocolError
from fedmpi.runtime import build, checkpoint
from fedmpi.runtime.memory import proportional_set_size
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.messages import Checkpoint, EvalReport, Evaluate, Ready, Setup, Stop, Train, TrainReport

SERVER = 0


def run_client(endpoint: Endpoint) -> int:
    """The whole life of a client rank; returns its exit code."""
    _, first = endpoint.poll()
    if isinstance(first, Stop):
        return 0  # rank 0 has said what was wrong
    if not isinstance(first, Setup):
        raise ProtocolError(f"rank 0 sent {type(first).__name__}, expected Setup", phase="setup")
    return Client(endpoint, first).serve()


class Client:
    def __init__(self, endpoint: Endpoint, setup: Setup):
        self.endpoint = endpoint
        self.watch = Stopwatch()
        with self.watch("setup"):
            plan = build.Plan.from_text(setup.config)
            self.config: Config = plan.config
            self.parties = setup.parties
            self.algorithm: Algorithm = build.algorithm(self.config)
            self.release = build.release(plan, self.algorithm)
            if plan.resume_round:
                checkpoint.restore_parties(self.config, self.algorithm, self.parties, plan.resume_round)
        endpoint.send(SERVER, Ready(dimension=self.algorithm.dimension, parties=self.parties))

    def serve(self) -> int:
        handlers = {Train: self.train, Evaluate: self.evaluate, Checkpoint: self.keep}
        while True:
            _, message = self.endpoint.poll()
            if isinstance(message, Stop):
                self.send_account()
                self.endpoint.flush()
                return 0
            if type(message) not in handlers:
                raise ProtocolError(f"rank 0 sent {type(message).__name__}, which no client takes", phase="round")
            handlers[type(message)](message)

    def train(self, model: Train) -> None:
        for party in model.parties:
            with self.watch("local work"):
                update = self.algorithm.local_work(party, model.theta, model.round)
            with self.watch("encode"):
                values, norm = self.release.encode(update.values, party, model.round, model.cohort)
                session = PlainParty(
                    model.round, party, self.release.encoding, self.algorithm.dimension, values, update.support
                )
                messages = session.start()
            with self.watch("send"):
                for message in messages:
                    self.endpoint.send(SERVER, message)
                if self.config.privacy.metrics == "party":
                    self.endpoint.send(SERVER, TrainReport(model.round, party, norm=norm, **update.figures))

    def evaluate(self, model: Evaluate) -> None:
        if self.config.privacy.metrics == "none":
            return
        for party in model.parties:
            if model.round == 0:
                with self.watch("references"):
                    alone = self.algorithm.references(party, model.theta)
                report = EvalReport(0, party, alone.untrained_correct, alone.total, alone.local_correct)
            else:
                with self.watch("evaluation"):
                    score = self.algorithm.evaluate(party, model.theta, model.round)
                report = EvalReport(model.round, party, score.correct, score.total, loss=score.loss)
            self.endpoint.send(SERVER, report)

    def keep(self, message: Checkpoint) -> None:
        with self.watch("checkpoint"):
            checkpoint.save_parties(self.config, self.algorithm, self.parties, message.round)
        self.send_account()

    def send_account(self) -> None:
        """What this rank sent and spent since its last account, this message included."""
        facts = {"cpu": dict(self.watch.cpu), "pss": proportional_set_size()}
        self.watch = Stopwatch()
        self.endpoint.send_account(SERVER, facts)
