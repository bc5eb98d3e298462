"""Losses at the worst of moments: each of these once gave a wrong model, a wrong accusation, or an end that nobody had asked for."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from dying_ranks import doom, plain, sums

from benchmarks.dying import Method
from fedmpi.cli import resolve
from fedmpi.errors import ProtocolError, TransportError
from fedmpi.report.sealed import read_sealed
from fedmpi.report.terminal import Terminal
from fedmpi.runtime.rank import Rank, run_client
from fedmpi.runtime.server import Server, run_server
from fedmpi.runtime.start import start_run
from fedmpi.transport.memory import MemoryEndpoint, run_ranks
from fedmpi.wire.control import Adopt, Release


def same_as_planned(lost, play, tmp_path, flags=""):  # noqa: F811
    planned = play(f"{plain(lost['dropouts']['lost']['plan'])} {flags}", name="planned", ranks=2)
    assert lost["model_sha256"] == planned["model_sha256"] and sums(tmp_path, "run") == sums(tmp_path, "planned")
    return planned


def test_who_is_back_has_nothing_left_of_those_that_it_had_taken_over(play, woken, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Rank 1 takes a party of rank 4 over, falls silent and comes back: others have that party now, and its state is theirs to keep."""
    held, checkpoint = {}, Rank.checkpoint

    def look(self, message):
        for client in self._clients:
            for party in client.parties:
                held.setdefault((message.round, party), set()).add(self._endpoint.rank)
        checkpoint(self, message)

    monkeypatch.setattr(Rank, "checkpoint", look)
    flags = "--on-loss adopt --rounds 11 --threshold 5"
    lost = play(flags, {4: ("ShareKeys", 3)}, dozing={1: ("ShareKeys", 5, woken(7))})
    said = capsys.readouterr().out
    assert "back on rank 1" in said
    assert held[10, 6] and all(len(held[10, party]) == 1 for party in range(8)), "a party's state is kept by one rank"
    assert lost["dropouts"]["caught"] == 0 and not lost["dropouts"]["benched"], said
    same_as_planned(lost, play, tmp_path, "--rounds 11")


@pytest.mark.parametrize("metrics", ["party", "none"])
@pytest.mark.parametrize("what, round", [("Unmask", 6), ("Stop", 0), ("Evaluate", 6)])
@pytest.mark.parametrize("on_loss", ["drop", "adopt"])
def test_every_party_is_kept_or_said_not_to_be(on_loss, what, round, metrics, play, tmp_path, capsys):  # noqa: F811
    play(f"--on-loss {on_loss} --keep-parties --metrics {metrics}", {3: (what, round)})
    said = capsys.readouterr().out
    kept = {p for file in (tmp_path / "run" / "parties").glob("*.npz") for p in read_sealed(file)["parties"].tolist()}
    assert kept >= {0, 1, 2, 3, 6, 7}
    assert len(kept) == 8 or on_loss == "drop" or what != "Unmask"
    assert kept == set(range(8)) or f"parties 4 to 5 may be lacking in {tmp_path}" in said, said


def test_who_cannot_take_its_parties_back_is_no_liar(play, woken, tmp_path, monkeypatch, capsys):  # noqa: F811
    """It stays without parties; what it had done for them is in its next tally, and nobody's offence."""

    def in_vain(self, message):
        self._answer("its disk is gone\nexit")

    monkeypatch.setattr(Rank, "come_home", in_vain)
    lost = play("--on-loss adopt --rounds 11", dozing={3: ("ShareKeys", 3, woken(5))})
    said = capsys.readouterr().out
    assert "rank 3 stays without parties: its disk is gone?exit" in said
    assert lost["dropouts"]["caught"] == 0 and not lost["dropouts"]["benched"], said
    same_as_planned(lost, play, tmp_path, "--rounds 11")


def test_parties_do_not_go_back_behind_what_they_released(play, monkeypatch):  # noqa: F811
    """A rank 0 that sends a rank its own parties back, of an earlier round, would have that round's updates twice."""
    whole = Server.round

    def round(self, round):
        if round == 4:
            self.mailbox.endpoint.send(1, Adopt(2, parties=self.mailbox.placement.home_of(1)))
        whole(self, round)

    monkeypatch.setattr(Server, "round", round)
    with pytest.raises(ProtocolError, match="sent this rank's parties back to round 2 after round 3"):
        play("--on-loss adopt")


def test_nor_by_way_of_a_rank_that_has_them_a_second_time():
    """Taken over, trained, released, and taken over again from before that."""
    config = SimpleNamespace(run=SimpleNamespace(on_loss="adopt", parties=8))
    home, block = (SimpleNamespace(parties=parties, trained=5, config=config) for parties in ((0, 1), (4,)))
    rank = Rank(None, home, None, None)
    rank._clients.append(block)
    rank.release(Release(parties=(4,)))
    assert rank._clients == [home]
    with pytest.raises(ProtocolError, match="once more, from before what they did here"):
        rank.adopt(Adopt(4, parties=(4,)))


def test_nobody_left_to_take_over_is_one_line(play, monkeypatch):  # noqa: F811
    """Rank 1 dies, and rank 2 was benched."""
    gather = Server.aggregate

    def aggregate(self, round, cohort):
        outcome = gather(self, round, cohort)
        if round == 3:
            self.mailbox.blame(2, "lied", at_once=True)
        return outcome

    monkeypatch.setattr(Server, "aggregate", aggregate)
    with pytest.raises(TransportError, match="no rank is left that could take"):
        play("--on-loss adopt --threshold 4 --aggregation plain", {1: ("Train", 3)}, ranks=3)


class Choosing(Method):
    """Parties 4 and 6 share in the clear, as their data have it."""

    chooses_clear = True

    def host(self, parties):
        super().host(parties)
        self.here = parties

    def clear_parties(self):
        return tuple(party for party in self.here if party in (4, 6))


@pytest.mark.parametrize("what", ["Setup", "Ready", "Train"])
def test_whose_choice_was_never_heard_is_hidden(what, play, tmp_path, capsys):  # noqa: F811
    """Rank 3 is lost before it could say that party 4 shares in the clear: whoever takes the party over does not do it either."""
    flags = "--method tests.test_losses_attacked:Choosing --aggregation hybrid --clear-rule x<=1 --on-loss adopt --threshold 4"
    lost = play(flags, {3: (what, 0)})
    said = capsys.readouterr().out
    assert lost["dropouts"]["caught"] == 0 and not lost["dropouts"]["benched"], said
    same_as_planned(lost, play, tmp_path)


class Own(Method):
    """Each party with coordinates of its own."""

    supports = ("union", "dense")

    def work(self, party, theta, round):
        whole = super().work(party, theta, round)
        support = np.arange(party * 3000, party * 3000 + 2000)
        return type(whole)(party, whole.values[support], support, whole.figures)


@pytest.mark.parametrize(
    "what, how",
    [
        ("SupportProposal", "secure"),
        ("AdvertiseKeys", "secure"),
        ("SupportProposal", "plain"),
        ("PlainInput", "plain"),
    ],
)
def test_coordinates_of_who_is_lost_are_those_of_the_plan(what, how, play, tmp_path):  # noqa: F811
    """Who is lost after it has named its coordinates has them in the union, and others have noise there."""
    flags = "--method tests.test_losses_attacked:Own --support union"
    lost = play(f"{flags} --aggregation {how} --on-loss adopt", {3: (what, 3)})
    same_as_planned(lost, play, tmp_path, flags)


def test_who_is_late_before_it_is_lost_is_in_the_plan(play, tmp_path, monkeypatch):  # noqa: F811
    """By default a phase has as long as a rank that is not heard of, and the phase began first."""
    silent, end = MemoryEndpoint.fall_silent, threading.Event()

    def unnoticed(self, until):
        time.sleep(2)
        silent(self, until)

    monkeypatch.setattr(MemoryEndpoint, "fall_silent", unnoticed)
    closing = Server.finish
    monkeypatch.setattr(Server, "finish", lambda self: (end.set(), closing(self))[1])
    lost = play("--phase-deadline 1", dozing={3: ("ShareKeys", 3, end)})
    assert {event.split(":")[0] for event in lost["dropouts"]["lost"]["plan"]} == {"3", "4", "5", "6"}
    same_as_planned(lost, play, tmp_path)


@pytest.mark.parametrize("on_loss", ["drop", "adopt"])
@pytest.mark.parametrize("what", ["ShareKeys", "MaskedInput", "Unmask"])
def test_epsilon_under_secret_noise_is_that_of_the_plan(what, on_loss, play):  # noqa: F811
    """Noise that went with a rank is missing in it; rounds that are done once more release nothing."""
    flags = "--entropy os --metrics none"
    lost = play(f"{flags} --on-loss {on_loss}", {3: (what, 3)})
    plan = ",".join(lost["dropouts"]["lost"]["plan"])
    planned = play(f"{flags} --dropout {plan}", name="planned", ranks=2)
    names = [name for name in lost if name.startswith("epsilon_")]
    assert {name: lost[name] for name in names} == {name: planned[name] for name in names}
    assert lost["epsilon_kind"] == "holds" and lost["epsilon_outside"] is not None
    if what != "Unmask" or on_loss == "drop":
        whole = play(flags, name="whole", ranks=2)
        assert lost["epsilon_outside"] > whole["epsilon_outside"], "less noise, more said"


@pytest.mark.parametrize("aggregation", ["secure", "plain"])
def test_rating_methods_take_parties_over_with_their_factors(aggregation, tmp_path):
    """Rows of a whole rank in one message, and states that are rows of a matrix."""
    models = {}
    for name, fault in (("lost", ("Train", 3)), ("planned", None)):
        plan = f"--dropout {','.join(models['plan'])}" if fault is None and models["plan"] else ""
        short = f"--preset demo-recsys --rounds 5 --parties 60 --checkpoint-every 2 --graph complete --threshold 31 --aggregation {aggregation} --on-loss adopt"
        config = resolve([*short.split(), *plan.split(), "--out", str(tmp_path / name)])
        start = start_run(config, 5, "in memory", Terminal())

        def rank(endpoint, config=config, start=start, fault=fault):
            if endpoint.rank == 0:
                return run_server(endpoint, *start)
            if endpoint.rank == 2 and fault:
                doom(endpoint, *fault)
            return run_client(endpoint, config)

        try:
            summary = run_ranks(5, rank)[0]
        finally:
            start.record.close()
        models[name] = summary["model_sha256"]
        models.setdefault("plan", summary["dropouts"]["lost"]["plan"])
    assert models["plan"] and {event.split(":")[0] for event in models["plan"]} == {"3"}
    assert models["lost"] == models["planned"]
