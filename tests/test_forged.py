"""What one rank says that cannot be: rank 0 goes on without it, or ends the run with one line, and believes none of it."""

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
from fedmpi.wire.messages import EvalReport, Fill, PlainInput, Train, TrainReport


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


def test_a_report_of_another_shape_is_not_read(make_config, run_in_memory, forge, capsys):
    honest = run_in_memory(make_config(), 3)
    forge(TrainReport, lambda m: [dataclasses.replace(m, figures=np.ones((len(m.parties), 2)))])
    summary = run_in_memory(make_config(), 3)
    assert summary["model_sha256"] == honest["model_sha256"] and summary["dropouts"]["caught"] == 4
    assert "sent a report that nobody asked for so; it is not read" in capsys.readouterr().out


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
    assert summary["epsilon_server"] is not None and summary["dropouts"]["caught"] == 4
    assert not any("loss" in row or "update_norm" in row for row in rows(config))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda m: [m, m], "reported twice|not its turn"),
        (lambda m: [dataclasses.replace(m, parties=(0, 0))], "reported twice"),
        (lambda m: [dataclasses.replace(m, figures=m.figures[:, :1])], "sent 1 test figures a party, expected"),
        (lambda m: [dataclasses.replace(m, figures=m.figures * np.nan)], "not a finite number"),
    ],
    ids=["twice", "one party twice", "columns", "not a number"],
)
def test_test_figures_that_cannot_be_end_the_run(change, said, make_config, run_in_memory, forge):
    forge(EvalReport, change)
    config = make_config("--eval-every 1")
    if said.startswith(
        "reported twice|"
    ):  # the second comes when nobody waits for it, or while the others are waited for
        try:
            assert run_in_memory(config, 3)["accuracy"] <= 1
        except ProtocolError as error:
            assert "reported twice" in str(error)
        return
    with pytest.raises(ProtocolError, match=said):
        run_in_memory(config, 3)


@pytest.mark.parametrize(
    "facts", [{}, {"costs": 1}, {"costs": [], "cpu": 3, "pss": 1}, {"costs": [[1]], "cpu": {}, "pss": 1}]
)
def test_a_tally_that_cannot_be_read_is_one_line(facts, make_config, run_in_memory, monkeypatch):
    whole = Endpoint.send_tally
    monkeypatch.setattr(
        Endpoint, "send_tally", lambda self, rank, said: whole(self, rank, facts if self.rank == 1 else said)
    )
    with pytest.raises(ProtocolError, match="rank 1 sent a tally that cannot be read"):
        run_in_memory(make_config(), 3)


def test_a_tally_that_comes_unasked_is_not_lost(make_config, run_in_memory, monkeypatch):
    """Its bytes and its rows would be missing together, and the ledger would still agree with itself."""
    from fedmpi.runtime.client import Client

    train = Client.train

    def early(self, model):
        self.send_tally()
        train(self, model)

    monkeypatch.setattr(Client, "train", early)
    with pytest.raises(ProtocolError, match="sent Tally, which is not its turn"):
        run_in_memory(make_config(), 3)


def test_nobody_speaks_under_another_ranks_name(make_config, run_in_memory, forge):
    forge(TrainReport, lambda m: [dataclasses.replace(m, party=3)])
    with pytest.raises(ProtocolError, match="party 3: spoke through rank 1, which does not host it"):
        run_in_memory(make_config(), 3)


# ---- and rank 0 to a client ----


@pytest.mark.parametrize(
    "ask, said",
    [
        (lambda m: [m, m], "rank 0 asked for round 1 after round 1"),
        (lambda m: [dataclasses.replace(m, parties=(0, 9))], "parties that this rank does not host"),
        (lambda m: [dataclasses.replace(m, theta=m.theta[:-1])], "rank 0 sent a model of"),
        (
            lambda m: [m, Fill(m.round, -1, m.parties, m.cohort, m.hidden)],
            "asked a party to fill a round that is over, or that it is in",
        ),
    ],
    ids=["again", "strangers", "short", "train and fill"],
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
