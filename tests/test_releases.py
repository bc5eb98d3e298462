"""The log of releases and its account: what is on the disk decides what is said, whatever became of the process."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.cli import resolve
from fedmpi.errors import DataError
from fedmpi.main import main
from fedmpi.privacy.account import Releases, fold
from fedmpi.privacy.accountant import Accountant, CohortView
from fedmpi.privacy.encoding import Encoding
from fedmpi.privacy.mechanism import Bounded, Cut, Mechanism, Noised
from fedmpi.privacy.releases import (
    Asked,
    Ended,
    Failed,
    Opened,
    ReleaseLog,
    Shown,
    Started,
    Stepped,
    Terms,
    parse,
    parties_of,
    ranges,
    unparse,
)

DELTA, SIGMA, PARTIES = 1e-5, 8.0, 6
EVERYONE = tuple(range(PARTIES))
NOISED = Noised(Encoding(1.0, 1 << 12, 20, 100), multiplier=SIGMA)


def terms(**changed) -> Terms:
    given_ = {
        "mechanism": NOISED,
        "parties": PARTIES,
        "rounds": 4,
        "delta": DELTA,
        "accountant": "rdp",
        "sampling": 1.0,
        "entropy": "os",
        "aggregation": "secure",
        "support": "dense",
        "denominator": "expected",
        "graph": "complete",
        "adversary": "passive",
        "colluding": 0,
    }
    return Terms(**(given_ | changed))


def asked(round, clear=(), cohort=EVERYONE, drawn=None, **changed):
    share = SIGMA / math.sqrt(len(cohort))
    facts = {"share": share, "exposed": False, "figures": False} | changed
    return Asked(round, cohort if drawn is None else drawn, cohort, clear, **facts)


def whole(round):
    return [asked(round), Opened(round, EVERYONE, 100), Stepped(round, EVERYONE, 100)]


def spent(*rounds):
    account = Accountant("rdp")
    for multiplier in rounds:
        account.spend(multiplier, 1.0)
    return account.epsilon(DELTA)


# ---- what counts ----


def test_a_round_counts_by_the_noise_that_was_left():
    left = (0, 1, 2, 4)
    account = fold([Started(terms()), asked(1), Opened(1, left, 100), Stepped(1, left, 100)])
    statement = account.statement()
    assert statement.epsilon_outside == pytest.approx(spent(SIGMA * math.sqrt(4 / 6)), rel=1e-3)
    assert statement.epsilon_party == pytest.approx(spent(SIGMA * math.sqrt(3 / 6)), rel=1e-3)
    assert account.server.joined() == [1, 1, 1, 0, 1, 0]


def test_colluders_noise_is_none_towards_rank_0():
    account = fold([Started(terms(colluding=2)), asked(1), Opened(1, EVERYONE, 100), Failed(1)])
    assert account.statement().epsilon_server == pytest.approx(spent(SIGMA * math.sqrt(4 / 6)), rel=1e-3)
    assert account.statement().epsilon_outside == 0


@pytest.mark.parametrize("end", [[], [Failed(1)], [Stepped(1, EVERYONE, 100)]])
def test_an_update_in_the_clear_counts_from_when_it_was_asked_for(end):
    account = fold([Started(terms(aggregation="hybrid")), asked(1, clear=(1, 3)), *end])
    by_hand = CohortView(PARTIES)
    by_hand.join(np.array([1, 3]), SIGMA / math.sqrt(6), adjacency=2.0)
    assert account.server.joined() == [0, 1, 0, 1, 0, 0]
    assert account.server.epsilon(DELTA) == by_hand.epsilon(DELTA)


def test_a_sum_counts_from_when_it_was_to_be_opened_and_only_once():
    before = fold([Started(terms()), asked(1)])
    before.settle()
    assert before.server.joined() == [0] * 6, "nobody was asked for what opens it"
    cut = fold([Started(terms()), asked(1), Opened(1, EVERYONE, 100), Started(terms(), 0), *whole(1)])
    assert cut.server.joined() == [2] * 6 and cut.outside.rounds == 1


def test_who_fills_a_cohort_up_gives_nothing_away():
    account = fold([Started(terms()), asked(1, drawn=(2,)), Opened(1, EVERYONE, 100), Stepped(1, EVERYONE, 100)])
    assert account.server.joined() == account.party.joined() == [0, 0, 1, 0, 0, 0]


def test_colluders_who_open_any_input_see_the_updates_of_all():
    account = fold([Started(terms(colluding=5)), asked(1, exposed=True), Opened(1, EVERYONE, 100), Failed(1)])
    by_hand = CohortView(PARTIES)
    by_hand.join(np.arange(6), SIGMA / math.sqrt(6), adjacency=2.0)
    assert account.server.epsilon(DELTA) == by_hand.epsilon(DELTA)


def test_what_is_repeated_counts_again_under_secret_noise_and_not_under_a_seed():
    events = [*whole(1), *whole(2), asked(3), Opened(3, EVERYONE, 100), Shown(2, "party")]
    secret = fold([Started(terms()), *events, Started(terms(), 1), *whole(2)])
    assert secret.outside.rounds == 3 and secret.server.joined() == [4] * 6
    seeded = fold([Started(terms(entropy="seeded")), *events, Started(terms(entropy="seeded"), 1), *whole(2)])
    assert seeded.outside.rounds == 2 and seeded.server.joined() == [2] * 6
    assert seeded.figures == "none", "what the repeated part will say is not said yet"


@pytest.mark.parametrize("failure", [[Failed(1)], []], ids=["failed", "cut short"])
def test_a_round_without_a_sum_ends_amplification(failure):
    start = Started(terms(sampling=0.3))
    account = fold([start, asked(1), *failure, Started(start.terms, 0), *whole(2)])
    assert account.lost and "without amplification" in account.statement().reason


def test_the_least_protected_figures_decide():
    account = fold([Started(terms())])
    assert account.figures == "none"
    account.take(Shown(0, "securesum"))
    assert account.figures == "securesum"
    account.take(asked(1, figures=True))
    account.take(Shown(1, "securesum"))
    assert account.figures == "party" and account.statement().epsilon_server is None


def test_a_log_of_two_kinds_of_runs_is_refused():
    for other in (
        {"entropy": "seeded"},
        {"sampling": 0.3},
        {"colluding": 3},
        {"denominator": "survivors"},
        {"parties": 7},
    ):
        with pytest.raises(DataError, match="runs with different settings"):
            fold([Started(terms()), *whole(1), Started(terms(**other), 0), *whole(1)])


def test_a_checksum_that_leaves_with_the_first_word_is_a_figure():
    assert fold([Started(terms(), 0, True)]).statement().epsilon_server is None
    assert fold([Started(terms(), 0, False)]).statement().epsilon_server == 0


def test_a_choice_to_share_in_the_clear_that_data_make_is_a_release():
    said = fold([Started(terms(aggregation="hybrid", clear_by_data=True)), *whole(1)]).statement()
    assert said.epsilon_server is None and not said.private and "their data's choice" in said.reason
    said = fold([Started(terms(aggregation="hybrid")), *whole(1)]).statement()
    assert said.epsilon_server is not None and said.private


def test_a_log_that_contradicts_itself_is_refused():
    for events in ([Stepped(1, EVERYONE, 100)], [asked(1), Opened(2, EVERYONE, 100)], [*whole(1), Failed(1)]):
        with pytest.raises(DataError, match="for which nobody was asked"):
            fold([Started(terms()), *events])
    with pytest.raises(DataError, match="empty"):
        fold([])


# ---- lines and files ----

parties = st.sets(st.integers(0, 40)).map(lambda found: tuple(sorted(found)))


@given(parties)
def test_sets_of_parties_survive_as_ranges(found):
    assert parties_of(ranges(found)) == found


def test_a_large_cohort_is_a_short_line():
    assert len(unparse(asked(1, cohort=tuple(range(70_000))))) < 300


@given(parties, parties, parties, st.floats(0, 1e6), st.booleans(), st.booleans())
def test_an_event_survives_as_a_line(drawn, cohort, clear, share, exposed, figures):
    event = Asked(3, drawn, cohort, clear, share, exposed, figures)
    assert parse(unparse(event)) == event


@pytest.mark.parametrize(
    "mechanism", [NOISED, Noised(NOISED.encoding, True), Bounded(NOISED.encoding), Cut(NOISED.encoding, width=5)]
)
def test_terms_survive_with_their_mechanism(mechanism):
    event = Started(terms(mechanism=mechanism), 3)
    assert parse(unparse(event)) == event
    assert isinstance(parse(unparse(event)).terms.mechanism, Mechanism)


@given(st.data())
def test_counting_line_by_line_is_counting_all_at_once(tmp_path_factory, data):
    """The account of a run that goes on, and of whoever reads its file later."""
    entropy = data.draw(st.sampled_from(["os", "seeded"]))
    start = Started(terms(entropy=entropy, sampling=data.draw(st.sampled_from([1.0, 0.5]))))
    folder = tmp_path_factory.mktemp("log")
    log = ReleaseLog.create(folder)
    log.append(start)
    running = Releases(log)
    for round in range(1, 5):
        survivors = data.draw(st.sampled_from([EVERYONE, (0, 2, 3, 4), (1, 5)]))
        running.note(asked(round, clear=data.draw(st.sampled_from([(), (1,), EVERYONE]))))
        running.note(Opened(round, survivors, 100))
        running.note(data.draw(st.sampled_from([Stepped(round, survivors, 100), Failed(round)])))
    again = fold(ReleaseLog.read(folder).events)
    assert again.as_dict() == running.account.as_dict()


def written(tmp_path, events):
    log = ReleaseLog.create(tmp_path)
    for event in events:
        log.append(event)
    return log


def test_a_line_that_was_cut_short_stands_for_nothing(tmp_path):
    log = written(tmp_path, [Started(terms()), *whole(1)])
    with log.path.open("ab") as stream:
        stream.write(b'{"event": "asked", "rou')
    assert ReleaseLog.read(tmp_path).events == log.events
    again = ReleaseLog.go_on(tmp_path, terms())
    again.append(Ended(1))
    assert ReleaseLog.read(tmp_path).events == [*log.events, Ended(1)]


def test_nobody_writes_on_where_somebody_else_does(tmp_path):
    log = written(tmp_path, [Started(terms())])
    other = ReleaseLog.go_on(tmp_path, terms())
    other.append(asked(1))
    with pytest.raises(DataError, match="was changed by somebody else"):
        log.append(asked(1))
    assert ReleaseLog.read(tmp_path).events == other.events


def test_the_log_of_another_run_is_not_gone_on_with(tmp_path):
    written(tmp_path, [Started(terms()), *whole(1)])
    with pytest.raises(DataError, match="log of a run with other settings"):
        ReleaseLog.go_on(tmp_path, terms(colluding=1))


@pytest.mark.parametrize(
    "line, said",
    [
        ("{}", "line 2 cannot be used"),
        ("[1]", "line 2 cannot be used"),
        ('{"event": "guessed"}', "line 2 cannot be used"),
        ('{"event": "failed", "round": "1"}', "line 2 cannot be used .round = '1'"),
        ('{"event": "failed", "round": true}', "line 2 cannot be used"),
        ('{"event": "failed"}', "expected round"),
        ('{"event": "opened", "round": 1, "parties": "3-1,0", "coordinates": 1}', "do not ascend"),
        ("\xff", "line 2 cannot be used"),
    ],
)
def test_a_damaged_line_is_named(line, said, tmp_path):
    log = written(tmp_path, [Started(terms())])
    with log.path.open("ab") as stream:
        stream.write(line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=f"releases.jsonl.*{said}"):
        ReleaseLog.read(tmp_path)


def test_a_log_knows_whether_it_holds_what_a_checkpoint_saw(tmp_path):
    log = written(tmp_path, [Started(terms()), *whole(1)])
    position = log.position()
    log.append(asked(2))
    ReleaseLog.read(tmp_path).check_covers(position)
    content = log.path.read_bytes()
    for damaged in (content[: position["bytes"] - 2], content.replace(b"0-5", b"0-4", 1)):
        log.path.write_bytes(damaged)
        with pytest.raises(DataError, match="older than the checkpoint beside it, or was changed"):
            ReleaseLog.read(tmp_path).check_covers(position)


# ---- in the engine ----


def test_the_opening_of_a_sum_is_on_the_disk_before_it_is_asked_for(make_config, run_in_memory, monkeypatch):
    from fedmpi.runtime.mailbox import Mailbox
    from fedmpi.secagg.messages import UnmaskRequest

    config, seen, answer = make_config("--entropy os --aggregation secure --parties 5"), [], Mailbox.answer

    def answers(self, messages):
        if any(isinstance(message, UnmaskRequest) for _, message in messages):
            seen.append(json.loads((config.out / "releases.jsonl").read_text().splitlines()[-1]))
        answer(self, messages)

    monkeypatch.setattr(Mailbox, "answer", answers)
    run_in_memory(config, 3)
    assert [(said["event"], said["round"], said["parties"]) for said in seen] == [
        ("opened", 1, "0-4"),
        ("opened", 2, "0-4"),
    ]


def test_every_number_of_a_run_comes_from_its_log(make_config, run_in_memory, capsys):
    config = make_config("--entropy os --aggregation hybrid --clear-parties 1 --parties 6 --dropout 2:3:mask")
    summary = run_in_memory(config, 3)
    account = fold(ReleaseLog.read(config.out).events)
    assert account.as_dict() == json.loads((config.out / "privacy.json").read_text())
    last = json.loads((config.out / "rounds.jsonl").read_text().splitlines()[-1])
    for name in ("epsilon_outside", "epsilon_server", "epsilon_party", "epsilon_nominal"):
        assert getattr(account.statement(), name) == summary[name] == last[name]
    capsys.readouterr()
    assert main(["privacy", str(config.out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == account.as_dict()


def test_privacy_of_a_run_that_did_not_end(make_config, run_in_memory, monkeypatch, capsys):
    from fedmpi.runtime.server import Server

    config, whole_round = make_config("--entropy os --rounds 5 --checkpoint-every 0"), Server.aggregate

    def stops(self, round, cohort):
        if round == 3:
            raise KeyboardInterrupt
        return whole_round(self, round, cohort)

    monkeypatch.setattr(Server, "aggregate", stops)
    with pytest.raises(KeyboardInterrupt):
        run_in_memory(config, 3)
    capsys.readouterr()
    assert main(["privacy", str(config.out)]) == 0
    said = capsys.readouterr().out
    assert "3 rounds asked for" in said and "2 steps of the model" in said and "did not end" in said
    assert "epsilon_outside" in said and "rank 0 sees the party's own update" in said
    assert fold(ReleaseLog.read(config.out).events).server.joined() == [3] * 4


def test_a_summary_that_says_otherwise_is_told(make_config, run_in_memory, capsys):
    config = make_config("--entropy os")
    run_in_memory(config, 3)
    path = config.out / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"epsilon_outside": 0.1}))
    assert main(["privacy", str(config.out)]) == 2
    assert "summary.json has epsilon_outside 0.1, the log of releases gives" in capsys.readouterr().err


def test_privacy_of_no_run_is_one_line(tmp_path, capsys):
    assert main(["privacy", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["privacy"]) == 2 and main(["privacy", "--help"]) == 0


def test_a_seeded_run_that_is_resumed_has_the_account_of_one_that_was_not(make_config, run_in_memory, monkeypatch):
    from fedmpi.runtime.server import Server

    flags = "--rounds 4 --checkpoint-every 2 --sampling 0.7 --min-cohort 1"
    through = make_config(flags)
    run_in_memory(through, 3)
    config, round_ = make_config(flags), Server.round

    def stops(self, round):
        if round == 4:
            raise KeyboardInterrupt
        round_(self, round)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "round", stops)
        with pytest.raises(KeyboardInterrupt):
            run_in_memory(config, 3)
    run_in_memory(resolve(["--resume", str(config.out)]), 3)
    assert (config.out / "privacy.json").read_text() == (through.out / "privacy.json").read_text()


# ---- a rank 0 that lies ----

ACTIVE = dict(adversary="active", least_noises=4, least_cohort=PARTIES)


def test_towards_a_rank_0_that_lies_every_round_counts_with_the_least_noise_that_it_can_leave():
    quiet = fold([Started(terms(**ACTIVE))])
    expected = Accountant("rdp")
    expected.spend(NOISED.of_sum(SIGMA / math.sqrt(PARTIES), 4, 100), 1.0, 4)
    assert quiet.lying() == pytest.approx(expected.epsilon(DELTA))
    events = [Started(terms(**ACTIVE))]
    for round in range(1, 5):
        events += [asked(round), Opened(round, EVERYONE, 100), Stepped(round, EVERYONE, 100)]
    honest = fold(events)
    assert honest.lying() == quiet.lying() > honest.statement().epsilon_server
    assert honest.as_dict()["epsilon_server_lying"] == honest.lying()


def test_a_run_that_was_resumed_under_fresh_noise_may_have_shown_a_liar_everything_twice():
    """After which round it goes on is rank 0's word."""
    twice = Accountant("rdp")
    twice.spend(NOISED.of_sum(SIGMA / math.sqrt(PARTIES), 4, 100), 1.0, 8)
    resumed = fold([Started(terms(**ACTIVE)), Started(terms(**ACTIVE), after=2)]).lying()
    assert resumed == pytest.approx(twice.epsilon(DELTA))
    seeded = terms(**ACTIVE, entropy="seeded")
    assert fold([Started(seeded), Started(seeded, after=2)]).lying() == fold([Started(seeded)]).lying()


@pytest.mark.parametrize(
    "changed, event",
    [({}, None), (ACTIVE, Shown(1, "party")), (ACTIVE | {"support": "union"}, None)],
    ids=["passive", "figures were shown", "no epsilon at all"],
)
def test_where_nothing_holds_towards_rank_0_nothing_holds_towards_one_that_lies(changed, event):
    mechanism = Noised(NOISED.encoding, multiplier=SIGMA, own_coordinates=changed.get("support") == "union")
    account = fold([Started(terms(**changed, mechanism=mechanism)), *([event] if event else [])])
    assert account.lying() is None


def test_a_log_from_before_there_was_such_a_figure_is_read():
    line = json.loads(unparse(Started(terms())))
    for name in ("least_noises", "least_cohort"):
        del line["terms"][name]
    assert parse(json.dumps(line)) == Started(terms())
