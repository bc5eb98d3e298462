"""Secret sharing: MMF algorithm 1 over l = 2^256 + 297, what t - 1 shares say, and who is named for wrong ones."""

import itertools
import json
import math
import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedmpi.crypto import shamir
from fedmpi.crypto.shamir import (
    KEYS,
    SEEDS,
    Field,
    create_shares,
    decode,
    decode_share,
    encode_share,
    int_to_secret,
    is_share,
    lagrange_weights,
    reconstruct,
    secret_to_int,
)
from fedmpi.errors import CryptoError

PRIME = KEYS.prime
elements = st.integers(0, PRIME - 1)
VECTORS = json.loads((Path(__file__).parent / "vectors" / "crypto.json").read_text())


def played(*coefficients):
    """A source of randomness that plays back given coefficients."""
    data = b"".join(c.to_bytes(32, "big") for c in coefficients)

    def random_bytes(n):
        assert n == len(data)
        return data

    return random_bytes


def falling(coefficients, x):
    """sum_j c_j x(x-1)...(x-j+1), by the definition."""
    return sum(c * math.prod(x - i for i in range(j)) for j, c in enumerate(coefficients)) % PRIME


def interpolate(points, at):
    """Lagrange by the definition, one inversion a factor."""
    value = 0
    for j, (xj, yj) in enumerate(points):
        for m, (xm, _) in enumerate(points):
            if m != j:
                yj = yj * (at - xm) * pow(xj - xm, -1, PRIME)
        value += yj
    return value % PRIME


@st.composite
def cohorts(draw, most=25, top=None):
    """(points, threshold): holders numbered 1..n, or with gaps, or anywhere in the field."""
    n = draw(st.integers(1, most))
    limit = draw(st.sampled_from([n, 3 * n, 2**17, PRIME - 1] if top is None else [top]))
    xs = draw(st.lists(st.integers(1, limit), min_size=n, max_size=n, unique=True))
    return xs, draw(st.integers(1, n))


# --- the field ---


def probably_prime(n, bases):
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        if all((x := x * x % n) != n - 1 for _ in range(twos - 1)):
            return False
    return True


@pytest.mark.parametrize("field", [KEYS, SEEDS])
def test_the_modulus_is_the_smallest_prime_above_every_secret(field):
    generator, prime, least = random.Random(5), field.prime, 2 ** (8 * field.secret_bytes)
    assert prime > least
    assert probably_prime(prime, [2, 3, 5, 7, *(generator.randrange(2, prime - 1) for _ in range(60))])
    assert not any(probably_prime(n, [2, 3, 5]) for n in range(least + 1, prime, 2))


# --- shares ---


@settings(deadline=None)
@given(cohorts(), st.lists(elements, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_any_t_shares_reconstruct(cohort, secrets, generator):
    xs, threshold = cohort
    shares = create_shares(secrets, threshold, xs, generator.randbytes)
    assert [len(row) for row in shares] == [len(xs)] * len(secrets)
    some = generator.sample(range(len(xs)), generator.randint(threshold, len(xs)))
    weights = lagrange_weights([xs[j] for j in some])
    assert [reconstruct(weights, [row[j] for j in some]) for row in shares] == secrets


@settings(deadline=None)
@given(cohorts(most=12), elements, st.data())
def test_shares_are_values_of_the_polynomial_of_the_secret_and_the_drawn_coefficients(cohort, secret, data):
    xs, threshold = cohort
    drawn = data.draw(st.lists(st.integers(0, 2**256 - 1), min_size=threshold - 1, max_size=threshold - 1))
    (shares,) = create_shares([secret], threshold, xs, played(*drawn))
    assert shares == [falling([secret, *drawn], x) for x in xs]


@pytest.mark.parametrize("n", [1, 2, 100, 101, 102, 103, 150, 210])
def test_a_share_does_not_depend_on_which_others_are_asked_for(n):
    """Holders in a row are served by additions, scattered ones by multiplications: the same polynomial."""
    generator = random.Random(n)
    threshold = max(1, n - 2)
    secrets = [generator.randrange(PRIME) for _ in range(2)]
    coefficients = [generator.randrange(2**256) for _ in range(2 * (threshold - 1))]
    row = list(range(1, n + 1))
    scattered = [*row, 10**5, 2**80, PRIME - 1]
    dense = create_shares(secrets, threshold, row, played(*coefficients))
    sparse = create_shares(secrets, threshold, scattered, played(*coefficients))
    assert [shares[:n] for shares in sparse] == dense
    shuffled = generator.sample(row, n)
    again = create_shares(secrets, threshold, shuffled, played(*coefficients))
    assert [[shares[x - 1] for x in shuffled] for shares in dense] == again


@pytest.mark.parametrize("secrets", [0, 1, 2, 3])
@pytest.mark.parametrize("threshold, n", [(1, 1), (1, 5), (101, 130), (102, 102), (202, 230)])
def test_shares_made_together_do_not_touch_each_other(secrets, threshold, n):
    """Every value as large as it can be, so that a lane that is too narrow would run into the next."""
    top = [PRIME - 1] * secrets
    coefficients = [2**256 - 1] * (secrets * (threshold - 1))
    shares = create_shares(top, threshold, range(1, n + 1), played(*coefficients))
    polynomial = [PRIME - 1, *[2**256 - 1] * (threshold - 1)]
    assert shares == [[falling(polynomial, x) for x in range(1, n + 1)]] * secrets


def test_lanes_hold_the_largest_differences():
    """Coefficients c_j = (l - 1) / j! make every difference as large as it can be."""
    for terms, n in ((30, 60), (100, 140), (101, 101), (230, 240)):
        polynomial = [-pow(math.factorial(j), -1, PRIME) % PRIME for j in range(terms)]
        expected = [falling(polynomial, x) for x in range(1, n + 1)]
        assert shamir._by_differences([polynomial] * 3, list(range(1, n + 1)), [KEYS] * 3) == [expected] * 3


def test_a_hundred_holders_with_two_secrets():
    secrets = [secret_to_int(os.urandom(32)) for _ in range(2)]
    shares = create_shares(secrets, 67, range(1, 101), os.urandom)
    survivors = sorted(random.Random(1).sample(range(100), 67))
    weights = lagrange_weights([j + 1 for j in survivors])
    assert [reconstruct(weights, [row[j] for j in survivors]) for row in shares] == secrets
    fewer = survivors[1:]
    assert reconstruct(lagrange_weights([j + 1 for j in fewer]), [shares[0][j] for j in fewer]) != secrets[0]


# --- what fewer shares say ---


@settings(deadline=None, max_examples=50)
@given(cohorts(most=9), st.randoms(use_true_random=False))
def test_fewer_than_t_shares_fit_every_secret_through_exactly_one_polynomial(cohort, generator):
    """For any t - 1 shares and any secret, one choice of the randomness leads from the one to the other: every choice
    is equally likely, and so is every secret."""
    xs, threshold = cohort
    (shares,) = create_shares([generator.randrange(PRIME)], threshold, xs, generator.randbytes)
    seen = generator.sample(range(len(xs)), threshold - 1)
    other = generator.randrange(PRIME)
    # t points fix a polynomial of degree t - 1. Its coefficients: the differences of its values at 0, 1, ..., t - 1.
    points = [(0, other), *((xs[j], shares[j]) for j in seen)]
    values = [interpolate(points, at) for at in range(threshold)]
    coefficients = []
    for j in range(threshold):
        coefficients.append(values[0] * pow(math.factorial(j), -1, PRIME) % PRIME)
        values = [right - left for left, right in itertools.pairwise(values)]
    assert coefficients[0] == other
    (explained,) = create_shares([other], threshold, xs, played(*coefficients[1:]))
    assert [explained[j] for j in seen] == [shares[j] for j in seen]


@pytest.mark.parametrize("xs", [(1, 2, 3, 4), (2, 9, 10, 5)])
def test_in_a_small_field_two_of_three_shares_are_uniform_whatever_the_secret(xs):
    """Every secret and every randomness of the field of 11 elements, counted."""
    for secret in range(11):
        seen = {pair: Counter() for pair in itertools.combinations(range(4), 2)}
        for c1, c2 in itertools.product(range(11), repeat=2):
            (shares,) = create_shares([secret], 3, xs, played(c1, c2), [Field(11, 32)])
            for i, j in seen:
                seen[i, j][shares[i], shares[j]] += 1
        assert all(counts == Counter(itertools.product(range(11), repeat=2)) for counts in seen.values())


# --- weights ---


def naive_weights(xs):
    return [
        math.prod(xm * pow(xm - xj, -1, PRIME) for m, xm in enumerate(xs) if m != j) % PRIME for j, xj in enumerate(xs)
    ]


@settings(deadline=None)
@given(cohorts(most=40))
def test_weights_are_those_of_lagrange(cohort):
    xs, _ = cohort
    assert lagrange_weights(xs) == naive_weights(xs)


@pytest.mark.parametrize("bits", range(5, 70))
def test_weights_do_not_overflow_a_machine_word(bits):
    """Differences as large as they can be for their size, several of which are multiplied in a word."""
    xs = [*range(1, 8), *range(2**bits - 8, 2**bits)]
    assert lagrange_weights(xs) == naive_weights(xs)


@pytest.mark.parametrize("count", [255, 256, 257, 600])
def test_weights_of_many_points(count):
    generator = random.Random(count)
    xs = generator.sample(range(1, 1000), count)
    coefficients = [generator.randrange(PRIME) for _ in range(count)]
    shares = [shamir._evaluate(coefficients, x, PRIME) for x in xs]
    assert reconstruct(lagrange_weights(xs), shares) == coefficients[-1]


def test_weights_take_the_integers_of_numpy():
    assert lagrange_weights(np.array([3, 1, 7])) == lagrange_weights([3, 1, 7])


# --- wrong shares ---


@settings(deadline=None)
@given(cohorts(most=20), st.randoms(use_true_random=False))
def test_wrong_shares_are_corrected_and_named(cohort, generator):
    xs, threshold = cohort
    secret = generator.randrange(PRIME)
    (shares,) = create_shares([secret], threshold, xs, generator.randbytes)
    wrong = sorted(generator.sample(range(len(xs)), generator.randint(0, (len(xs) - threshold) // 2)))
    for j in wrong:
        shares[j] = (shares[j] + generator.choice([1, PRIME - 1, generator.randrange(1, PRIME)])) % PRIME
    assert decode(xs, shares, threshold) == (secret, wrong)


@pytest.mark.parametrize("errors", [0, 1, 5, 16])
def test_of_a_hundred_shares_sixteen_may_lie(errors):
    generator = random.Random(errors)
    secret = generator.randrange(PRIME)
    (shares,) = create_shares([secret], 67, range(1, 101), generator.randbytes)
    wrong = sorted(generator.sample(range(100), errors))
    for j in wrong:
        shares[j] = generator.randrange(PRIME)
    assert decode(range(1, 101), shares, 67) == (secret, wrong)


def test_too_many_wrong_shares_are_refused():
    generator = random.Random(3)
    (shares,) = create_shares([77], 67, range(1, 101), generator.randbytes)
    for j in generator.sample(range(100), 17):
        shares[j] = generator.randrange(PRIME)
    with pytest.raises(CryptoError, match="more than 16 of 100 shares are wrong"):
        decode(range(1, 101), shares, 67)


def test_without_surplus_a_lie_is_not_seen_and_with_one_it_is_not_placed():
    (shares,) = create_shares([77], 3, range(1, 5), random.Random(4).randbytes)
    shares[1] ^= 1
    secret, wrong = decode([1, 2, 3], shares[:3], 3)
    assert secret != 77 and wrong == []
    with pytest.raises(CryptoError, match="more than 0 of 4"):
        decode([1, 2, 3, 4], shares, 3)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 3), st.lists(st.integers(1, 12), min_size=3, max_size=7, unique=True), st.data())
def test_decoding_finds_the_only_polynomial_near_enough_or_refuses(threshold, xs, data):
    """Any word at all over the field of 13 elements, against all polynomials of that field."""
    word = data.draw(st.lists(st.integers(0, 12), min_size=len(xs), max_size=len(xs)))
    near = []
    for coefficients in itertools.product(range(13), repeat=threshold):
        values = [sum(c * x**i for i, c in enumerate(coefficients)) % 13 for x in xs]
        wrong = [j for j, (a, b) in enumerate(zip(values, word)) if a != b]
        if 2 * len(wrong) <= len(xs) - threshold:
            near.append((coefficients[0], wrong))
    if near:
        assert [decode(xs, word, threshold, Field(13, 1))] == near
    else:
        with pytest.raises(CryptoError):
            decode(xs, word, threshold, Field(13, 1))


# --- bytes ---


@given(elements)
def test_a_share_is_33_bytes(share):
    data = encode_share(share)
    assert is_share(data)
    assert len(data) == KEYS.share_bytes == 33 and decode_share(data) == share


@pytest.mark.parametrize("value", [PRIME, PRIME + 1, 2**264 - 1])
def test_a_share_has_one_encoding(value):
    assert decode_share(encode_share(PRIME - 1)) == PRIME - 1 and is_share(encode_share(PRIME - 1))
    assert not is_share(value.to_bytes(33, "big"))
    with pytest.raises(CryptoError, match="not an element of the field"):
        decode_share(value.to_bytes(33, "big"))


@pytest.mark.parametrize("size", [0, 32, 34])
def test_a_share_of_another_size_is_refused(size):
    assert not is_share(bytes(size))
    with pytest.raises(CryptoError, match=f"33 bytes, not {size}"):
        decode_share(bytes(size))


@given(st.binary(min_size=32, max_size=32))
def test_a_secret_is_32_bytes(secret):
    assert int_to_secret(secret_to_int(secret)) == secret


def test_what_is_no_secret_is_refused():
    for size in (0, 31, 33):
        with pytest.raises(CryptoError, match=f"not {size}"):
            secret_to_int(bytes(size))
    for value in (2**256, PRIME - 1, -1):
        with pytest.raises(CryptoError, match="not a secret of 32 bytes"):
            int_to_secret(value)
    for value in (PRIME, -1):
        with pytest.raises(CryptoError, match="not an element"):
            encode_share(value)


# --- arguments ---


@pytest.mark.parametrize(
    "secrets, threshold, xs, message",
    [
        ([1], 0, [1, 2], "threshold of 0 does not fit 2 shares"),
        ([1], 3, [1, 2], "threshold of 3 does not fit 2 shares"),
        ([1], 1, [], "no share"),
        ([1], 1, [0, 1], "at 0 lies the secret"),
        ([1], 1, [-1, 1], "from 1 to l - 1"),
        ([1], 1, [PRIME], "from 1 to l - 1"),
        ([1], 2, [4, 4], "the same point"),
        ([1], 1, [1.0], "points of shares are integers"),
        ([PRIME], 1, [1], "a secret is not an element"),
        ([-1], 1, [1], "a secret is not an element"),
        ([b"x"], 1, [1], "a secret is not an integer"),
    ],
)
def test_arguments_that_cannot_be_shared(secrets, threshold, xs, message):
    with pytest.raises(CryptoError, match=message):
        create_shares(secrets, threshold, xs, os.urandom)


@pytest.mark.parametrize(
    "xs, shares, threshold, message",
    [
        ([1, 2], [1, 2, 3], 2, "3 shares do not go with 2 points"),
        ([1, 2], [1, 2], 3, "2 shares cannot be decoded with a threshold of 3"),
        ([1, 2], [1, 2], 0, "threshold of 0"),
        ([1, 1], [1, 2], 1, "the same point"),
        ([1, 2], [1, PRIME], 1, "a share is not an element"),
    ],
)
def test_arguments_that_cannot_be_decoded(xs, shares, threshold, message):
    with pytest.raises(CryptoError, match=message):
        decode(xs, shares, threshold)


def test_weights_and_shares_go_together():
    with pytest.raises(CryptoError, match="2 shares do not go with 3 weights"):
        reconstruct(lagrange_weights([1, 2, 3]), [1, 2])
    with pytest.raises(CryptoError, match="a share is not an element"):
        reconstruct(lagrange_weights([1, 2]), [1, PRIME])


def test_a_source_that_gives_too_little_is_refused():
    with pytest.raises(CryptoError, match="gave 10 bytes, 64 were asked for"):
        create_shares([1], 3, [1, 2, 3], lambda n: bytes(10))


def test_errors_hold_no_secret():
    secret = PRIME + 123456789
    for call in (
        lambda: create_shares([secret], 1, [1], os.urandom),
        lambda: encode_share(secret),
        lambda: int_to_secret(secret),
        lambda: reconstruct([1], [secret]),
        lambda: decode([1], [secret], 1),
    ):
        with pytest.raises(CryptoError) as caught:
            call()
        assert not re.search(r"\d{20}", str(caught.value)) and "123456789" not in repr(caught.value)


# --- both fields at once ---


@given(cohorts(), st.lists(st.sampled_from([KEYS, SEEDS]), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_secrets_of_both_fields_are_shared_together_and_each_is_its_own(cohort, fields, generator):
    xs, threshold = cohort
    xs = [x for x in xs if x < SEEDS.prime]
    threshold = min(threshold, len(xs))
    assume(threshold)
    secrets = [generator.randbytes(field.secret_bytes) for field in fields]
    numbers = [secret_to_int(secret, field) for secret, field in zip(secrets, fields)]
    drawn = generator.randbytes((threshold - 1) * sum(field.secret_bytes for field in fields))
    together, at = create_shares(numbers, threshold, xs, lambda n: drawn[:n], fields), 0
    for field, secret, number, shares in zip(fields, secrets, numbers, together):
        own = drawn[at : at + (threshold - 1) * field.secret_bytes]
        at += len(own)
        assert create_shares([number], threshold, xs, lambda n, own=own: own, [field]) == [shares]
        some = generator.sample(range(len(xs)), threshold)
        weights = lagrange_weights([xs[j] for j in some], field)
        assert int_to_secret(reconstruct(weights, [shares[j] for j in some], field), field) == secret
        assert all(decode_share(encode_share(share, field), field) == share for share in shares)
        assert {len(encode_share(share, field)) for share in shares} == {field.secret_bytes + 1}


def test_a_seed_is_no_key_and_its_shares_are_none_of_a_key():
    assert SEEDS.share_bytes == 17 and not is_share(bytes(17)) and not is_share(bytes(33), SEEDS)
    assert is_share((SEEDS.prime - 1).to_bytes(17, "big"), SEEDS) and not is_share(SEEDS.prime_bytes, SEEDS)
    for call in (
        lambda: secret_to_int(bytes(32), SEEDS),
        lambda: decode_share(bytes(33), SEEDS),
        lambda: decode_share(SEEDS.prime_bytes, SEEDS),
        lambda: encode_share(SEEDS.prime, SEEDS),
        lambda: int_to_secret(2**128, SEEDS),
        lambda: create_shares([SEEDS.prime], 1, [1], os.urandom, [SEEDS]),
        lambda: create_shares([1, 2], 1, [1], os.urandom, [SEEDS]),
        lambda: create_shares([1], 1, [SEEDS.prime], os.urandom, [SEEDS]),
    ):
        with pytest.raises(CryptoError):
            call()


# --- the format ---


@pytest.mark.parametrize("case", VECTORS["shamir"], ids=lambda case: case["name"])
def test_shares_are_what_they_were(case):
    """The format, pinned: randomness and secrets in, shares out."""
    random_bytes = bytes.fromhex(case["random"])
    secrets = [secret_to_int(bytes.fromhex(secret)) for secret in case["secrets"]]
    shares = create_shares(secrets, case["threshold"], case["xs"], lambda n: random_bytes[:n])
    assert [[encode_share(share).hex() for share in row] for row in shares] == case["shares"]
    weights = lagrange_weights(case["xs"])
    assert [int_to_secret(reconstruct(weights, row)).hex() for row in shares] == case["secrets"]
