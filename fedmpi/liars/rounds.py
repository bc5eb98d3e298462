"""A rank 0 that lies in the rounds: other models for some, old sessions, the same question twice."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from fedmpi.aggregation.protocol import digest
from fedmpi.config import Config
from fedmpi.liars.base import (
    Opened,
    ServerAttack,
    Verdict,
    only_secure,
    opened,
    parties_in_words,
    threshold_of,
    watched,
)
from fedmpi.liars.stage import Forged, Quiet
from fedmpi.privacy.releases import ReleaseLog, Stepped
from fedmpi.runtime import build
from fedmpi.runtime.start import Start
from fedmpi.secagg.messages import (
    AdvertiseKeys,
    ConsistencyCheck,
    MaskedInput,
    ShareBatch,
    ShareKeys,
    Unmask,
    Withdrawal,
)
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
        self.batched = config.aggregation.key_rounds > 0
        self.threshold, self.victims = threshold_of(config), set(start.placement.parties_of(VICTIM))
        with watched() as self.true, opened() as self.opened:
            try:
                super().play(endpoint, start, terminal, act)
            finally:
                events = ReleaseLog.read(config.out).events
                self.sums = [event.survivors for event in events if isinstance(event, Stepped)]

    def judge(self) -> Verdict:
        mixed = list(filter(self.is_mixed, self.sums))
        small = [parties for parties in self.sums if len(parties) < self.threshold]
        true = [found for found in self.opened if self.is_mixed(found.parties) and self.is_true(found)]
        if mixed and not small and self.batched and not true:
            unseen = "" if self.true else " (by the protocol; not compared, because parties are other processes here)"
            return Verdict(f"rubbish: masks of those who saw different models do not cancel{unseen}")
        if mixed or small:
            return Verdict(f"the sum of {parties_in_words((mixed or small)[0])}, who saw different models", broken=True)
        if self.sums:
            return Verdict(
                f"the sum of {parties_in_words(self.sums[0])}, who all saw one model; nothing of the victim's"
            )
        return Verdict("nothing: no sum was opened")

    def is_mixed(self, parties: tuple[int, ...]) -> bool:
        return self.victims.intersection(parties) not in (set(), set(parties))

    def is_true(self, found: Opened) -> bool:
        """Whether what was opened is the sum of what its parties put in, as far as that can be seen here."""
        known = [self.true[found.round, party] for party in found.parties if (found.round, party) in self.true]
        total = np.sum(np.array(known, np.uint64), axis=0, dtype=np.uint64) & np.uint64((1 << found.bits) - 1)
        return len(known) == len(found.parties) and np.array_equal(total, found.total)


class Replay(ServerAttack):
    name = "replay"
    tries = "plays a recorded session, word for word, to the same parties started again: wants the same rounds under other noise"
    acts = 2
    words: Sequence[tuple[int, Message]] = ()
    # Sent before anything of a party's data is in it, or in place of it.
    HARMLESS = (Ready, AdvertiseKeys, ShareKeys, ShareBatch, Withdrawal, Tally)

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
