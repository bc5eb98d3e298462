"""A server that lies, against real parties: what it could compute from what it received (benchmarks/lying_server.py has more)."""

import dataclasses

import pytest

from benchmarks.lying_batches import BatchLiar, run_batches
from benchmarks.lying_server import Liar, run
from fedmpi.secagg import dealing
from fedmpi.secagg.batch import BatchDealing, BatchRing
from fedmpi.secagg.messages import KEY_SHARE, SEED_SHARE
from fedmpi.secagg.party import Done, Identity, Masked, SecAggParty
from fedmpi.secagg.rules import Rules
from fedmpi.secagg.transcript import Transcript


@pytest.mark.slow
def test_no_input_and_no_sum_below_the_threshold_can_be_computed():
    counts, wrong = run(250, seed=1)
    assert not wrong
    assert counts["with a sum"] > 25 and counts["messages refused"] > 2500, "it both gets somewhere and lies"


@pytest.mark.slow
def test_nor_where_keys_are_made_for_a_batch_of_rounds():
    counts, wrong = run_batches(150, seed=1)
    assert not wrong
    assert counts["with a sum"] > 75 and counts["messages refused"] > 1500, "it both gets somewhere and lies"


def nothing(*_):
    return None


UNSIGNED = (SecAggParty, "_check_signatures", nothing)
ANY_SURVIVORS = (SecAggParty, "_check_survivors", nothing)
ANY_SIGNATURE = (Identity, "verifies", lambda *_: True)
ONE_NAME = (Rules, "instance", b"the same for all")
ANY_BUNDLE = (dealing, "_shares", lambda *_: (bytes(SEED_SHARE), bytes(KEY_SHARE)))
SABOTAGED = {
    "nobody looks at what others signed": (Liar.many_lists, UNSIGNED),
    "nobody looks at the survivors": (Liar.many_lists, UNSIGNED, ANY_SURVIVORS),
    "any signature will do": (Liar.with_puppets, ANY_SIGNATURE),
    "an earlier instance's words will do, and masks are agreed on with whose bundle did not open": (
        Liar.again,
        ONE_NAME,
        ANY_BUNDLE,
        ANY_SIGNATURE,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SABOTAGED)
def test_without_its_checks_the_protocol_falls_and_it_is_noticed(what, monkeypatch):
    """The judgement must be able to find something, or it says nothing."""
    play, *checks = SABOTAGED[what]
    for target, name, weaker in checks:
        monkeypatch.setattr(target, name, weaker)
    assert any(run(1, seed=number, play=play)[1] for number in range(60))


# ---- of batches ----

OF_ROUND, PAIR, DEAL, RECEIVE = (
    Transcript.of_round,
    BatchDealing._pair,
    BatchDealing.deal.__func__,
    SecAggParty.receive,
)


def repeated(which):
    """Of the seeds that a party draws for a batch, b or a, the first for all rounds."""

    def deal(cls, meeting):
        draws = []

        def draw(size):
            draws.append(meeting.random(size))
            return draws[-1][:16] * (size // 16) if len(draws) == which else draws[-1]

        return DEAL(cls, dataclasses.replace(meeting, random=draw))

    return BatchDealing, "deal", classmethod(deal)


def once_more(party, message):
    """It answers, and is where it was before it was told of the survivors."""
    if isinstance(party.state, Masked):
        party.masked = party.state
    answer = RECEIVE(party, message)
    if isinstance(party.state, Done):
        party.state = party.masked
    return answer


def without_its_number(transcript, rules):
    return OF_ROUND(transcript, dataclasses.replace(rules, round=rules.batch[0]))


BATCHES_SABOTAGED = {
    "round transcripts are the same for all rounds": (
        BatchLiar.old_signatures,
        (Transcript, "of_round", without_its_number),
    ),
    "round transcripts are that of the batch": (
        BatchLiar.other_models,
        (Transcript, "of_round", lambda transcript, rules: transcript),
    ),
    "one a_u for all rounds": (BatchLiar.come_and_go, repeated(2)),
    "one b_u for all rounds": (BatchLiar.come_and_go, repeated(1)),
    "one k_uv for all rounds": (
        BatchLiar.come_and_go,
        (BatchDealing, "_pair", staticmethod(lambda *given: PAIR(*given)[:16] * given[-1])),
    ),
    "a round is answered twice": (BatchLiar.answered_twice, (SecAggParty, "receive", once_more)),
    "keys of a round are taken twice": (BatchLiar.taken_twice, (BatchRing, "forget", nothing)),
    "nobody looks at what others signed": (BatchLiar.lists_of_their_own, UNSIGNED),
    "any signature will do": (BatchLiar.puppets, ANY_SIGNATURE),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BATCHES_SABOTAGED)
def test_a_batch_without_its_checks_falls_and_it_is_noticed(what, monkeypatch):
    play, check = BATCHES_SABOTAGED[what]
    monkeypatch.setattr(*check)
    assert any(run_batches(1, seed=number, play=play)[1] for number in range(60))
