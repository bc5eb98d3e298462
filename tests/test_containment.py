"""A client rank that lies stops nobody: it is named, left out with its parties, and the run goes on as if they had dropped out."""

import csv
import dataclasses
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fedmpi.cli import resolve
from fedmpi.runtime.client import Client
from fedmpi.runtime.conduct import MESSAGES, Conduct
from fedmpi.runtime.mailbox import LINGER, Mailbox, Out
from fedmpi.runtime.placement import Placement
from fedmpi.runtime.server import Server
from fedmpi.secagg import dealing, pki
from fedmpi.secagg import party as machines
from fedmpi.secagg.messages import SEALED, SEED_SHARE, MaskedInput, ShareKeys, Unmask
from fedmpi.transport.endpoint import Endpoint, FrameError
from fedmpi.transport.memory import Hub
from fedmpi.wire.frame import FRAMING, Header
from fedmpi.wire.messages import EvalReport, PlainInput, Ready, Stop, Tally, TrainReport, encode
from fedmpi.wire.phases import Purpose

# ---- who is out, and for how long ----


def test_who_offends_is_out_of_the_session_and_in_its_second_one_for_good():
    conduct = Conduct(Placement(6, 4))
    conduct.begin("round 1")
    assert conduct.rank_offends(2, "lied") == "round 1: rank 2 lied; parties 2 to 3 left out of it"
    assert conduct.rank_offends(2, "lied again") is None, "named once"
    assert conduct.is_out(2) and not conduct.benched
    conduct.begin("round 2")
    assert not conduct.is_out(2)
    assert conduct.rank_offends(2, "lied") == "round 2: rank 2 lied; parties 2 to 3 left out for the rest of the run"
    conduct.begin("round 3")
    assert conduct.is_out(2) and conduct.benched == (2, 3) and conduct.rank_offends(2, "lied") is None


def test_a_party_is_out_by_itself():
    conduct = Conduct(Placement(6, 4))
    for round, said in ((1, "it is treated as dropped"), (2, "left out for the rest of the run")):
        conduct.begin(f"round {round}")
        line = conduct.party_offends(3, "party 3, update: sent nothing")
        assert line.startswith(f"round {round}: party 3, update: sent nothing; ") and line.endswith(said)
        assert conduct.party_offends(3, "again") is None and not conduct.is_out(2)
    assert conduct.benched == (3,) and not conduct.benched_ranks


def test_late_messages_are_no_offence_until_they_are_more_than_can_be_owed():
    conduct = Conduct(Placement(6, 4))
    for session in range(3):
        conduct.begin(f"round {session}")
    owed = 4 * MESSAGES * 3  # three sessions, and the time before them; two parties and their rank
    assert not any(conduct.let_go(1) for _ in range(owed)) and conduct.let_go(1)
    conduct.in_time(2)
    assert not any(conduct.let_go(2) for _ in range(3 * MESSAGES)) and conduct.let_go(2), "it owes nothing of before"


def test_what_was_done_is_remembered_over_an_interruption():
    conduct, before = Conduct(Placement(6, 4)), Conduct(Placement(6, 4))
    before.begin("round 1")
    before.rank_offends(1, "lied", at_once=True)
    before.rank_offends(3, "lied")
    before.party_offends(2, "lied")
    conduct.restore(json.loads(json.dumps(before.state())))
    conduct.begin("round 2")
    assert conduct.is_out(1) and conduct.benched == (0, 1)
    conduct.rank_offends(3, "lied")
    conduct.party_offends(2, "lied")
    assert conduct.benched == (0, 1, 2, 4, 5)
    elsewhere = Conduct(Placement(6, 3))
    elsewhere.restore(before.state())
    assert elsewhere.benched == (0, 1) and not elsewhere.benched_ranks, "its parties are on other ranks now"
    elsewhere.restore({})


# ---- what a rank can make rank 0 hold ----


class Most:
    """A PlainInput of so many bytes, and nothing else."""

    def __init__(self, size):
        self.size = size

    def payload(self, source, kind):
        return self.size if kind == PlainInput.TYPE else None

    def largest(self, source):
        return self.size


def test_a_frame_that_announces_a_tebibyte_is_refused_by_its_header():
    hub = Hub(2, chunk=1 << 16)
    server = hub.endpoints[0]
    server.limits = Most(1 << 20)
    huge = Header(PlainInput.TYPE, 1, 0, 1 << 40).pack() + bytes((1 << 16) - FRAMING)
    hub.queues[0].put((1, huge))
    with pytest.raises(FrameError, match="from rank 1: .*announces 1099511627776 bytes, at most 1048576") as caught:
        server.poll(1)
    assert caught.value.lost and server.held(1) == 0
    server.mute(1)
    for _ in range(100):
        hub.queues[0].put((1, huge))
    assert server.poll(0.2) is None and server.held(1) == 0


def test_a_frame_that_never_ends_is_held_up_to_its_limit():
    hub = Hub(2, chunk=1 << 10)
    server = hub.endpoints[0]
    server.limits = Most(1 << 13)
    whole = bytes(encode(PlainInput(1, 0, b"", bytes((1 << 13) - 4))))
    for start in range(0, 8 << 10, 1 << 10):
        hub.queues[0].put((1, whole[start : start + (1 << 10)]))
    assert server.poll(0.05) is None and server.held(1) == 8 << 10
    for _ in range(3):  # more than it announced
        hub.queues[0].put((1, bytes(1 << 10)))
    with pytest.raises(FrameError, match="announces 8192 payload bytes"):
        server.poll(1)
    assert server.held(1) == 0


def test_a_message_that_never_comes_up_is_refused_whatever_its_size():
    server, client = Hub(2).endpoints
    server.limits = Most(100)
    client.send(0, Stop())
    with pytest.raises(FrameError, match="type 9, which a client does not send in this run") as caught:
        server.poll(1)
    assert not caught.value.lost, "what follows can be read"
    client.send(0, PlainInput(1, 0, b"", b"x"))
    assert server.poll(1)[0] == 1


def test_the_largest_messages_are_known_before_the_first_one(make_config, monkeypatch, run_in_memory):
    """Every run of every other test is held to these bounds; here, that they are bounds."""
    seen = []
    begin = Server.handshake
    monkeypatch.setattr(Server, "handshake", lambda self: (seen.append(self.mailbox.endpoint.limits), begin(self)))
    run_in_memory(make_config("--aggregation secure --metrics none --parties 6 --threshold 4"), 3)
    (limits,) = seen
    assert limits.payload(1, TrainReport.TYPE) is limits.payload(1, EvalReport.TYPE) is None
    assert limits.payload(1, PlainInput.TYPE) is None
    assert limits.largest(1) < 1 << 20


# ---- deadlines ----


@pytest.fixture
def mailbox():
    hub = Hub(3)
    said = []
    made = Mailbox(hub.endpoints[0], Placement(4, 3), 0.3, warn=said.append)
    made.conduct.begin("round 5")
    made.said = said
    return made, hub


class Flood:
    """A queue that always has one more message, until it is empty for once."""

    def __init__(self, piece):
        self.piece, self.taken = piece, 0

    def get_nowait(self):
        self.taken += 1
        return self.piece


@pytest.mark.parametrize(
    "frame",
    [
        bytes(encode(PlainInput(4, 0, b"", b"old"))),
        bytes(encode(PlainInput(5, 3, b"", b"not its own"))),
        b"garbage that is longer than a header",
        b"short",
        bytes(encode(Tally())),
    ],
    ids=["late", "stranger", "garbage", "short", "tally"],
)
def test_no_flood_moves_a_deadline(frame, mailbox):
    post, hub = mailbox
    hub.queues[0] = Flood((1, frame))
    begun = time.monotonic()
    while True:
        arrived = post.take_of(5, Purpose.TRAINING, begun + 0.3)
        if arrived is None:
            break
        assert arrived == Out(1, (0, 1))
    assert time.monotonic() - begun < 0.3 + LINGER + 0.5 and hub.queues[0].taken > 100
    assert post.conduct.benched_ranks == {1} and 1 <= len(post.said) <= 2, "not a line for each"


def test_no_flood_keeps_tallies_from_being_collected(mailbox):
    post, hub = mailbox
    hub.queues[0] = Flood((1, bytes(encode(PlainInput(4, 0, b"", b"old")))))
    begun = time.monotonic()
    assert post.collect("end", Tally, lambda rank, tally: "") == {1, 2}
    assert time.monotonic() - begun < 0.3 + LINGER + 0.5


def test_who_answered_in_time_is_found_behind_a_flood(mailbox):
    post, hub = mailbox
    for _ in range(1000):
        hub.queues[0].put((1, b"garbage that is longer than a header"))
    hub.endpoints[2].send(0, PlainInput(5, 3, b"", b"x"))
    passed = time.monotonic() - 10  # rank 0 was busy meanwhile
    while isinstance(arrived := post.take_of(5, Purpose.TRAINING, passed), Out):
        pass
    assert arrived[0] == 2 and post.conduct.benched_ranks == {1}


# ---- whole runs ----


def rows(config):
    return [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]


def planned(parties, rounds):
    return "--dropout " + ",".join(f"{r}:{p}:advertise" for r in range(1, rounds + 1) for p in parties)


def raw(client, data):
    client.endpoint._post(0, memoryview(data))


@pytest.fixture
def lying(monkeypatch):
    """Ranks that do something else than to train."""

    def lying(acts):
        train = Client.train

        def tempted(self, model, theta):
            act = acts.get(self.endpoint.rank)
            if act is None or act(self, model):
                train(self, model, theta)

        monkeypatch.setattr(Client, "train", tempted)

    return lying


def garbage(client, model):
    raw(client, np.random.default_rng(model.round).bytes(1000))


def flood(client, model):
    """Messages of a round that was never asked for, far more than anybody waits for."""
    for _ in range(20_000):
        raw(client, bytes(encode(PlainInput(99, client.parties[0], b"", bytes(100)))))


def forged_size(client, model):
    raw(client, Header(PlainInput.TYPE, model.round, client.parties[0], 1 << 40).pack() + bytes(5000))


ACTS = {
    "garbage": garbage,
    "five bytes": lambda client, model: raw(client, b"FM\2\4\0"),
    "somebody else's party": lambda client, model: client.endpoint.send(0, PlainInput(model.round, 5, b"", b"x")),
    "a tally": lambda client, model: client.send_tally(),
    "a tebibyte": forged_size,
    "a flood": flood,
}


@pytest.mark.parametrize("aggregation", ["plain", "secure --threshold 4"])
@pytest.mark.parametrize("act", ACTS)
def test_a_lying_ranks_parties_are_as_good_as_dropped(act, aggregation, make_config, run_in_memory, lying, capsys):
    flags = f"--parties 6 --rounds 3 --aggregation {aggregation} --phase-deadline 3"
    wanted = run_in_memory(make_config(f"{flags} {planned((0, 1), 3)}"), 4)
    capsys.readouterr()
    lying({1: ACTS[act]})
    config = make_config(flags)
    begun = time.monotonic()
    summary = run_in_memory(config, 4)
    assert time.monotonic() - begun < 20
    assert summary["model_sha256"] == wanted["model_sha256"] and [row["survivors"] for row in rows(config)] == [4] * 3
    assert summary["dropouts"]["benched"] == [0, 1] and summary["untallied_ranks"] == [1]
    assert summary["dropouts"]["failed_rounds"] == 0 and summary["accuracy"] is not None
    said = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ") and " rank 1 " in line
    ]
    assert 1 <= len(said) <= 3 and sum("for the rest of the run" in line for line in said) == 1


@pytest.fixture
def speaking(monkeypatch):
    """Ranks that say something else than their sessions do, party by party."""

    def speaking(changes):
        say = Client.say

        def other(self, messages):
            change = changes.get(self.endpoint.rank)
            say(self, [change(message) for message in messages] if change else messages)

        monkeypatch.setattr(Client, "say", other)

    return speaking


def deal_rubbish(message):
    if not isinstance(message, ShareKeys):
        return message
    bundles = tuple(dataclasses.replace(bundle, sealed=bytes(SEALED)) for bundle in message.bundles)
    return dataclasses.replace(message, bundles=bundles)


@pytest.mark.parametrize("identities", [False, True], ids=["passive", "active"])
def test_twenty_parties_go_on_with_three_lying_ranks(
    identities, make_config, run_in_memory, lying, speaking, tmp_path, capsys
):
    flags = "--parties 20 --rounds 3 --aggregation secure --eval-every 1 --phase-deadline 30"
    if identities:
        pki.make(tmp_path / "identities", 20)
        flags += f" --pki {tmp_path / 'identities'}"
    liars = tuple(range(2, 8))  # of ranks 2, 3 and 4
    wanted = run_in_memory(make_config(f"{flags} {planned(liars, 3)}"), 11)
    capsys.readouterr()
    lying({2: garbage, 3: flood})
    speaking({4: deal_rubbish})
    config = make_config(flags)
    summary = run_in_memory(config, 11)
    assert summary["model_sha256"] == wanted["model_sha256"] and summary["dropouts"]["failed_rounds"] == 0
    assert summary["dropouts"]["benched"] == list(liars) and summary["untallied_ranks"] == [2, 3]
    assert all(row["cohort"] == 20 and row["survivors"] == 14 for row in rows(config))
    assert summary["epsilon_outside"] == wanted["epsilon_outside"]
    said = capsys.readouterr().out
    assert "round 1: party 6, ShareKeys: dealt bundles that" in said and "party 6 is in dispute with" in said


# ---- one of the two lies ----

ONE_DEALER = {(holder, 1) for holder in (0, 2, 3)}


def weighed(*sessions):
    conduct = Conduct(Placement(6, 4))
    for number, disputes in enumerate(sessions, start=1):
        conduct.begin(f"round {number}")
        conduct.weigh(disputes)
    return conduct


def test_a_dealer_that_is_in_dispute_with_several_is_benched_the_second_time():
    assert weighed(ONE_DEALER).benched == () and weighed(ONE_DEALER, ONE_DEALER).benched == (1,)
    assert weighed(ONE_DEALER, {}, ONE_DEALER).benched == (1,)


def test_a_holder_that_accuses_one_after_the_other_is_found_out():
    accusing = [{(4, dealer)} for dealer in (0, 2, 1)]
    assert weighed(*accusing[:2]).benched == () and weighed(*accusing).benched == (4,)


def test_of_a_single_pair_nobody_is_benched_however_often_they_quarrel():
    assert weighed(*[{(4, 0)}] * 20).benched == ()


def test_an_honest_party_is_not_benched_by_one_lying_rank():
    """Whatever its parties say, in however many rounds: one of them is in every dispute."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        sessions = []
        for _ in range(8):
            pairs = set()
            for liar in (2, 3):
                others = rng.choice([0, 1, 4, 5], rng.integers(0, 5), replace=False).tolist()
                pairs |= {(liar, other) if rng.random() < 0.5 else (other, liar) for other in others}
            sessions.append(pairs)
        assert set(weighed(*sessions).benched) <= {2, 3}


def test_disputes_are_remembered_over_an_interruption():
    before = weighed({(4, 0)}, {(4, 2)})
    after = Conduct(Placement(6, 4))
    after.restore(json.loads(json.dumps(before.state())))
    after.begin("round 3")
    after.weigh({(4, 1)})
    assert after.benched == (4,)


def test_a_bad_dealer_costs_no_round(make_config, run_in_memory, speaking):
    """It failed every one."""
    flags = "--parties 6 --rounds 5 --aggregation secure --threshold 4"
    wanted = run_in_memory(make_config(f"{flags} {planned((0, 1), 5)}"), 4)
    speaking({1: deal_rubbish})
    summary = run_in_memory(make_config(flags), 4)
    assert summary["dropouts"]["failed_rounds"] == 0 and summary["dropouts"]["benched"] == [0, 1]
    assert summary["model_sha256"] == wanted["model_sha256"]


def test_a_dealer_of_wrong_shares_costs_a_round_or_two_and_is_benched(make_config, run_in_memory, speaking, capsys):
    """Its bundles open, and what is in them is not what it committed to: that is seen when shares are combined."""

    def other(message):
        return dataclasses.replace(message, commitment=bytes(32)) if isinstance(message, ShareKeys) else message

    speaking({1: other})
    summary = run_in_memory(make_config("--parties 8 --rounds 5 --aggregation secure --threshold 5"), 9)
    assert summary["dropouts"]["failed_rounds"] == 2 and summary["dropouts"]["benched"] == [0]
    assert "party 0, ShareKeys: dealt shares that do not fit what it committed to" in capsys.readouterr().out


# ---- what a review found ----


def test_who_shares_in_the_clear_is_no_ranks_choice_where_it_is_not_asked(
    make_config, run_in_memory, monkeypatch, capsys
):
    """Believed, it had rank 0 announce a cohort that every honest rank refused."""
    monkeypatch.setattr(
        Client,
        "say_ready",
        lambda self: self.endpoint.send(
            0,
            Ready(
                0,
                -1,
                self.algorithm.dimension,
                self.algorithm.data_fingerprint,
                self.parties[:1] if self.endpoint.rank == 1 else (),
            ),
        ),
    )
    summary = run_in_memory(make_config("--parties 6 --rounds 2 --aggregation secure --threshold 4"), 4)
    assert summary["dropouts"]["benched"] == [0, 1] and summary["dropouts"]["failed_rounds"] == 0
    assert "rank 1 " in capsys.readouterr().out


@pytest.mark.parametrize("ranks, benched", [(8, [0]), (2, [])])
def test_a_dealer_of_random_shares_is_benched(ranks, benched, make_config, run_in_memory, monkeypatch, capsys):
    """It failed every round, and nobody was named. Where all are on one rank it stays open who of them lied, and the run says what
    came of it."""
    whole, deal, lying = machines.SecAggParty._share_keys, dealing.create_shares, threading.local()

    def share_keys(self, state, message):
        lying.now = self.party == 0
        return whole(self, state, message)

    def shares(secrets, threshold, xs, draw, fields):
        if lying.now:
            return [[int.from_bytes(draw(field.secret_bytes), "big") for _ in xs] for field in fields]
        return deal(secrets, threshold, xs, draw, fields)

    monkeypatch.setattr(machines.SecAggParty, "_share_keys", share_keys)
    monkeypatch.setattr(dealing, "create_shares", shares)
    summary = run_in_memory(make_config("--parties 7 --rounds 5 --aggregation secure"), ranks)
    assert summary["dropouts"]["benched"] == benched
    assert summary["dropouts"]["failed_rounds"] == (2 if benched else 5)
    assert ("no round had a sum" in capsys.readouterr().out) == (not benched)


@pytest.mark.parametrize("parties, ranks", [(4, 5), (5, 6), (12, 5)])
def test_a_rank_that_opens_wrong_shares_costs_no_round(parties, ranks, make_config, run_in_memory, speaking):
    def wrong(message):
        if not isinstance(message, Unmask):
            return message
        answers = (
            dataclasses.replace(a, share=bytes(SEED_SHARE - 1) + bytes([message.party + 1])) for a in message.answers
        )
        return dataclasses.replace(message, answers=tuple(answers))

    flags = f"--parties {parties} --rounds 3 --aggregation secure"
    wanted = run_in_memory(make_config(flags), ranks)
    speaking({1: wrong})
    summary = run_in_memory(make_config(flags), ranks)
    assert summary["dropouts"]["failed_rounds"] == 0
    if parties == 12:
        assert set(summary["dropouts"]["benched"]) == {0, 1, 2}
    else:
        assert set(summary["dropouts"]["benched"]) <= {0}
    assert wanted["dropouts"]["benched"] == []


def test_one_complaint_a_round_keeps_nobody_out_for_good(make_config, run_in_memory, speaking):
    def complain(message):
        if isinstance(message, Unmask):  # and stays with what it said
            return dataclasses.replace(message, answers=tuple(a for a in message.answers if a.owner != 5))
        return dataclasses.replace(message, unopened=(5,)) if isinstance(message, MaskedInput) else message

    speaking({1: complain})
    config = make_config("--parties 6 --rounds 4 --aggregation secure --threshold 4")
    summary = run_in_memory(config, 7)
    assert summary["dropouts"]["failed_rounds"] == 0 and summary["dropouts"]["benched"] == []
    events = [json.loads(line) for line in (config.out / "releases.jsonl").read_text().splitlines()]
    assert [event["parties"] for event in events if event["event"] == "opened"] == ["0-4", "1-5"] * 2


def test_a_report_of_nobody_is_an_offence(make_config, run_in_memory, lying):
    def empty(client, model):
        client.endpoint.send(0, TrainReport(model.round, client.parties[0], (), np.zeros((0, 5))))

    lying({1: empty})
    summary = run_in_memory(make_config("--parties 6 --rounds 3 --aggregation secure --threshold 4"), 4)
    assert summary["dropouts"]["benched"] == [0, 1]


def test_a_tally_that_comes_late_is_no_offence(mailbox):
    """As of a rank with a slow disk."""
    (box, hub), said = mailbox, mailbox[0].said
    endpoints, box.patience = hub.endpoints, 0.05
    assert box.collect("checkpoint", Tally, lambda source, message: "") == set(box.placement.ranks())
    box.conduct.begin("round 2")
    endpoints[1].send(0, Tally())
    endpoints[1].send(0, PlainInput(2, box.placement.parties_of(1)[0], b"", b"x"))
    arrived = box.take_of(2, Purpose.TRAINING, time.monotonic() + 1)
    assert isinstance(arrived, tuple) and isinstance(arrived[1], PlainInput) and not said


def test_a_rank_that_does_not_take_its_post_is_sent_no_more_of_it(make_config, run_in_memory, monkeypatch):
    """Rank 0 kept every model for it, and waited for it in every round."""
    flags = "--parties 6 --rounds 3 --aggregation secure --threshold 4 --eval-every 1"
    wanted = run_in_memory(make_config(f"{flags} {planned((0, 1), 3)}"), 4)
    monkeypatch.setattr(Endpoint, "behind", lambda self, age: {1} if self.rank == 0 and age else set())
    config = make_config(flags)
    summary = run_in_memory(config, 4)
    assert summary["model_sha256"] == wanted["model_sha256"] and summary["dropouts"]["real"] == 6
    assert summary["dropouts"]["benched"] == [] and summary["accuracy"] is not None
    with open(config.out / "messages.csv") as stream:
        to_it = [row for row in csv.DictReader(stream) if (row["direction"], row["rank"]) == ("down", "1")]
    assert not {row["message"] for row in to_it} & {"Train", "Evaluate"}


def test_a_silent_rank_with_the_whole_cohort_fails_the_round_and_not_the_run(make_config, run_in_memory, monkeypatch):
    monkeypatch.setattr(
        "fedmpi.runtime.schedule.cohort", lambda config, round: (0, 1) if round == 2 else tuple(range(6))
    )
    train = Client.train
    monkeypatch.setattr(
        Client,
        "train",
        lambda self, model, theta: train(self, model, theta) if (self.endpoint.rank, model.round) != (1, 2) else None,
    )
    flags = "--parties 6 --rounds 3 --sampling 0.5 --min-cohort 2 --epsilon inf --round-deadline 3 --eval-every 0"
    summary = run_in_memory(make_config(flags), 4)
    assert summary["dropouts"]["failed_rounds"] == 1 and summary["dropouts"]["real"] == 2


def test_hidden_test_figures_go_on_without_the_benched(make_config, run_in_memory, lying, capsys):
    lying({1: garbage})
    config = make_config("--parties 6 --rounds 3 --aggregation secure --threshold 4 --metrics securesum --eval-every 1")
    summary = run_in_memory(config, 4)
    assert summary["accuracy"] is not None and summary["dropouts"]["benched"] == [0, 1]
    assert "test figures of round 3 are those of 4 of 6 parties" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [4, 3])
def test_a_resumed_run_remembers_who_lied(ranks, make_config, run_in_memory, lying, monkeypatch):
    flags = "--parties 6 --rounds 4 --checkpoint-every 3"
    wanted = run_in_memory(make_config(f"{flags} {planned((0, 1), 4)}"), 4)
    lying({1: garbage})
    config = make_config(flags)
    whole = Server.round
    with monkeypatch.context() as patch:
        patch.setattr(Server, "round", lambda self, round: whole(self, round) if round < 4 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_in_memory(config, 4)
    monkeypatch.undo()  # whoever lied is honest now, and still not asked
    summary = run_in_memory(resolve(["--resume", str(config.out)]), ranks)
    assert summary["dropouts"]["benched"] == [0, 1] and summary["model_sha256"] == wanted["model_sha256"]


def test_a_rank_that_lies_in_the_handshake_is_benched_at_once(make_config, run_in_memory, monkeypatch, capsys):
    ready = Client.say_ready
    monkeypatch.setattr(
        Client,
        "say_ready",
        lambda self: raw(self, b"FM\1 of another version") if self.endpoint.rank == 1 else ready(self),
    )
    flags = "--parties 6 --rounds 2"
    summary = run_in_memory(make_config(flags), 4)
    assert summary["dropouts"]["benched"] == [0, 1]
    monkeypatch.undo()
    assert summary["model_sha256"] == run_in_memory(make_config(f"{flags} {planned((0, 1), 2)}"), 4)["model_sha256"]
    assert "handshake: rank 1 sent what cannot be read (frame has version 1" in capsys.readouterr().out


def test_a_late_party_is_no_offender(make_config, run_in_memory, monkeypatch, capsys):
    """It is expired, and what it still says is let go of: it is back in the next round."""
    train = Client.train

    def late(self, model, theta):
        if self.endpoint.rank == 1 and model.round == 1:
            time.sleep(3)
        train(self, model, theta)

    monkeypatch.setattr(Client, "train", late)
    config = make_config("--parties 6 --rounds 3 --round-deadline 2 --phase-deadline 2")
    summary = run_in_memory(config, 4)
    assert summary["dropouts"]["caught"] == 0 and summary["dropouts"]["benched"] == []
    assert [row["survivors"] for row in rows(config)][::2] == [4, 6] and summary["untallied_ranks"] == []


@pytest.mark.slow
def test_damaged_frames_harm_neither_end(monkeypatch, capsys):
    """The quick end of benchmarks.mutated_frames, which has a million of them."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    from benchmarks import mutated_frames

    monkeypatch.setattr(sys, "argv", ["mutated_frames", "--frames", "6000", "--client-frames", "600"])
    mutated_frames.main()
    assert "flood" in capsys.readouterr().out
