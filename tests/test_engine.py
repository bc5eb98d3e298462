"""The whole engine in one process: same server, same client, in-memory transport."""

import csv
import hashlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedmpi.cli import resolve
from fedmpi.config import Config, from_dict
from fedmpi.errors import ConfigError, DataError, ProtocolError, TransportError
from fedmpi.privacy.account import fold
from fedmpi.privacy.accountant import Accountant, calibrate
from fedmpi.privacy.releases import ReleaseLog
from fedmpi.randomness.words import SeededWords
from fedmpi.runtime import build, checkpoint, floor, schedule
from fedmpi.runtime.placement import Placement
from fedmpi.runtime.server import Server
from fedmpi.transport.ledger import COUNTS, KEYS
from fedmpi.wire.bits import packed_size
from fedmpi.wire.frame import FRAMING
from fedmpi.wire.messages import (
    Checkpoint,
    Delta,
    EvalReport,
    Evaluate,
    PlainInput,
    Ready,
    Setup,
    Stop,
    Tally,
    Train,
    TrainReport,
)
from fedmpi.wire.sums import expected_size

SUMMARY_FIELDS = """task method preset seed rounds parties ranks accuracy epsilon_outside epsilon_server epsilon_nominal
epsilon_kind epsilon_reason private delta bytes_up bytes_down seconds dropouts model_sha256""".split()


def total_bytes(summary, view):
    return sum(sum(summary[key][view].values()) for key in ("bytes_up", "bytes_down"))


# ---- what a run leaves behind ----


def test_a_run_leaves_its_folder_with_every_field_of_the_contract(make_config, run_in_memory):
    config = make_config("--local-epochs 1")
    summary = run_in_memory(config, 3)
    assert set(SUMMARY_FIELDS) <= set(summary)
    assert summary == json.loads((config.out / "summary.json").read_text())
    assert 0 <= summary["accuracy"] <= 1 and 0 <= summary["accuracy_local_only"] <= 1
    assert from_dict(yaml.safe_load((config.out / "config.yaml").read_text()), Config(), "file").run.rounds == 2
    rows = [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[0]["epsilon_outside"] < rows[1]["epsilon_outside"] == pytest.approx(summary["epsilon_outside"])
    assert rows[-1]["accuracy"] == summary["accuracy"]
    privacy = json.loads((config.out / "privacy.json").read_text())
    assert privacy["epsilon_kind"] == summary["epsilon_kind"] and privacy["trust"] and privacy["released"]
    assert not list(config.out.glob(".*.tmp")), "no half-written files"


def test_the_result_is_the_algorithms_own_arithmetic(make_config, run_in_memory):
    """One round by hand: local work, mechanism, integer sum, step; the engine must arrive at the same bytes."""
    config = make_config("--rounds 1")
    summary = run_in_memory(config, 3)
    method = build.algorithm(config, device="cpu")
    sigma = calibrate(config.privacy.epsilon, config.privacy.delta, 1.0, 1)
    mechanism = build.mechanism(build.Orders(config, sigma), method)
    theta, total = method.initial(), 0
    for party in range(4):
        update = method.work(party, theta, 1)
        draw = partial(SeededWords, config.run.seed, party=party, round=1)
        total = total + mechanism.encoding.unwrap(mechanism.encode(update.values, 4, draw, party))
    theta = method.step(theta, mechanism.encoding.decode(total), 1 / 4, method.public_support(theta))
    assert summary["model_sha256"] == hashlib.sha256(theta.tobytes()).hexdigest()


# ---- placement ----


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--support own",
        "--sampling 0.7 --min-cohort 1 --seed 3",
        "--method centaur",
        "--method dp-fedavg-fb --support dense",
        "--method ppsgd --support dense --sampling 0.7 --min-cohort 1 --seed 3",
        "--method pmtl-ft --support dense --sampling 0.7 --min-cohort 1 --seed 3",
        "--method dp-pfedhome --epsilon 1 --sampling 0.7 --min-cohort 1 --seed 3",
        "--method fedavg --epsilon inf --support dense",
        "--method fedrep --epsilon inf --support dense",
        "--method local-only --epsilon inf --support dense",
    ],
)
def test_the_model_and_the_logical_bytes_do_not_depend_on_placement(flags, make_config, run_in_memory):
    summaries = [run_in_memory(make_config(flags), ranks) for ranks in (5, 3, 2)]
    assert len({summary["model_sha256"] for summary in summaries}) == 1
    assert len({summary["accuracy"] for summary in summaries}) == 1
    assert len({total_bytes(summary, "logical") for summary in summaries}) == 1
    wire = [total_bytes(summary, "wire") for summary in summaries]
    assert wire[0] > wire[1] > wire[2], "fewer ranks share more downloads"


def test_the_chunk_size_does_not_matter(make_config, run_in_memory):
    hashes = {run_in_memory(make_config(), 3, chunk=chunk)["model_sha256"] for chunk in (1 << 30, 4096)}
    assert len(hashes) == 1


def test_another_seed_is_another_run(make_config, run_in_memory):
    hashes = {run_in_memory(make_config(f"--seed {seed}"), 3)["model_sha256"] for seed in (1, 2)}
    assert len(hashes) == 2


@pytest.mark.parametrize("parties, ranks", [(1, 2), (4, 3), (20, 21), (943, 21), (7, 4)])
def test_every_party_has_one_home_and_blocks_are_even(parties, ranks):
    placement = Placement(parties, ranks)
    blocks = [placement.parties_of(rank) for rank in placement.ranks()]
    assert [party for block in blocks for party in block] == list(range(parties))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    assert all(party in placement.parties_of(placement.rank_of(party)) for party in range(parties))
    assert dict(placement.by_block(range(parties))) == dict(zip(placement.ranks(), blocks))


def test_more_client_ranks_than_parties_is_refused():
    with pytest.raises(ConfigError, match=r"parties = 4: must be at least the number of client ranks \(9\)"):
        Placement(4, 10)
    with pytest.raises(ConfigError, match="at least 2"):
        Placement(4, 1)


# ---- the ledger is the sum of the size laws is what was given to the transport ----


def law_totals(config, ranks, coordinates, bits, setup_bytes, coded):
    """Wire and logical payload bytes of a whole run by phase and direction, from the laws alone. `coded`: bytes of all its sums on the
    way down, whose size is that of their content (tests/test_sums.py)."""
    parties, rounds = config.run.parties, config.run.rounds
    blocks = [len(Placement(parties, ranks).parties_of(rank)) for rank in range(1, ranks)]
    evaluations = 1 + sum(schedule.evaluation_due(config, round) for round in range(1, rounds + 1))
    value_bytes = packed_size(coordinates, bits)
    wire = {
        ("setup", "down"): sum(Setup.wire_size(setup_bytes, block) for block in blocks),
        ("setup", "up"): Ready.wire_size(0) * len(blocks),
        ("model", "down"): rounds * sum(Train.wire_size(block) for block in blocks) + coded * len(blocks),
        ("update", "up"): rounds * parties * PlainInput.wire_size(0, value_bytes),
        ("report", "up"): rounds * parties * TrainReport.wire_size(1, 5),
        ("evaluation", "down"): evaluations * sum(Evaluate.wire_size(block) for block in blocks),
        ("evaluation", "up"): sum(
            EvalReport.wire_size(block, 3) + (evaluations - 1) * EvalReport.wire_size(block, 2) for block in blocks
        ),
        ("bookkeeping", "down"): Stop.wire_size() * len(blocks),
    }
    logical = {
        ("setup", "down"): parties * Setup.wire_size(setup_bytes, 1),
        ("setup", "up"): parties * Ready.wire_size(0),
        ("model", "down"): parties * (rounds * Train.wire_size(1) + coded),
        ("update", "up"): wire["update", "up"],
        ("report", "up"): wire["report", "up"],
        ("evaluation", "down"): evaluations * parties * Evaluate.wire_size(1),
        ("evaluation", "up"): parties * (EvalReport.wire_size(1, 3) + (evaluations - 1) * EvalReport.wire_size(1, 2)),
    }
    return wire, logical


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_ledger_is_the_sum_of_the_size_laws(ranks, make_config, run_in_memory):
    config = make_config("--rounds 3 --eval-every 2")
    summary = run_in_memory(config, ranks)
    with open(config.out / "messages.csv") as stream:
        rows = [
            {key: value if key in KEYS else int(value) for key, value in row.items()} for row in csv.DictReader(stream)
        ]
    assert set(rows[0]) == {*KEYS, *COUNTS}
    mechanism = json.loads((config.out / "privacy.json").read_text())["mechanism"]
    sizes = [r["logical_payload"] for r in rows if r["message"] == "Setup" and r["logical_payload"]]
    setup_bytes = sizes[0] - Setup.wire_size(0, 1)
    deltas = {row["round"]: row["wire_payload"] for row in rows if row["message"] == "Delta" and row["wire_payload"]}
    noise = mechanism["noise_multiplier"] * mechanism["sensitivity_in_steps"]
    for size in deltas.values():
        assert Delta.wire_size(0, 0) < size < Delta.wire_size(0, 1.05 * expected_size(mechanism["coordinates"], noise))
    coded = sum(deltas.values())
    laws = law_totals(config, ranks, mechanism["coordinates"], mechanism["bits"], setup_bytes, coded)
    for view, law in zip(("wire", "logical"), laws, strict=True):
        counted = {}
        for row in rows:
            key = row["phase"], row["direction"]
            if row[f"{view}_payload"] and row["message"] != "Tally":
                counted[key] = counted.get(key, 0) + row[f"{view}_payload"]
        assert counted == law
    messages = sum(row["messages"] for row in rows)
    assert sum(row["wire_framing"] for row in rows) == FRAMING * messages
    # and the summary is the ledger (the server itself holds the ledger against the bytes given to the transport)
    for view in ("wire", "logical"):
        assert total_bytes(summary, view) == sum(row[f"{view}_payload"] + row[f"{view}_framing"] for row in rows)


@pytest.mark.parametrize("kind", [Train, PlainInput])
def test_a_ledger_that_misses_a_byte_stops_the_run_or_is_not_used(kind, make_config, run_in_memory, monkeypatch):
    from fedmpi.transport.ledger import Ledger

    record = Ledger.record

    def forgetful(self, message, peer, payload):
        record(self, message, peer, payload - (message.round == 2 and isinstance(message, kind)))

    monkeypatch.setattr(Ledger, "record", forgetful)
    if kind is PlainInput:  # the clients' own count, which rank 0 holds against what it got
        assert run_in_memory(make_config(), 3)["untallied_ranks"] == [1, 2]
    else:
        with pytest.raises(ProtocolError, match="the ledger counts"):
            run_in_memory(make_config(), 3)


# ---- interruption ----


def interrupted(monkeypatch, at):
    whole = Server.round

    def stops(self, round):
        if round == at:
            raise KeyboardInterrupt
        whole(self, round)

    monkeypatch.setattr(Server, "round", stops)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--support own --sampling 0.8 --min-cohort 1",
        "--aggregation secure --dropout 4:1:mask",
        "--method dp-fedavg-fb",
        "--method ppsgd --sampling 0.8 --min-cohort 1",
        "--method pmtl-ft --sampling 0.8 --min-cohort 1",
        "--method dp-pfedhome --sampling 0.8 --min-cohort 1",
    ],
)
@pytest.mark.parametrize("ranks", [3, 5])
def test_an_interrupted_run_resumes_to_the_same_model(flags, ranks, make_config, run_in_memory, monkeypatch):
    flags = f"--rounds 5 --checkpoint-every 2 {flags}"
    through = run_in_memory(make_config(flags), 3)
    config = make_config(flags)
    with monkeypatch.context() as patch:
        interrupted(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            run_in_memory(config, 3)
    assert checkpoint.latest_round(config.out) == 2
    resumed = run_in_memory(resolve(["--resume", str(config.out)]), ranks)  # on other ranks than before
    for field in ("model_sha256", "accuracy", "accuracy_untrained", "epsilon_outside", "epsilon_server", "rounds"):
        assert resumed[field] == through[field]
    rows = [json.loads(line)["round"] for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5]


def test_a_resumed_run_keeps_its_settings(make_config, run_in_memory):
    config = make_config("--rounds 3 --checkpoint-every 2")
    run_in_memory(config, 3)
    for flags, said in (
        ("--epsilon 3", "epsilon was 8.0 and cannot become 3.0"),
        ("--rounds 9", "rounds was 3"),
        ("--seed 4", "seed"),
    ):
        with pytest.raises(ConfigError, match=f"resume: {said}"):
            resolve(["--resume", str(config.out), *flags.split()])
    assert resolve(["--resume", str(config.out), "--round-deadline", "9"]).run.round_deadline == 9


def killed(run_in_memory, monkeypatch, config, at, step="round", after=False):
    """The run until `step` of round `at`, or just after it, which it does not survive."""
    whole = getattr(Server, step)

    def stops(self, round, *rest):
        if round == at:
            if after:
                whole(self, round, *rest)
            raise KeyboardInterrupt
        return whole(self, round, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Server, step, stops)
        with pytest.raises(KeyboardInterrupt):
            run_in_memory(config, 3)


def released(config):
    """(sums that left rank 0, rounds that the worst party's update reached rank 0 in)"""
    statement = json.loads((config.out / "privacy.json").read_text())
    return statement["rounds_accounted"], statement["worst_party"]["rounds_joined"]


SECRET = "--rounds 5 --checkpoint-every 2 --entropy os"


def test_with_secret_noise_a_repeated_round_is_counted_twice(make_config, run_in_memory, monkeypatch):
    through = run_in_memory(make_config(SECRET), 3)
    config = make_config(SECRET)
    killed(run_in_memory, monkeypatch, config, 4)
    resumed = run_in_memory(resolve(["--resume", str(config.out)]), 3)
    assert resumed["epsilon_outside"] > through["epsilon_outside"]
    assert released(config) == (6, 6)  # round 3 twice


def test_a_second_interruption_forgets_nothing_of_the_first(make_config, run_in_memory, monkeypatch):
    config = make_config(SECRET)
    killed(run_in_memory, monkeypatch, config, 4)
    again = resolve(["--resume", str(config.out)])
    killed(run_in_memory, monkeypatch, again, 4)
    run_in_memory(again, 3)
    assert released(config) == (7, 7)  # round 3 three times


@pytest.mark.parametrize("aggregation", ["plain", "secure --threshold 3"])
def test_rank_0_may_have_seen_the_round_that_was_cut_short(aggregation, make_config, run_in_memory, monkeypatch):
    config = make_config(f"{SECRET} --aggregation {aggregation}")
    killed(run_in_memory, monkeypatch, config, 4, "aggregate", after=True)
    resumed = run_in_memory(resolve(["--resume", str(config.out)]), 3)
    assert released(config) == (6, 7)  # nobody outside saw a sum of round 4
    longer = make_config(f"{SECRET} --aggregation {aggregation}")
    killed(run_in_memory, monkeypatch, longer, 5)
    assert run_in_memory(resolve(["--resume", str(longer.out)]), 3)["epsilon_server"] <= resumed["epsilon_server"]


def test_an_update_that_came_late_is_remembered_too(make_config, run_in_memory, monkeypatch):
    """A party that was dropped in round 3 may still have sent its update: it counts from when it was asked."""
    config = make_config(f"{SECRET} --dropout 3:2:mask")
    killed(run_in_memory, monkeypatch, config, 4, "aggregate")
    run_in_memory(resolve(["--resume", str(config.out)]), 3)
    assert fold(ReleaseLog.read(config.out).events).server.joined() == [
        7,
        7,
        7,
        7,
    ]  # 1, 2, 3 and 4, then 3, 4 and 5 once more


def test_rounds_to_be_repeated_are_counted_with_the_noise_that_they_had(make_config, run_in_memory, monkeypatch):
    config = make_config(f"{SECRET} --dropout 3:1:mask,3:2:mask")
    killed(run_in_memory, monkeypatch, config, 4)
    resumed = run_in_memory(resolve(["--resume", str(config.out)]), 3)
    # Two of four lost, in both rounds 3: half the noise. Composed by hand:
    sigma, account = calibrate(config.privacy.epsilon, config.privacy.delta, 1.0, 5), Accountant("rdp")
    for left in (4, 4, 2, 2, 4, 4):
        account.spend(sigma * (left / 4) ** 0.5, 1.0)
    assert resumed["epsilon_outside"] == pytest.approx(account.epsilon(config.privacy.delta), rel=1e-6)


def test_a_sampled_cohort_is_remembered_by_name(make_config, run_in_memory, monkeypatch):
    config = make_config(f"{SECRET} --parties 12 --sampling 0.5 --min-cohort 1")
    monkeypatch.setattr(schedule, "cohort", lambda config, round: (8, 9, 10, 11))
    killed(run_in_memory, monkeypatch, config, 4)
    monkeypatch.setattr(schedule, "cohort", lambda config, round: (9, 10, 11))
    run_in_memory(resolve(["--resume", str(config.out)]), 3)
    assert fold(ReleaseLog.read(config.out).events).server.joined() == [0] * 8 + [3, 6, 6, 6]


def test_without_its_account_a_run_under_secret_noise_is_not_gone_on_with(make_config, run_in_memory, monkeypatch):
    config = make_config(SECRET)
    killed(run_in_memory, monkeypatch, config, 4)
    (config.out / "releases.jsonl").write_text("{\n")
    with pytest.raises(DataError, match="releases.jsonl line 1 cannot be used .*what was released is unknown"):
        run_in_memory(resolve(["--resume", str(config.out)]), 3)


# ---- privacy ----


def test_shared_support_states_figures_and_says_they_are_simulated(make_config, run_in_memory):
    summary = run_in_memory(make_config("--epsilon 2 --metrics none"), 3)
    assert summary["epsilon_outside"] == pytest.approx(2, rel=1e-4) and summary["epsilon_outside"] <= 2 + 1e-9
    assert summary["epsilon_server"] > summary["epsilon_outside"]
    assert (summary["epsilon_kind"], summary["private"]) == ("simulated", False)
    assert "seed" in summary["epsilon_reason"]


def test_figures_that_reach_rank_0_leave_no_epsilon_towards_it(make_config, run_in_memory):
    for metrics, flags in (("party", ""), ("securesum", "--aggregation secure")):
        summary = run_in_memory(make_config(f"{flags} --entropy os --metrics {metrics}"), 3)
        assert summary["epsilon_server"] is None and not summary["private"]
        assert (
            "epsilon_server does not hold" in summary["epsilon_reason"]
            and "--metrics none" in summary["epsilon_reason"]
        )
        assert summary["epsilon_outside"] is not None and summary["epsilon_party"] is not None


def test_secret_noise_keeps_figures_home_unless_told_otherwise(make_config):
    assert make_config("--entropy os").privacy.shown == "none"
    assert make_config("").privacy.shown == "party"
    assert make_config("--entropy os --metrics party").privacy.shown == "party"


def test_a_party_s_own_costs_stay_home_with_its_figures(make_config, run_in_memory):
    def parties(config):
        run_in_memory(config, 3)
        return {line.split(",")[0] for line in (config.out / "costs.csv").read_text().splitlines()[1:]}

    assert parties(make_config("--aggregation secure --metrics party")) == {"0", "1", "2", "3"}
    assert parties(make_config("--aggregation secure --metrics none")) == {"-1"}


def test_another_party_knows_its_own_noise_and_the_cohorts(make_config, run_in_memory):
    """Composed by hand: the noise of three of four, and no amplification by sampling."""
    summary = run_in_memory(make_config("--epsilon 2"), 3)
    sigma, account = calibrate(2.0, 1e-5, 1.0, 2), Accountant("rdp")
    account.spend(sigma * (3 / 4) ** 0.5, 1.0, rounds=2)
    assert summary["epsilon_party"] == pytest.approx(account.epsilon(1e-5), rel=1e-6)
    assert summary["epsilon_party"] > summary["epsilon_outside"]
    config = make_config("--parties 12 --sampling 0.5 --rounds 4 --epsilon 2")
    sampled = run_in_memory(config, 3)
    assert sampled["epsilon_party"] > 1.5 * sampled["epsilon_outside"]


def test_a_method_that_sends_rows_cannot_claim_an_epsilon(make_config, run_in_memory, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))
    rows = "--method toy_rows:Rows --dataset none --support dense --clip 8"
    assert run_in_memory(make_config(f"{rows} --epsilon inf"), 3)["epsilon_kind"] == "none"
    with pytest.raises(ConfigError, match="epsilon = 1: toy_rows:Rows adds no noise and promises no epsilon"):
        run_in_memory(make_config(f"{rows} --epsilon 1 --entropy os"), 3)


def test_secret_noise_is_private_and_not_repeatable(make_config, run_in_memory):
    first, second = (run_in_memory(make_config("--entropy os"), 3) for _ in range(2))
    assert (first["epsilon_kind"], first["private"]) == ("holds", True)
    assert first["model_sha256"] != second["model_sha256"]


@pytest.mark.parametrize(
    "flags, kind", [("--support own", "nominal"), ("--accountant pld", "nominal"), ("--epsilon inf", "none")]
)
def test_where_nothing_holds_nothing_is_claimed(flags, kind, make_config, run_in_memory):
    summary = run_in_memory(make_config(flags), 3)
    assert summary["epsilon_outside"] is summary["epsilon_server"] is summary["epsilon_party"] is None
    assert summary["epsilon_kind"] == kind and not summary["private"] and summary["epsilon_reason"]
    assert (summary["epsilon_nominal"] is None) == (kind == "none")


def test_without_metrics_nothing_but_updates_leaves_a_party(make_config, run_in_memory):
    config = make_config("--metrics none")
    summary = run_in_memory(config, 3)
    assert summary["accuracy"] is None and summary["accuracy_untrained"] is None
    up = {line.split(",")[3] for line in (config.out / "messages.csv").read_text().splitlines()[1:] if ",up," in line}
    assert up == {"Ready", "PlainInput", "Tally"}
    assert summary["model_sha256"] == run_in_memory(make_config(), 3)["model_sha256"]


def test_poisson_cohorts_have_the_right_size_and_depend_on_the_round():
    config = resolve("--parties 400 --sampling 0.25".split())
    sizes = [len(schedule.cohort(config, round)) for round in range(1, 101)]
    # Binomial(400, 1/4): mean 100, deviation 8.66; the mean of 100 has deviation 0.87
    assert abs(np.mean(sizes) - 100) < 5 * 0.87
    assert 5 < np.std(sizes) < 13
    assert schedule.cohort(config, 1) == schedule.cohort(config, 1) != schedule.cohort(config, 2)
    secret = resolve("--parties 400 --sampling 0.25 --entropy os".split())
    assert schedule.cohort(secret, 1) != schedule.cohort(secret, 1), "amplification needs a secret sample"


# ---- trouble ----


def test_a_folder_that_holds_a_run_is_not_overwritten(make_config, run_in_memory):
    config = make_config()
    run_in_memory(config, 3)
    before = (config.out / "summary.json").read_text()
    with pytest.raises(ConfigError, match="holds a run already"):
        run_in_memory(config, 3)
    assert (config.out / "summary.json").read_text() == before


def test_a_width_that_could_wrap_is_refused_at_the_start(make_config, run_in_memory):
    with pytest.raises(ConfigError, match="bits = 8: .* could wrap"):
        run_in_memory(make_config("--bits 8"), 3)


def test_an_exception_inside_a_client_ends_the_run(make_config, run_in_memory, monkeypatch):
    from fedmpi.vision.methods.dp_pfeddsu import Method

    def fails(self, party, theta, round):
        raise ZeroDivisionError(f"party {party}")

    monkeypatch.setattr(Method, "work", fails)
    with pytest.raises(ZeroDivisionError, match="party"):
        run_in_memory(make_config(), 3)


def test_a_nan_update_is_refused_by_its_own_party(make_config, run_in_memory):
    with pytest.raises(ProtocolError, match="not finite"):
        run_in_memory(make_config("--ext-lr 1e38 --rounds 3 --batch-size 4"), 3)


def test_when_nobody_answers_the_run_ends_at_the_deadline(make_config, monkeypatch, run_in_memory):
    from fedmpi.runtime.client import Client

    monkeypatch.setattr(Client, "train", lambda self, model, theta: None)
    with pytest.raises(TransportError, match="nobody answered within the deadline"):
        run_in_memory(make_config("--round-deadline 1"), 3)


def test_an_evaluation_that_never_comes_ends_the_run(make_config, monkeypatch, run_in_memory):
    from fedmpi.runtime.client import Client

    monkeypatch.setattr(Client, "evaluate", lambda self, model, theta: None)
    with pytest.raises(TransportError, match=r"no answer within 1 s \(round_deadline\); missing: 0, 1, 2, 3"):
        run_in_memory(make_config("--round-deadline 1"), 3)


def test_a_party_cannot_speak_through_a_rank_that_does_not_host_it(make_config, monkeypatch, run_in_memory):
    from fedmpi.aggregation.plain import PlainParty

    start = PlainParty.start

    def impostor(self):
        import dataclasses

        return [dataclasses.replace(message, party=(message.party + 2) % 4) for message in start(self)]

    monkeypatch.setattr(PlainParty, "start", impostor)
    summary = run_in_memory(make_config("--rounds 3"), 3)
    assert summary["dropouts"]["benched"] == [0, 1, 2, 3] and summary["dropouts"]["failed_rounds"] == 3
    assert summary["accuracy"] is None, "nobody is left to ask"


def test_setup_travels_whole():
    config = resolve("--epsilon inf --seed 9 --out /somewhere".split())
    orders = build.Orders(config, 3.25, "0f" * 16, 0, "1e" * 16)
    setup = Setup(config=orders.to_text(), parties=tuple(range(config.run.parties)))
    assert floor.agree(config, setup, 1, 2) == orders
    assert Checkpoint.wire_size() == 0 and Tally.COLUMNS == len(KEYS) + len(COUNTS)


def test_threads_are_shared_out_when_asked():
    config = resolve(["--threads", "auto"])
    cores = build.thread_count(config, {})
    assert cores >= 1
    assert build.thread_count(config, {"OMPI_COMM_WORLD_LOCAL_SIZE": str(cores)}) == 1
    assert build.thread_count(resolve(["--threads", "3"]), {}) == 3
