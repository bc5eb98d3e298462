"""The protocol: exact for every dropout pattern, silent about everything else, and loud about liars."""

import contextlib
import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secagg_driver import Round, identities

from fedmpi.aggregation.protocol import ProtocolRules
from fedmpi.cli import resolve
from fedmpi.crypto import shamir
from fedmpi.crypto.keys import Agreement, Channel
from fedmpi.errors import ConfigError, CryptoError, DataError, Fault, ProtocolError
from fedmpi.secagg import graph as graphs
from fedmpi.secagg import messages as m
from fedmpi.secagg import opening, pki
from fedmpi.secagg import party as states
from fedmpi.secagg.pairs import bundle_channel, mask_key
from fedmpi.secagg.party import SecAggParty
from fedmpi.secagg.rules import Rules, share_points
from fedmpi.secagg.transcript import Transcript, digest_of_keys
from fedmpi.wire.bits import unpack
from fedmpi.wire.phases import Cost, Phase, Purpose

PHASES = ["AdvertiseKeys", "ShareKeys", "MaskedInput", "Unmask"]
ACTIVE_PHASES = [*PHASES[:3], "ConsistencyCheck", "Unmask"]


# ---- the exactness law ----


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_sum_is_exactly_the_survivors_for_any_dropout(data):
    n = data.draw(st.integers(3, 40), "n")
    threshold = data.draw(st.integers(n // 2 + 1, n), "threshold")
    bits = data.draw(st.sampled_from([8, 13, 16, 21, 32, 33, 64]), "bits")
    active = data.draw(st.booleans(), "active") and n <= 12
    round = Round(
        n,
        threshold=threshold,
        bits=bits,
        seed=data.draw(st.integers(0, 99)),
        identities=identities(n) if active else None,
    )
    lost = data.draw(st.integers(0, n), "lost")
    order = data.draw(st.permutations(round.cohort))
    vanish = {p: data.draw(st.sampled_from(ACTIVE_PHASES if active else PHASES)) for p in order[:lost]}
    round.run(vanish)
    at = {phase: [p for p in vanish if vanish[p] == phase] for phase in ACTIVE_PHASES}
    in_sum = n - sum(len(at[phase]) for phase in PHASES[:3])
    if n - lost >= threshold:
        round.check_sum(sorted(p for p in round.cohort if vanish.get(p) not in PHASES[:3]))
    else:
        assert round.server.failed and f"threshold is {threshold}" in round.server.reason
        with pytest.raises(ProtocolError):
            round.server.result()
    assert round.server.done and (in_sum >= threshold or round.server.failed)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_regular_graph_is_as_exact(data):
    n = data.draw(st.integers(8, 40), "n")
    degree = data.draw(st.integers(2, (n - 2) // 2), "half degree") * 2
    threshold = data.draw(st.integers(degree // 2 + 1, max(degree // 2 + 1, int(0.8 * degree))), "threshold")
    round = Round(n, threshold=threshold, degree=degree if degree < n - 1 else None, seed=data.draw(st.integers(0, 99)))
    lost = data.draw(st.integers(0, n // 3), "lost")
    order = data.draw(st.permutations(round.cohort))
    vanish = {p: data.draw(st.sampled_from(PHASES)) for p in order[:lost]}
    round.run(vanish)
    if round.server.failed:
        assert lost and "threshold" in round.server.reason
    else:
        round.check_sum()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_dealer_and_server_agree_on_share_points_whoever_is_lost_in_between(data):
    n = data.draw(st.integers(6, 24), "n")
    degree = data.draw(st.sampled_from([None, *range(4, n - 1, 2)]), "degree")
    holders = n if degree is None else degree + 1
    round = Round(n, threshold=holders // 2 + 1, degree=degree, seed=data.draw(st.integers(0, 99)))
    order = data.draw(st.permutations(round.cohort))
    lost = order[: data.draw(st.integers(0, n // 2), "lost")]
    vanish = {p: data.draw(st.sampled_from(PHASES)) for p in lost}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shamir, "_by_products", None)  # points have no gaps: nobody multiplies
        round.run(vanish)
    shown = {x.party: [peer.party for peer in x.peers] for x in round.sent if isinstance(x, m.KeyList)}
    for owner, peers in shown.items():
        points = share_points(owner, peers)
        assert sorted(points) == sorted([owner, *peers]) and sorted(points.values()) == list(range(1, len(peers) + 2))
        assert points == share_points(owner, round.server._alive_neighbours(owner, round.server._keys))
    if not round.server.failed:
        assert not round.server.faults
        round.check_sum()


def test_share_points_follow_the_numbers_of_the_parties_and_not_the_order_of_a_list():
    assert share_points(30, [7, 90, 4]) == share_points(30, [90, 4, 7]) == {4: 1, 7: 2, 30: 3, 90: 4}


@pytest.mark.parametrize("degree", [None, 6])
def test_weights_are_computed_once_when_nobody_is_lost(degree, monkeypatch):
    seen, weights = [], opening.lagrange_weights
    monkeypatch.setattr(
        opening, "lagrange_weights", lambda points, field: (seen.append(points), weights(points, field))[1]
    )
    round = Round(12, threshold=5 if degree else 8, degree=degree).run()
    round.check_sum(round.cohort)
    assert seen == [tuple(range(1, round.rules.threshold + 1))]


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_a_round_that_loses_more_than_it_may_ends_before_anything_is_opened(phase, active):
    for lost in range(3):
        round = Round(8, threshold=5, most_lost=1, identities=identities(8) if active else None)
        round.run({p: phase for p in round.cohort[:lost]})
        assert round.server.failed == (lost > 1 and phase != "Unmask")  # whose input arrived is in the sum
        if round.server.failed:
            assert "2 of 8 parties are lost, with more than 1 the sum is not opened" in round.server.reason
            assert not any(isinstance(message, (m.SurvivorList, m.UnmaskRequest)) for message in round.sent)
        else:
            round.check_sum()


class Lax(Rules):
    """Of a server that does not keep to how many may be lost."""

    tolerated = 99


def vars_of(rules):
    return {field.name: getattr(rules, field.name) for field in dataclasses.fields(rules)}


@pytest.mark.parametrize("active", [False, True])
def test_a_party_does_not_open_a_sum_without_more_than_may_be_lost(active):
    round = Round(8, threshold=5, most_lost=1, identities=identities(8) if active else None)
    round.server.rules = Lax(**vars_of(round.rules))
    with pytest.raises(ProtocolError, match="without 2 parties, expected 1 or fewer"):
        round.run({p: "MaskedInput" for p in round.cohort[:2]})


def test_in_a_sparse_graph_a_party_sees_what_its_neighbours_lost():
    round = Round(20, threshold=4, degree=6, most_lost=1)
    round.server.rules = Lax(**vars_of(round.rules))
    lost = round.graph.neighbours(round.cohort[0])[:2]
    with pytest.raises(ProtocolError, match="without 2 parties, expected 1 or fewer"):
        round.run({p: "MaskedInput" for p in lost})


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("n", [3, 7])
def test_dropouts_down_to_the_threshold_and_below(phase, n):
    threshold = graphs.default_threshold(n)
    for lost in range(n):
        round = Round(n).run({p: phase for p in Round(n).cohort[:lost]})
        assert round.server.failed == (n - lost < threshold)
        if not round.server.failed:
            round.check_sum(round.cohort if phase == "Unmask" else round.cohort[lost:])


def test_the_order_of_arrival_does_not_matter():
    one, two = Round(6).run(), Round(6)
    queue = [party.start() for party in two.parties.values()]
    rng = np.random.default_rng(1)
    while not two.server.done:
        message = queue.pop(rng.integers(len(queue)))
        queue += two._answers(two.server.receive(message), {})
    assert np.array_equal(one.server.result()[0], two.server.result()[0])


def test_threads_change_nothing():
    rounds = [Round(6, dimension=100_000) for _ in range(2)]
    rounds[1].server._threads = 3
    for round in rounds:
        round.run({round.cohort[2]: "MaskedInput"})
        round.check_sum()


# ---- the rules ----


@pytest.mark.parametrize("threshold, n", [(2, 4), (3, 6), (0, 3), (7, 6), (1, 3)])
def test_a_threshold_of_half_or_less_is_refused_by_the_rules_themselves(threshold, n):
    with pytest.raises(ConfigError, match=f"threshold = {threshold}"):
        Rules(b"s" * 16, 1, n, threshold, n - 1, 4, 20)


@pytest.mark.parametrize(
    "bits, lane", [(8, "u1"), (9, "u2"), (16, "u2"), (21, "u4"), (32, "u4"), (33, "u8"), (64, "u8")]
)
def test_masks_use_the_narrowest_lane(bits, lane):
    assert Rules(b"s" * 16, 1, 3, 2, 2, 4, bits).lane == np.dtype(lane)


KEYS = b"k" * 32
CHANGES = (
    dict(session=b"t" * 16),
    dict(round=2),
    dict(cohort=7, degree=6, threshold=5),
    dict(threshold=4),
    dict(dimension=5),
    dict(bits=21),
    dict(active=True),
    dict(most_lost=0),
    dict(most_lost=1),
    dict(purpose=Purpose.TEST),
    dict(agreed=b"a"),
    dict(about=b"a"),
)


def test_contexts_of_other_instances_and_parties_differ():
    base = Rules(b"s" * 16, 1, 5, 3, 4, 4, 20)
    others = [dataclasses.replace(base, **change) for change in CHANGES]
    every = [base, *others, dataclasses.replace(base, batch=(1, 3)), dataclasses.replace(base, batch=(0, 3))]
    assert len({rules.instance for rules in every}) == len(every)
    assert len({rules.keys_text(1, b"c" * 32, b"m" * 32) for rules in every}) == len(every)
    places = [Transcript.of(rules, KEYS) for rules in every] + [Transcript.of(base, b"l" * 32)]
    contexts = {place.context(*parties) for place in places for parties in ((1, 2), (2, 1), (1,), (1, 2, 3))}
    assert len(contexts) == 4 * len(places)
    assert len({place.survivors_text((1, 2)) for place in places}) == len(places)


def test_everything_that_rules_hold_is_in_the_name_of_the_instance():
    """A field that is added and forgotten there would be one that two parties could be told differently."""
    base = Rules(b"s" * 16, 1, 5, 3, 4, 4, 20)
    changed = {name for change in CHANGES for name in change} | {"batch"}
    assert changed == {field.name for field in dataclasses.fields(Rules)}
    assert vars_of(base).keys() == changed


def test_the_digest_of_keys_is_of_parties_and_of_both_keys_in_party_order():
    keys = {p: m.PeerKeys(p, bytes([p]) * 32, bytes([p + 1]) * 32) for p in (3, 1, 2)}
    base = digest_of_keys(keys)
    assert base == digest_of_keys(dict(sorted(keys.items())))
    others = [
        {**keys, 3: m.PeerKeys(3, keys[3].mask_key, keys[3].cipher_key)},
        {p: keys[p] for p in (1, 2)},
        {1: keys[1], 2: keys[2], 4: keys[3]},
        {1: keys[2], 2: keys[1], 3: keys[3]},
    ]
    assert len({base, *map(digest_of_keys, others)}) == 5


def test_contexts_of_pairs_are_contexts():
    place = Transcript.of(Rules(b"s" * 16, 1, 5, 3, 4, 4, 20), KEYS)
    expected = {peer: (place.context(7, peer), place.context(peer, 7)) for peer in (1, 9, 300)}
    assert place.pair_contexts(7, (1, 9, 300)) == expected


def test_both_ends_of_a_pair_derive_the_same_and_no_other_pair_round_or_session_does():
    base = Rules(b"s" * 16, 1, 5, 3, 4, 4, 20)
    low, high = Agreement(b"l" * 32), Agreement(b"h" * 32)
    places = [(base, 1, 2), (base, 1, 3), (base, 2, 3), (dataclasses.replace(base, round=2), 1, 2)]
    places.append((dataclasses.replace(base, session=b"t" * 16), 1, 2))
    places.append((dataclasses.replace(base, purpose=Purpose.TEST), 1, 2))
    places.append((dataclasses.replace(base, about=b"another model"), 1, 2))
    sealed, keys = [], set()
    for rules, a, b in places:
        place = Transcript.of(rules, KEYS)
        up, down = place.pair_contexts(a, [b])[b], place.pair_contexts(b, [a])[a]
        keys |= {mask_key(low, high.public, True, up), mask_key(high, low.public, False, down)}
        ends = bundle_channel(low, high.public, True, up), bundle_channel(high, low.public, False, down)
        sealed += [ends[0].seal(b"text"), ends[1].seal(b"text")]
        assert ends[1].open(sealed[-2]) == ends[0].open(sealed[-1]) == b"text"
        for other in sealed[:-2]:
            for end in ends:
                with pytest.raises(CryptoError):
                    end.open(other)
    assert len(keys) == len(places) and len(set(sealed)) == 2 * len(places)


# ---- a party takes nobody's word ----


def at_phase(phase, n=5, ids=None):
    """A party that has done everything up to `phase`, and the message that comes next."""
    round = Round(n, identities=ids)
    held = {}
    target = round.cohort[1]
    original = round.parties[target].receive

    def watch(message):
        if type(message) is phase:
            held["message"] = message
            held["party"] = copy.copy(round.parties[target])
            held["party"].receive = SecAggParty.receive.__get__(held["party"])
        return original(message)

    round.parties[target].receive = watch
    round.run()
    return held["party"], held["message"], round


def snapshot(party):
    """Everything that it knows; a state is compared field by field, and its dicts by what is in them."""
    known = {**vars(party), **vars(party.state)}
    return {k: copy.copy(v) if isinstance(v, dict) else v for k, v in known.items() if k != "receive"}


def refused(party, message, said):
    before = snapshot(party)
    with pytest.raises(ProtocolError, match=said):
        party.receive(message)
    after = snapshot(party)
    for name, value in before.items():
        assert after[name] is value or after[name] == value, f"{name} changed"


def replace(message, **changes):
    return dataclasses.replace(message, **changes)


def test_wrong_key_lists_are_refused_and_change_nothing():
    party, good, _ = at_phase(m.KeyList)
    peers = good.peers
    me = m.PeerKeys(party.party, b"a" * 32, b"b" * 32)
    low_order = dataclasses.replace(peers[0], cipher_key=bytes(32))
    cases = {
        "names a party twice": replace(good, peers=(*peers[:-1], peers[0])),
        "or itself": replace(good, peers=(*peers[:-1], me)),
        "was shown 2 peers, expected 3 to 4": replace(good, peers=peers[:2]),
        "was shown 5 peers": replace(good, peers=(*peers, m.PeerKeys(99, b"x" * 32, b"y" * 32))),
        "same key twice": replace(
            good, peers=(*peers[:-1], dataclasses.replace(peers[-1], mask_key=peers[0].mask_key))
        ),
        f"cannot agree with the key of party {peers[0].party}": replace(good, peers=(low_order, *peers[1:])),
        "of round 9": replace(good, round=9),
        "of the test of round 3": replace(good, purpose=Purpose.TEST),
        "for party 99": replace(good, party=99),
    }
    for said, message in cases.items():
        refused(party, message, said)
    assert isinstance(party.receive(good), m.ShareKeys)


def test_a_peer_whose_mask_key_is_of_low_order_gets_no_input():
    """Only the server looks at a mask key before it is used; one that lets it pass finds the party refusing."""
    party, good, _ = at_phase(m.KeyList)
    party.receive(replace(good, peers=(dataclasses.replace(good.peers[0], mask_key=bytes(32)), *good.peers[1:])))
    # the bundles are of parties that were shown the same list, as far as it can be seen here
    dealing = party.state.dealing
    contexts = dealing.transcript.pair_contexts(party.party, dealing.peers)
    sealed = {
        p: Channel(c._key, p < party.party, contexts[p][1], contexts[p][0]).seal(bytes(m.SEED_SHARE + m.KEY_SHARE))
        for p, c in dealing.channels.items()
    }
    bundles = tuple(m.Bundle(p, text) for p, text in sealed.items())
    refused(party, m.ShareList(3, party.party, bundles), f"cannot agree with the key of party {good.peers[0].party}")


def test_wrong_share_lists_are_refused():
    party, good, _ = at_phase(m.ShareList)
    refused(party, replace(good, bundles=(*good.bundles, good.bundles[0])), "two of one party")
    refused(party, replace(good, bundles=(*good.bundles, m.Bundle(99, bytes(m.SEALED)))), "stranger")
    refused(party, replace(good, bundles=good.bundles[:2]), "was shown 2 bundles, expected 3 or more")
    assert isinstance(party.receive(good), m.MaskedInput)


def test_a_party_never_opens_below_its_threshold_nor_for_a_list_without_itself():
    party, good, round = at_phase(m.UnmaskRequest)
    refused(party, replace(good, survivors=good.survivors[:3]), "was shown 3 survivors, expected 4 or more")
    refused(party, replace(good, survivors=tuple(p for p in good.survivors if p != party.party)), "not itself")
    refused(party, replace(good, survivors=(*good.survivors, 99)), "a party that it did not mask with")
    refused(party, replace(good, survivors=good.survivors[::-1]), "out of order")
    answer = party.receive(good)
    assert all(isinstance(a, m.SelfMaskShare) for a in answer.answers)
    refused(party, good, "opened its shares")  # never twice


def test_an_answer_holds_one_secret_of_each_peer_and_erases_the_rest():
    party, good, round = at_phase(m.UnmaskRequest)
    dropped = good.survivors[0] if good.survivors[0] != party.party else good.survivors[1]
    answer = party.receive(replace(good, survivors=tuple(p for p in good.survivors if p != dropped)))
    kinds = {a.owner: type(a) for a in answer.answers}
    assert kinds.pop(dropped) is m.PairKeyShare and set(kinds.values()) == {m.SelfMaskShare}
    assert type(party.state) is states.Done and not vars(party.state)


def test_only_legal_moves_move_a_party():
    every = [m.KeyList, m.ShareList, m.SurvivorList, m.UnmaskRequest]
    for phase in (m.KeyList, m.ShareList, m.UnmaskRequest):
        party, good, _ = at_phase(phase)
        for kind in every:
            if kind is not phase:
                refused(party, kind(good.round, good.party), f"got {kind.__name__}, but it")
    fresh = Round(4).parties[0]
    refused(fresh, m.KeyList(3, 0), "has not started")
    fresh.start()
    with pytest.raises(ProtocolError, match="start twice"):
        fresh.start()
    assert type(fresh.state) is states.Advertised


def test_secrets_do_not_show():
    round = Round(4).run()
    ids = identities(3)
    assert "secret" in repr(ids[0]) and ids[0]._private.hex() not in repr(ids[0])
    for message in round.sent:
        for p, values in round.inputs.items():
            if isinstance(message, m.MaskedInput) and message.party == p:
                assert not np.array_equal(unpack(message.values, 8, 20), values)


# ---- liars ----


def lie_once(kind, liar, change):
    """A tamper function: the liar's message of this kind is replaced."""

    def tamper(message):
        return [change(message)] if isinstance(message, kind) and message.party == liar else None

    return tamper


LIAR = 6
BEFORE_ITS_INPUT = {
    "key of low order": (m.AdvertiseKeys, lambda x: replace(x, mask_key=bytes(32))),
    "the same key twice": (m.AdvertiseKeys, lambda x: replace(x, mask_key=x.cipher_key)),
    "share for party 99": (
        m.ShareKeys,
        lambda x: replace(x, bundles=(*x.bundles[:-1], m.Bundle(99, x.bundles[-1].sealed))),
    ),
    "sent 5 shares, expected 6": (m.ShareKeys, lambda x: replace(x, bundles=x.bundles[:-1])),
    "sent 19 bytes, expected 20": (m.MaskedInput, lambda x: replace(x, values=x.values[:-1])),
    "of round 2 in round 3": (m.MaskedInput, lambda x: replace(x, round=2)),
    "of the test of round 3 in round 3": (m.MaskedInput, lambda x: replace(x, purpose=Purpose.TEST)),
}


@pytest.mark.parametrize("said", BEFORE_ITS_INPUT)
def test_a_liar_is_named_and_treated_as_dropped(said):
    kind, change = BEFORE_ITS_INPUT[said]
    round = Round(7).run(tamper=lie_once(kind, LIAR, change))
    assert any(fault.party == LIAR and said in fault.what for fault in round.server.faults)
    round.check_sum([p for p in round.cohort if p != LIAR])


def test_bits_beyond_the_end_of_an_input_are_a_lie():
    change = lie_once(m.MaskedInput, LIAR, lambda x: replace(x, values=x.values[:-1] + bytes([x.values[-1] | 0x80])))
    round = Round(7, dimension=7).run(tamper=change)
    assert any("bits set beyond its end" in fault.what for fault in round.server.faults)
    round.check_sum([p for p in round.cohort if p != LIAR])


def test_a_second_different_input_takes_the_first_one_out():
    def tamper(message):
        if isinstance(message, m.MaskedInput) and message.party == LIAR:
            return [message, replace(message, values=bytes(len(message.values)))]

    round = Round(7).run(tamper=tamper)
    assert Fault(LIAR, "MaskedInput", "sent a second, different input") in round.server.faults
    round.check_sum([p for p in round.cohort if p != LIAR])


def test_an_impostor_of_another_partys_keys_is_refused():
    stolen = {}

    def tamper(message):
        if isinstance(message, m.AdvertiseKeys):
            if message.party == 0:
                stolen["key"] = message.cipher_key
            if message.party == LIAR:
                return [replace(message, cipher_key=stolen["key"])]

    round = Round(7).run(tamper=tamper)
    assert any("a key of another party" in fault.what for fault in round.server.faults)
    round.check_sum([p for p in round.cohort if p != LIAR])


@pytest.mark.parametrize("how", ["replayed", "truncated", "altered"])
def test_a_bundle_that_does_not_open_is_named_and_the_round_goes_on(how):
    earlier = Round(7, round=2).run()
    old = next(x for x in earlier.sent if isinstance(x, m.ShareKeys) and x.party == LIAR)

    def change(message):
        bad = old.bundles[0].sealed if how == "replayed" else message.bundles[0].sealed
        bad = bad[:-1] + b"\0" if how == "truncated" else bytes([bad[0] ^ 1]) + bad[1:] if how == "altered" else bad
        return replace(message, bundles=(m.Bundle(message.bundles[0].party, bad), *message.bundles[1:]))

    round = Round(7).run(tamper=lie_once(m.ShareKeys, LIAR, change))
    assert list(map(str, round.server.faults)) == [
        f"party {LIAR}, ShareKeys: dealt bundles that 1 of its peers could not open"
    ]
    round.check_sum([p for p in round.cohort if p != LIAR])


def test_wrong_shares_are_decoded_and_their_holders_named():
    liars = (3, 9)

    def tamper(message):
        if isinstance(message, m.Unmask) and message.party in liars:
            wrong = [
                dataclasses.replace(a, share=bytes(m.SEED_SHARE - 1) + bytes([message.party])) for a in message.answers
            ]
            return [replace(message, answers=tuple(wrong))]

    round = Round(9, threshold=5).run(tamper=tamper)
    for liar in liars:
        assert Fault(liar, "Unmask", f"sent a wrong share of party {LIAR}", certain=False) in round.server.faults
    assert {fault.party for fault in round.server.faults} == set(liars)
    round.check_sum(round.cohort)


def test_without_surplus_shares_a_wrong_one_fails_the_round_and_accuses_nobody():
    def tamper(message):
        if isinstance(message, m.Unmask) and message.party == 3:
            wrong = [dataclasses.replace(a, share=bytes(m.SEED_SHARE)) for a in message.answers]
            return [replace(message, answers=tuple(wrong))]

    round = Round(4, threshold=4).run(tamper=tamper)
    assert round.server.failed and "too few to tell who lied" in round.server.reason
    assert not round.server.faults


def test_opening_the_wrong_secret_is_refused():
    def change(message):
        first = message.answers[0]
        return replace(message, answers=(m.PairKeyShare(first.owner, bytes(m.KEY_SHARE)), *message.answers[1:]))

    round = Round(7).run(tamper=lie_once(m.Unmask, LIAR, change))
    assert any("opened the wrong secret" in fault.what for fault in round.server.faults)
    round.check_sum(round.cohort)  # its input is in; only its shares are not used


def test_a_dealer_that_committed_to_another_secret_is_named():
    round = Round(7).run(tamper=lie_once(m.ShareKeys, LIAR, lambda x: replace(x, commitment=bytes(32))))
    assert round.server.failed and f"the shares of party {LIAR} do not fit its commitment" in round.server.reason
    assert [(fault.party, fault.certain) for fault in round.server.faults] == [(LIAR, False)]
    assert round.server.disputes == {(p, LIAR) for p in round.cohort if p != LIAR}


def test_more_wrong_shares_than_can_be_told_apart_fail_the_round_and_accuse_nobody():
    def tamper(message):
        if isinstance(message, m.Unmask) and message.party in (3, 6, 9, 12, 15):
            wrong = [
                dataclasses.replace(a, share=bytes(m.SEED_SHARE - 1) + bytes([message.party])) for a in message.answers
            ]
            return [replace(message, answers=tuple(wrong))]

    round = Round(9, threshold=5).run(tamper=tamper)
    assert round.server.failed and "too few to tell who lied" in round.server.reason and not round.server.faults


def test_shares_of_a_number_that_is_no_secret_open_nothing():
    for field in (shamir.KEYS, shamir.SEEDS):
        # shares of a constant polynomial
        constant = {holder: (holder + 1, 2 ** (8 * field.secret_bytes)) for holder in range(3)}
        with pytest.raises(CryptoError, match="do not fit its commitment"):
            opening.Opening(2).open(opening.Dealt(0, constant, lambda secret: True, field))


WRONG_ANSWERS = {
    "answered for 6 peers, expected 7": lambda x: replace(x, answers=x.answers[1:]),
    "that is no share": lambda x: replace(x, answers=(m.SelfMaskShare(0, b"\xff" * m.SEED_SHARE), *x.answers[1:])),
}


@pytest.mark.parametrize("said", WRONG_ANSWERS)
def test_answers_that_cannot_be_used_are_refused_and_done_without(said):
    round = Round(7).run(tamper=lie_once(m.Unmask, LIAR, WRONG_ANSWERS[said]))
    assert any(fault.party == LIAR and said in fault.what for fault in round.server.faults)
    round.check_sum(round.cohort)


def test_a_round_in_which_nobody_is_left_fails_with_the_reason():
    round = Round(4).run(dict.fromkeys(Round(4).cohort, "MaskedInput"))
    assert round.server.reason == "round 3, MaskedInput: no party sent its input, the threshold is 3"
    assert round.server.drop(0) == [] and round.server.phase_name == "FAILED"


def test_whoever_is_late_is_lost():
    round = Round(5)
    queue = [round.parties[p].start() for p in round.cohort[:4]]
    assert not any(round.server.receive(message) for message in queue)
    assert round.server.waiting() == (12,)
    shown = round.server.expire()
    assert [party for party, _ in shown] == [0, 3, 6, 9] and round.server.phase_name == "ShareKeys"


# ---- the server refuses without a trace ----


def test_the_server_changes_nothing_on_a_refused_message():
    round = Round(5)
    first = [party.start() for party in round.parties.values()]
    round.server.receive(first[0])
    before = copy.deepcopy({k: v for k, v in vars(round.server).items() if k not in ("_meter", "_opening")})
    for wrong in (
        first[0],
        replace(first[1], party=77),
        replace(first[1], round=9),
        m.MaskedInput(3, 3, b""),
        m.Unmask(3, 3),
        m.ShareKeys(3, 3),
        replace(first[1], mask_key=first[1].cipher_key),
    ):
        with pytest.raises(ProtocolError):
            round.server.receive(wrong)
    after = {k: v for k, v in vars(round.server).items() if k not in ("_meter", "_opening")}
    assert all(before[k] == after[k] for k in before)


# ---- an active server ----


def test_an_active_round_is_exact_too():
    round = Round(6, identities=identities(6)).run({3: "MaskedInput", 6: "ConsistencyCheck"})
    round.check_sum([p for p in round.cohort if p != 3])


@pytest.mark.parametrize(
    "kind, change, said",
    [
        (m.AdvertiseKeys, dict(signature=b""), "keys without a signature"),
        (m.AdvertiseKeys, dict(signature=bytes(64)), "keys that its identity did not sign"),
        (m.ConsistencyCheck, dict(signature=bytes(64)), "a signature that does not fit the survivors"),
    ],
)
def test_signatures_that_are_missing_or_wrong_are_refused(kind, change, said):
    round = Round(7, identities=identities(7)).run(tamper=lie_once(kind, LIAR, lambda x: replace(x, **change)))
    assert any(fault.party == LIAR and said in fault.what for fault in round.server.faults)
    round.check_sum()


def test_where_nobody_signs_a_signature_is_refused():
    signed = lie_once(m.AdvertiseKeys, LIAR, lambda x: replace(x, signature=bytes(64)))
    assert Fault(LIAR, "AdvertiseKeys", "sent a signature") in Round(7).run(tamper=signed).server.faults


def test_keys_that_the_server_made_up_are_caught():
    party, good, _ = at_phase(m.KeyList, ids=identities(5))
    forged = dataclasses.replace(good.peers[0], mask_key=b"\x09" + bytes(31))
    refused(party, replace(good, peers=(forged, *good.peers[1:])), "that it did not sign")
    swapped = dataclasses.replace(good.peers[0], signature=good.peers[1].signature)
    refused(party, replace(good, peers=(swapped, *good.peers[1:])), "that it did not sign")


def test_keys_of_an_earlier_round_do_not_verify():
    ids = identities(5)
    old = Round(5, identities=ids, round=2)
    stale = old.parties[0].start()
    party, good, _ = at_phase(m.KeyList, ids=ids)
    peer = m.PeerKeys(0, stale.cipher_key, stale.mask_key, stale.signature)
    refused(party, replace(good, peers=(peer, *good.peers[1:])), "that it did not sign")


def test_a_server_that_shows_two_survivor_lists_opens_nothing():
    """The server tells half the parties that party 0 dropped, and the other half that it did not: with shares of both secrets of
    party 0 it could read its input. The signatures do not add up, and nobody opens anything."""
    ids = identities(6)
    round = Round(6, identities=ids)
    queue = [party.start() for party in round.parties.values()]
    while round.server.phase_name != "ConsistencyCheck":
        message = queue.pop(0)
        answers = round.server.receive(message)
        if round.server.phase_name == "ConsistencyCheck":
            break
        queue += round._answers(answers, {})
    with_zero, without_zero = round.cohort, round.cohort[1:]
    shown = {p: with_zero if p in (0, 3, 6) else without_zero for p in round.cohort}
    signatures = {p: round.parties[p].receive(m.SurvivorList(3, p, shown[p])).signature for p in round.cohort}
    for p in round.cohort:
        proof = tuple(m.Signed(q, signature) for q, signature in signatures.items())
        with pytest.raises(ProtocolError, match="valid signatures on the survivors"):
            round.parties[p].receive(m.UnmaskRequest(3, p, shown[p], proof))
        if p:
            other = with_zero if shown[p] == without_zero else without_zero
            with pytest.raises(ProtocolError, match="other survivors than it signed"):
                round.parties[p].receive(m.UnmaskRequest(3, p, other, proof))
    assert all(type(party.state) is states.Signed for party in round.parties.values())


@pytest.mark.parametrize("active", [False, True])
def test_the_test_of_a_round_is_a_round_of_its_own(active):
    ids = identities(6) if active else None
    round = Round(6, identities=ids, purpose=Purpose.TEST).run({3: "MaskedInput"})
    round.check_sum([p for p in round.cohort if p != 3])
    assert {message.purpose for message in round.sent} == {Purpose.TEST} and {x.round for x in round.sent} == {3}


def test_keys_of_the_test_of_a_round_do_not_verify_in_it():
    ids = identities(5)
    other = Round(5, identities=ids, purpose=Purpose.TEST).parties[0].start()
    party, good, _ = at_phase(m.KeyList, ids=ids)
    peer = m.PeerKeys(0, other.cipher_key, other.mask_key, other.signature)
    refused(party, replace(good, peers=(peer, *good.peers[1:])), "that it did not sign")


def test_without_an_identity_there_is_no_active_round():
    rules = Rules(b"s" * 16, 1, 4, 3, 3, 4, 20, active=True)
    with pytest.raises(ProtocolError, match="identity key"):
        SecAggParty(rules, 0, np.zeros(4, np.uint64))


def test_identities_are_made_from_the_command_line_and_never_overwritten(tmp_path, monkeypatch, capsys):
    def command(parties):
        monkeypatch.setattr("sys.argv", ["pki", str(tmp_path / "ids"), "--parties", parties])
        pki.main()

    command("2")
    public = pki.read_public(tmp_path / "ids", 2)
    assert pki.read_identity(tmp_path / "ids", 1, public).public == public
    for parties, said in (("2", "exists already"), ("0", "must be 1 or more")):
        with pytest.raises(SystemExit) as ended:
            command(parties)
        assert ended.value.code == 2 and said in capsys.readouterr().err
    (tmp_path / "ids.keys" / "party-00001.key").unlink()
    with pytest.raises(DataError, match="party-00001.key cannot be read"):
        pki.read_identity(tmp_path / "ids", 1, public)


# ---- what a masked input shows ----


def test_a_masked_input_looks_uniform():
    """Mean, serial correlation and byte histogram of an input that is all zeros, within five deviations."""
    round = Round(5, bits=32, dimension=200_000)
    round.inputs = {p: np.zeros(200_000, np.uint64) for p in round.cohort}
    for p, party in round.parties.items():
        party.state = states.New(round.inputs[p])
    round.run()
    for message in (x for x in round.sent if isinstance(x, m.MaskedInput)):
        values = unpack(message.values, 200_000, 32) / 2.0**32
        n = len(values)
        assert abs(values.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
        centred = values - values.mean()
        assert abs((centred[1:] * centred[:-1]).mean() / centred.var()) < 5 / n**0.5
        counts = np.bincount(np.frombuffer(message.values, np.uint8), minlength=256)
        chi = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert abs(chi - 255) < 5 * (2 * 255) ** 0.5
    round.check_sum(round.cohort)


def test_a_meter_is_told_the_phase_that_work_is_done_for():
    measured = set()

    def meter(phase, cost):
        measured.add((phase, cost))
        return contextlib.nullcontext()

    round = Round(4)
    for machine in (round.server, *round.parties.values()):
        machine._meter = meter
    round.run({round.cohort[0]: "MaskedInput"})
    of_party = {
        Phase.ADVERTISE_KEYS: {Cost.DH},
        Phase.SHARE_KEYS: {Cost.SHAMIR_SPLIT, Cost.DH, Cost.AEAD},
        Phase.MASKED_INPUT: {Cost.AEAD, Cost.DH, Cost.PRG, Cost.ENCODE},
    }
    of_server = {Phase.UNMASK: {Cost.SHAMIR_COMBINE, Cost.DH, Cost.AGGREGATE, Cost.PRG}}
    assert measured == {(phase, cost) for phase, costs in (of_party | of_server).items() for cost in costs}


def test_fresh_keys_every_round():
    first, second = (Round(4, round=r) for r in (1, 2))
    keys = [m_.mask_key for r in (first, second) for m_ in (p.start() for p in r.parties.values())]
    assert len(set(keys)) == 8


# ---- what a lying server is left with ----


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--pki x --parties 20", (14, 20)),
        ("--pki x --parties 20 --colluding 3", (11, 20)),
        ("--pki x --parties 20 --threshold 11", (11, 20)),
        ("--parties 20", (0, 0)),
        ("--pki x --parties 20 --aggregation hybrid --clear-parties 1", (0, 0)),
        ("--pki x --parties 20 --sampling 0.5 --min-cohort 3", (2, 3)),
        ("--pki x --parties 20 --sampling 0.5 --min-cohort 4", (4, 6)),
    ],
)
def test_the_sum_with_the_least_noise_is_known_before_a_run(flags, expected):
    config = resolve([*"--graph complete --aggregation secure".split(), *flags.split()])
    noises, cohort = ProtocolRules(config).least_noise()
    assert (noises, cohort) == expected
