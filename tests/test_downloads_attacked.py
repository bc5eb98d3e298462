"""Downloads as sums, attacked: methods whose step is no function, ranks that ask at odd moments."""

import csv
import dataclasses
import itertools
import threading
import time

import numpy as np
import pytest
from dying_ranks import player

from benchmarks.dying import Method as Dying
from fedmpi.runtime.server import Server


class Small(Dying):
    dimension = 400

    def initial(self):
        return np.zeros(self.dimension, np.float32)

    def support_size(self):
        return self.dimension


class Hidden(Small):
    """Its step differs from call to call: no rank makes the model that rank 0 has."""

    calls = itertools.count(1)

    def step(self, theta, total, rate, support):
        return super().step(theta, total, rate, support) + np.float32(next(self.calls))


class Scribbles(Small):
    """Its local work writes into the model that it is given."""

    def work(self, party, theta, round):
        done = super().work(party, theta, round)
        theta += 1
        return done


class InPlace(Small):
    """Its step writes into the model that it is given."""

    def step(self, theta, total, rate, support):
        theta += (rate * total).astype(np.float32)
        return theta


class Nothing(Small):
    """Updates of zeros: a sum without any coordinate."""

    def work(self, party, theta, round):
        done = super().work(party, theta, round)
        return dataclasses.replace(done, values=np.zeros_like(done.values))


@pytest.fixture
def play(tmp_path):
    def run(method, *flags, **options):
        return player(tmp_path, f"test_downloads_attacked:{method}")(*flags, **options)

    return run


def test_local_work_that_writes_into_the_model_is_refused_or_harmless(play):
    """Whatever the placement: the second party of a rank must not work from what the first one left."""
    models = set()
    for ranks in (2, 9):
        try:
            models.add(play("Scribbles", "--rounds 1", ranks=ranks, name=f"run{ranks}")["model_sha256"])
        except ValueError as error:
            assert "read-only" in str(error)
    assert len(models) <= 1


def test_a_step_in_place_is_refused_or_harmless_under_adoption(play):
    """What is done once more starts from the models of those rounds, and not from what a step made of them since."""
    try:
        lost = play("InPlace", "--on-loss adopt --checkpoint-every 4", {3: ("ShareKeys", 4)})
    except ValueError as error:
        assert "read-only" in str(error)
        return
    plan = lost["dropouts"]["lost"]["plan"]
    planned = play("InPlace", f"--aggregation plain --checkpoint-every 4 --dropout {','.join(plan)}", name="p", ranks=2)
    assert lost["model_sha256"] == planned["model_sha256"]


def test_parties_are_kept_where_metrics_stay_home_and_a_rank_has_to_ask(play, tmp_path):
    """The last Evaluate has no answer, and Stop comes before the model that was asked for."""
    play("Hidden", "--metrics none --keep-parties --rounds 1 --checkpoint-every 0")
    play("Small", "--metrics none --keep-parties --rounds 1 --checkpoint-every 0", name="wanted")
    kept, wanted = (sorted(path.name for path in (tmp_path / name / "parties").iterdir()) for name in ("run", "wanted"))
    assert kept == wanted


def test_a_sum_of_zeros_is_a_sum(play, capsys):
    play("Nothing", "--epsilon inf --aggregation plain")
    assert "has another model" not in capsys.readouterr().out


@pytest.mark.parametrize("what", ["AskModel", "Train"])
def test_a_silent_rank_that_has_asked_for_the_model_comes_back(what, play, capsys, monkeypatch):
    event, whole = threading.Event(), Server.round

    def round(self, round):
        if round == 5:
            event.set()
            time.sleep(0.3)
        whole(self, round)

    monkeypatch.setattr(Server, "round", round)
    try:
        play("Hidden", "--on-loss adopt --rounds 9 --round-deadline 10", dozing={3: (what, 2, event)})
    finally:
        event.set()
    said = capsys.readouterr().out
    assert "rank 3 is heard of again" in said and "parties 4 to 5 back on rank 3" in said


def test_what_a_rank_asked_for_is_in_its_partys_logical_bytes(play, tmp_path):
    """A party on each rank: what it would have moved on a link of its own is what was moved."""
    play("Hidden", "--rounds 3", ranks=9)
    with (tmp_path / "run" / "messages.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["message"] in ("Model", "Delta")]
    wire, logical = (sum(int(row[f"{kind}_payload"]) for row in rows) for kind in ("wire", "logical"))
    assert wire == logical


class Apart(Small):
    """Its first model is another one on each rank."""

    calls = itertools.count(1)

    def initial(self):
        return np.full(self.dimension, next(self.calls), np.float32)


@pytest.mark.parametrize("flags", ["", "--metrics none", "--download full", "--on-loss adopt"])
def test_a_first_model_that_differs_is_noticed(flags, play, tmp_path, capsys):
    summary = play("Apart", flags, {3: ("ShareKeys", 4)} if "adopt" in flags else None)
    assert "has another model than rank 0" in capsys.readouterr().out and summary["dropouts"]["caught"] == 0


class Peeks(Small):
    """Its test writes into the model that it is given."""

    def references(self, party, theta):
        theta += 1
        return super().references(party, theta)


def test_a_test_that_writes_into_the_model_is_refused_or_harmless(play):
    models = set()
    for ranks in (2, 9):
        try:
            models.add(play("Peeks", "--rounds 1", ranks=ranks, name=f"run{ranks}")["model_sha256"])
        except ValueError as error:
            assert "read-only" in str(error)
    assert len(models) <= 1


@pytest.mark.parametrize("asks", [False, True])
def test_who_was_late_is_what_a_plan_would_have_been_also_where_it_had_to_ask(asks, play, monkeypatch):
    """A party that vanishes by plan has done its local work. One whose rank asks for the model, and is late with that, has not."""
    from fedmpi.runtime.mirror import Mirror
    from fedmpi.transport.endpoint import Endpoint

    follow, send, slept = Mirror.follow, Endpoint.send, []

    def erring(self, delta):
        follow(self, delta)
        if asks and threading.current_thread().name == "rank 3" and delta.round == 2:
            self._set(self.theta + 1, self.version)

    def late(self, rank, message):
        named = "AskModel" if asks else "TrainReport"
        if self.rank == 3 and type(message).__name__ == named and message.round == (2 if asks else 3) and not slept:
            slept.append(time.sleep(4))
        send(self, rank, message)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "follow", erring)
        patch.setattr(Endpoint, "send", late)
        lost = play("Small", "--round-deadline 2 --checkpoint-every 0 --eval-every 0")
    plan = lost["dropouts"]["lost"]["plan"]
    assert {event.split(":")[0] for event in plan} >= {"3"}
    flags = f"--aggregation plain --checkpoint-every 0 --eval-every 0 --dropout {','.join(plan)}"
    assert lost["model_sha256"] == play("Small", flags, name="planned", ranks=2)["model_sha256"]
