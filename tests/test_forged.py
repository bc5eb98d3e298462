"""What one rank says that cannot be: rank 0 goes on without it and believes none of it; a client ends the run with one line."""

import dataclasses
import json

import numpy as np
import pytest

from fedmpi.aggregation.protocol import ProtocolRules, Session
from fedmpi.cli import resolve
from fedmpi.errors import ConfigError, FedmpiError, ProtocolError
from fedmpi.privacy.encoding import Encoding
from fedmpi.runtime.server import Server
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.messages import EvalReport, Fill, Model, PlainInput, Tally, Train, TrainReport


@pytest.fixture
def forge(monkeypatch):
    """Rank 1 sends what `change` makes of its messages of a kind."""

    def forge(kind, change):
        send = Endpoint.send

        def forged(self, rank, message):
            if self.rank != 1 or not isinstance(message, kind):
                return send(self, rank, message)
            for made in change(message):
                send(self, rank, made)

        monkeypatch.setattr(Endpoint, "send", forged)

    return forge


def rows(config):
    return [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]


def test_a_report_of_another_shape_costs_its_rank_the_round(make_config, run_in_memory, forge, capsys):
    planned = run_in_memory(make_config("--dropout 1:0:advertise,1:1:advertise,2:0:advertise,2:1:advertise"), 3)
    forge(TrainReport, lambda m: [dataclasses.replace(m, figures=np.ones((len(m.parties), 2)))])
    summary = run_in_memory(make_config(), 3)
    assert summary["model_sha256"] == planned["model_sha256"] and summary["dropouts"]["caught"] == 2
    said = capsys.readouterr().out
    assert said.count("rank 1 sent a report of 2 figures a party, expected 5; parties 0 to 1 left out") == 2


@pytest.mark.parametrize("column, value", [(-2, -1.0), (-1, 1.5), (-1, np.nan)], ids=["norm", "share", "no share"])
def test_a_report_that_cannot_be_is_not_read(column, value, make_config, run_in_memory, forge):
    def change(m):
        m.figures[:, column] = value
        return [m]

    forge(TrainReport, change)
    config = make_config()
    assert run_in_memory(config, 3)["dropouts"]["benched"] == [0, 1]
    assert all(row["survivors"] == 2 and row["update_norm"] > 0 and 0 <= row["clipped"] <= 1 for row in rows(config))


def test_a_loss_that_is_not_finite_is_no_offence_and_in_no_mean(make_config, run_in_memory, forge):
    def change(m):
        m.figures[:, 0] = np.inf
        return [m]

    forge(TrainReport, change)
    config = make_config()
    assert run_in_memory(config, 3)["dropouts"]["caught"] == 0
    assert all(row["survivors"] == 4 and np.isfinite(row["loss"]) for row in rows(config))


def test_a_report_is_read_once(make_config, run_in_memory, forge):
    forge(TrainReport, lambda m: [m, dataclasses.replace(m, figures=m.figures + 100)])
    config = make_config()
    run_in_memory(config, 3)
    assert all(row["loss"] < 50 for row in rows(config))


def test_a_report_that_nobody_asked_for_is_not_read(make_config, run_in_memory, forge):
    """It would be a figure in rounds.jsonl of a run that says that no figure left."""
    forge(PlainInput, lambda m: [TrainReport(m.round, m.party, (m.party,), np.ones((1, 5))), m])
    config = make_config("--entropy os")
    summary = run_in_memory(config, 3)
    assert summary["epsilon_server"] is not None and summary["dropouts"]["caught"] == 2
    assert not any("loss" in row or "update_norm" in row for row in rows(config))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: [dataclasses.replace(m, parties=(0, 0))],
        lambda m: [dataclasses.replace(m, figures=m.figures[:, :1])],
        lambda m: [dataclasses.replace(m, figures=m.figures * np.nan)],
        lambda m: [dataclasses.replace(m, figures=m.figures + 1)],
    ],
    ids=["one party twice", "columns", "not a number", "more right than there are"],
)
def test_test_figures_that_cannot_be_are_in_no_mean(change, make_config, run_in_memory, forge, capsys):
    forge(EvalReport, change)
    summary = run_in_memory(make_config("--eval-every 1"), 3)
    assert 0 <= summary["accuracy"] <= 1 and 0 <= summary["accuracy_untrained"] <= 1
    assert summary["dropouts"]["benched"] == [0, 1], "in round 0 and in round 1"
    said = capsys.readouterr().out
    assert said.count("test figures of round 0 are those of 2 of 4 parties") == 1


def test_test_figures_are_counted_once(make_config, run_in_memory, forge):
    """The second one comes when nobody waits for it, or costs its rank the test."""
    forge(EvalReport, lambda m: [m, m])
    assert 0 <= run_in_memory(make_config("--eval-every 1"), 3)["accuracy"] <= 1


TALLIES = {
    "empty": lambda t: dataclasses.replace(t, facts={}),
    "no list of costs": lambda t: dataclasses.replace(t, facts=t.facts | {"costs": 1}),
    "ragged costs": lambda t: dataclasses.replace(t, facts=t.facts | {"costs": [[1]]}),
    "somebody else's costs": lambda t: dataclasses.replace(t, facts=t.facts | {"costs": [[3, "update", "MPI", 1.0]]}),
    "an unknown cost": lambda t: dataclasses.replace(t, facts=t.facts | {"costs": [[0, "update", "fun", 1.0]]}),
    "no table of seconds": lambda t: dataclasses.replace(t, facts=t.facts | {"cpu": 3}),
    "seconds below zero": lambda t: dataclasses.replace(t, facts=t.facts | {"cpu": {"setup": -1e9}}),
    "seconds without end": lambda t: dataclasses.replace(t, facts=t.facts | {"cpu": {"setup": float("nan")}}),
    "seconds of nothing": lambda t: dataclasses.replace(t, facts=t.facts | {"cpu": {"x\ny": 1.0}}),
    "no memory": lambda t: dataclasses.replace(t, facts=t.facts | {"pss": -1}),
    "another rank's rows": lambda t: changed(t, 5, 2),
    "the way down": lambda t: changed(t, 4, 0),
    "somebody else's row": lambda t: changed(t, 6, 3),
    "an unknown phase": lambda t: changed(t, 2, 99),
    "a byte more in a row": lambda t: changed(t, 8, 1),
    "less than nothing": lambda t: changed(t, 11, -5),
    "more than can be counted": lambda t: changed(t, 10, 2**63 - 1),
    "ages": lambda t: dataclasses.replace(t, facts=t.facts | {"cpu": {"setup": 1e308}}),
    "words": lambda t: dataclasses.replace(t, facts=t.facts | {"cpu": {"[/red]\x1b[2J": 1.0}}),
    "fewer given": lambda t: dataclasses.replace(t, bytes_given=t.bytes_given - 1),
    "a byte more in both": lambda t: dataclasses.replace(
        changed(t, 8, 1), bytes_given=int(changed(t, 8, 1).rows[:, 8:10].sum())
    ),
}


def changed(tally, column, value):
    rows = tally.rows.copy()
    rows[-1, column] = value
    return dataclasses.replace(tally, rows=rows)


@pytest.mark.parametrize("lie", TALLIES)
def test_a_tally_that_cannot_be_is_not_used(lie, make_config, run_in_memory, monkeypatch, capsys):
    """The ledger of the others still holds to the byte: a run that cannot show that fails."""
    whole = Endpoint._dispatch

    def lying(self, rank, message):
        if self.rank == 1 and isinstance(message, Tally):
            message = TALLIES[lie](message)
        return whole(self, rank, message)

    monkeypatch.setattr(Endpoint, "_dispatch", lying)
    config = make_config("--checkpoint-every 1")
    summary = run_in_memory(config, 3)
    assert summary["untallied_ranks"] == [1] and summary["dropouts"]["benched"] == [0, 1]
    assert {
        line.split(",")[5] for line in (config.out / "messages.csv").read_text().splitlines() if ",up," in line
    } == {"2"}
    said = capsys.readouterr().out
    assert said.count("rank 1 sent a tally that cannot be") == 2 and "\x1b" not in said


def test_a_tally_that_never_comes_is_named_and_the_results_are_there(make_config, run_in_memory, monkeypatch, capsys):
    whole = Endpoint.send_tally
    monkeypatch.setattr(Endpoint, "send_tally", lambda self, rank, facts: self.rank == 2 and whole(self, rank, facts))
    config = make_config("--round-deadline 5")
    honest = run_in_memory(config, 3)
    assert honest["untallied_ranks"] == [1] and (config.out / "model.npz").exists()
    assert "end of the run: no Tally from ranks [1] (round_deadline)" in capsys.readouterr().out


def test_a_tally_that_comes_unasked_costs_its_rank_the_round(make_config, run_in_memory, monkeypatch, capsys):
    """Its bytes and its rows would be missing together, and the ledger would still agree with itself."""
    from fedmpi.runtime.client import Client

    train = Client.train

    def early(self, model):
        if self.endpoint.rank == 1:
            self.send_tally()
        train(self, model)

    monkeypatch.setattr(Client, "train", early)
    config = make_config()
    summary = run_in_memory(config, 3)
    assert [row["survivors"] for row in rows(config)] == [2, 2] and summary["untallied_ranks"] == [1]
    assert capsys.readouterr().out.count("rank 1 sent Tally, which is not its turn") == 2


def test_nobody_speaks_under_another_ranks_name(make_config, run_in_memory, forge, capsys):
    forge(TrainReport, lambda m: [dataclasses.replace(m, party=3)])
    config = make_config()
    run_in_memory(config, 3)
    assert [row["survivors"] for row in rows(config)] == [2, 2]
    assert capsys.readouterr().out.count("rank 1 spoke for party 3, which it does not host") == 2


# ---- and rank 0 to a client ----


@pytest.mark.parametrize(
    "ask, said",
    [
        (lambda m: [m, m], "rank 0 asked for round 1 after round 1"),
        (lambda m: [dataclasses.replace(m, parties=(0, 9))], "parties that this rank does not host"),
        (lambda m: [Model(m.version, theta=np.zeros(3, np.float32)), m], "rank 0 sent a model of 3 coordinates"),
        (
            lambda m: [dataclasses.replace(m, model=bytes(32))],
            "rank 0 sent another model than the one that it speaks of",
        ),
        (
            lambda m: [m, Fill(m.round, -1, m.parties, m.cohort, m.hidden)],
            "asked a party to fill a round that is over, or that it is in",
        ),
    ],
    ids=["again", "strangers", "short", "another", "train and fill"],
)
def test_a_client_is_asked_once_for_what_it_has(ask, said, make_config, run_in_memory, monkeypatch):
    """Asked twice in one round it would release twice, with noise for one."""
    send = Endpoint.send

    def forged(self, rank, message):
        for made in ask(message) if isinstance(message, Train) and rank == 1 else [message]:
            send(self, rank, made)

    monkeypatch.setattr(Endpoint, "send", forged)
    with pytest.raises(ProtocolError, match=said):
        run_in_memory(make_config("--entropy os"), 3)


def test_noise_alone_is_not_given_where_there_is_none(make_config, run_in_memory, monkeypatch):
    monkeypatch.setattr(Server, "fillers", lambda self, round, drawn: (3,))
    monkeypatch.setattr("fedmpi.runtime.schedule.cohort", lambda config, round: (0, 1, 2))
    with pytest.raises(ProtocolError, match="asked for noise alone, but this method adds none"):
        run_in_memory(make_config("--epsilon inf --sampling 0.5"), 3)


# ---- honest runs and settings at their edges ----


@pytest.mark.parametrize("metrics", ["party", "none"])
def test_a_run_that_diverges_ends_in_one_line_or_well(metrics, cache, tmp_path, run_in_memory):
    flags = f"--preset demo-recsys --method fedmf --parties 12 --rounds 6 --server-lr 1e5 --metrics {metrics}"
    config = resolve([*flags.split(), "--graph", "complete", "--cache-dir", str(cache), "--out", str(tmp_path / "run")])
    try:
        run_in_memory(config, 3)
    except FedmpiError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("parties, rate, lost", [(100, 0.07, 7), (50, 0.14, 7), (100, 0.05, 5)])
def test_as_many_may_be_lost_as_the_graph_was_drawn_for(parties, rate, lost):
    config = resolve(f"--parties {parties} --graph regular --expected-dropout {rate} --aggregation secure".split())
    assert ProtocolRules(config).of(Session(1), parties, Encoding(1.0, 4, 8, 1)).tolerated == lost


def test_a_threshold_that_cannot_add_test_figures_up_is_refused_before_the_start(make_config, run_in_memory):
    flags = "--parties 12 --aggregation hybrid --clear-parties 0,1,2,3,4,5 --threshold 5 --metrics securesum"
    config = make_config(flags)
    with pytest.raises(ConfigError, match="threshold = 5: must be above half of the 12"):
        run_in_memory(config, 3)
    assert not config.out.exists()


def test_anchors_and_merges_are_no_repetition(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("a: &a {rounds: 3}\nrun: {<<: *a, parties: 9}\n")
    with pytest.raises(ConfigError, match="mine.yaml: .*a"):
        resolve(["--config", str(file)])  # there is no layer `a`, and that is all
    file.write_text("run: {? [a, b] : 1}\n")
    with pytest.raises(ConfigError):
        resolve(["--config", str(file)])
