"""Bundles that do not open: who leaves, and that the others' sum is exact all the same."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secagg_driver import Round, identities

from fedmpi.errors import ProtocolError
from fedmpi.secagg import dealing
from fedmpi.secagg import messages as m
from fedmpi.secagg import party as states
from fedmpi.secagg.disputes import who_leaves


def spoiled(pairs):
    """A tamper function: what these dealers seal for these holders is rubbish."""

    def tamper(message):
        if isinstance(message, m.ShareKeys):
            bad = {holder for dealer, holder in pairs if dealer == message.party}
            bundles = tuple(
                dataclasses.replace(b, sealed=bytes(m.SEALED)) if b.party in bad else b for b in message.bundles
            )
            return [dataclasses.replace(message, bundles=bundles)]

    return tamper


def ids(n, active):
    return identities(n) if active else None


def leaving(round):
    return {fault.party for fault in round.server.faults}


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("n", [3, 7, 12])
def test_a_dealer_of_rubbish_leaves_and_the_round_goes_on(n, active):
    for number in range(1, 6):  # every round, not every other
        round = Round(n, round=number, identities=ids(n, active))
        liar = round.cohort[1]
        others = [p for p in round.cohort if p != liar]
        round.run(tamper=spoiled({(liar, p) for p in others}))
        round.check_sum(others)
        assert [str(fault) for fault in round.server.faults] == [
            f"party {liar}, ShareKeys: dealt bundles that {n - 1} of its peers could not open"
        ]


@pytest.mark.parametrize("active", [False, True])
def test_nobody_masks_with_a_dealer_whose_bundle_did_not_open(active):
    round = Round(7, identities=ids(7, active))
    round.run(tamper=spoiled({(0, 3), (0, 6)}))
    inputs = {x.party: x for x in round.sent if isinstance(x, m.MaskedInput)}
    assert {p: x.unopened for p, x in inputs.items() if x.unopened} == {3: (0,), 6: (0,)}
    assert leaving(round) == {0}
    round.check_sum(round.cohort[1:])


def test_a_holder_that_complains_of_everybody_leaves_alone():
    round = Round(7)
    whole = round.parties[6]._move

    def complain(message):
        state, answer = whole(message)
        if isinstance(answer, m.MaskedInput):
            return state, dataclasses.replace(answer, unopened=tuple(p for p in round.cohort if p != 6))
        return state, answer

    round.parties[6]._move = complain
    round.run()
    assert [str(fault) for fault in round.server.faults] == [
        "party 6, MaskedInput: said of 6 bundles that they do not open"
    ]
    round.check_sum([p for p in round.cohort if p != 6])


@pytest.mark.parametrize("active", [False, True])
def test_a_dealer_whose_secret_is_lost_costs_nobody_the_sum(active):
    """It deals one bundle that opens: who masked with it says what with, because nobody can find its key any more."""
    round = Round(9, threshold=6, identities=ids(9, active))
    liar, friend = 0, 24
    round.run(tamper=spoiled({(liar, p) for p in round.cohort if p not in (liar, friend)}))
    asked = {x.party: x.direct for x in round.sent if isinstance(x, m.UnmaskRequest)}
    assert asked[friend] == (liar,) and set(asked.values()) == {(liar,), ()}
    round.check_sum(round.cohort[1:])


def test_that_friend_can_end_one_round_by_its_silence_and_the_dealer_is_named_for_it():
    round = Round(9, threshold=6)
    spoil = spoiled({(0, p) for p in round.cohort if p not in (0, 24)})
    round.run({24: "Unmask"}, tamper=spoil)
    assert round.server.failed and "party 24, which masked with party 0, has not answered" in round.server.reason
    assert leaving(round) == {0}


@pytest.mark.parametrize("active", [False, True])
def test_a_party_that_can_open_too_few_withdraws_and_leaves_the_others_their_round(active):
    round = Round(9, threshold=6, identities=ids(9, active))
    victim, liars = 24, (0, 3, 6, 9)
    pairs = {(liar, victim) for liar in liars}
    round.run(tamper=spoiled(pairs))
    assert type(round.parties[victim].state) is states.Withdrawn
    withdrawn = [x for x in round.sent if isinstance(x, m.Withdrawal)]
    assert [(x.party, x.unopened) for x in withdrawn] == [(victim, liars)]
    assert victim not in round.server.result()[1]
    round.check_sum()
    with pytest.raises(ProtocolError, match="but it withdrew"):
        round.parties[victim].receive(m.UnmaskRequest(3, victim, round.cohort))


@settings(max_examples=80)
@given(st.data())
def test_the_sum_is_exact_whatever_is_sealed_for_whom(data):
    n = data.draw(st.integers(4, 14), "n")
    active = data.draw(st.booleans(), "active") and n <= 9
    degree = None if active else data.draw(st.sampled_from([None, *range(4, n - 1, 2)]), "degree")
    holders = n if degree is None else degree + 1
    round = Round(
        n,
        threshold=holders // 2 + 1,
        degree=degree,
        identities=ids(n, active),
        seed=data.draw(st.integers(0, 99)),
    )
    liars = data.draw(st.lists(st.sampled_from(round.cohort), max_size=3, unique=True), "liars")
    pairs = {(d, h) for d in liars for h in data.draw(st.lists(st.sampled_from(round.cohort), unique=True)) if h != d}
    phases = ["AdvertiseKeys", "ShareKeys", "MaskedInput", "Unmask"]
    vanish = {
        p: data.draw(st.sampled_from(phases)) for p in data.draw(st.lists(st.sampled_from(round.cohort), max_size=2))
    }
    round.run(vanish, tamper=spoiled(pairs))
    if round.server.failed:
        assert (pairs or vanish) and "threshold is" in round.server.reason
        return
    round.check_sum()
    # whoever leaves was in a dispute, and no two that are in one are both in the sum
    in_sum = set(round.server.result()[1])
    assert leaving(round) <= {p for pair in round.server.disputes for p in pair}
    assert not any({holder, dealer} <= in_sum for holder, dealer in round.server.disputes)


@pytest.mark.parametrize(
    "unopened", [(99,), (3, 3), (6, 3), (0,)], ids=["a stranger", "twice", "out of order", "itself"]
)
def test_a_complaint_that_cannot_be_is_a_lie_of_who_complains(unopened):
    def tamper(message):
        if isinstance(message, m.MaskedInput) and message.party == 0:
            return [dataclasses.replace(message, unopened=unopened)]

    round = Round(5).run(tamper=tamper)
    assert [str(f) for f in round.server.faults] == [
        "party 0, MaskedInput: complained of bundles that it was not sent, or out of order"
    ]
    round.check_sum(round.cohort[1:])


@pytest.mark.parametrize("active", [False, True])
def test_a_server_cannot_ask_for_the_mask_of_a_survivor(active):
    round = Round(5, identities=ids(5, active))
    ask = round.server._ask_shares

    def cheat():
        return [(p, dataclasses.replace(x, direct=x.survivors[:1])) for p, x in ask()]

    round.server._ask_shares = cheat
    with pytest.raises(ProtocolError, match="asked for the mask of a party that survived"):
        round.run()


@pytest.mark.parametrize("n, liars", [(4, (3,)), (5, (3,)), (9, (3, 6, 9)), (12, (0, 3, 6, 9))])
def test_as_many_may_open_wrong_shares_as_there_are_to_spare(n, liars):
    """Twice as many as Reed-Solomon decoding finds: the commitment tells when the secret is right."""

    def tamper(message):
        if isinstance(message, m.Unmask) and message.party in liars:
            wrong = [
                dataclasses.replace(a, share=bytes(m.SEED_SHARE - 1) + bytes([message.party + 1]))
                for a in message.answers
            ]
            return [dataclasses.replace(message, answers=tuple(wrong))]

    round = Round(n).run(tamper=tamper)
    assert n - len(liars) == round.rules.threshold
    round.check_sum(round.cohort)
    assert {holder for holder, _ in round.server.disputes} <= set(liars) and leaving(round) == set(liars)


@pytest.mark.parametrize("active", [False, True])
def test_a_dealer_of_random_shares_is_the_one_in_dispute(active):
    """Its bundles open; what is in them fits nothing. That costs the round, and is held against nobody else."""
    round = Round(7, identities=ids(7, active))
    deal = dealing.create_shares

    def random_shares(secrets, threshold, xs, random_bytes, fields):
        return [[int.from_bytes(random_bytes(f.secret_bytes), "big") for _ in xs] for f in fields]

    whole = round.parties[6]._move

    def lie(message):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dealing, "create_shares", random_shares)
            return whole(message)

    round.parties[6]._move = lie
    round.run()
    assert round.server.failed and deal is dealing.create_shares
    assert round.server.disputes == {(p, 6) for p in round.cohort if p != 6} and leaving(round) == {6}


def test_who_withdraws_without_need_lies():
    round = Round(6)
    whole = round.parties[0]._move

    def withdraw(message):
        state, answer = whole(message)
        return (state, m.Withdrawal(3, 0, (15,))) if isinstance(answer, m.MaskedInput) else (state, answer)

    round.parties[0]._move = withdraw
    round.run()
    assert [str(f) for f in round.server.faults] == [
        "party 0, MaskedInput: withdrew with 4 bundles that opened, 3 are enough"
    ]
    round.check_sum(round.cohort[1:])


def test_nobody_keeps_another_out_for_good():
    """Of two alone, one leaves in odd rounds and the other in even ones."""
    for number in range(1, 7):
        round = Round(6, round=number).run(tamper=spoiled({(0, 3)}))
        assert leaving(round) == ({0} if number % 2 else {3})
        round.check_sum([p for p in round.cohort if p not in leaving(round)])


def test_parties_of_one_rank_are_one_voice():
    pairs = {(0, 4), (1, 4)}
    assert who_leaves(pairs, lambda p: p // 2, 2) == [(0, {4}), (1, {4})] and who_leaves(pairs, round=2)[0][0] == 4
    assert [p for p, _ in who_leaves(pairs | {(2, 4)}, lambda p: p // 2, 2)] == [4]


def wrong_share_of(owner, holder):
    def tamper(message):
        if isinstance(message, m.Unmask) and message.party == holder:
            answers = (
                dataclasses.replace(a, share=bytes(m.SEED_SHARE)) if a.owner == owner else a for a in message.answers
            )
            return [dataclasses.replace(message, answers=tuple(answers))]

    return tamper


def test_a_wrong_share_of_another_is_a_dispute_and_of_itself_a_lie():
    of_another = Round(9, threshold=5).run(tamper=wrong_share_of(0, 6))
    assert of_another.server.disputes == {(6, 0)} and [f.certain for f in of_another.server.faults] == [False]
    of_itself = Round(9, threshold=5).run(tamper=wrong_share_of(6, 6))
    assert not of_itself.server.disputes
    assert [(f.party, f.certain) for f in of_itself.server.faults] == [(6, True)]
    for round in (of_another, of_itself):
        round.check_sum(round.cohort)


# ---- who leaves ----

disputes = st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]), max_size=25)


@given(disputes)
def test_of_every_pair_in_dispute_somebody_leaves_and_nobody_else_does(pairs):
    found = who_leaves(pairs)
    gone = {party for party, _ in found}
    assert all(holder in gone or dealer in gone for holder, dealer in pairs)
    assert gone <= {party for pair in pairs for party in pair} and len(found) == len(gone)
    assert found == who_leaves(sorted(pairs))


@given(st.integers(0, 9), st.sets(st.integers(0, 9), min_size=2), st.booleans())
def test_one_liar_that_is_in_dispute_with_several_leaves_alone(liar, others, as_dealer):
    others = others - {liar}
    pairs = {(other, liar) if as_dealer else (liar, other) for other in others}
    expected = [liar] if len(others) > 1 or as_dealer else list(others)
    assert [party for party, _ in who_leaves(pairs)] == expected
