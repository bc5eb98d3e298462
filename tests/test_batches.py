"""Keys for several rounds: exact whoever vanishes from which, one round opened and no other, used once and gone."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secagg_driver import Batch, Round, identities

from fedmpi.errors import CryptoError, ProtocolError
from fedmpi.secagg import batch as keys_of_batches
from fedmpi.secagg import messages as m
from fedmpi.secagg.batch import list_channel
from fedmpi.secagg.party import SecAggParty
from fedmpi.secagg.rules import Rules
from fedmpi.secagg.transcript import Transcript

FIRST = ["AdvertiseKeys", "ShareKeys", "MaskedInput", "Unmask"]
LATER = ["MaskedInput", "Unmask"]


def survivors(round, vanish):
    """Who is in the sum: everybody with keys that did not vanish before its input."""
    return [p for p in round.cohort if vanish.get(p) not in FIRST[:3]]


# ---- the exactness law ----


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_rounds_sum_is_exactly_its_survivors_for_any_dropout(data):
    n = data.draw(st.integers(3, 16), "n")
    threshold = data.draw(st.integers(n // 2 + 1, n), "threshold")
    active = data.draw(st.booleans(), "active") and n <= 8
    batch = Batch(
        n,
        data.draw(st.integers(2, 5), "rounds"),
        threshold=threshold,
        bits=data.draw(st.sampled_from([8, 13, 21, 33])),
        seed=data.draw(st.integers(0, 99)),
        identities=identities(n) if active else None,
    )
    for number in batch.rounds:
        round = batch.round(number)
        phases = FIRST if number == batch.rounds[0] else LATER
        lost = data.draw(st.integers(0, len(round.cohort) - threshold), "lost")
        order = data.draw(st.permutations(round.cohort))
        vanish = {p: data.draw(st.sampled_from([*phases, *["ConsistencyCheck"] * active])) for p in order[:lost]}
        round.run(vanish)
        round.check_sum(survivors(round, vanish))
        assert not round.server.faults and not round.server.disputes


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_regular_graph_is_as_exact(data):
    n, degree = data.draw(st.integers(12, 30), "n"), data.draw(st.sampled_from([6, 8]), "degree")
    batch = Batch(n, 3, threshold=degree // 2 + 1, degree=degree, seed=data.draw(st.integers(0, 99)))
    for number in batch.rounds:
        round = batch.round(number)
        order = data.draw(st.permutations(round.cohort))
        vanish = {p: data.draw(st.sampled_from(FIRST if number == batch.rounds[0] else LATER)) for p in order[:2]}
        round.run(vanish)
        if not round.server.failed:
            round.check_sum()
        else:
            assert "threshold" in round.server.reason
        if batch.made.batch is None:
            return


def test_who_drops_out_of_a_round_is_back_in_the_next_and_who_missed_the_keys_is_not():
    batch = Batch(7, 4, threshold=4)
    batch.round(3).run({0: "AdvertiseKeys", 3: "ShareKeys", 6: "MaskedInput"}).check_sum([9, 12, 15, 18])
    batch.round(4).run({9: "MaskedInput"}).check_sum([6, 12, 15, 18])
    batch.round(5).run().check_sum([6, 9, 12, 15, 18])
    batch.round(6).run({6: "Unmask"}).check_sum([6, 9, 12, 15, 18])


def test_a_round_takes_two_messages_of_a_party_and_the_first_four():
    batch = Batch(5, 3)
    sent = [[type(x).__name__ for x in batch.round(number).run().sent if x.party == 0] for number in batch.rounds]
    later = ["MaskedInput", "UnmaskRequest", "Unmask"]
    assert sent == [["AdvertiseKeys", "KeyList", "ShareBatch", "ShareList", *later], later, later]


def test_a_failed_round_leaves_the_keys_of_the_others():
    batch = Batch(5, 3, threshold=4)
    batch.round(3).run().check_sum()
    failed = batch.round(4).run({0: "MaskedInput", 3: "MaskedInput"}).server
    assert failed.failed and "the threshold is 4" in failed.reason
    batch.round(5).run().check_sum([0, 3, 6, 9, 12])


# ---- one round, and no other ----


def opened_lists(batch, number, vanish):
    """The seeds of those that vanish from a round, as rank 0 finds them."""
    round, seeds = batch.round(number), {}
    material = round.server._material
    fits = material.fits_key

    def note(owner, secret):
        found = fits(owner, secret)
        if found:
            seeds[owner] = secret
        return found

    material.fits_key = note
    round.run(vanish).check_sum()
    return seeds


def test_the_secret_of_a_vanished_party_opens_that_round_and_no_other():
    batch = Batch(6, 4, threshold=4)
    batch.round(3).run().check_sum()
    seeds = opened_lists(batch, 4, {0: "MaskedInput", 3: "MaskedInput"})
    assert set(seeds) == {0, 3}
    dealt, transcript = batch.made.batch.dealt, batch.made.batch.transcript
    for owner, number, claimed in itertools.product(seeds, batch.rounds, batch.rounds):
        channel = list_channel(seeds[owner], transcript, owner, claimed, False)
        if number == claimed == 4:
            assert len(channel.open(dealt[owner][1][1])) == 16 * 5
        else:
            with pytest.raises(CryptoError):
                channel.open(dealt[owner][1][number - 3])
    for other in {*dealt} - {*seeds}:
        with pytest.raises(CryptoError):
            list_channel(seeds[0], transcript, other, 4, False).open(dealt[other][1][1])


def test_every_round_has_secrets_and_masks_of_its_own():
    batch, masks, shares = Batch(5, 4, threshold=3), [], []
    for number in batch.rounds:
        round = batch.round(number)
        round.run({p: "Unmask" for p in (0, 3)} if number == 4 else None)
        round.check_sum()
        for message in round.sent:
            if isinstance(message, m.Unmask):
                shares += [answer.share for answer in message.answers]
    assert len(set(shares)) == len(shares)
    batch = Batch(5, 4)
    batch.round(3).run()
    for number in (4, 5, 6):
        round = batch.round(number)
        for p in round.cohort:
            round.parties[p].start()
            masks += [(number, key) for key in round.parties[p].state.masks.values()]
    keys = {key for _, key in masks}
    assert len(keys) == 3 * 5 * 4 // 2, "two parties have each mask, and no two rounds the same"


def test_keys_are_used_once_and_wiped():
    batch = Batch(5, 4)
    batch.round(3).run()
    round = batch.round(5)
    round.run()
    ring = batch.rings[0]
    assert not ring.has(3) and not ring.has(4) and not ring.has(5) and ring.has(6) and not ring.has(7)
    again = batch.round(5)
    with pytest.raises(CryptoError, match="the keys of round 5 are gone"):
        again.parties[0].start()
    for texts, size in (([ring._seeds], 16), (ring._pairs.values(), 16), (ring._held.values(), 34)):
        for text in texts:
            assert not any(text[: 3 * size]) and any(text[3 * size :])
    assert "secret" in repr(ring)
    assert not {"mask", "mask_private", "cipher"} & set(vars(ring)), "what agreed on them is gone"


# ---- what everybody must see alike ----

COMMON = (
    dict(session=b"t" * 16),
    dict(cohort=7, degree=6, threshold=5),
    dict(threshold=4),
    dict(active=True),
    dict(agreed=b"a"),
    dict(batch=(1, 9)),
    dict(batch=(2, 8)),
)
OF_A_ROUND = (dict(round=3), dict(dimension=5), dict(bits=21), dict(most_lost=0), dict(most_lost=1), dict(about=b"a"))


def test_all_that_rules_hold_is_in_the_batch_or_in_the_round():
    base = Rules(b"s" * 16, 2, 5, 3, 4, 4, 20, batch=(1, 8))
    fields = {name for change in (*COMMON, *OF_A_ROUND) for name in change} | {"purpose"}
    assert fields == {field.name for field in dataclasses.fields(Rules)}
    common = [base, *(dataclasses.replace(base, **change) for change in COMMON)]
    assert len({rules.instance for rules in common}) == len(common)
    assert len({rules.keys_text(1, b"c" * 32, b"m" * 32) for rules in common}) == len(common)
    own = [base, *(dataclasses.replace(base, **change) for change in OF_A_ROUND)]
    assert {rules.instance for rules in own} == {base.instance}
    places = [Transcript.of(rules, b"k" * 32).of_round(rules) for rules in (*common, *own[1:])]
    assert len({place.digest for place in places}) == len(places)
    alone = dataclasses.replace(base, batch=None)
    assert Transcript.of(alone, b"k" * 32).digest not in {place.digest for place in places} | {
        Transcript.of(base, b"k" * 32).digest
    }


@pytest.mark.parametrize("active", [False, True])
def test_parties_that_were_shown_different_models_do_not_unmask_each_other(active):
    batch = Batch(6, 3, threshold=4, identities=identities(6) if active else None)
    batch.round(3).run()
    round = batch.round(4)
    odd = batch.round(4, about=b"another model")
    for p in (0, 3):
        round.parties[p] = odd.parties[p]
    if active:
        with pytest.raises(ProtocolError, match="valid signatures on the survivors"):
            round.server._take_signature = lambda message: round.server._signatures.update(
                {message.party: message.signature}
            )
            round.run()
        return
    round.run()
    total, got = round.server.result()
    assert got == round.cohort and not np.array_equal(total, round.expected(got))


def test_a_later_round_begins_with_inputs_and_nothing_else():
    batch = Batch(5, 3)
    batch.round(3).run()
    round = batch.round(4)
    keys = SecAggParty(dataclasses.replace(round.rules, batch=None), 0, round.inputs[0]).start()
    with pytest.raises(ProtocolError, match="sent AdvertiseKeys, expected MaskedInput"):
        round.server.receive(keys)
    for p in round.cohort:
        round.parties[p].start()
    with pytest.raises(ProtocolError, match="got KeyList, but it sent its input"):
        round.parties[0].receive(m.KeyList(4, 0))


# ---- liars ----


def test_shares_of_the_wrong_kind_or_number_are_refused():
    def as_of_one_round(message):
        if isinstance(message, m.ShareBatch) and message.party == 6:
            return [m.ShareKeys(3, 6, tuple(m.Bundle(b.party, bytes(m.SEALED)) for b in message.bundles), bytes(32))]

    def one_less(message):
        if isinstance(message, m.ShareBatch) and message.party == 6:
            fewer = tuple(m.Bundle(b.party, b.sealed[34:]) for b in message.bundles)
            return [
                dataclasses.replace(
                    message, bundles=fewer, commitments=message.commitments[1:], lists=message.lists[1:]
                )
            ]

    for tamper, said in ((as_of_one_round, "keys of 1 rounds"), (one_less, "keys of 2 rounds")):
        round = Batch(5, 3, threshold=3).round(3).run(tamper=tamper)
        assert [f.party for f in round.server.faults] == [6] and said in round.server.faults[0].what
        round.check_sum([0, 3, 9, 12])


def test_in_a_round_of_its_own_a_batch_is_refused():
    message = next(x for x in Batch(5, 3).round(3).run().sent if isinstance(x, m.ShareBatch) and x.party == 6)
    round = Round(5, threshold=3).run(
        tamper=lambda x: [dataclasses.replace(message)] if isinstance(x, m.ShareKeys) and x.party == 6 else None
    )
    assert "keys of 3 rounds, expected 1" in round.server.faults[0].what
    round.check_sum([0, 3, 9, 12])


def test_wrong_shares_are_found_in_every_round():
    batch = Batch(7, 3, threshold=4)

    def tamper(message):
        if isinstance(message, m.Unmask) and message.party == 3:
            wrong = tuple(dataclasses.replace(a, share=bytes(16) + b"\1") for a in message.answers)
            return [dataclasses.replace(message, answers=wrong)]

    for number in batch.rounds:
        vanish = {12: "MaskedInput"} if number > 3 else {}
        round = batch.round(number).run(vanish, tamper)
        round.check_sum([p for p in round.cohort if p not in vanish])
        assert {holder for holder, _ in round.server.disputes} == {3}
        assert {fault.party for fault in round.server.faults} == {3}


def test_a_bundle_that_does_not_open_costs_one_of_the_two_in_each_round():
    batch = Batch(6, 3, threshold=4)

    def damage(message):
        if isinstance(message, m.ShareBatch) and message.party == 9:
            bad = [dataclasses.replace(b, sealed=bytes(len(b.sealed))) if b.party == 0 else b for b in message.bundles]
            return [dataclasses.replace(message, bundles=tuple(bad))]

    for number in batch.rounds:
        round = batch.round(number).run(tamper=damage)
        assert round.server.disputes == {(0, 9)}
        round.check_sum([p for p in round.cohort if p != (9 if number % 2 else 0)])


def test_a_list_that_does_not_open_fails_its_round_and_names_its_dealer():
    batch = Batch(6, 3, threshold=4)

    def damage(message):
        if isinstance(message, m.ShareBatch) and message.party == 9:
            return [
                dataclasses.replace(message, lists=(message.lists[0], bytes(len(message.lists[1])), message.lists[2]))
            ]

    batch.round(3).run(tamper=damage).check_sum()
    failed = batch.round(4).run({9: "MaskedInput"}).server
    assert failed.failed and {dealer for _, dealer in failed.disputes} == {9}
    batch.round(5).run({9: "MaskedInput"}).check_sum([0, 3, 6, 12, 15])


def test_a_dealer_that_lists_wrong_keys_spoils_only_what_it_vanishes_from(monkeypatch):
    """As far as it could have by its input: said in the protocol's README. A list cannot be held against anything but its seal."""
    batch, sealing = Batch(5, 4, threshold=3), keys_of_batches.list_channel

    class Wrong:
        def __init__(self, channel):
            self.seal = lambda text: channel.seal(bytes(len(text)))

    def channel(seed, transcript, owner, round, seals):
        made = sealing(seed, transcript, owner, round, seals)
        return Wrong(made) if owner == 6 and seals else made

    monkeypatch.setattr(keys_of_batches, "list_channel", channel)
    batch.round(3).run().check_sum()
    batch.round(4).run({0: "MaskedInput"}).check_sum([3, 6, 9, 12])
    spoilt = batch.round(5).run({6: "MaskedInput"})
    total, got = spoilt.server.result()
    assert got == (0, 3, 9, 12) and not np.array_equal(total, spoilt.expected(got))
    batch.round(6).run().check_sum()


@pytest.mark.parametrize("active", [False, True])
def test_who_can_open_too_few_bundles_withdraws_from_every_round(active):
    batch = Batch(6, 3, threshold=4, identities=identities(6) if active else None)

    def damage(message):
        if isinstance(message, m.ShareBatch) and message.party != 0:
            bad = [dataclasses.replace(b, sealed=bytes(len(b.sealed))) if b.party == 0 else b for b in message.bundles]
            return [dataclasses.replace(message, bundles=tuple(bad))]

    for number in batch.rounds:
        round = batch.round(number).run(tamper=damage)
        assert any(isinstance(x, m.Withdrawal) and x.party == 0 for x in round.sent)
        round.check_sum([p for p in round.cohort if p != 0])
