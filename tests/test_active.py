"""A rank 0 that lies to real client ranks, `--pki` given: each attack that worked once, and what it gets now."""

import dataclasses
import json

import pytest

from fedmpi.aggregation.protocol import agreed
from fedmpi.errors import ConfigError, FedmpiError, ProtocolError
from fedmpi.liars.rounds import another_model
from fedmpi.runtime import schedule
from fedmpi.runtime.build import Orders
from fedmpi.runtime.floor import agree
from fedmpi.runtime.rank import run_client
from fedmpi.secagg import messages as secagg
from fedmpi.secagg import pki
from fedmpi.transport.endpoint import Endpoint
from fedmpi.transport.memory import Hub
from fedmpi.wire.control import NONCE
from fedmpi.wire.messages import Evaluate, Fill, Nonces, Ready, Setup, Train

pytestmark = pytest.mark.slow

COORDINATES = 16  # of toy_parties:Steady


@pytest.fixture
def active(make_config, tmp_path):
    """A configuration with identities; without training, so that a round takes no time."""
    file = tmp_path / "identities"
    pki.make(file, 6)

    def make(flags=""):
        return make_config(
            "--method toy_parties:Steady --dataset none --parties 6 --rounds 3 --aggregation secure --support dense "
            f"--graph complete --metrics none --pki {file} {flags}"
        )

    return make


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))


@pytest.fixture
def lie(monkeypatch):
    """What rank 0 sends to a rank becomes what `change` makes of it; returns all that reached it."""

    def lie(change):
        send, seen = Endpoint.send, []

        def forged(self, rank, message):
            if self.rank:
                seen.append(message)
                return send(self, rank, message)
            for made in change(rank, message):
                send(self, rank, made)

        monkeypatch.setattr(Endpoint, "send", forged)
        monkeypatch.setattr(
            "fedmpi.secagg.server.verify", lambda *_: True
        )  # it does not check what it knows to be false
        return seen

    return lie


def kinds(seen):
    return {type(message).__name__ for message in seen}


def test_an_honest_rank_0_gets_the_same_model_as_without_identities(active, run_in_memory):
    config = active()
    summary = run_in_memory(config, 4)
    assert summary["dropouts"]["failed_rounds"] == 0
    passive = dataclasses.replace(config.aggregation, pki=None, adversary="passive")
    other = dataclasses.replace(config, aggregation=passive)
    other = dataclasses.replace(other, run=dataclasses.replace(config.run, out=str(config.out) + "-passive"))
    assert run_in_memory(other, 3)["model_sha256"] == summary["model_sha256"]


def test_the_statement_of_an_active_run_has_what_a_lying_rank_0_could_learn(active, run_in_memory):
    config = active("--entropy os --epsilon 4")
    summary = run_in_memory(config, 4)
    said = json.loads((config.out / "privacy.json").read_text())
    assert said["epsilon_server_lying"] > summary["epsilon_server"] > 0
    assert any("epsilon_server_lying" in line for line in said["trust"])


@pytest.mark.parametrize("victim", [1, 3])
def test_parties_that_are_shown_different_models_do_not_add_up(victim, active, run_in_memory, lie):
    """Those who train from zeros answered with zeros, so that the sum was the victim's update."""

    def change(rank, message):
        if isinstance(message, Train) and rank != victim:
            return another_model(message, COORDINATES)
        return [message]

    seen = lie(change)
    with pytest.raises(ProtocolError, match="was shown keys of party . that it did not sign"):
        run_in_memory(active(), 4)
    assert not kinds(seen) & {"MaskedInput", "ConsistencyCheck", "Unmask"}


def test_without_identities_they_do_not_add_up_either(active, run_in_memory, lie):
    """An honest rank 0 does not do this; but nothing is added up across two models whoever it is."""

    def change(rank, message):
        if isinstance(message, Train) and rank == 1:
            return another_model(message, COORDINATES)
        return [message]

    config = active()
    config = dataclasses.replace(
        config, aggregation=dataclasses.replace(config.aggregation, pki=None, adversary="passive")
    )
    lie(change)
    run_in_memory(config, 4)
    rows = [json.loads(line) for line in (config.out / "releases.jsonl").read_text().splitlines()]
    assert {row["parties"] for row in rows if row["event"] == "opened"} == {"2-5"}, "who saw one model, and nobody else"


def test_a_filler_is_bound_to_the_model_that_the_others_were_shown(active, run_in_memory, lie, monkeypatch):
    monkeypatch.setattr("fedmpi.runtime.schedule.cohort", lambda config, round: (0, 3))

    def change(rank, message):
        return [dataclasses.replace(message, model=bytes(32)) if isinstance(message, Fill) else message]

    seen = lie(change)
    with pytest.raises(ProtocolError, match="that it did not sign"):
        run_in_memory(active("--sampling 0.5"), 4)
    assert "MaskedInput" not in kinds(seen)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda m: [dataclasses.replace(m, nonces=bytes(len(m.nonces)))], "nonces that lack this rank's"),
        (lambda m: [dataclasses.replace(m, nonces=m.nonces[:-1])], "nonces that lack this rank's"),
        (lambda m: [m, m], "that nobody asked for"),
        (lambda m: [], "began before it had sent everybody's nonces"),
    ],
    ids=["others", "too few", "twice", "none"],
)
def test_a_session_has_every_partys_nonce_in_its_name(change, said, active, run_in_memory, lie):
    lie(lambda rank, message: change(message) if isinstance(message, Nonces) else [message])
    with pytest.raises(ProtocolError, match=said):
        run_in_memory(active(), 3)


def test_where_only_the_others_nonces_are_old_their_signatures_do_not_fit(active, run_in_memory, lie):
    def change(rank, message):
        if isinstance(message, Nonces) and rank == 1:
            first, rest = message.nonces[: 2 * NONCE], message.nonces[2 * NONCE :]
            message = dataclasses.replace(message, nonces=first + bytes(len(rest)))
        return [message]

    seen = lie(change)
    with pytest.raises(ProtocolError, match="that it did not sign"):
        run_in_memory(active(), 4)
    assert "MaskedInput" not in kinds(seen)


def test_a_recorded_session_cannot_be_played_to_parties_again(active, run_in_memory, monkeypatch):
    """Everything that rank 0 sent in one run, to the same parties started again, with the same session and rounds."""
    send, sent = Endpoint.send, []

    def record(self, rank, message):
        if self.rank == 0 and rank == 1:
            sent.append(message)
        send(self, rank, message)

    config = active()
    with monkeypatch.context() as patch:
        patch.setattr(Endpoint, "send", record)
        run_in_memory(config, 3)
    assert {Setup, Nonces, Train, secagg.KeyList, secagg.UnmaskRequest} <= {type(message) for message in sent}
    hub = Hub(3)
    for message in sent:
        hub.endpoints[0].send(1, message)
    with pytest.raises(ProtocolError, match="nonces that lack this rank's"):
        run_client(hub.endpoints[1], config)
    got = []
    while (arrived := hub.endpoints[0].poll(0)) is not None:
        got.append(arrived[1])
    assert [type(message) for message in got] == [Ready]


@pytest.mark.parametrize("metrics", ["party", "securesum"])
def test_a_test_is_asked_for_once(metrics, active, run_in_memory, lie):
    """Asked again with another model it would show the same figures of it, and sums of others."""

    def change(rank, message):
        again = isinstance(message, Evaluate) and message.round == 3
        return [message, *another_model(message, COORDINATES)] if again else [message]

    lie(change)
    with pytest.raises(ProtocolError, match="asked for the test of round 3 after that of round 3"):
        run_in_memory(active(f"--metrics {metrics}"), 3)


def test_a_bundle_that_rank_0_alters_costs_it_a_party_and_gives_it_nothing(active, run_in_memory, lie):
    def change(rank, message):
        if isinstance(message, secagg.ShareList) and message.party == 0:
            first, *others = message.bundles
            message = dataclasses.replace(
                message, bundles=(dataclasses.replace(first, sealed=bytes(secagg.SEALED)), *others)
            )
        return [message]

    lie(change)
    summary = run_in_memory(active(), 4)
    assert summary["dropouts"]["failed_rounds"] == 0


def test_a_survivor_with_whom_a_party_did_not_mask_is_refused(active, run_in_memory, lie):
    """As when rank 0 alters a bundle and then says that nobody left."""

    def change(rank, message):
        if isinstance(message, secagg.ShareList) and message.party == 0:
            first, *others = message.bundles
            message = dataclasses.replace(
                message, bundles=(dataclasses.replace(first, sealed=bytes(secagg.SEALED)), *others)
            )
        if isinstance(message, secagg.SurvivorList):
            message = dataclasses.replace(message, survivors=tuple(range(6)))
        return [message]

    seen = lie(change)
    with pytest.raises(ProtocolError, match="include a party that it did not mask with"):
        run_in_memory(active(), 4)
    assert "Unmask" not in kinds(seen)


# ---- what a review found ----


def test_a_party_is_played_by_one_rank(active, run_in_memory, lie):
    """Two ranks of a host can both read a party's key: told that they both host it, it would be in two sums of a round, and their
    difference another's input."""

    def change(rank, message):
        return [dataclasses.replace(message, parties=(0, 1)) if isinstance(message, Setup) and rank == 2 else message]

    seen = lie(change)
    with pytest.raises(ConfigError, match="parties = 0, 1: so says rank 0, and this rank's place is with 2 to 3"):
        run_in_memory(active(), 4)
    assert kinds(seen) <= {"Ready"}


@pytest.mark.parametrize("kind", [Train, Evaluate])
def test_a_run_has_no_round_after_its_last(kind, active, run_in_memory, lie):
    """Each would be one more sum, and no epsilon counts it."""

    def change(rank, message):
        late = isinstance(message, kind) and message.round == 3
        return [message, dataclasses.replace(message, round=4)] if late else [message]

    lie(change)
    with pytest.raises(ProtocolError, match="rank 0 asked for round 4, the run has 3"):
        run_in_memory(active("--metrics securesum"), 4)


def test_a_test_is_asked_for_when_it_is_due(active, run_in_memory, lie):
    def change(rank, message):
        first = isinstance(message, Train) and message.round == 2
        return [Evaluate(1, -1, message.parties, 6, 6, message.version, message.model), message] if first else [message]

    lie(change)
    with pytest.raises(ProtocolError, match="a test of round 1, which has none"):
        run_in_memory(active("--metrics securesum --eval-every 2"), 4)


@pytest.mark.parametrize("hidden, fits", [(4, True), (3, False), (5, False), (6, False), (0, False)])
def test_in_a_hybrid_everybody_knows_how_many_are_hidden(hidden, fits, active):
    """The threshold follows from it: of three it would be two."""
    config = active("--aggregation hybrid --clear-parties 0,1")
    if fits:
        schedule.check_cohort(config, 6, hidden)
    else:
        with pytest.raises(ProtocolError, match=f"announced a cohort of 6 with {hidden} hidden"):
            schedule.check_cohort(config, 6, hidden)
    schedule.check_cohort(config, 6, 3, chooses=True)  # where data decide, nobody can know


def test_numbers_that_are_none_are_refused_in_one_line(active):
    own = active()
    honest = json.loads(Orders(own, 5.0, "0" * 32, run="0" * 32).to_text())
    for change in ({"multiplier": 7}, {"multiplier": 10**400}, {"config": {"privacy": {"epsilon": 10**400}}}):
        text = dict(honest)
        if "config" in change:
            text["config"] = honest["config"] | {"privacy": honest["config"]["privacy"] | change["config"]["privacy"]}
        else:
            text |= change
        with pytest.raises(FedmpiError) as caught:
            agree(own, Setup(config=json.dumps(text), parties=tuple(range(6))), 1, 2)
        assert "\n" not in str(caught.value)


def test_a_whole_number_for_a_fraction_is_the_same_setting_on_every_rank(active):
    config = active()
    clip = dataclasses.replace(config, privacy=dataclasses.replace(config.privacy, clip=1))
    other = dataclasses.replace(config, privacy=dataclasses.replace(config.privacy, clip=1.0))
    assert agreed(clip, 2.0) == agreed(other, 2.0) != agreed(config, 2.0) != agreed(config, 3.0)
