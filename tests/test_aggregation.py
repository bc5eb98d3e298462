"""Sessions driven by plain calls: what a server's end refuses, and that a refused message changes nothing."""

import numpy as np
import pytest

from fedmpi.aggregation.plain import PlainParty, PlainServer
from fedmpi.aggregation.union import UnionParty, UnionServer
from fedmpi.errors import ProtocolError
from fedmpi.privacy.encoding import Encoding
from fedmpi.wire.bits import pack
from fedmpi.wire.messages import EvalReport, PlainInput, SupportProposal, SupportUnion
from fedmpi.wire.phases import Purpose
from fedmpi.wire.support import encode_support

ENCODING = Encoding(1.0, 16, 8, 3)
VALUES = np.array([1, 2, 255], np.uint64)  # 1, 2, -1


def update(party=0, round=1, support=b"", values=None, **more):
    return PlainInput(round, party, support, pack(VALUES, 8) if values is None else values, **more)


REFUSED = {
    "sent EvalReport, expected PlainInput": EvalReport(1, 0, (0,), np.ones((1, 2))),
    "sent an update of round 2 in round 1": update(round=2),
    "sent an update of round 1 in round 1": update(purpose=Purpose.TEST),
    "is not in this round's cohort": update(party=7),
    "sent a support, none was asked for": update(support=encode_support(np.arange(3), 5)),
    "sent 2 bytes of values, expected 3": update(values=b"12"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_an_update_that_cannot_be_is_refused_and_changes_nothing(said):
    server = PlainServer(1, (0, 1), ENCODING, 3)
    with pytest.raises(ProtocolError, match=said):
        server.receive(REFUSED[said])
    assert server.waiting() == (0, 1) and not server.result().total.any()
    server.receive(update())
    with pytest.raises(ProtocolError, match="sent a second update"):
        server.receive(update())
    server.receive(update(1))
    assert server.done and server.result().total.tolist() == [2, 4, -2] and server.result().survivors == (0, 1)


@pytest.mark.parametrize(
    "support, said",
    [
        (b"", "sent no support"),
        (encode_support(np.array([0, 4]), 5), "sent a support of 2 coordinates, expected 3"),
        (b"\xff" * 40, "support"),
    ],
)
def test_a_support_of_its_own_is_checked(support, said):
    server = PlainServer(1, (0,), ENCODING, 5, own_support=True)
    with pytest.raises(ProtocolError, match=said):
        server.receive(update(support=support))
    server.receive(update(support=encode_support(np.array([0, 2, 4]), 5)))
    assert server.result().total.tolist() == [1, 0, 2, 0, -1]


def test_with_more_lost_than_may_be_there_is_no_sum():
    server = PlainServer(1, (0, 1, 2), ENCODING, 3, most_lost=1)
    server.receive(update())
    server.expire()
    assert server.failed and "2 of 3 parties are lost, with more than 1" in server.reason


def test_a_party_in_the_clear_has_one_thing_to_say():
    party = PlainParty(1, 0, ENCODING, 3, VALUES)
    assert [message.party for message in party.start()] == [0]
    with pytest.raises(ProtocolError, match="nothing more to say"):
        party.receive(update())


# ---- the union before a sum ----


def union_server(cohort=(0, 1, 2)):
    return UnionServer(1, cohort, 6, lambda coded, size: PlainServer(1, cohort, Encoding(1.0, 16, 8, size), size))


def proposal(party, *coordinates):
    return SupportProposal(1, party, encode_support(np.array(coordinates), 6))


def test_the_union_goes_to_those_who_spoke_and_the_sum_is_over_it():
    server = union_server()
    assert server.start() == [] and server.phase_name == "support" and server.coordinates == 0
    assert server.receive(proposal(0, 1, 4)) == [] and server.drop(2) == []
    answers = server.receive(proposal(1, 4, 5))
    assert [party for party, _ in answers] == [0, 1] and isinstance(answers[0][1], SupportUnion)
    assert server.coordinates == 4 and server.waiting() == (0, 1)  # 0 is always there
    server.receive(update(0, values=pack(np.arange(4, dtype=np.uint64), 8)))
    server.receive(update(1, values=pack(np.ones(4, np.uint64), 8)))
    found = server.result()
    assert found.support.tolist() == [0, 1, 4, 5] and found.total.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "message, said",
    [
        (update(), "sent PlainInput, expected SupportProposal"),
        (proposal(7, 1), "is not in this round's cohort"),
        (SupportProposal(1, 0, b"\xff" * 9), "party 0, support"),
    ],
)
def test_a_proposal_that_cannot_be_is_refused_and_changes_nothing(message, said):
    server = union_server()
    with pytest.raises(ProtocolError, match=said):
        server.receive(message)
    assert server.waiting() == (0, 1, 2)
    server.receive(proposal(0, 1))
    with pytest.raises(ProtocolError, match="a second support"):
        server.receive(proposal(0, 2))
    with pytest.raises(ProtocolError, match="not a sum"):
        server.result()


def test_nobody_who_speaks_leaves_an_empty_round():
    server = union_server()
    server.expire()
    assert server.done and server.result().survivors == ()


@pytest.mark.parametrize(
    "message, said",
    [
        (update(), "before the support"),
        (SupportUnion(1, 0, encode_support(np.array([1, 2]), 6)), "without this party's own coordinates"),
    ],
)
def test_a_party_takes_no_union_that_leaves_it_out(message, said):
    party = UnionParty(1, 0, 6, np.ones(2), np.array([2, 4]), lambda coded, values: pytest.fail("it went on"))
    assert [type(said) for said in party.start()] == [SupportProposal]
    with pytest.raises(ProtocolError, match=said):
        party.receive(message)
