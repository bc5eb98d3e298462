"""Keys for several rounds, attacked: what a server could say in a later round to have less than when the keys were made."""

import dataclasses

import pytest
from secagg_driver import Batch, identities

from fedmpi.errors import ProtocolError

# What is settled when keys are made, and what a server that picks n in a hybrid could then say in a later round.
CHANGES = (
    dict(threshold=5),
    dict(cohort=5, degree=4, threshold=3),
    dict(cohort=5, degree=4),
    dict(active=False),
    dict(session=b"another session."),
    dict(agreed=b"weaker settings"),
    dict(batch=(3, 6)),
)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_later_round_has_the_cohort_the_threshold_and_the_settings_that_keys_were_made_for(changes):
    batch = Batch(6, 3, threshold=4, identities=identities(6))
    batch.round(3).run().check_sum()
    party, ring = batch.round(4).parties[0], batch.rings[0]
    party.rules = dataclasses.replace(party.rules, **changes)
    with pytest.raises(ProtocolError, match="keys that were made for another"):
        party.start()
    assert ring.has(4), "a refusal changes nothing"
    batch.round(4).run().check_sum()
