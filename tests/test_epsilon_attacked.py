"""Attacks that made a run print an epsilon that did not hold; each failed on the code before."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedmpi.cli import resolve
from fedmpi.errors import ConfigError, DataError, ProtocolError
from fedmpi.privacy.account import fold
from fedmpi.privacy.accountant import Accountant, CohortView, calibrate
from fedmpi.privacy.releases import ReleaseLog
from fedmpi.runtime.server import Server

DELTA = 1e-5
TOY = "--method toy_parties:Steady --dataset none --support dense --clip 1 --epsilon 1 --entropy os"


@pytest.fixture
def toy(make_config, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))

    def make(flags, method="Steady"):
        return make_config(f"{TOY.replace('Steady', method)} --parties 6 {flags}")

    return make


def stopped(run_in_memory, monkeypatch, config, at, step="round", after=False):
    """Run until `step` of round `at`, or just after it, and die there."""
    whole = getattr(Server, step)

    def stops(self, round, *rest):
        if round == at and not after:
            raise KeyboardInterrupt
        result = whole(self, round, *rest)
        if round == at:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Server, step, stops)
        with pytest.raises(KeyboardInterrupt):
            run_in_memory(config, 3)


def resume(run_in_memory, config):
    return run_in_memory(resolve(["--resume", str(config.out)]), 3)


def privacy(config):
    return json.loads((config.out / "privacy.json").read_text())


def account(config):
    """Counted anew from the log of releases."""
    return fold(ReleaseLog.read(config.out).events)


# ---- sampling with losses ----


def test_where_parties_are_lost_sampling_does_not_amplify(toy, run_in_memory):
    """Parties 1 and 2 always vanish: whatever is released has party 0 in it or is a filler's noise, and how much noise is left
    tells which. Amplified with q = 0.1 it was printed as 0.6, and is above 2.6."""
    rounds, sampling = 40, 0.1
    lost = ",".join(f"{round}:{party}:mask" for round in range(1, rounds + 1) for party in (1, 2))
    flags = f"--parties 3 --min-cohort 1 --rounds {rounds} --sampling {sampling} --checkpoint-every 0 --dropout {lost}"
    config = toy(flags)
    summary = run_in_memory(config, 3)
    sigma, by_hand = calibrate(1.0, DELTA, sampling, rounds), Accountant("rdp")
    for row in map(json.loads, (config.out / "rounds.jsonl").read_text().splitlines()):
        if "survivors" in row:
            asked = row["cohort"] + row.get("fillers", 0)
            by_hand.spend(sigma * (row["survivors"] / asked) ** 0.5, 1.0)
    assert by_hand.rounds < rounds
    assert summary["epsilon_outside"] >= 0.999 * by_hand.epsilon(DELTA) > 1
    assert "without amplification by sampling" in summary["epsilon_reason"]


def test_one_lost_party_is_enough_and_is_remembered_across_a_resume(toy, run_in_memory, monkeypatch):
    whole = run_in_memory(toy("--sampling 0.5 --rounds 6"), 3)
    assert whole["epsilon_outside"] <= 1 + 1e-6 and "amplification" not in whole["epsilon_reason"]
    everybody = ",".join(f"1:{party}:unmask" for party in range(6))
    config = toy(f"--sampling 0.5 --rounds 6 --checkpoint-every 2 --aggregation secure --dropout {everybody}")
    stopped(run_in_memory, monkeypatch, config, 4)
    summary = resume(run_in_memory, config)
    assert summary["epsilon_outside"] > whole["epsilon_outside"]
    assert "without amplification by sampling" in summary["epsilon_reason"]


# ---- colluders ----


def test_colluders_who_could_open_an_input_are_refused(toy, run_in_memory):
    """They hold a threshold of the shares of both secrets: a sum hides nothing from them."""
    with pytest.raises(
        ConfigError, match="colluding = 4: so many open any single update with rank 0; must be at most 3"
    ):
        run_in_memory(toy("--aggregation secure --colluding 4"), 3)
    assert run_in_memory(toy("--aggregation secure --colluding 3"), 3)["epsilon_server"] is not None
    with pytest.raises(ConfigError, match=r"colluding = 100: .* at most --corrupt \(0.05\) of 200"):
        run_in_memory(toy("--parties 200 --aggregation secure --graph regular --colluding 100"), 3)


def test_in_a_small_cohort_the_same_colluders_count_as_seeing_every_update(toy, run_in_memory, monkeypatch):
    """Cohorts of 6 have a threshold of 4, cohorts of 9 one of 6."""
    from fedmpi.runtime import schedule

    monkeypatch.setattr(schedule, "cohort", lambda config, round: tuple(range(9 if round == 1 else 6)))
    config = toy("--parties 12 --sampling 0.5 --rounds 2 --aggregation secure --colluding 4")
    run_in_memory(config, 3)
    sigma = calibrate(1.0, DELTA, 0.5, 2)
    by_hand = CohortView(12)
    by_hand.join(np.arange(9), sigma * (5 / 9) ** 0.5)
    by_hand.join(np.arange(6), sigma / 6**0.5, adjacency=2.0)
    assert privacy(config)["epsilon_server"] == pytest.approx(by_hand.epsilon(DELTA), rel=1e-3)


# ---- interruptions ----


def test_a_run_interrupted_before_its_first_checkpoint_goes_on_with_its_account(toy, run_in_memory, monkeypatch):
    config = toy("--rounds 5 --aggregation secure --checkpoint-every 0")
    stopped(run_in_memory, monkeypatch, config, 4)
    assert resume(run_in_memory, config)["epsilon_outside"] > 1
    assert privacy(config)["rounds_accounted"] == 3 + 5


@pytest.mark.parametrize(
    "was, becomes",
    [
        ("entropy: os", "entropy: seeded"),
        ("sampling: 1.0", "sampling: 0.3"),
        ("colluding: 0", "colluding: 2"),
        ("denominator: expected", "denominator: survivors"),
        ("delta: 1.0e-05", "delta: 0.001"),
        ("epsilon: 1.0", "epsilon: 2.0"),
    ],
)
def test_a_run_whose_settings_were_changed_is_not_gone_on_with(was, becomes, toy, run_in_memory, monkeypatch):
    """What was released before counts under the old terms, what follows would be under the new ones."""
    config = toy("--rounds 5 --checkpoint-every 0")
    stopped(run_in_memory, monkeypatch, config, 4)
    path = config.out / "config.yaml"
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, becomes))
    with pytest.raises(DataError, match="log of a run with other settings"):
        resume(run_in_memory, config)


def test_the_log_of_a_run_is_not_overwritten(toy, run_in_memory, monkeypatch):
    config = toy("--rounds 5 --checkpoint-every 0")
    stopped(run_in_memory, monkeypatch, config, 4)
    (config.out / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="holds a run already"):
        run_in_memory(config, 3)


def test_a_new_run_beside_an_interrupted_one_is_warned(toy, run_in_memory, monkeypatch, capsys):
    config = toy("--rounds 3 --checkpoint-every 0")
    stopped(run_in_memory, monkeypatch, config, 2)
    monkeypatch.chdir(config.out.parent)
    default = resolve([*f"{TOY} --parties 6 --rounds 3".split(), "--cache-dir", config.data.cache_dir])
    default.out.parent.mkdir()
    config.out.rename(default.out)
    capsys.readouterr()
    run_in_memory(default, 3)
    assert "was interrupted after it released something under secret noise" in capsys.readouterr().out


def test_two_jobs_never_work_in_one_folder(toy, run_in_memory, monkeypatch):
    config = toy("--rounds 4 --checkpoint-every 2")
    stopped(run_in_memory, monkeypatch, config, 3)
    whole, seen = Server.round, []

    def also(self, round):
        if round == 4:
            with pytest.raises(ConfigError, match="another job is at work in it"):
                resume(run_in_memory, config)
            seen.append(round)
        whole(self, round)

    monkeypatch.setattr(Server, "round", also)
    resume(run_in_memory, config)
    assert seen == [4]


def test_an_account_older_than_its_checkpoint_is_not_believed(toy, run_in_memory, monkeypatch):
    config, old = toy("--rounds 6 --checkpoint-every 3"), {}
    whole = Server.round

    def copies(self, round):
        if round == 2:
            old["text"] = (config.out / "releases.jsonl").read_text()
        whole(self, round)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "round", copies)
        stopped(run_in_memory, patch, config, 5)
    (config.out / "releases.jsonl").write_text(old["text"])
    with pytest.raises(DataError, match="older than the checkpoint"):
        resume(run_in_memory, config)


def test_a_round_cut_short_counts_who_chose_to_share_in_the_clear(toy, run_in_memory, monkeypatch):
    config = toy("--rounds 4 --aggregation hybrid --checkpoint-every 1", "Chooses")
    stopped(run_in_memory, monkeypatch, config, 2, "aggregate", after=True)
    stopped(run_in_memory, monkeypatch, resolve(["--resume", str(config.out)]), 2)
    sigma, by_hand = calibrate(1.0, DELTA, 1.0, 4), CohortView(1)
    for _ in range(2):
        by_hand.join(0, sigma / 6**0.5, adjacency=2.0)
    assert account(config).server.epsilon(DELTA) == pytest.approx(by_hand.epsilon(DELTA), rel=1e-3), "seen twice"


def test_a_run_that_has_ended_under_secret_noise_is_not_run_again(toy, run_in_memory):
    config = toy("--rounds 3 --checkpoint-every 2")
    run_in_memory(config, 3)
    before = {path.name: path.read_bytes() for path in config.out.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match="that run has ended"):
        resume(run_in_memory, config)
    assert before == {path.name: path.read_bytes() for path in config.out.iterdir() if path.is_file()}


def test_an_update_in_the_clear_counts_from_when_it_was_asked_for(toy, run_in_memory, monkeypatch):
    """It may lie at rank 0's door, unread, when the job dies."""
    config = toy("--rounds 3 --checkpoint-every 1 --dropout 2:0:mask")
    stopped(run_in_memory, monkeypatch, config, 3)
    assert account(config).server.joined() == [2] * 6


def test_starting_over_leaves_nothing_of_the_attempt_before(toy, run_in_memory, monkeypatch):
    config = toy("--rounds 3 --checkpoint-every 0")
    stopped(run_in_memory, monkeypatch, config, 3)
    stale = config.out / "checkpoint" / "2" / "parties-00003-00005.npz"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half a file")
    resume(run_in_memory, config)
    assert not stale.exists()


def test_a_log_of_another_version_is_one_line(toy, run_in_memory, monkeypatch):
    config = toy("--rounds 3 --checkpoint-every 0")
    stopped(run_in_memory, monkeypatch, config, 3)
    path = config.out / "releases.jsonl"
    path.write_text(path.read_text().replace('"drawn":', '"taken":'))
    with pytest.raises(DataError, match=r"releases.jsonl line 2 cannot be used .*what was released is unknown"):
        resume(run_in_memory, config)


def test_another_entropy_settles_the_metrics_of_a_file_anew(toy, run_in_memory):
    config = toy("--entropy seeded")
    run_in_memory(config, 3)
    again = resolve(["--config", str(config.out / "config.yaml"), "--entropy", "os"])
    assert config.privacy.shown == "party" and again.privacy.shown == "none"


# ---- methods of a user's own ----


@pytest.mark.parametrize(
    "method, what", [("Picks", "chose coordinates of its own"), ("Longer", r"shape \(17,\), expected 16")]
)
def test_a_method_cannot_send_what_it_did_not_declare(method, what, toy, run_in_memory):
    with pytest.raises(ProtocolError, match=what):
        run_in_memory(toy("", method), 3)


def test_no_checksum_of_the_data_leaves_a_rank_that_keeps_its_figures(make_config, run_in_memory, monkeypatch):
    from fedmpi.runtime.handshake import Readiness
    from fedmpi.wire.messages import Ready

    seen, take = [], Readiness.take
    monkeypatch.setattr(
        Readiness, "take", lambda self, rank, message: (seen.append(message), take(self, rank, message))[1]
    )
    run_in_memory(make_config("--entropy os"), 3)
    assert [message.data for message in seen] == [0, 0] and isinstance(seen[0], Ready)
