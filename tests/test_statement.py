"""What a run says about its epsilon: one test for each rule."""

import itertools
import json
import math

import numpy as np
import pytest

from fedmpi.privacy.accountant import Accountant, calibrate
from fedmpi.privacy.encoding import Encoding, choose_encoding
from fedmpi.privacy.mechanism import Noised
from fedmpi.privacy.releases import Terms
from fedmpi.privacy.statement import Spent, Statement, rounding, state, warnings

SUPPORTS = ("own", "union", "shared", "dense")
AGGREGATIONS = ("plain", "secure", "hybrid")


def mechanism(sigma=40.0, support="shared", coordinates=100, clip=0.01):
    return Noised(Encoding(clip, 4096, 20, coordinates), support in ("own", "union"), sigma)


def say(
    sigma=40.0, support="shared", outside=0.9, server=1.7, party=1.2, nominal=0.8, metrics="none", lost=False, **changed
):
    terms = {
        "parties": 20,
        "rounds": 10,
        "delta": 1e-5,
        "accountant": "rdp",
        "sampling": 1.0,
        "entropy": "os",
        "aggregation": "secure",
        "denominator": "expected",
        "graph": "complete",
        "adversary": "passive",
        "colluding": 0,
    }
    made = Terms(mechanism(sigma, support), support=support, **(terms | changed))
    return state(made, Spent(outside, server, party, nominal, lost, metrics))


@pytest.mark.parametrize("support", ["shared", "dense"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_secret_integer_noise_on_a_public_support_holds(support, aggregation):
    said = say(support=support, aggregation=aggregation)
    assert (said.epsilon_outside, said.epsilon_server, said.epsilon_nominal) == (0.9, 1.7, 0.8)
    assert said.epsilon_kind == "holds" and said.private and said.reason == ""


@pytest.mark.parametrize("support", ["shared", "dense"])
def test_noise_from_the_seed_is_a_simulation(support):
    said = say(support=support, entropy="seeded")
    assert (said.epsilon_outside, said.epsilon_server, said.epsilon_nominal) == (0.9, 1.7, 0.8)
    assert said.epsilon_kind == "simulated" and not said.private
    assert "recomputed from the run's seed" in said.reason
    assert "what the same run with --entropy os would hold" in said.reason


@pytest.mark.parametrize("support", ["own", "union"])
@pytest.mark.parametrize("entropy", ("seeded", "os"))
def test_a_support_taken_from_private_data_is_nominal(support, entropy):
    said = say(support=support, entropy=entropy, aggregation="plain")
    assert said.epsilon_outside is None and said.epsilon_server is None
    assert said.epsilon_nominal == 0.8 and said.epsilon_kind == "nominal" and not said.private
    assert "chosen from private data and shows in what is sent and in the model" in said.reason
    assert ("recomputed" in said.reason) == (entropy == "seeded")
    assert "would hold" not in said.reason
    assert any("support" in line for line in said.released)


def test_pld_is_nominal_because_the_noise_is_integer():
    said = say(accountant="pld")
    assert said.epsilon_outside is None and said.epsilon_server is None
    assert said.epsilon_nominal == 0.8 and said.epsilon_kind == "nominal" and not said.private
    assert "continuous Gaussian" in said.reason and "integer" in said.reason


@pytest.mark.parametrize("support", SUPPORTS)
def test_no_noise_claims_nothing(support):
    said = say(support=support, sigma=0.0, outside=math.inf, server=math.inf, nominal=math.inf)
    assert said.epsilon_outside is said.epsilon_server is said.epsilon_nominal is None
    assert said.epsilon_kind == "none" and not said.private
    assert said.reason == "no noise was added"
    assert said.released[0] == "the models, without noise"


def test_an_unbounded_figure_is_null_with_its_reason():
    said = say(server=math.inf)
    assert said.epsilon_outside == 0.9 and said.epsilon_server is None
    assert said.epsilon_kind == "holds" and not said.private
    assert "epsilon_server is unbounded" in said.reason and "epsilon_outside" not in said.reason
    said = say(party=math.inf)
    assert said.epsilon_party is None and not said.private and "epsilon_party is unbounded" in said.reason
    said = say(server=math.inf, outside=math.inf, party=math.inf)
    assert said.epsilon_kind == "none" and "epsilon_outside is unbounded" in said.reason
    said = say(nominal=math.inf)
    assert said.epsilon_nominal is None and "epsilon_nominal is unbounded" in said.reason


def test_a_denominator_that_counts_survivors_has_no_figure_outside():
    said = say(denominator="survivors")
    assert said.epsilon_outside is said.epsilon_party is None and said.epsilon_server == 1.7 and not said.private
    assert "number of survivors" in said.reason


def test_trust_says_who_must_be_honest():
    secure, plain, hybrid = (say(aggregation=a, colluding=2).trust for a in ("secure", "plain", "hybrid"))
    for trust in (secure, plain, hybrid):
        text = " ".join(trust)
        assert "whoever sees the released models and nothing else" in text
        assert "all updates of one of 20 parties are there or are zero" in text
        assert "rank 0 is honest" in text
        assert "no amplification by sampling" in text
        assert "the worst party really joined" in text
        assert "colluding parties: 2" in text
    local = "the local figure, one update replaced by any other (sensitivity 2C), under the party's own noise sigma C"
    assert local in plain[1] and local in hybrid[1] and local not in secure[1]
    assert "sees sums only" in secure[1] and "sees sums only" in hybrid[1] and "sees sums only" not in plain[1]
    assert "colluding parties: 0" in " ".join(say().trust)


@pytest.mark.parametrize("metrics", ["party", "securesum"])
def test_figures_without_noise_leave_no_epsilon_towards_the_server(metrics):
    said = say(metrics=metrics)
    assert said.epsilon_server is None and not said.private and said.epsilon_kind == "holds"
    assert (said.epsilon_outside, said.epsilon_party) == (0.9, 1.2)
    assert "epsilon_server does not hold" in said.reason


def test_what_an_active_adversary_can_do_is_said_where_the_protocol_stands_up_to_it():
    whole, in_part = say(adversary="active", least_noises=4, least_cohort=6), say(adversary="active")
    assert any("learns of every round one sum" in line and "epsilon_server_lying" in line for line in whole.trust)
    assert any("no figure is claimed towards a rank 0 that lies" in line for line in in_part.trust)
    assert not any("lies" in line for line in say().trust)


def test_what_leaves_beside_the_models_is_listed():
    assert any("each party's evaluation metrics" in line for line in say(metrics="party").released)
    assert any("sums of the parties' evaluation metrics" in line for line in say(metrics="securesum").released)
    assert not any("metrics" in line for line in say(metrics="none").released)
    assert any("CPU seconds of each rank" in line for line in say(metrics="none").released)
    assert any("in the clear" in line for line in say(aggregation="hybrid").released)
    assert any("cohort" in line for line in say().released)


def test_every_statement_is_plain_json():
    numbers = [0.0, 1.5, math.inf]
    for support, aggregation, entropy, kind in itertools.product(
        SUPPORTS, AGGREGATIONS, ("seeded", "os"), ("rdp", "pld")
    ):
        for sigma, outside, server in itertools.product([0.0, 3.0], numbers, numbers):
            said = say(
                support=support,
                aggregation=aggregation,
                entropy=entropy,
                accountant=kind,
                sigma=sigma,
                outside=outside,
                server=server,
                nominal=server,
            )
            back = json.loads(json.dumps(said.as_dict(), allow_nan=False))
            assert Statement(**back) == said
            # A missing number is always explained, and nothing is private that is not whole.
            if None in (said.epsilon_outside, said.epsilon_server, said.epsilon_party, said.epsilon_nominal):
                assert said.reason
            assert said.private <= (
                said.epsilon_kind == "holds"
                and None not in (said.epsilon_outside, said.epsilon_server, said.epsilon_party)
            )
            assert said.private <= (entropy == "os" and support in ("shared", "dense") and kind == "rdp" and sigma > 0)


@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_no_statement_is_made_of_a_number_that_is_none(bad):
    for name in ("outside", "server", "party", "nominal"):
        with pytest.raises(ValueError, match=name):
            say(**{name: bad})
    with pytest.raises(ValueError, match="epsilon_outside"):
        Statement(math.inf, None, None, None, "holds", "", True, 1e-5, [], [])


def test_noise_to_signal_is_what_the_paper_settings_make_it():
    # epsilon 1, 20 parties, all of them in every one of 100 rounds, 270,000 coordinates: about a hundred.
    paper = mechanism(40.45, coordinates=270_000)
    ratio = paper.noise_to_signal(1.0, 20, 100)
    assert ratio == pytest.approx(40.45 * math.sqrt(270_000) / 20 / 10) and 100 < ratio < 110
    assert mechanism(8.0, coordinates=100).noise_to_signal(0.25, 400, 4) == 0.4
    line = paper.opening(1.0, 20, 100)
    assert "sigma 40.45" in line and "norm 105 in 270000" in line and "to 1 at most" in line and "R = 105" in line
    assert "\n" not in line
    assert mechanism(0.0).opening(1.0, 20, 5).startswith("noise: none")


def test_noise_to_signal_is_that_of_the_sums_over_a_run():
    rng, sigma, q, parties, coordinates, rounds, bound = np.random.default_rng(3), 5.0, 0.5, 40, 4000, 9, 0.3
    noise = rng.normal(0, sigma * bound / (q * parties), (rounds, coordinates)).sum(axis=0)
    ratio = np.linalg.norm(noise) / (rounds * bound)
    assert mechanism(sigma, coordinates=coordinates).noise_to_signal(q, parties, rounds) == pytest.approx(
        ratio, rel=0.05
    )


def test_what_rounding_costs_is_said_before_a_run_starts():
    sigma = calibrate(8.0, 1e-5, 1.0, 30)
    encoding = choose_encoding(clip=0.01, dimension=7870, parties=20, multiplier=sigma, rounds=30)
    chosen = Noised(encoding, multiplier=sigma)
    line = rounding(chosen, 20, 30, 1.0, 1e-5, "rdp")
    assert line == (
        "rounding: 15 bits for 347 steps in C, which add 0.97 % to sigma: epsilon is accounted as 8, and would be 7.908 for as much "
        "noise without rounding; in 30 rounds any sum wraps with probability 2^-40.3 at most"
    )
    # The second figure by the account itself: the same noise over the sensitivity C.
    accountant = Accountant()
    accountant.spend(sigma * encoding.sensitivity / encoding.steps, 1.0, 30)
    assert accountant.epsilon(1e-5) == pytest.approx(7.908, abs=5e-4)
    # A grid that was asked for may be so coarse that a sum of discrete Gaussians is not one: the account says so, and this line.
    coarse = Noised(Encoding(1.0, 32, 17, 10), multiplier=2.0)
    accountant = Accountant()
    accountant.spend(coarse.of_sum(coarse.share(2000) / coarse.encoding.sensitivity, 2000, 10), 1.0, 3)
    assert f"accounted as {accountant.epsilon(1e-5):.4g}," in rounding(coarse, 2000, 3, 1.0, 1e-5, "rdp")
    hardly = Noised(Encoding(1.0, 4, 17, 10), multiplier=2.0)
    assert "accounted as inf," in rounding(hardly, 2000, 3, 1.0, 1e-5, "rdp")
    for sampling, kind in itertools.product((0.1, 1.0), ("rdp", "pld")):
        assert "\n" not in rounding(chosen, 20, 30, sampling, 1e-5, kind)
    assert (
        rounding(mechanism(0.0), 20, 30, 1.0, 1e-5, "rdp") == "rounding: 20 bits for 4096 steps in C; no sum can wrap"
    )


def test_warnings():
    assert warnings(1e-5, 20, 0.5, 8.0, "centaur") == []
    (line,) = warnings(0.05, 20, 0.5, 8.0, "centaur")
    assert "delta 0.05 is not below 1/parties = 0.05" in line
    (line,) = warnings(1e-5, 20, 105.0, 8.0, "centaur")
    assert "105 times the most that its updates can carry; with centaur parties did better alone above 8" in line
    assert len(warnings(1e-5, 20, 3.0, 1.7, "dp-pfeddsu")) == 1
    assert warnings(1e-5, 20, 8.0, 8.0, "centaur") == []
    assert len(warnings(0.1, 20, 30.0, 8.0, "centaur")) == 2
    # Without noise nothing is claimed, so there is nothing to warn of.
    assert warnings(0.1, 20, 0.0, 8.0, "centaur") == []
