"""Amplification by sampling with a smallest cohort: every round runs, filled up with noise, and epsilon is that of plain q.

The independent computation is dp-accounting's privacy loss distribution, from below (optimistic) and from above.
"""

import json
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.stats import binom, norm

from fedmpi.algorithm import Algorithm
from fedmpi.cli import resolve
from fedmpi.errors import ProtocolError
from fedmpi.privacy.account import Account
from fedmpi.privacy.accountant import calibrate
from fedmpi.privacy.encoding import choose_encoding
from fedmpi.privacy.mechanism import Noised
from fedmpi.privacy.releases import Asked, Stepped
from fedmpi.runtime import build, schedule
from fedmpi.wire.messages import Train

pytestmark = pytest.mark.slow

DELTA = 1e-5


def bounds(sigma, q, rounds):
    """epsilon of `rounds` Poisson-sampled Gaussians, (not more than the truth, not less than it)"""

    def one(pessimistic):
        single = pld.from_gaussian_mechanism(
            sigma, sampling_prob=q, pessimistic_estimate=pessimistic, value_discretization_interval=1e-3
        )
        return single.self_compose(rounds).get_epsilon_for_delta(DELTA)

    return one(False), one(True)


def account_of(config, dimension=400):
    privacy = config.privacy
    sigma = calibrate(privacy.epsilon, privacy.delta, privacy.sampling, config.run.rounds)
    encoding = choose_encoding(
        clip=1.0, dimension=dimension, parties=config.run.parties, multiplier=sigma, rounds=config.run.rounds
    )
    return Account(build.terms(config, Noised(encoding, multiplier=sigma), Algorithm)), sigma


GRID = [(20, 0.08, 3, 60), (20, 0.08, 3, 10), (12, 0.25, 5, 30), (40, 0.05, 3, 100), (100, 0.1, 8, 20), (8, 0.5, 4, 15)]


@pytest.mark.parametrize("parties, q, least, rounds", GRID)
def test_the_account_lies_between_the_truth_and_the_target(parties, q, least, rounds):
    config = resolve(
        f"--parties {parties} --sampling {q} --min-cohort {least} --rounds {rounds} --epsilon 1 --entropy os".split()
    )
    account, sigma = account_of(config)
    for round in range(1, rounds + 1):
        drawn = schedule.cohort(config, round)
        cohort = (*drawn, *schedule.fillers(config, round, drawn, ()))
        assert schedule.enough(least, cohort, ()), "every round runs"
        account.take(Asked(round, drawn, cohort, (), sigma / len(cohort) ** 0.5, exposed=False, figures=False))
        account.take(Stepped(round, cohort, 400))
    printed = account.statement().epsilon_outside
    below, above = bounds(sigma, q, rounds)
    assert below <= printed <= 1.0 + 1e-6
    assert printed <= 1.35 * above, "and it is no empty bound"


def test_skipping_small_cohorts_broke_the_figure_that_was_printed_for_it():
    """20 parties, q = 0.08, 3 at least: only the rounds that ran were counted, with q, though they include a party more often."""
    parties, q, least, rounds = 20, 0.08, 3, 60
    sigma = calibrate(1.0, DELTA, q, rounds)
    ran = binom.sf(least - 1, parties, q)
    included = q * binom.sf(least - 2, parties - 1, q) / ran
    # The skipping mechanism against data where all others are zero is exactly a sampled Gaussian with `included`.
    as_skipped, _ = bounds(sigma, included, round(ran * rounds))
    _, as_counted = bounds(sigma, q, round(ran * rounds))
    assert as_counted < 0.6 < 0.9 < as_skipped


@pytest.mark.parametrize("sigma", [1.0, 2.0, 3.0])
def test_no_probability_stands_in_for_a_cohort_that_must_be_large_enough(sigma):
    """Why cohorts are filled and not conditioned on: accounted with the true probability q' of being included, one round
    already exceeds delta at its epsilon. The others' updates (here all the same unit vector, the party's own orthogonal to
    it) tell how many they were, and with just enough of them the party was there for certain."""
    parties, q, least = 20, 0.08, 3
    ran = binom.sf(least - 1, parties, q)
    included = q * binom.sf(least - 2, parties - 1, q) / ran
    _, epsilon = bounds(sigma, included, 1)
    others = np.arange(parties)
    chance = binom.pmf(others, parties - 1, q) / ran
    with_it, without = np.where(others >= least - 1, q * chance, 0), np.where(others >= least, (1 - q) * chance, 0)
    along, across = np.linspace(-10 * sigma, parties + 10 * sigma, 1500), np.linspace(-10 * sigma, 1 + 10 * sigma, 1500)
    cell = (along[1] - along[0]) * (across[1] - across[0])
    density = norm.pdf(along[:, None], others, sigma)
    there, away = density @ with_it, density @ without
    p = np.outer(there, norm.pdf(across, 1, sigma)) + np.outer(away, norm.pdf(across, 0, sigma))
    r = np.outer(there + away, norm.pdf(across, 0, sigma))
    assert np.sum(np.maximum(0, p - math.exp(epsilon) * r)) * cell > 2 * DELTA


def test_how_many_others_were_drawn_says_nothing_of_a_party():
    config = resolve("--parties 6 --sampling 0.3 --min-cohort 3".split())
    drawn = [schedule.cohort(config, round) for round in range(1, 4001)]
    for others in (1, 2, 3):
        there = [0 in cohort for cohort in drawn if len(set(cohort) - {0}) == others]
        assert np.mean(there) == pytest.approx(0.3, abs=5 * math.sqrt(0.21 / len(there)))


def test_fillers_are_strangers_to_the_draw_and_just_enough():
    config = resolve("--parties 30 --sampling 0.05 --min-cohort 5".split())
    chosen = set()
    for round in range(1, 200):
        drawn = schedule.cohort(config, round)
        fillers = schedule.fillers(config, round, drawn, ())
        assert len(set(drawn) | set(fillers)) == len(drawn) + len(fillers) == max(5, len(drawn))
        assert fillers == schedule.fillers(config, round, drawn, ()), "in seeded mode the same every time"
        chosen |= set(fillers)
    assert chosen == set(range(30))


def test_fillers_of_a_hybrid_round_are_hidden_ones():
    config = resolve("--parties 12 --sampling 0.2 --min-cohort 3 --aggregation hybrid --clear-parties 0,1,2,3".split())
    clear = {0, 1, 2, 3}
    assert schedule.fillers(config, 1, (0, 1, 2), clear) == (), "nobody hidden: the clear ones are enough"
    for drawn in ((), (0,), (0, 1, 2, 7), (5, 6)):
        fillers = schedule.fillers(config, 1, drawn, clear)
        assert not set(fillers) & clear and len((set(drawn) | set(fillers)) - clear) == 3


# ---- in the engine ----


def rows(config):
    return [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]


SMALL_COHORTS = "--parties 8 --rounds 6 --sampling 0.2 --min-cohort 3 --seed 1 --metrics none"


def test_a_small_cohort_is_filled_up_and_every_round_counts(make_config, run_in_memory):
    config = make_config(f"{SMALL_COHORTS} --epsilon 1")
    summary = run_in_memory(config, 3)
    found = rows(config)
    assert all(row["cohort"] + row.get("fillers", 0) == row["survivors"] >= 3 for row in found)
    assert any(row["cohort"] == 0 for row in found) and any("fillers" in row for row in found)
    sigma = calibrate(1.0, DELTA, 0.2, 6)
    below, above = bounds(sigma, 0.2, 6)
    assert below <= summary["epsilon_outside"] <= 1 + 1e-6
    # towards the server and a party only who was drawn has anything to lose
    joined = sum(row["cohort"] for row in found)
    worst = json.loads((config.out / "privacy.json").read_text())["worst_party"]
    assert 1 <= worst["rounds_joined"] <= min(6, joined)


def test_filled_cohorts_give_one_model_whatever_the_aggregation_and_placement(make_config, run_in_memory):
    runs = [("plain", 3), ("secure", 3), ("secure", 9), ("hybrid --clear-parties 2", 3)]
    hashes = {
        run_in_memory(make_config(f"{SMALL_COHORTS} --aggregation {how}"), ranks)["model_sha256"]
        for how, ranks in runs[:3]
    }
    assert len(hashes) == 1
    # a hybrid takes its fillers from the hidden ones, which are others
    assert run_in_memory(make_config(f"{SMALL_COHORTS} --aggregation {runs[3][0]}"), 3)["epsilon_outside"] is not None


def test_without_noise_a_small_cohort_is_not_run(make_config, run_in_memory):
    config = make_config(f"{SMALL_COHORTS} --epsilon inf")
    run_in_memory(config, 3)
    small = [row for row in rows(config) if row["cohort"] < 3]
    assert small and all("skipped" in row and "survivors" not in row for row in small)


def test_a_filler_has_nothing_but_noise_in_the_sum(make_config, run_in_memory, monkeypatch):
    """With nobody drawn the model moves by noise alone, and by that of `min_cohort` whole shares."""
    from fedmpi.runtime.server import Server

    monkeypatch.setattr(schedule, "cohort", lambda config, round: ())
    moves, step = [], Server.step

    def watched(self, round, found, drawn):
        moves.append(found.total / (self.mechanism.multiplier * self.mechanism.encoding.sensitivity))
        step(self, round, found, drawn)

    monkeypatch.setattr(Server, "step", watched)
    run_in_memory(make_config(SMALL_COHORTS), 3)
    assert len(moves) == 6 and all(np.std(move) == pytest.approx(1, abs=0.05) for move in moves)


# ---- the number that a party is told ----


@pytest.mark.parametrize(
    "flags, cohort, hidden",
    [
        ("--aggregation secure", 2**32 - 1, 2**32 - 1),
        ("--aggregation secure", 2**32 - 1, 4),
        ("--aggregation secure", 4, 3),
        ("--aggregation secure", 3, 3),  # with --sampling 1 everybody is in
        ("--aggregation secure --sampling 0.5", 2, 2),
        ("--aggregation plain", 5, 0),
        ("--aggregation plain", 4, 4),
        ("--aggregation hybrid --clear-parties 0", 4, 2),
        ("--aggregation hybrid --clear-parties 0", 4, 5),
    ],
)
def test_a_party_does_not_believe_any_cohort(flags, cohort, hidden, make_config, run_in_memory, monkeypatch):
    """A larger cohort makes a smaller share of the noise: 2^32 - 1 cut an update's noise two hundredfold."""
    from fedmpi.aggregation.protocol import digest
    from fedmpi.runtime.server import Server

    def lies(self, kind, round, parties, fillers=()):
        told = cohort, hidden, 0, digest(self.theta)
        self.mailbox.to_hosts(parties, lambda hosted: Train(round, -1, hosted, *told))

    monkeypatch.setattr(Server, "send_model", lies)
    monkeypatch.setattr(Server, "measure_references", lambda self: None)
    with pytest.raises(ProtocolError, match="rank 0 announced a cohort of"):
        run_in_memory(make_config(flags), 3)
