"""A hundred thousand damaged messages into both state machines: no crash, no change on refusal, nothing altered accepted."""

import copy
import dataclasses
import random

import numpy as np
import pytest
from secagg_driver import Round, identities

from benchmarks.mutated_frames import mutate
from fedmpi.errors import ProtocolError, WireError
from fedmpi.secagg import messages as m
from fedmpi.wire.messages import decode, encode

pytestmark = pytest.mark.slow

PER_STEP = 7_000  # times 7 kinds of message passive, 9 active: 112,000


def state(machine):
    """Everything that a machine knows; agreements and identities are compared by identity, they are never changed."""
    return {k: copy.copy(v) if isinstance(v, (dict, set, list)) else v for k, v in vars(machine).items()}


def same(before, after):
    return all(
        after[k] is v or (isinstance(v, (dict, set, list, bytes, str, tuple)) and after[k] == v)
        for k, v in before.items()
    )


def clone(machine):
    twin = copy.copy(machine)
    twin.__dict__ = state(machine)
    return twin


def steps(active):
    """(machine before the message, the message) for one message of every kind of a whole round."""
    round = Round(5, identities=identities(5) if active else None)
    seen = {}
    parties, server = round.parties, round.server

    def note(machine, message):
        seen.setdefault(type(message), (clone(machine), message))

    queue = [party.start() for party in parties.values()]
    while not server.done:
        message = queue.pop(0)
        note(server, message)
        for p, answer in server.receive(message):
            note(parties[p], answer)
            queue.append(parties[p].receive(answer))
    round.check_sum(round.cohort)
    return list(seen.values())


@pytest.mark.parametrize("active", [False, True])
def test_damaged_messages_are_refused_without_a_trace_or_are_harmless(active):
    rng = random.Random(active)
    count = accepted = 0
    for machine, message in steps(active):
        frame = bytes(encode(message))
        before = state(machine)
        for _ in range(PER_STEP):
            count += 1
            damaged = mutate(rng, frame)
            try:
                decoded = decode(damaged)
            except WireError:
                continue
            trial = clone(machine)
            try:
                trial.receive(decoded)
            except ProtocolError:
                assert same(before, trial.__dict__), f"{type(message).__name__} was refused but left a trace"
                continue
            accepted += 1
            check_harmless(active, message, decoded, trial)
    assert count >= 7 * PER_STEP
    assert accepted, "some changes, as in a masked value, cannot be seen: the test must reach them"


def check_harmless(active, message, decoded, machine):
    """What may pass: what nobody can tell from an honest message. A signed message and a sealed bundle never do."""
    if decoded == message:
        return
    if active:
        assert not isinstance(message, (m.AdvertiseKeys, m.KeyList, m.ConsistencyCheck)), "a signed message was altered"
    if isinstance(message, m.ShareList):
        originals = {bundle.party: bundle.sealed for bundle in message.bundles}
        for bundle in decoded.bundles:
            altered = originals.get(bundle.party) != bundle.sealed
            held = getattr(machine.state, "held", {})  # none where so many do not open that it withdraws
            assert not altered or bundle.party not in held, "an altered bundle was opened"
    if isinstance(message, m.UnmaskRequest):
        assert set(decoded.survivors) <= set(message.survivors) and len(decoded.survivors) >= machine.rules.threshold
        if active:
            assert decoded.survivors == message.survivors


def test_a_flipped_bit_in_any_place_of_a_bundle_is_seen():
    round = Round(4)
    queue = [party.start() for party in round.parties.values()]
    while not any(isinstance(x, m.ShareKeys) for x in queue):
        queue += round._answers(round.server.receive(queue.pop(0)), {})
    lists = []
    while queue:
        lists += round.server.receive(queue.pop(0))
    party, message = lists[0]
    machine = round.parties[party]
    for bit in range(8 * m.SEALED):
        sealed = bytearray(message.bundles[0].sealed)
        sealed[bit // 8] ^= 1 << bit % 8
        trial = clone(machine)
        bundle = dataclasses.replace(message.bundles[0], sealed=bytes(sealed))
        trial.receive(dataclasses.replace(message, bundles=(bundle, *message.bundles[1:])))
        assert bundle.party not in trial.state.held
    assert np.array_equal(machine.state.values, round.inputs[party])
