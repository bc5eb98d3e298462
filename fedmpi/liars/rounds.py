"""A rank 0 that lies in the rounds: other models for some, old sessions, the same question twice."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from fedmpi.aggregation.protocol import digest
from fedmpi.config import Config
from fedmpi.liars.base import ServerAttack, Verdict, only_secure, parties_in_words, threshold_of
from fedmpi.liars.stage import Forged, Quiet
from fedmpi.privacy.releases import ReleaseLog, Stepped
from fedmpi.runtime import build
from fedmpi.runtime.start import Start
from fedmpi.secagg.messages import AdvertiseKeys, ConsistencyCheck, MaskedInput, ShareKeys, Unmask, Withdrawal
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.message import Message, speakers
from fedmpi.wire.messages import EvalReport, Evaluate, Model, PlainInput, PlainRows, Ready, Tally, Train, TrainReport

VICTIM = 1  # the rank


def another_model(task: Train | Evaluate, dimension: int) -> list[Message]:
    """The same task with a model that nobody else is shown."""
    theta = np.ones(dimension, np.float32)
    return [Model(task.version, theta=theta), dataclasses.replace(task, model=digest(theta))]


class Models(ServerAttack):
    name = "models"
    tries = "shows the victim's rank one model and all others another: wants a sum in which only the victim's part is unknown"

    def fits(self, config: Config) -> str:
        return only_secure(config)

    def says(self, endpoint: Forged, rank: int, message: Message) -> Iterable[Message]:
        if isinstance(message, Train) and rank == VICTIM:  # its own machine goes with the others, whose sum it can open
            return another_model(message, self.dimension)
        return [message]

    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None:
        config = start.orders.config
        self.dimension = build.algorithm(config, device="cpu").dimension
        self.threshold, self.victims = threshold_of(config), set(start.placement.parties_of(VICTIM))
        try:
            super().play(endpoint, start, terminal, act)
        finally:
            events = ReleaseLog.read(config.out).events
            self.sums = [event.survivors for event in events if isinstance(event, Stepped)]

    def judge(self) -> Verdict:
        mixed = [parties for parties in self.sums if self.victims.intersection(parties) not in (set(), set(parties))]
        small = [parties for parties in self.sums if len(parties) < self.threshold]
        if mixed or small:
            return Verdict(f"the sum of {parties_in_words((mixed or small)[0])}, who saw different models", broken=True)
        if self.sums:
            return Verdict(
                f"the sum of {parties_in_words(self.sums[0])}, who all saw one model; nothing of the victim's"
            )
        return Verdict("nothing: no sum was opened")


class Replay(ServerAttack):
    name = "replay"
    tries = "plays a recorded session, word for word, to the same parties started again: wants the same rounds under other noise"
    acts = 2
    words: Sequence[tuple[int, Message]] = ()
    # Sent before anything of a party's data is in it, or in place of it.
    HARMLESS = (Ready, AdvertiseKeys, ShareKeys, Withdrawal, Tally)

    def fits(self, config: Config) -> str:
        return only_secure(config)

    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None:
        if act == 0:
            super().play(endpoint, start, terminal, act)
            assert isinstance(endpoint, Forged)
            self.words = list(endpoint.sent)
        else:
            for rank, message in self.words:
                endpoint.send(rank, message)

    def judge(self) -> Verdict:
        answers = [message for _, message in self.heard[1] if not isinstance(message, self.HARMLESS)]
        if answers:
            return Verdict(f"{len(answers)} answers once more, the first a {type(answers[0]).__name__}", broken=True)
        return Verdict(f"nothing: of {len(self.words)} recorded messages none got an input or a share")


class Again(ServerAttack):
    """First a round, then a test: the second one with another model, to see the figures of that as well."""

    name = "again"
    tries = "asks for the same round twice, and for the same test twice: wants two releases where one is accounted for"
    acts = 2
    flags = "--metrics party --eval-every 1"
    RELEASES = (AdvertiseKeys, MaskedInput, ConsistencyCheck, Unmask, PlainInput, PlainRows, TrainReport, EvalReport)

    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None:
        self.dimension = build.algorithm(start.orders.config, device="cpu").dimension
        super().play(endpoint, start, terminal, act)

    def says(self, endpoint: Forged, rank: int, message: Message) -> Iterable[Message]:
        if self.act == 0 and isinstance(message, Train):
            return [message, message]
        if self.act == 1 and isinstance(message, Evaluate):
            return [message, *another_model(message, self.dimension)]
        return [message]

    def judge(self) -> Verdict:
        twice: Counter[tuple[str, int, int, int]] = Counter()
        for act, heard in enumerate(self.heard):
            for _, message in heard:
                if isinstance(message, self.RELEASES):
                    name = f"{type(message).__name__} for {'test' if message.purpose else 'training'}"
                    twice.update((name, act, message.round, party) for party in speakers(message))
        again = [key for key, count in twice.items() if count > 1]
        if again:
            name, _, round, party = again[0]
            return Verdict(f"{len(again)} second answers, as party {party}'s {name} of round {round}", broken=True)
        return Verdict("nothing: each was answered once")
