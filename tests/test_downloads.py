"""How parties get the next model: the sum that made it, from which each makes it by itself, or all of it. The model is the same."""

import csv
import itertools

import numpy as np
import pytest

from fedmpi.errors import FedmpiError
from fedmpi.privacy.encoding import Encoding
from fedmpi.privacy.mechanism import Cut, Noised
from fedmpi.runtime.downloads import Downloads, size
from fedmpi.runtime.mirror import Mirror, move
from fedmpi.transport.endpoint import Endpoint
from fedmpi.transport.memory import Hub
from fedmpi.wire.messages import AskModel, Delta, Model, Train

IMAGES = "--parties 6 --rounds 3 --eval-every 2 --metrics party"
RATINGS = "--preset demo-recsys --parties 12 --rounds 4 --eval-every 2 --items 30"


def rows(config, **where):
    with (config.out / "messages.csv").open() as file:
        found = list(csv.DictReader(file))
    return [row for row in found if all(row[name] == str(value) for name, value in where.items())]


def total(config, column, **where):
    return sum(int(row[column]) for row in rows(config, **where))


def both(make_config, run_in_memory, flags, ranks=3):
    configs = [make_config(f"{flags} --download {how}") for how in ("full", "delta")]
    return configs, [run_in_memory(config, ranks) for config in configs]


@pytest.mark.parametrize(
    "flags",
    [
        f"{IMAGES} --support shared --aggregation secure",
        f"{IMAGES} --support shared --dropout 0.3 --denominator survivors",
        f"{IMAGES} --support own",
        f"{IMAGES} --support union",
        f"{IMAGES} --method centaur --support dense --aggregation hybrid --clear-parties 0",
        f"{IMAGES} --method dp-pfedhome --support dense --home-rounds 1 --noise-budget 0.001",
        f"{IMAGES} --method fedavg --support dense --epsilon inf",
        f"{IMAGES} --support shared --sampling 0.5 --min-cohort 2 --rounds 6",
        f"{RATINGS} --method fedmf --aggregation plain --support own",
        f"{RATINGS} --method fedmf --optimizer adam --server-lr 0.05 --aggregation secure --graph complete",
        f"{RATINGS} --method fedmmf-lr --optimizer counted --sampling 0.6 --graph complete",
        f"{RATINGS} --method fedmf --min-raters 3 --graph complete",
        f"{RATINGS} --method fed-lr --optimizer adam --server-lr 0.05 --graph complete",
    ],
)
def test_the_model_is_the_same_and_nobody_has_to_ask(flags, make_config, run_in_memory, capsys):
    (full, delta), (first, second) = both(make_config, run_in_memory, flags)
    assert first["model_sha256"] == second["model_sha256"]
    assert first["scores"] == second["scores"] if "scores" in first else True
    assert "has another model" not in capsys.readouterr().out
    assert not rows(delta, message="AskModel") and not rows(full, message="Delta")
    assert rows(delta, message="Delta")
    for column in ("wire_payload", "logical_payload"):
        assert total(delta, column, phase="model") < total(full, column, phase="model")


def test_a_model_that_is_there_is_not_sent_again(make_config, run_in_memory):
    """Neither for a test nor for the round after it, nor the first one, which everybody draws."""
    often, once = (make_config(f"{IMAGES} --aggregation secure --eval-every {every}") for every in (1, 0))
    for config in (often, once):
        run_in_memory(config, 3)
        assert not rows(config, message="Model")
        assert {row["round"] for row in rows(config, message="Delta")} == {"1", "2", "3"}
        assert total(config, "messages", message="Delta") == 3 * 2, "a round's to each rank"
    assert total(often, "logical_payload", message="Delta") == total(once, "logical_payload", message="Delta")


def test_what_a_party_would_have_moved_does_not_depend_on_its_rank(make_config, run_in_memory):
    """Under sampling a rank has what one of its parties was sent; another one, drawn later, would have had to catch up."""
    flags = f"{IMAGES} --sampling 0.4 --min-cohort 1 --rounds 8 --eval-every 4"
    configs = [make_config(flags) for _ in range(3)]
    for config, ranks in zip(configs, (2, 3, 7)):
        run_in_memory(config, ranks)
    by_party = [
        {
            party: total(config, "logical_payload", phase="model", direction="down", party=party)
            + total(config, "logical_framing", phase="model", direction="down", party=party)
            for party in range(6)
        }
        for config in configs
    ]
    assert by_party[0] == by_party[1] == by_party[2] and min(by_party[0].values()) > 0
    assert total(configs[0], "wire_payload", phase="model") < sum(by_party[0].values())
    alone = total(configs[2], "wire_payload", phase="model") + total(configs[2], "wire_framing", phase="model")
    assert alone == sum(by_party[2].values()), "a party on each rank: what it would have moved, it moved"


def flip_a_bit(monkeypatch, rank_of_round):
    """The mirror of a rank errs by one bit in these rounds."""
    from fedmpi.runtime import rank as ranks

    class Erring(Mirror):
        rank = 0

        def follow(self, delta):
            super().follow(delta)
            if (self.rank, delta.round) in rank_of_round and self.version == delta.round:
                wrong = self.theta.copy()
                wrong.view(np.uint32)[5] ^= 1
                self._set(wrong, self.version)

    class Watched(ranks.Rank):
        def __init__(self, endpoint, home, mirror, make):
            mirror.__class__, mirror.rank = Erring, endpoint.rank
            super().__init__(endpoint, home, mirror, make)

    monkeypatch.setattr(ranks, "Rank", Watched)


@pytest.mark.parametrize("flags", [f"{IMAGES} --aggregation secure", f"{RATINGS} --method fedmf --optimizer adam"])
def test_a_rank_whose_model_differs_by_one_bit_notices_and_asks_for_all_of_it(
    flags, make_config, run_in_memory, monkeypatch, capsys
):
    flags += " --graph complete --rounds 4"
    wanted = run_in_memory(make_config(flags), 3)
    flip_a_bit(monkeypatch, {(1, 2)})
    config = make_config(flags)
    assert run_in_memory(config, 3)["model_sha256"] == wanted["model_sha256"]
    assert capsys.readouterr().out.count("rank 1 has another model than rank 0 after round 2") == 1
    assert [row["rank"] for row in rows(config, message="AskModel")] == ["1"]
    sent = [row for row in rows(config, message="Model") if row["messages"] != "0"]
    assert [(row["rank"], row["round"]) for row in sent] == [("1", "2")]
    assert {row["round"] for row in rows(config, message="Delta", rank=1)} == {"1", "2", "3", "4"}, "then sums again"


def test_a_rank_that_errs_time_and_again_gets_nothing_but_models(make_config, run_in_memory, monkeypatch, capsys):
    flags = f"{IMAGES} --rounds 5"
    wanted = run_in_memory(make_config(flags), 3)
    flip_a_bit(monkeypatch, set(itertools.product([1], range(1, 6))))
    config = make_config(flags)
    assert run_in_memory(config, 3)["model_sha256"] == wanted["model_sha256"]
    assert "it is sent all of it, and gets nothing else from now on" in capsys.readouterr().out
    assert total(config, "messages", message="AskModel") == 2
    assert {row["round"] for row in rows(config, message="Delta", rank=1)} == {"1", "2"}


def test_who_asks_for_nothing_is_left_out_and_stops_nobody(make_config, run_in_memory, monkeypatch, capsys):
    """A rank that asks for the same model again and again."""
    send = Endpoint.send

    def nagging(self, rank, message):
        send(self, rank, message)
        if self.rank == 1 and message.round == 2 and type(message).__name__ == "TrainReport":
            for _ in range(3):
                send(self, 0, AskModel(2))

    monkeypatch.setattr(Endpoint, "send", nagging)
    config = make_config(f"{IMAGES} --rounds 4")
    summary = run_in_memory(config, 3)
    assert "rank 1 asked for a model that it had been sent" in capsys.readouterr().out
    assert summary["dropouts"]["caught"] >= 1 and (config.out / "model.npz").exists()


def test_a_resumed_run_sends_the_model_once_and_then_sums(make_config, run_in_memory, monkeypatch):
    flags = f"{RATINGS} --method fedmf --optimizer adam --checkpoint-every 2 --rounds 6 --graph complete"
    wanted = run_in_memory(make_config(flags), 3)
    from fedmpi.runtime.server import Server

    config, whole = make_config(flags), Server.round

    def until(self, round):
        if round == 5:
            raise FedmpiError("enough")
        whole(self, round)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "round", until)
        with pytest.raises(FedmpiError, match="enough"):
            run_in_memory(config, 3)
    from fedmpi.cli import resolve

    again = resolve(["--resume", str(config.out), "--download", "delta"])
    assert run_in_memory(again, 3)["model_sha256"] == wanted["model_sha256"]
    assert {row["round"] for row in rows(config, message="Model")} == {"4"}
    assert {"5", "6"} <= {row["round"] for row in rows(config, message="Delta")}


# ---- what a rank is sent, without a run ----


class Toy:
    """A model of so many numbers, moved as every method's is by default."""

    def __init__(self, dimension, state=0):
        self.dimension, self._state = dimension, state

    def server_state(self):
        return {"state": np.zeros(self._state)} if self._state else {}

    def load_server_state(self, state):
        assert len(state["state"]) == self._state

    def initial(self):
        return np.zeros(self.dimension, np.float32)

    def support_size(self):
        return self.dimension

    def public_support(self, theta):
        return None

    def step(self, theta, total, rate, support):
        return (theta + rate * total).astype(np.float32)


@pytest.fixture
def server(make_config):
    def make(dimension=1000, state=0, flags="", mechanism=None):
        config = make_config(f"--parties 4 {flags}")
        hub = Hub(3)
        mechanism = mechanism or Noised(Encoding(1.0, 64, 16, dimension), multiplier=1.0)
        toy = Toy(dimension, state)
        return Downloads(config, hub.endpoints[0], toy, mechanism, lambda line: None), hub, toy, mechanism

    return make


def noise(dimension, round, deviation=40.0):
    return np.rint(np.random.default_rng(round).normal(0, deviation, dimension)).astype(np.int64)


def sent_to(hub, rank):
    found = []
    while (arrived := hub.endpoints[rank].poll(0)) is not None:
        found.append(arrived[1])
    return found


def test_who_missed_rounds_gets_the_sums_since_or_the_model_whichever_is_less(server):
    downloads, hub, toy, mechanism = server()
    theta, mirror = toy.initial(), Mirror(toy, mechanism)
    downloads.bring(1, (0, 1), theta)
    assert sent_to(hub, 1) == [], "the first model is there"
    made = {}
    for round in range(1, 9):
        made[round] = noise(1000, round)
        theta = move(toy, mechanism, theta, made[round], 0.5, None)
        downloads.stepped(round, made[round], 0.5, None)
        if round in (1, 4):
            downloads.bring(1, (0, 1), theta)
    first = sent_to(hub, 1)
    assert [type(message) for message in first] == [Delta] * 4 and [message.round for message in first] == [1, 2, 3, 4]
    whole = Model.wire_size(1000)
    assert sum(map(size, first[1:])) <= whole
    for message in first:
        mirror.follow(message)
    downloads.bring(2, (2,), theta)  # all eight: longer than the model
    (model,) = sent_to(hub, 2)
    assert isinstance(model, Model) and model.round == 8 and 8 * size(first[0]) > whole
    downloads.bring(1, (0, 1), theta)
    for message in sent_to(hub, 1):
        mirror.follow(message)
    assert mirror.version == 8 and np.array_equal(mirror.theta, theta)
    assert mirror.is_of(Train(9, version=8, model=mirror._digest)) and not mirror.is_of(Train(9, version=8))


def test_what_steps_remember_is_part_of_the_model(server):
    downloads, hub, toy, _ = server(state=5000)
    theta = toy.initial()
    for round in range(1, 20):
        downloads.stepped(round, noise(1000, round), 1.0, None)
    downloads.bring(1, (0,), theta)
    assert all(isinstance(message, Delta) for message in sent_to(hub, 1)), "longer chains are worth it"
    downloads.go_on(19)
    downloads.bring(2, (3,), theta)
    (model,) = sent_to(hub, 2)
    assert isinstance(model, Model) and len(model.state) > 8 * 5000
    full, hub, toy, _ = server(state=5000, flags="--download full")
    full.stepped(1, noise(1000, 1), 1.0, None)
    full.bring(1, (0,), theta)
    assert sent_to(hub, 1)[0].state == b"", "but not of who gets nothing else than models"


@pytest.mark.parametrize("scattered", [True, False])
def test_coordinates_that_the_round_has_found_travel_with_the_sum(server, scattered):
    downloads, hub, toy, mechanism = server()
    found = np.array([3, 17, 500, 999])
    values = np.array([5, -7, 1, 30], np.int64)
    everywhere = np.zeros(1000, np.int64)
    everywhere[found] = values
    downloads.stepped(1, *((everywhere, 0.5, None) if scattered else (values, 0.5, found)))
    downloads.bring(1, (0,), toy.initial())
    (delta,) = sent_to(hub, 1)
    assert delta.scattered is scattered and delta.count == 4 and size(delta) < 60
    total, support = Mirror(toy, mechanism)._read(delta)
    if scattered:
        assert support is None and np.array_equal(total, everywhere)
    else:
        assert np.array_equal(support, found) and np.array_equal(total, values)


def test_rows_are_coded_as_rows(server):
    rng = np.random.default_rng(0)
    scales = np.exp(rng.normal(3, 1.5, (50, 1)))
    total = np.rint(scales * rng.standard_normal((50, 20)) * 9 + 0.6).astype(np.int64).reshape(-1)
    sizes = []
    for width in (1, 20):
        downloads, hub, toy, _ = server(mechanism=Cut(Encoding(1.0, 64, 16, 1000), width=width))
        downloads.stepped(1, total, 1.0, None)
        downloads.bring(1, (0,), toy.initial())
        sizes.append(size(sent_to(hub, 1)[0]))
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    "broken",
    [
        {"values": b"\7"},
        {"count": 999},
        {"count": 1 << 30},
        {"support": b"\1\2\3"},
        {"base": 4},
        {"round": 0},
    ],
)
def test_a_sum_that_cannot_be_read_leaves_the_model_as_it_was(server, broken):
    import dataclasses

    downloads, hub, toy, mechanism = server()
    downloads.stepped(1, noise(1000, 1), 1.0, None)
    downloads.bring(1, (0,), toy.initial())
    (delta,) = sent_to(hub, 1)
    mirror = Mirror(toy, mechanism)
    mirror.follow(dataclasses.replace(delta, **broken))
    assert mirror.version == 0 and not mirror.theta.any()
    mirror.follow(delta)
    assert mirror.version == 1 and mirror.theta.any()
