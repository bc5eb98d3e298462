"""A rank that dies at any moment is a dropout of its parties in that phase, and nothing else: in memory, where a rank is a thread."""

import json

import pytest
from dying_ranks import plain, sums

from benchmarks.chaos import MOMENTS
from fedmpi.errors import TransportError
from fedmpi.runtime.placement import Placement, named
from fedmpi.runtime.rank import Rank
from fedmpi.transport.heartbeat import BEAT, Silence


@pytest.mark.parametrize("on_loss", ["drop", "adopt"])
@pytest.mark.parametrize("what, round", [(what, round) for what, round, _ in MOMENTS if what not in ("work", "part")])
def test_a_rank_that_dies_is_what_a_plan_would_have_been(what, round, on_loss, play, tmp_path, capsys):
    lost = play(f"--on-loss {on_loss}", {3: (what, round)})
    said = capsys.readouterr().out
    losses = lost["dropouts"]["lost"]
    assert [loss["rank"] for loss in losses["ranks"]] == [3] and losses["ranks"][0]["parties"] == (4, 5)
    assert said.count("rank 3 is gone") == 1, "once"
    planned = play(plain(losses["plan"]), name="planned", ranks=2)
    assert lost["model_sha256"] == planned["model_sha256"]
    assert sums(tmp_path, "run") == sums(tmp_path, "planned"), "and every sum on the way"
    assert lost["epsilon_outside"] == planned["epsilon_outside"]
    rounds = {int(event.split(":")[0]) for event in losses["plan"]}
    if on_loss == "adopt":
        assert len(rounds) <= 1, "back in the next round"
    elif what not in ("Stop",):
        assert max(rounds) == 6, "out for the rest of the run"


def test_several_die_at_once_a_whole_host_of_them(play, tmp_path):
    faults = {1: ("MaskedInput", 3), 2: ("ShareKeys", 3), 4: ("Unmask", 3)}
    lost = play("--on-loss adopt --threshold 9 --parties 16", faults, ranks=9)
    plan = lost["dropouts"]["lost"]["plan"]
    assert sorted(loss["rank"] for loss in lost["dropouts"]["lost"]["ranks"]) == [1, 2, 4]
    planned = play(f"{plain(plan)} --parties 16", name="planned", ranks=2)
    assert lost["model_sha256"] == planned["model_sha256"] and sums(tmp_path, "run") == sums(tmp_path, "planned")


def test_who_took_over_may_die_as_well(play, tmp_path):
    lost = play("--on-loss adopt --threshold 5", {2: ("MaskedInput", 3), 1: ("Adopted", 0)})
    plan = lost["dropouts"]["lost"]["plan"]
    planned = play(plain(plan), name="planned", ranks=2)
    assert {event.split(":")[0] for event in plan} == {"3"}
    assert lost["model_sha256"] == planned["model_sha256"]


def test_a_party_whose_state_is_nowhere_stays_out(play, tmp_path, monkeypatch, capsys):
    """Hosts with disks of their own: the others do not see what it kept."""
    from fedmpi.errors import DataError
    from fedmpi.runtime import checkpoint

    def nowhere(config, algorithm, parties, round, mark):
        raise DataError(f"checkpoint has no state of party {parties[0]}")

    monkeypatch.setattr(checkpoint, "load_parties", nowhere)
    lost = play("--on-loss adopt", {3: ("ShareKeys", 5)})
    said = capsys.readouterr().out
    assert "left out for the rest of the run: cannot take over" in said and "has no state of party" in said
    plan = lost["dropouts"]["lost"]["plan"]
    assert {event.split(":")[0] for event in plan} == {"5", "6"}


@pytest.mark.parametrize(
    "what, round", [("Train", 3), ("ShareKeys", 3), ("Unmask", 3), ("EvalReport", 2), ("Checkpoint", 2)]
)
def test_a_silent_rank_that_comes_back_gets_its_parties_back(what, round, play, woken, tmp_path, capsys):
    """Others had them meanwhile; nothing of what they did is lost, nor of what the ledger counts."""
    lost = play("--on-loss adopt --rounds 9", dozing={3: (what, round, woken(5))})
    said = capsys.readouterr().out
    assert said.count("rank 3 has not been heard of") == said.count("rank 3 is heard of again") == 1
    assert "parties 4 to 5 back on rank 3" in said
    plan = lost["dropouts"]["lost"]["plan"]
    assert {event.split(":")[0] for event in plan} <= {"3"} and lost["dropouts"]["caught"] == 0
    planned = play(f"{plain(plan)} --rounds 9", name="planned", ranks=2)
    assert lost["model_sha256"] == planned["model_sha256"] and sums(tmp_path, "run") == sums(tmp_path, "planned")


def test_a_silent_rank_that_comes_back_is_told_to_leave(play, woken, tmp_path, capsys):
    lost = play("--on-loss drop", dozing={3: ("ShareKeys", 3, woken(5))})
    said = capsys.readouterr()
    assert "rank 3: rank 0 had not heard of it for too long, and went on without it" in said.err
    plan = lost["dropouts"]["lost"]["plan"]
    assert lost["model_sha256"] == play(plain(plan), name="planned", ranks=2)["model_sha256"]
    assert lost["dropouts"]["caught"] == 0


@pytest.mark.parametrize("on_loss", ["drop", "adopt"])
def test_a_rank_that_keeps_no_checkpoint_in_time_is_lost_and_the_others_have_one(
    on_loss, play, woken, tmp_path, monkeypatch
):
    """Its heart beats all the while. Had the checkpoint been left out for it, two of them in a row would have left nothing to resume from."""
    whole, slow = Rank.checkpoint, woken(6)

    def checkpoint(self, message):
        if self._endpoint.rank == 3 and message.round in (2, 4):
            slow.wait()
        whole(self, message)

    monkeypatch.setattr(Rank, "checkpoint", checkpoint)
    lost = play(f"--on-loss {on_loss} --round-deadline 2")
    assert [(loss["rank"], loss["why"]) for loss in lost["dropouts"]["lost"]["ranks"]] == [
        (3, "kept no checkpoint within round_deadline")
    ]
    plan = lost["dropouts"]["lost"]["plan"]
    assert {event.split(":")[0] for event in plan} == (set() if on_loss == "adopt" else {"3", "4", "5", "6"})
    assert lost["model_sha256"] == play(plain(plan), name="planned", ranks=2)["model_sha256"]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir() if (path / "server.json").exists())
    assert kept == ["2", "4"]


def test_every_round_that_is_done_once_more_has_a_deadline_of_its_own(play, tmp_path, monkeypatch):
    """A rank that takes over parties of a long time ago is not given up for it."""
    monkeypatch.setenv("FEDMPI_PACE", "0.9")  # seconds of a party's work: a rank's two take 1.8, five rounds of one 4.5
    lost = play("--on-loss adopt --rounds 6 --checkpoint-every 0 --eval-every 0 --round-deadline 4", {3: ("Train", 5)})
    plan = lost["dropouts"]["lost"]["plan"]
    assert {event.split(":")[0] for event in plan} == {"5"}
    monkeypatch.setenv("FEDMPI_PACE", "0")
    flags = "--checkpoint-every 0 --eval-every 0"
    assert lost["model_sha256"] == play(f"{flags} {plain(plan)}", name="planned", ranks=2)["model_sha256"]
    assert lost["dropouts"]["lost"]["ranks"][0]["rank"] == 3


def test_with_too_few_left_the_run_ends_and_is_resumed_with_everybody(play, tmp_path):
    with pytest.raises(TransportError, match=r"4 of 8 parties are left, a sum needs 6: no later round can have one"):
        play("", {2: ("Train", 4), 3: ("Train", 4)})
    again = play(f"--resume {tmp_path / 'run'}")
    assert again["model_sha256"] == play(name="whole")["model_sha256"]


def test_end_ends_it(play):
    with pytest.raises(TransportError, match="^round 3: rank 2 is gone$"):
        play("--on-loss end", {2: ("ShareKeys", 3)})


def test_nobody_left_ends_it(play):
    with pytest.raises(TransportError, match="is gone$"):
        play("--aggregation plain", dict.fromkeys(range(1, 5), ("Train", 2)))


@pytest.mark.parametrize("on_loss", ["drop", "adopt"])
def test_interrupted_after_a_loss_and_resumed(on_loss, play, tmp_path):
    """Who was lost stays lost, who was taken over is there: as if it had not been interrupted."""
    whole = play(f"--on-loss {on_loss}", {2: ("ShareKeys", 3)}, name="whole")
    with pytest.raises(TransportError):
        play(f"--on-loss {on_loss}", {2: ("ShareKeys", 3), **dict.fromkeys((1, 3, 4), ("Train", 6))})
    resumed = play(f"--resume {tmp_path / 'run'}", ranks=3)
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert resumed["dropouts"]["lost"]["plan"] == whole["dropouts"]["lost"]["plan"]
    assert [loss["rank"] for loss in resumed["dropouts"]["lost"]["ranks"]] == [2]


def test_the_rows_and_the_terminal_say_what_was_lost(play, tmp_path, capsys):
    play("", {3: ("ShareKeys", 3)})
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [row.get("lost", 0) for row in rows] == [0, 0, 2, 2, 2, 2]
    assert [row["survivors"] for row in rows] == [8, 8, 6, 6, 6, 6]
    said = capsys.readouterr().out
    assert "round 3: rank 3 is gone; parties 4 to 5 left out for the rest of the run" in said


def test_parties_are_shared_out_to_who_hosts_fewest_and_stay_in_one_place():
    placement = Placement(20, 5)
    for lost in (2, 4):
        for host, part in placement.share_out(lost, {1, 3}):
            placement.move(part, host)
        assert placement.parties_of(lost) == ()
    assert sorted(placement.parties_of(1) + placement.parties_of(3)) == list(range(20))
    assert abs(len(placement.parties_of(1)) - len(placement.parties_of(3))) <= 2
    assert sorted(party for _, block in placement.by_block(range(20)) for party in block) == list(range(20))
    assert all(party in placement.parties_of(placement.rank_of(party)) for party in range(20))
    assert named((3,)) == "party 3" and named((4, 0, 1, 2, 7)) == "parties 0 to 2, 4 and 7"


def test_silence_is_counted_while_somebody_looks(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("fedmpi.transport.heartbeat.time.monotonic", lambda: now[0])
    silence = Silence((1, 2), deadline=10)

    def after(seconds, *heard):
        now[0] += seconds
        for rank in heard:
            silence.heard(rank)
        return silence.look()

    for _ in range(4):
        assert after(1, 1, 2) == ([], [])
    assert after(3600, 1) == ([], []), "nobody looked for an hour: nobody is blamed for it"
    assert after(2 * BEAT, 1) == ([2], []), "spoken of at half of the deadline"
    assert after(2, 1) == ([], []), "once"
    assert after(2, 1) == ([], [])
    assert after(2, 1) == ([], [2])
    assert after(1, 1, 2) == ([], []), "there again"
