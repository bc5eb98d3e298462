"""Rating methods: each part is its equation, and a run does not depend on placement or on how sums are formed."""

import dataclasses
import json

import numpy as np
import pytest
from fitting import fitting, method_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.aggregation.rows import RowServer, RowsParty
from fedmpi.algorithm import RowUpdates, method_names
from fedmpi.cli import resolve
from fedmpi.errors import ConfigError, ProtocolError
from fedmpi.privacy.encoding import Encoding
from fedmpi.privacy.mechanism import Cut
from fedmpi.recsys.buckets import buckets
from fedmpi.recsys.factors import Parties, Solver, predict
from fedmpi.recsys.layout import Layout
from fedmpi.recsys.models import FactorisationMachine, Linear, Network
from fedmpi.recsys.private import Fit, fit_all
from fedmpi.recsys.rule import ClearRule
from fedmpi.recsys.steps import Adam, Counted, Sgd
from fedmpi.runtime import build, departures
from fedmpi.wire.bits import pack, pack_signed
from fedmpi.wire.messages import PlainRows, decode, encode

METHODS = method_names(("fedmpi.recsys.methods",))
SHARING = [name for name in METHODS if not name.startswith("local")]


@pytest.fixture
def make(cache, tmp_path):
    """A small configuration: 12 parties of generated ratings, plain."""
    counter = iter(range(1000))

    def resolved(flags: str = ""):
        small = (
            "--preset demo-recsys --parties 12 --items 30 --ratings 240 --rounds 3 --eval-every 2 --aggregation plain "
            "--support own --graph complete "
        ) + fitting(method_of(flags) or "fedmf", "--factors 3 --mask-epochs 5")
        out = tmp_path / f"run{next(counter)}"
        return resolve([*small.split(), "--cache-dir", str(cache), "--out", str(out), *flags.split()])

    return resolved


def hosted(config, parties=None):
    method = build.algorithm(config)
    method.host(tuple(range(config.run.parties)) if parties is None else parties)
    return method


# ---- parties in batches ----


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_every_rating_stands_in_one_bucket_of_the_next_power_of_two(counts):
    offsets = np.concatenate(([0], np.cumsum(counts)))
    seen = []
    for bucket in buckets(offsets):
        length = bucket.places.shape[1]
        assert length & (length - 1) == 0
        for member, places in zip(bucket.members, bucket.places):
            own = places[places < offsets[-1]]
            assert own.tolist() == list(range(offsets[member], offsets[member + 1]))
            assert length / 2 < len(own) <= length or length == len(own) == 1
            seen += own.tolist()
    assert sorted(seen) == list(range(offsets[-1]))


def example(solver, *, counted=True, biased=True, seed=0, parties=5, items=12, k=3):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 9, parties)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    chosen = np.concatenate([np.sort(rng.choice(items, count, replace=False)) for count in counts])
    ratings = rng.integers(1, 6, len(chosen)).astype(float)
    layout = Layout(items, k, counted, biased)
    theta = rng.normal(size=(items, layout.width)).astype(np.float32)
    if counted:
        theta[:, 0] = rng.integers(0, 20, items)
    made = Solver(solver, 0.7, 0.7, 4.0, 2, 0.3, biased)
    start = rng.normal(size=(parties, k))
    return Parties(layout, made, offsets, chosen, start), theta, ratings, start


@pytest.mark.parametrize("biased", [True, False])
def test_ridge_factors_are_the_minimisers(biased):
    parties, theta, ratings, _ = example("ridge", biased=biased)
    values, errors = parties.gradients(theta, ratings)
    layout = parties.layout
    for u in range(5):
        own = slice(parties.offsets[u], parties.offsets[u + 1])
        q = layout.q(theta)[parties.items[:-1][own]].astype(float)
        w = np.column_stack((np.ones(len(q)) * biased, q))
        y = ratings[own] - layout.bias(theta)[parties.items[:-1][own]]
        z = np.linalg.solve(w.T @ w + 0.7 * np.eye(4), w.T @ y)
        assert np.allclose(parties.z[u], z)
        error = y - w @ z
        assert np.allclose(errors[own], error)
        assert np.allclose(values[own][:, -3:], -error[:, None] * z[1:], atol=1e-5)  # MMF (6) without lambda q
        assert np.all(values[own][:, 0] == 1)
        if biased:
            assert np.allclose(values[own][:, 1], -error, atol=1e-5)


def test_posterior_gradients_are_those_of_the_expected_squared_error():
    parties, theta, ratings, _ = example("posterior")
    values, _ = parties.gradients(theta, ratings)
    layout, u = parties.layout, 1
    own = slice(parties.offsets[u], parties.offsets[u + 1])
    items = parties.items[:-1][own]
    variance = 0.7 / (theta[items, 0].astype(float) + 4.0)
    z = parties.z[u]

    def expected_loss(rows):
        q = layout.q(rows)[items]
        w = np.column_stack((np.ones(len(q)), q))
        return 0.5 * np.sum((ratings[own] - layout.bias(rows)[items] - w @ z) ** 2) + 0.5 * np.sum(w @ s * w)

    w = np.column_stack((np.ones(len(items)), layout.q(theta)[items].astype(float)))
    s = 0.7 * np.linalg.inv(w.T @ w + 0.7 * np.eye(4) + np.diag([0, 1, 1, 1]) * variance.sum())
    rows = theta.astype(float)
    for row, item in enumerate(items):
        for column in range(1, layout.width):
            up, down = rows.copy(), rows.copy()
            up[item, column] += 1e-5
            down[item, column] -= 1e-5
            slope = (expected_loss(up) - expected_loss(down)) / 2e-5
            assert values[own][row, column] == pytest.approx(slope, abs=2e-4)


def test_steps_are_the_printed_equations():
    parties, theta, ratings, start = example("steps", counted=False, biased=False)
    values, _ = parties.gradients(theta, ratings)
    for u in range(5):
        own = slice(parties.offsets[u], parties.offsets[u + 1])
        q = theta[parties.items[:-1][own]].astype(float)
        p = start[u]
        for _ in range(2):  # MMF (7), downhill
            p = p - 0.3 * np.mean([0.7 * p - (r - row @ p) * row for r, row in zip(ratings[own], q)], axis=0)
        assert np.allclose(parties.z[u], [0, *p])
        error = ratings[own] - q @ p
        assert np.allclose(values[own], 4.0 * q - error[:, None] * p, atol=1e-5)  # MMF (6)


@pytest.mark.parametrize("solver", ["steps", "ridge", "posterior"])
def test_a_partys_bits_do_not_depend_on_who_shares_its_rank(solver):
    parties, theta, ratings, start = example(solver, parties=40, items=60, k=5)
    together, _ = parties.gradients(theta, ratings)
    for u in (0, 7, 39):
        own = slice(parties.offsets[u], parties.offsets[u + 1])
        alone = Parties(
            parties.layout,
            parties.solver,
            np.array([0, own.stop - own.start]),
            parties.items[:-1][own],
            start[u : u + 1],
        )
        values, _ = alone.gradients(theta, ratings[own])
        assert np.array_equal(values, together[own])
        assert np.array_equal(alone.z[0], parties.z[u])
        assert np.array_equal(alone.solve(theta, ratings[own])[0], parties.solve(theta, ratings)[u])


def test_a_prediction_is_offset_plus_bias_plus_product():
    layout = Layout(4, 2, True, True)
    theta = np.arange(16, dtype=np.float32).reshape(4, 4)
    z = np.array([[1.0, 2.0, 3.0]])
    assert predict(layout, theta, z, np.array([0]), np.array([2])) == [1 + 9 + 2 * 10 + 3 * 11]


# ---- server steps ----


def test_server_steps():
    values, gradient, counts = np.zeros((2, 3)), np.ones((2, 3)), np.array([3.0, 0.0])
    assert np.allclose(Sgd(0.1).step(values, gradient, counts), -0.1)
    assert np.allclose(Adam(0.1).step(values, 7 * gradient, counts), -0.1)  # the first step has the rate's length
    step = Counted(0.5, 0.5, prior=2.0)
    first = step.step(values, gradient, counts)
    assert np.allclose(first, -0.5 * gradient / np.array([[5.0], [2.0]]))
    assert np.allclose(step.step(first, gradient, counts), 2.5 * first)
    assert np.allclose(Counted(0.5, 0.5, prior=0.0).step(values, gradient, counts), [[-0.5 / 3] * 3, [-0.5] * 3])


@pytest.mark.parametrize("kind", [Sgd, Adam, lambda rate: Counted(rate, 0.5, 2.0)])
def test_a_server_step_goes_on_from_its_checkpoint(kind):
    gradients = np.random.default_rng(0).normal(size=(4, 2, 3))
    counts, through, first = np.array([3.0, 1.0]), kind(0.1), kind(0.1)
    a = b = np.zeros((2, 3))
    for gradient in gradients[:2]:
        a, b = through.step(a, gradient, counts), first.step(b, gradient, counts)
    second = kind(0.1)
    second.load(first.state())
    for gradient in gradients[2:]:
        a, b = through.step(a, gradient, counts), second.step(b, gradient, counts)
    assert np.array_equal(a, b)


# ---- models of a rating from features ----


@pytest.mark.parametrize(
    "model", [Linear(4), FactorisationMachine(4, 2), Network(4, 3)], ids=lambda m: type(m).__name__
)
def test_gradients_are_slopes(model):
    rng = np.random.default_rng(1)
    parameters, x = rng.normal(size=(2, model.size)), rng.normal(size=(2, 5, 4))
    slope = rng.normal(size=(2, 5))
    found = model.gradient(parameters, x, slope)
    for index in range(model.size):
        move = np.zeros(model.size)
        move[index] = 1e-6
        change = (model.predict(parameters + move, x) - model.predict(parameters - move, x)) / 2e-6
        assert np.allclose(found[:, index], (slope * change).sum(axis=1), atol=1e-6)
    assert model.start(rng).shape == (model.size,)


def test_a_factorisation_machine_has_every_pair_once():
    model = FactorisationMachine(3, 2)
    rng = np.random.default_rng(0)
    parameters, x = rng.normal(size=(1, model.size)), rng.normal(size=(1, 1, 3))
    v, one = parameters[0, 4:].reshape(3, 2), x[0, 0]
    pairs = sum(v[a] @ v[b] * one[a] * one[b] for a in range(3) for b in range(a + 1, 3))
    assert model.predict(parameters, x)[0, 0] == pytest.approx(parameters[0, 0] + parameters[0, 1:4] @ one + pairs)


def test_a_private_linear_model_is_the_partys_own_ridge_solution(make):
    method = hosted(make())
    block, rng = method.block, np.random.default_rng(0)
    x = rng.normal(size=(method.store.num_items, 4))
    found = fit_all(Linear(4), block, x, Fit(2.0, 5.0, 1.0, 3.5, 1, 0.1), rng)
    for u in (0, 5, 11):
        own = slice(block.train_offsets[u], block.train_offsets[u + 1])
        ones = np.column_stack((np.ones(own.stop - own.start), x[block.train_items[own]]))
        weights = np.linalg.solve(
            ones.T @ ones + np.diag([2.0, 5, 5, 5, 5]), ones.T @ (block.train_values[own].astype(float) - 3.5)
        )
        assert np.allclose(found.train[own], 3.5 + ones @ weights)
        tested = slice(block.test_offsets[u], block.test_offsets[u + 1])
        assert np.allclose(found.test[tested], 3.5 + weights[0] + x[block.test_items[tested]] @ weights[1:])


@pytest.mark.parametrize("model", [FactorisationMachine(4, 2), Network(4, 3)], ids=lambda m: type(m).__name__)
def test_descent_lowers_a_private_models_error(model, make):
    method = hosted(make())
    x = np.random.default_rng(0).normal(size=(method.store.num_items, 4))

    def error(epochs):
        rng = np.random.default_rng(1)
        predicted = fit_all(model, method.block, x, Fit(1.0, 0.1, 0.1, 3.5, epochs, 0.05), rng).train
        return np.mean((predicted - method.block.train_values) ** 2)

    assert error(60) < 0.8 * error(1)


# ---- rows on their way ----

ENCODING = Encoding(8.0, 1 << 14, 24, 12)  # 4 rows of 3


def updates(counts, row_numbers, values):
    figures = np.zeros((len(counts), 2))
    return RowUpdates(
        tuple(range(len(counts))), np.array(counts), np.array(row_numbers), np.array(values, float), figures
    )


def test_encoded_rows_are_within_half_a_step_and_the_bound():
    release = Cut(ENCODING, width=3)
    values = np.array([[0.1, -9.0, 8.0], [1e-5, 0.0, 100.0]], np.float32)
    steps, cut = release.encode_rows(values)
    assert np.abs(steps).max() <= ENCODING.steps
    assert np.allclose(steps / ENCODING.scale, np.clip(values, -8, 8), atol=0.5 / ENCODING.scale)
    assert cut.sum() == 2
    with pytest.raises(ProtocolError, match="not a finite number"):
        release.encode_rows(np.array([[np.nan, 0, 0]]))


@settings(max_examples=50)
@given(st.data())
def test_rows_in_the_clear_add_up_to_what_dense_vectors_do(data):
    parties = data.draw(st.integers(1, 6))
    chosen = [sorted(data.draw(st.sets(st.integers(0, 3)))) for _ in range(parties)]
    numbers = np.array([row for own in chosen for row in own], np.int64)
    steps = data.draw(st.lists(st.integers(-(1 << 14), 1 << 14), min_size=3 * len(numbers), max_size=3 * len(numbers)))
    encoded = np.array(steps, np.int32).reshape(-1, 3)
    update = RowUpdates(
        tuple(range(parties)), np.array([len(o) for o in chosen]), numbers, encoded * 1.0, np.zeros((parties, 2))
    )
    clear = np.array(data.draw(st.lists(st.booleans(), min_size=parties, max_size=parties)))
    members = tuple(np.flatnonzero(clear).tolist())
    server = RowServer(1, members, ENCODING, 12, width=3)
    session = RowsParty(1, update.parties, update.counts, update.rows, encoded, clear, ENCODING)
    for message in session.start():
        server.receive(decode(encode(message)))
    assert server.done and server.result().survivors == members
    dense = [ENCODING.wrap(departures._dense(update, encoded, index, 12)) for index in members]
    wanted = ENCODING.unwrap(sum(dense, np.zeros(12, np.uint64)))
    assert server.result().total.tolist() == wanted.tolist()


def test_errors_beyond_the_scale_or_of_more_items_than_there_are_cannot_be(make):
    method = hosted(make())
    items = method.store.num_items
    possible = [[0, 0, 0], [16 * items, 4 * items, items], [2.5, 2.0, 3]]
    wrong = [[-1, 0, 1], [17, 4, 1], [16, 5, 1], [0, 0, items + 1], [0, 0, 0.5], [np.nan, 0, 1], [0, 0, np.inf]]
    assert method.plausible(np.array(possible, float), 1).all()
    assert not method.plausible(np.array(wrong, float), 1).any()


def test_many_rows_go_in_several_messages_of_whole_parties(monkeypatch):
    monkeypatch.setattr("fedmpi.aggregation.rows.MESSAGE_ROWS", 4)
    update = updates([3, 3, 1, 2], [0, 1, 2, 0, 1, 3, 2, 1, 2], np.zeros((9, 3)))
    everyone = np.ones(4, bool)
    session = RowsParty(1, update.parties, update.counts, update.rows, np.zeros((9, 3), np.int32), everyone, ENCODING)
    messages = list(session.start())
    assert [message.parties for message in messages] == [(0,), (1, 2), (3,)]
    assert [message.party for message in messages] == [0, -1, 3]


def rows_message(parties=(0, 1), counts=(1, 2), numbers=(3, 0, 2), value=5, round=1, bits=16, width=3, row_bits=2):
    packed = pack(np.array(numbers), row_bits), pack_signed(np.full(len(numbers) * width, value, np.int64), bits)
    return PlainRows(round, -1, tuple(parties), np.array(counts), *packed, row_bits, bits, width)


REFUSED = {
    "round 9 in round 1": rows_message(round=9),
    "not in this round's cohort": rows_message(parties=(0, 7)),
    "second update": rows_message(parties=(0, 0)),
    "rows of 2 values": rows_message(width=2),
    "and 20 a value, expected 3, 2 and 16": rows_message(bits=20),
    "7 bits a row number": rows_message(row_bits=7),
    "sent 5 rows of one party, there are 4": rows_message(counts=(5, 0), numbers=(0, 1, 2, 3, 3)),
    "nonzero padding": dataclasses.replace(rows_message(), rows=b"\xff"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_message_of_rows_that_cannot_be_is_refused_whole(said):
    server = RowServer(1, (0, 1, 2), ENCODING, 12, width=3)
    with pytest.raises(ProtocolError, match=said):
        server.receive(REFUSED[said])
    assert server.waiting() == (0, 1, 2) and not server.result().total.any()


@pytest.mark.parametrize(
    "message", [rows_message(numbers=(3, 2, 0)), rows_message(numbers=(3, 2, 2))], ids=["descending", "twice"]
)
def test_a_party_whose_rows_cannot_be_is_named_and_its_neighbour_counts(message):
    server = RowServer(1, (0, 1), ENCODING, 12, width=3)
    server.receive(message)
    assert server.done and server.result().survivors == (0,)
    assert list(map(str, server.faults)) == ["party 1, update: sent rows that do not exist or do not ascend"]
    assert server.result().total.reshape(4, 3).tolist() == [[0] * 3, [0] * 3, [0] * 3, [5] * 3]


def test_a_value_out_of_range_is_named():
    server = RowServer(1, (0, 1), ENCODING, 12, width=3)
    server.receive(rows_message(value=(1 << 14) + 1))
    assert server.result().survivors == () and "party 0, update: sent a value out of range" in map(str, server.faults)


# ---- whole runs ----


@pytest.mark.parametrize("name", METHODS)
def test_a_run_does_not_depend_on_placement(name, make, run_in_memory):
    summaries = [run_in_memory(make(f"--method {name}"), ranks) for ranks in (2, 4, 13)]
    assert len({summary["model_sha256"] for summary in summaries}) == 1
    assert len({summary["rmse"] for summary in summaries}) == 1
    assert summaries[0]["task"] == "recommendation" and 0.3 < summaries[0]["mae"] <= summaries[0]["rmse"] < 2
    assert summaries[0]["rmse_optimum"] < summaries[0]["rmse_party_mean"]


@pytest.mark.parametrize("name", SHARING)
def test_secure_is_plain_is_hybrid(name, make, run_in_memory):
    flags = f"--method {name} --rounds 2 --dropout 1:3:mask,2:5:share"
    plain = run_in_memory(make(flags), 3)
    for other in (
        "--aggregation secure --support dense",
        "--aggregation hybrid --support dense --clear-parties 0,3,7,8",
    ):
        summary = run_in_memory(make(f"{flags} {other}"), 4)
        assert summary["model_sha256"] == plain["model_sha256"]
        assert summary["dropouts"]["planned"] == 2


@pytest.mark.parametrize(
    "flags", ["", "--optimizer adam --party-solver steps --factor-mean 1 --item-reg 0.1 --server-lr 0.05"]
)
def test_an_interrupted_run_goes_on_to_the_same_model(flags, make, run_in_memory, monkeypatch):
    from fedmpi.runtime.server import Server

    flags = f"--method fedmmf-lr --rounds 5 --checkpoint-every 2 --sampling 0.7 {flags}"
    through = run_in_memory(make(flags), 3)
    config = make(flags)
    with monkeypatch.context() as patch:
        original = Server.round

        def interrupted(self, round):
            if round == 4:
                raise KeyboardInterrupt
            original(self, round)

        patch.setattr(Server, "round", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_in_memory(config, 3)
    resumed = run_in_memory(resolve(["--resume", str(config.out)]), 5)  # on other ranks
    assert resumed["model_sha256"] == through["model_sha256"] and resumed["rmse"] == through["rmse"]


def test_test_ratings_never_touch_training(make):
    config = make("--method fedmmf-fm")
    one, two = hosted(config), hosted(config)
    two.block = dataclasses.replace(two.block, test_values=two.block.test_values[::-1].copy() * 0 + 5)
    two.fit_private_models()
    theta = one.initial()
    everyone = tuple(range(12))
    assert np.array_equal(one.row_updates(everyone, theta, 1).values, two.row_updates(everyone, theta, 1).values)


def test_masked_ratings_and_predictions_are_those_of_the_paper(make):
    method = hosted(make("--method fedmmf-lr"))
    block = method.block
    assert np.allclose(method.targets, block.train_values - method.private.train)  # MMF (11)
    theta = method.initial()
    z = method.parties.solve(method.layout.rows(theta), method.targets)
    wanted = predict(method.layout, method.layout.rows(theta), z, method.test_users, block.test_items)
    assert np.allclose(method.predictions(theta), wanted + method.private.test)  # MMF (12)


def test_biases_start_at_the_mean_of_raw_ratings_and_at_nothing_for_masked_ones(make):
    for name, start in (("fedmf", 2.5), ("fedmmf-lr", 0.0)):
        method = hosted(make(f"--method {name} --rating-centre 2.5"))
        rows_ = method.layout.rows(method.initial())
        assert np.all(method.layout.bias(rows_) == start)
        # with nothing to say, a step leaves them there
        stepped = method.step(method.initial(), np.zeros(method.dimension), 1.0, None)
        assert np.all(method.layout.bias(method.layout.rows(stepped)) == start)


def test_with_min_raters_items_of_few_are_counted_and_not_trained(make, run_in_memory):
    config = make("--min-raters 8 --rounds 4")
    method = hosted(config)
    everyone, theta = tuple(range(12)), method.initial()
    counts = method.store.rater_counts
    assert (counts < 8).any() and (counts >= 8).any()
    first = method.row_updates(everyone, theta, 1)
    assert not first.values[:, 1:].any() and np.all(first.values[:, 0] == 1)  # a census
    total = np.zeros((method.layout.items, method.layout.width))
    np.add.at(total, first.rows, first.values)
    counted = method.step(theta, total.reshape(-1), 1.0, None)
    assert np.array_equal(method.layout.rows(counted)[:, 1:], method.layout.rows(theta)[:, 1:])
    assert method.layout.counts(method.layout.rows(counted)).tolist() == counts.tolist()
    second = method.row_updates(everyone, counted, 2)
    sent = np.abs(second.values[:, 1:]).sum(axis=1) > 0
    assert np.array_equal(sent, counts[second.rows] >= 8)
    plain = run_in_memory(config, 3)
    secure = run_in_memory(make("--min-raters 8 --rounds 4 --aggregation secure --support dense"), 3)
    assert plain["model_sha256"] == secure["model_sha256"]


def released(method, update, missing=None):
    """The sum of an update's rows, without those of one party."""
    total = np.zeros((method.layout.items, method.layout.width))
    there = np.ones(len(update.rows), bool) if missing is None else method.train_users != missing
    np.add.at(total, update.rows[there], update.values[there])
    return total.reshape(-1)


@pytest.mark.parametrize("flags", ["", "--min-raters 3", "--min-raters 3 --optimizer adam --server-lr 0.05"])
def test_raters_are_counted_once_and_then_nothing_is_sent_of_them(flags, make):
    method = hosted(make(flags))
    everyone, theta, layout = tuple(range(12)), method.initial(), method.layout
    first = method.row_updates(everyone, theta, 1)
    assert np.all(first.values[:, 0] == 1)
    theta = method.step(theta, released(method, first, missing=4), 1.0, None)
    counted = layout.counts(layout.rows(theta)).copy()
    assert counted.tolist() == np.bincount(first.rows[method.train_users != 4], minlength=layout.items).tolist()
    for round, missing in ((2, None), (3, 7)):
        update = method.row_updates(everyone, theta, round)
        assert not update.values[:, 0].any() and update.values[:, 1:].any()
        theta = method.step(theta, released(method, update, missing), 1.0, None)
        assert np.array_equal(layout.counts(layout.rows(theta)), counted)
    # A round that gave no sum was no count: the same rows are sent to it again.
    assert np.all(method.row_updates(everyone, method.initial(), 2).values[:, 0] == 1)


def test_an_item_that_nobody_had_rated_when_raters_were_counted_does_no_harm(make):
    method = hosted(make("--item-reg 0 --item-prior --bias-reg 0"))
    everyone, theta = tuple(range(12)), method.initial()
    alone = method.store.rater_counts.min()
    for round in range(1, 8):
        total = released(method, method.row_updates(everyone, theta, round))
        if round == 1:  # as if an item's raters had all been missing
            method.layout.rows(total)[method.store.rater_counts == alone] = 0
        theta = method.step(theta, total, 1.0, None)
        assert np.isfinite(theta).all()


# What a run loses, and whether its last round, the third, gives a sum.
LOSSES = {
    "--min-raters 4": True,
    "--min-raters 4 --dropout 1:5:mask,1:6:share": True,  # counts hold no gradient
    "--min-raters 4 --dropout 3:5:mask": False,
    "--min-raters 4 --dropout 3:5:advertise": False,
    "--min-raters 4 --rater-margin 1 --dropout 3:5:mask": True,
    "--min-raters 4 --rater-margin 1 --dropout 3:5:mask,3:6:share": False,
    "--min-raters 4 --rater-margin 2 --dropout 3:5:mask,3:6:share": True,
    "--dropout 3:5:mask,3:6:share": True,
}


@pytest.mark.parametrize("flags", LOSSES)
def test_a_round_that_loses_more_raters_than_the_margin_leaves_the_model_as_it_was(flags, make, run_in_memory):
    plain = run_in_memory(make(flags), 3)
    config = make(f"{flags} --aggregation secure --support dense")
    secure = run_in_memory(config, 3)
    assert plain["model_sha256"] == secure["model_sha256"]
    before = run_in_memory(make(f"{flags} --rounds 2"), 3)
    assert (plain["model_sha256"] != before["model_sha256"]) == LOSSES[flags]
    failed = [json.loads(line).get("failed") for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert failed[:2] == [None, None] and (failed[2] is None) == LOSSES[flags]
    assert LOSSES[flags] or "the sum is not opened" in failed[2]
    assert plain["dropouts"]["failed_rounds"] == secure["dropouts"]["failed_rounds"] == (not LOSSES[flags])


def test_who_is_lost_once_its_input_arrived_is_in_the_sum(make, run_in_memory):
    flags = "--min-raters 4 --aggregation secure --support dense"
    lost, whole = (run_in_memory(make(f"{flags} {more}"), 3) for more in ("--dropout 3:5:unmask", ""))
    assert lost["dropouts"]["planned"] == 1 and lost["model_sha256"] == whole["model_sha256"]


def test_items_that_the_margin_could_leave_with_too_few_raters_are_not_trained(make):
    method = hosted(make("--min-raters 5 --rater-margin 3"))
    everyone, theta, counts = tuple(range(12)), method.initial(), method.store.rater_counts
    assert method.most_lost(theta) is None  # the sum that counts may lose anybody
    theta = method.step(theta, released(method, method.row_updates(everyone, theta, 1)), 1.0, None)
    assert method.most_lost(theta) == 3
    second = method.row_updates(everyone, theta, 2)
    sent = np.abs(second.values).sum(axis=1) > 0
    assert np.array_equal(sent, counts[second.rows] >= 8) and 0 < sent.sum() < len(sent)


def test_a_method_that_shares_nothing_sends_no_update(make, run_in_memory):
    config = make("--method local-lr")
    summary = run_in_memory(config, 3)
    rows_ = [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert len(rows_) == 1 and rows_[0]["skipped"] == "local-lr shares nothing"
    assert ",update," not in (config.out / "messages.csv").read_text()
    assert summary["rmse"] > 0


def test_the_hybrid_rule_decides_by_each_partys_own_data(make, run_in_memory):
    method = hosted(make("--method fedmmf-lr"))
    rule = ClearRule.parse("indicator<=1")
    found = rule.figures(method.block.train_offsets, method.targets, method.block.train_values, method.store.scale)
    middle = float(np.median(found["indicator"]))
    config = make(f"--method fedmmf-lr --aggregation hybrid --support dense --clear-rule indicator<={middle:.9f}")
    chosen = hosted(config).clear_parties()
    assert chosen == tuple(np.flatnonzero(found["indicator"] <= round(middle, 9)).tolist()) and 3 <= len(chosen) <= 9
    summary = run_in_memory(config, 4)
    assert summary["hybrid"]["clear"] == len(chosen) and summary["hybrid"]["hidden"] == 12 - len(chosen)
    assert summary["hybrid"]["bytes_saved_up"] > 0 and summary["hybrid"]["cpu_seconds_saved"] > 0
    text = (config.out / "messages.csv").read_text()
    assert "PlainRows" in text and "MaskedInput" in text
    assert summary["model_sha256"] == run_in_memory(make("--method fedmmf-lr"), 2)["model_sha256"]


REFUSED_SETTINGS = {
    "--epsilon 1": "epsilon = 1: fedmf adds no noise and promises no epsilon",
    "--denominator expected": "denominator = expected",
    "--dataset digits": "dataset = digits: not for method fedmf, which takes generated, lastfm",
    "--dataset none": "dataset = none: not for method fedmf, which takes generated",
    "--dataset none --method centaur": "dataset = none: not for method centaur, which takes an image set",
    "--method dp-pfeddsu": "dataset = generated: not for method dp-pfeddsu, which takes an image set",
    "--support shared": "support = shared: method fedmf takes own, dense",
    "--method fed-lr --optimizer counted": "optimizer = counted: fed-lr has no items",
    "--method fed-nn --denominator survivors": "denominator = survivors: fed-nn adds gradients up",
    "--aggregation hybrid --support dense --clear-rule speed<=1 --method fedmmf-lr": "clear_rule = speed<=1: must be",
    "--aggregation hybrid --support dense --clear-rule indicator<=2 --method fedmmf-lr": "clear_rule = indicator<=2: must be",
    "--min-raters 3 --sampling 0.5": "min_raters = 3: needs sampling 1, not 0.5",
    "--min-raters 3 --aggregation hybrid --support dense --clear-parties 1": "min_raters = 3: not with aggregation hybrid",
    "--rater-margin 2": "rater_margin = 2: means nothing without min_raters above 1",
    "--clear-rule indicator<=0.5": "clear_rule = indicator<=0.5: only with aggregation hybrid",
    "--aggregation hybrid --support dense --clear-rule indicator<=0.5": "clear_rule = indicator<=0.5: method fedmf",
}


@pytest.mark.parametrize("flags", REFUSED_SETTINGS)
def test_settings_that_cannot_be_are_refused_in_one_line(flags, make, run_in_memory, tmp_path):
    with pytest.raises(ConfigError) as caught:
        run_in_memory(make(flags), 3)
    assert REFUSED_SETTINGS[flags] in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("config.yaml"))  # no folder is claimed for a run that cannot be


@pytest.mark.parametrize("name", METHODS)
def test_no_rating_method_needs_torch(name):
    import subprocess
    import sys

    code = f"import sys, fedmpi.algorithm as a; a.load_method({name!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
