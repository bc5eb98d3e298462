"""The Hadamard rotation: a rotation, the same for everybody, that takes fewer bits and changes no epsilon."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.errors import ConfigError
from fedmpi.privacy.encoding import choose_encoding, needed_bits, rounding_cost
from fedmpi.privacy.mechanism import (
    BoundedVector,
    ClippedVector,
    Mechanism,
    Rotated,
    Wanted,
    choose_mechanism,
)
from fedmpi.privacy.rotation import block_of, padded, rotate, rotate_back
from fedmpi.randomness.words import SeededWords


def wanted(**changed):
    settings = {
        "epsilon": 1.0,
        "clip": 0.5,
        "multiplier": 4.0,
        "margin": 0.0,
        "parties": 300,
        "rounds": 3,
        "bits": 0,
        "steps": 0,
        "own_coordinates": False,
        "rotation": "hadamard",
        "seed": 7,
    }
    return Wanted(**(settings | changed))


@given(st.integers(1, 20_000), st.integers(0, 5), st.integers(1, 9))
def test_it_is_a_rotation_and_goes_back(dimension, seed, round):
    values = np.random.default_rng(seed).normal(size=dimension)
    turned = rotate(values, seed, round)
    assert len(turned) == padded(dimension) and padded(dimension) % block_of(dimension) == 0
    assert padded(dimension) - dimension < block_of(dimension)
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(values))
    steps = np.rint(turned * 2**20).astype(np.int64)
    assert np.allclose(rotate_back(steps, dimension, seed, round) / 2**20, values, atol=1e-4)


def test_it_is_sylvesters_matrix_under_signs_that_change_with_the_round():
    hadamard = np.array([[1]])
    while len(hadamard) < 8:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    turns = [np.stack([rotate(unit, 3, round) for unit in np.eye(8)], axis=1) * math.sqrt(8) for round in range(1, 9)]
    for turn in turns:
        signs = turn[0]
        assert np.allclose(np.abs(signs), 1) and np.allclose(turn, hadamard * signs)
    assert len({tuple(np.rint(turn[0])) for turn in turns}) > 4


def test_one_large_coordinate_is_spread_over_its_block():
    update = np.zeros(10_000)
    update[17] = 1.0
    turned = rotate(update, 1, 1)
    assert len(turned) == 2 * 8192 and np.abs(turned).max() == pytest.approx(8192**-0.5)


@given(st.integers(1, 300_000), st.integers(1, 5000), st.floats(0.01, 200), st.integers(1, 1000))
def test_the_width_holds_for_turned_signals_and_noise_together(dimension, parties, multiplier, rounds):
    size, block = padded(dimension), block_of(dimension)
    run = {"dimension": size, "parties": parties, "multiplier": multiplier, "rounds": rounds}
    encoding = choose_encoding(clip=1.0, **run, block=block)
    deviation = math.hypot(parties * encoding.steps / math.sqrt(block), multiplier * encoding.sensitivity)
    z = (2 ** (encoding.bits - 1) - parties) / deviation
    assert z > 0 and 2 + math.log2(size * rounds) - z * z / 2 * math.log2(math.e) <= -40 + 1e-6
    assert rounding_cost(encoding.steps, size, parties, multiplier) <= 0.01
    assert encoding.bits == 8 or needed_bits(encoding.steps + 1, **run, block=block) > encoding.bits


def test_a_sum_of_turned_updates_is_the_sum_of_updates_and_noise():
    """All parties with all of their update in the same coordinate, the worst case of what is not turned."""
    mechanism = choose_mechanism(ClippedVector(), wanted(), 5000, "mine")
    plain = choose_mechanism(ClippedVector(), wanted(rotation="none"), 5000, "mine")
    assert isinstance(mechanism, Rotated) and mechanism.encoding.bits < plain.encoding.bits
    here, total = mechanism.of_round(4), np.zeros(mechanism.encoding.dimension, np.uint64)
    update = np.zeros(5000)
    update[3] = 2.0  # clipped to 0.5
    for party in range(300):
        total += here.encode(update, 300, lambda purpose, p=party: SeededWords(5, purpose, p, 4), party)
    found = here.decode(mechanism.encoding.unwrap(total))
    assert found.shape == (5000,) and found[3] == pytest.approx(150, abs=10)
    assert np.std(np.delete(found, 3)) == pytest.approx(4.0 * 0.5, rel=0.05)


def test_its_account_is_that_of_the_padded_vector_and_its_log_can_be_read():
    mechanism = choose_mechanism(ClippedVector(), wanted(), 5000, "mine")
    sensitivity = mechanism.encoding.sensitivity
    assert mechanism.encoding.dimension == 8192 and mechanism.coordinates == 5000
    assert mechanism.of_sum(mechanism.share(300) / sensitivity, 300, 8192) == pytest.approx(4.0, rel=1e-12)
    assert Mechanism.from_facts(json.loads(json.dumps(mechanism.facts()))) == mechanism
    assert mechanism.noise_to_signal(1.0, 300, 3) == pytest.approx(4.0 * math.sqrt(5000) / 300 / math.sqrt(3))


@pytest.mark.parametrize(
    "declared, changed",
    [
        (ClippedVector(), {"own_coordinates": True}),
        (ClippedVector(), {"epsilon": math.inf, "multiplier": 0.0}),
        (BoundedVector(64.0), {"epsilon": math.inf, "multiplier": 0.0}),
    ],
)
def test_it_is_refused_where_it_has_no_proof(declared, changed):
    with pytest.raises(ConfigError, match="rotation = hadamard: only for updates that are clipped and noised"):
        choose_mechanism(declared, wanted(**changed), 50, "mine")


@pytest.mark.parametrize("download", ["delta", "full"])
@pytest.mark.parametrize("support", ["shared", "dense"])
def test_plain_and_secure_runs_end_with_one_model(make_config, run_in_memory, support, download, capsys):
    def run(aggregation):
        flags = f"--aggregation {aggregation} --support {support} --rotation hadamard --epsilon 8 --rounds 2"
        return run_in_memory(make_config(f"{flags} --download {download}"), 3)

    plain, secure = run("plain"), run("secure")
    assert plain["model_sha256"] == secure["model_sha256"]
    said = capsys.readouterr().out
    assert "rounding: " in said and "has another model" not in said  # ranks turn the sums back as rank 0 does
