"""Keys for several rounds inside the engine: the same model and the same epsilon, whoever vanishes, dies, resumes or lies."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest
from dying_ranks import plain, sums

from fedmpi.aggregation.dropout import DropoutPlan, parse, plan_of
from fedmpi.cli import resolve
from fedmpi.errors import ConfigError, ProtocolError
from fedmpi.runtime.client import Client
from fedmpi.runtime.server import Server
from fedmpi.secagg import pki
from fedmpi.wire.message import speakers
from fedmpi.wire.messages import Train
from fedmpi.wire.phases import Phase

TOY = "--method toy_parties:Steady --dataset none --parties 7 --support dense --graph complete"
# Round 1, 4 and 7 make the keys.
PLAN = "1:0:advertise,1:1:share,2:2:mask,2:3:share,3:4:unmask,4:5:share,6:6:advertise"


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))


def messages(config):
    with open(config.out / "messages.csv") as file:
        return list(csv.DictReader(file))


# ---- the same model ----


@pytest.mark.parametrize("support", ["shared", "union"])
@pytest.mark.parametrize("graph", ["complete", "regular"])
@pytest.mark.parametrize("plan", ["", PLAN])
def test_secure_is_plain_bit_for_bit(support, graph, plan, make_config, run_in_memory):
    flags = f"--support {support} --seed 5 --parties 12 --rounds 7 --keys batch:3 --eval-every 0"
    flags += f" --dropout {plan}" if plan else ""
    rates = "--corrupt 0.05 --expected-dropout 0.35" if graph == "regular" else "--threshold 7"
    secure = run_in_memory(make_config(f"--aggregation secure {flags} --graph {graph} {rates}"), 4)
    in_clear = run_in_memory(make_config(f"--aggregation plain {flags}"), 3)
    assert secure["dropouts"]["failed_rounds"] == 0
    assert secure["model_sha256"] == in_clear["model_sha256"] and secure["accuracy"] == in_clear["accuracy"]
    assert secure["dropouts"]["real"] == in_clear["dropouts"]["real"] == 0
    assert secure["dropouts"]["planned"] == in_clear["dropouts"]["planned"] + ("3:4:unmask" in plan)
    if not plan:
        every_round = run_in_memory(
            make_config(f"--aggregation secure {flags} --keys round --graph {graph} {rates}"), 3
        )
        assert every_round["model_sha256"] == secure["model_sha256"]


@pytest.mark.parametrize("flags", ["--aggregation hybrid --clear-parties 1,3", "--metrics securesum --eval-every 2"])
def test_a_hybrid_and_secure_test_figures_go_with_it(flags, make_config, run_in_memory):
    settings = f"--parties 7 --rounds 5 --aggregation secure --dropout 2:5:mask {flags}"
    both = [run_in_memory(make_config(f"{settings} --keys {keys}"), 3) for keys in ("round", "batch:4")]
    assert both[0]["model_sha256"] == both[1]["model_sha256"] and both[0]["accuracy"] == both[1]["accuracy"]


def test_ratings_go_with_it(make_config, run_in_memory):
    settings = "--preset demo-recsys --method fedmf --parties 12 --rounds 5 --aggregation secure"
    both = [run_in_memory(make_config(f"{settings} --keys {keys}"), 3) for keys in ("round", "batch:16")]
    assert both[0]["model_sha256"] == both[1]["model_sha256"] and both[0]["rmse"] == both[1]["rmse"]


def test_an_active_adversary_goes_with_it(make_config, run_in_memory, tmp_path):
    pki.make(tmp_path / "identities", 7)
    flags = f"{TOY} --aggregation secure --rounds 5 --metrics none --dropout 2:3:mask,3:4:check,4:2:unmask"
    flags += f" --pki {tmp_path / 'identities'}"
    both = [run_in_memory(make_config(f"{flags} --keys {keys}"), 4) for keys in ("round", "batch:3")]
    assert both[0]["model_sha256"] == both[1]["model_sha256"]
    assert both[0]["epsilon_server"] == both[1]["epsilon_server"]


def test_epsilon_is_that_of_the_same_sums(make_config, run_in_memory):
    flags = f"{TOY} --aggregation secure --rounds 6 --metrics none --dropout 2:3:mask,5:4:unmask --noise-margin 0.2"
    both = [make_config(f"{flags} --keys {keys}") for keys in ("round", "batch:4")]
    one, other = (run_in_memory(config, 3) for config in both)
    for name in ("epsilon_outside", "epsilon_server", "epsilon_party", "epsilon_kind", "model_sha256"):
        assert one[name] == other[name]
    events = [
        [json.loads(line) for line in (config.out / "releases.jsonl").read_text().splitlines()] for config in both
    ]
    kinds = [[event["event"] for event in log if event["event"] in ("Opened", "Stepped")] for log in events]
    assert kinds[0] == kinds[1]


def test_a_round_is_two_trips_and_the_keys_are_made_once(make_config, run_in_memory):
    config = make_config(f"{TOY} --aggregation secure --rounds 5 --keys batch:3 --metrics none --epsilon inf")
    run_in_memory(config, 3)
    phases = {}
    for row in messages(config):
        if row["direction"] == "up" and int(row["round"]) and int(row["party"]) == 2:
            phases.setdefault(int(row["round"]), []).append(row["phase"])
    keys = ["AdvertiseKeys", "ShareKeys", "MaskedInput", "Unmask"]
    assert phases == {1: keys, 2: keys[2:], 3: keys[2:], 4: keys, 5: keys[2:]}


# ---- the plan ----


def test_who_vanishes_when_keys_are_made_is_out_for_the_batch():
    plan = dataclasses.replace(parse(PLAN, 0, 7), batch=3)
    assert [plan.phase(round, 0) for round in range(1, 6)] == [Phase.ADVERTISE_KEYS, *[Phase.SUPPORT] * 2, None, None]
    assert [plan.phase(round, 5) for round in range(3, 8)] == [None, Phase.SHARE_KEYS, *[Phase.SUPPORT] * 2, None]
    assert plan.phase(2, 3) is plan.phase(6, 6) is Phase.MASKED_INPUT, "where no keys are made"
    assert plan.phase(3, 4) is Phase.UNMASK
    for phase, missing in ((Phase.MASKED_INPUT, True), (Phase.UPDATE, True), (Phase.UNMASK, False)):
        assert plan.misses(2, 0, phase) is missing
    assert not DropoutPlan().batch and plan_of(resolve(["--keys", "batch:5"])).batch == 5


# ---- who was late, or is lost ----


def test_a_party_that_misses_the_keys_sits_the_batch_out_and_the_plan_says_so(make_config, run_in_memory, monkeypatch):
    say = Client.say

    def late(self, spoken):
        kept = [m for m in spoken if not (type(m).__name__ == "ShareBatch" and speakers(m) == (2,) and m.round == 1)]
        say(self, kept)

    monkeypatch.setattr(Client, "say", late)
    flags = f"{TOY} --aggregation secure --rounds 5 --keys batch:3 --phase-deadline 1"
    config = make_config(flags)
    summary = run_in_memory(config, 4)
    lost = summary["dropouts"]["lost"]["plan"]
    assert lost == ["1:2:mask", "2:2:mask", "3:2:mask"] and summary["dropouts"]["real"] == 3
    survivors = [json.loads(line)["survivors"] for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert survivors == [6, 6, 6, 7, 7]
    monkeypatch.setattr(Client, "say", say)
    for keys, kind in (("round", "plain"), ("batch:3", "plain"), ("batch:3", "secure")):
        again = f"{TOY} --aggregation {kind} --rounds 5 --keys {keys} --dropout {','.join(lost)}"
        assert run_in_memory(make_config(again), 3)["model_sha256"] == summary["model_sha256"]


def test_after_a_round_that_failed_everybody_makes_new_keys(make_config, run_in_memory):
    config = make_config(
        f"{TOY} --aggregation secure --rounds 6 --keys batch:6 --threshold 6 --dropout 2:0:mask,2:1:mask,1:5:share"
    )
    summary = run_in_memory(config, 3)
    rows = [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert [("failed" in row, row.get("survivors")) for row in rows[:3]] == [(False, 6), (True, None), (False, 6)]
    made = sorted({int(row["round"]) for row in messages(config) if row["message"] == "ShareBatch"})
    assert made == [1, 3] and summary["dropouts"]["failed_rounds"] == 1


MOMENTS = [
    ("AdvertiseKeys", 1),
    ("ShareBatch", 1),
    ("ShareList", 1),
    ("Train", 3),
    ("MaskedInput", 3),
    ("UnmaskRequest", 3),
    ("KeyList", 5),
    ("Unmask", 5),
]


@pytest.mark.parametrize("on_loss", ["drop", "adopt"])
@pytest.mark.parametrize("what, round", MOMENTS)
def test_a_rank_that_dies_is_what_a_plan_would_have_been(what, round, on_loss, play, tmp_path):
    lost = play(f"--on-loss {on_loss} --keys batch:4", {3: (what, round)})
    losses = lost["dropouts"]["lost"]
    assert [loss["rank"] for loss in losses["ranks"]] == [3]
    planned = play(plain(losses["plan"]), name="planned", ranks=2)
    assert lost["model_sha256"] == planned["model_sha256"] and sums(tmp_path, "run") == sums(tmp_path, "planned")
    assert lost["epsilon_outside"] == planned["epsilon_outside"]
    rounds = {int(event.split(":")[0]) for event in losses["plan"]}
    assert len(rounds) <= 1 if on_loss == "adopt" else max(rounds) == 6


@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_run_that_was_interrupted_makes_new_keys_and_the_same_model(at, make_config, run_in_memory, monkeypatch):
    flags = f"{TOY} --aggregation secure --rounds 6 --keys batch:4 --checkpoint-every 1 --dropout {PLAN}".replace(
        "Steady", "Remembers"
    )
    through, config = run_in_memory(make_config(flags), 3), make_config(flags)
    whole = Server.round

    def stops(self, round):
        if round == at:
            raise KeyboardInterrupt
        whole(self, round)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "round", stops)
        with pytest.raises(KeyboardInterrupt):
            run_in_memory(config, 3)
    resumed = run_in_memory(resolve(["--resume", str(config.out)]), 4)
    assert resumed["model_sha256"] == through["model_sha256"]
    for file in (config.out / "checkpoint").rglob("*"):
        assert file.is_dir() or b"ring" not in file.read_bytes()


# ---- what cannot be ----


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--keys batch:16 --sampling 0.5", "keys = batch:16: not with sampling < 1"),
        ("--keys batch:1", "must be round, or batch:2 to batch:256"),
        ("--keys batch:257", "must be round, or batch:2 to batch:256"),
        ("--keys batch", "must be round"),
        ("--keys batch:²", "must be round"),
        ("--keys batch:-4", "must be round"),
        ("--keys rounds", "must be round"),
        ("--keys batch:4:5", "must be round"),
    ],
)
def test_keys_that_cannot_be_are_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        resolve(flags.split())


@pytest.mark.parametrize(
    "keys, settings, said",
    [
        (7, "--keys batch:4", "keys of round 7 in round 2"),
        (0, "--keys batch:4", "keys of round 0 in round 2"),
        (3, "--keys batch:4", "keys of round 3 in round 2"),
        (2, "--keys round", "keys of round 2 in round 2"),
        (1, "--keys batch:4 --aggregation plain", "keys of round 1 in round 2"),
    ],
)
def test_a_rank_does_not_believe_any_keys(keys, settings, said, make_config, run_in_memory, monkeypatch):
    train = Client.train

    def lied_to(self, asked, theta):
        train(self, dataclasses.replace(asked, keys=keys) if asked.round == 2 else asked, theta)

    monkeypatch.setattr(Client, "train", lied_to)
    with pytest.raises(ProtocolError, match=said):
        run_in_memory(make_config(f"{TOY} --aggregation secure --rounds 4 {settings}"), 3)


def test_rank_0_that_begins_anew_in_the_midst_of_a_batch_gets_what_it_would_have(
    make_config, run_in_memory, monkeypatch
):
    """Keys that are made more often than announced are fresh keys: nothing is used twice."""
    whole = Server.round

    def anew(self, round):
        if round == 3:
            self.end.renew_keys()
        whole(self, round)

    flags = f"{TOY} --aggregation secure --rounds 6 --keys batch:6"
    expected = run_in_memory(make_config(flags), 3)["model_sha256"]
    monkeypatch.setattr(Server, "round", anew)
    config = make_config(flags)
    assert run_in_memory(config, 3)["model_sha256"] == expected
    assert {int(row["round"]) for row in messages(config) if row["message"] == "ShareBatch"} == {1, 3}


def test_a_party_without_keys_says_nothing_even_if_it_is_asked(make_config, run_in_memory, monkeypatch):
    """Rank 0 says that keys were made in a round that this rank knows nothing of: it sits out, and nothing of it leaves."""
    train, said = Client.train, []

    def lied_to(self, asked: Train, theta):
        if asked.round == 5 and 0 in self.parties:
            self.end._keyed.clear()
        train(self, asked, theta)

    say = Client.say

    def heard(self, spoken):
        spoken = list(spoken)
        said.extend((m.round, m.party) for m in spoken)
        say(self, spoken)

    monkeypatch.setattr(Client, "train", lied_to)
    monkeypatch.setattr(Client, "say", heard)
    config = make_config(f"{TOY} --aggregation secure --rounds 6 --keys batch:6 --phase-deadline 1 --round-deadline 3")
    run_in_memory(config, 4)
    assert (4, 0) in said and (5, 0) not in said


def test_a_bundle_that_does_not_open_is_held_against_its_dealer_once_a_set_up(make_config, run_in_memory, monkeypatch):
    """One lie when keys are made was a dispute in every round of the batch, and benched who was in it at the second."""
    say = Client.say

    def damages(self, spoken):
        def change(message):
            if type(message).__name__ == "ShareBatch" and message.party == 2 and message.round == 1:
                first, *others = message.bundles
                return dataclasses.replace(
                    message, bundles=(dataclasses.replace(first, sealed=bytes(len(first.sealed))), *others)
                )
            return message

        say(self, [change(message) for message in spoken])

    monkeypatch.setattr(Client, "say", damages)
    config = make_config(f"{TOY} --aggregation secure --rounds 6 --keys batch:6")
    summary = run_in_memory(config, 8)
    assert summary["dropouts"]["benched"] == []
    assert sorted({int(row["round"]) for row in messages(config) if row["message"] == "ShareBatch"}) == [1, 2]
    survivors = [json.loads(line)["survivors"] for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert survivors == [6, 7, 7, 7, 7, 7]
