"""A server that lies, against real parties: what it could compute from what it received (benchmarks/lying_server.py has more)."""

import pytest

from benchmarks.lying_server import Liar, run
from fedmpi.secagg import dealing
from fedmpi.secagg.messages import KEY_SHARE, SEED_SHARE
from fedmpi.secagg.party import Identity, SecAggParty
from fedmpi.secagg.rules import Rules


@pytest.mark.slow
def test_no_input_and_no_sum_below_the_threshold_can_be_computed():
    counts, wrong = run(400, seed=1)
    assert not wrong
    assert counts["with a sum"] > 40 and counts["messages refused"] > 4000, "it both gets somewhere and lies"


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
    assert run(60, seed=2, play=play)[1]
