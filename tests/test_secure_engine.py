"""Secure aggregation inside the engine: the same model as plain, whatever vanishes, and honest about what it protects."""

import csv
import json
import time

import pytest

from fedmpi.aggregation.dropout import parse
from fedmpi.algorithm import load_method, method_names
from fedmpi.errors import ConfigError, DataError, ProtocolError
from fedmpi.privacy.mechanism import Bounded
from fedmpi.runtime.client import Client
from fedmpi.runtime.server import Server
from fedmpi.secagg import messages as secagg
from fedmpi.secagg import pki
from fedmpi.wire.phases import Purpose

PLAN = "--dropout 1:0:advertise,1:1:share,2:2:mask,2:3:unmask,3:4:mask,3:5:unmask,3:6:share"
SECURE = "--aggregation secure --parties 7 --rounds 3"
PLAIN = "--aggregation plain --parties 7 --rounds 3"


def rows(config):
    return [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]


# ---- the exactness law, end to end ----


@pytest.mark.parametrize("support", ["shared", "dense", "union"])
@pytest.mark.parametrize("graph", ["complete", "regular"])
@pytest.mark.parametrize("plan", ["", PLAN])
def test_secure_is_plain_bit_for_bit(support, graph, plan, make_config, run_in_memory):
    flags = f"--support {support} {plan} --seed 5"
    rates = "--corrupt 0.1 --expected-dropout 0.3" if graph == "regular" else "--threshold 4"
    secure = run_in_memory(make_config(f"{SECURE} {flags} --graph {graph} {rates}"), 4)
    plain = run_in_memory(make_config(f"{PLAIN} {flags}"), 3)
    assert secure["dropouts"]["failed_rounds"] == 0
    if plan:
        assert secure["dropouts"]["planned"] > 0
    assert secure["model_sha256"] == plain["model_sha256"]
    assert secure["accuracy"] == plain["accuracy"]


SHARING = [name for name in method_names(("fedmpi.vision.methods",)) if load_method(name).shares]


@pytest.mark.parametrize("name", SHARING)
def test_every_method_and_a_hybrid_give_the_same_model(name, make_config, run_in_memory):
    flags = f"--method {name} --dropout 2:3:mask" + (
        " --epsilon inf" if load_method(name).sends.kind is Bounded else ""
    )
    plain = run_in_memory(make_config(f"{PLAIN} {flags}"), 3)
    secure = run_in_memory(make_config(f"{SECURE} {flags}"), 3)
    hybrid = run_in_memory(make_config(f"{SECURE} {flags} --aggregation hybrid --clear-parties 1,3"), 3)
    assert plain["model_sha256"] == secure["model_sha256"] == hybrid["model_sha256"]


def test_an_active_round_gives_the_same_model(make_config, run_in_memory, tmp_path):
    file = tmp_path / "pki.json"
    pki.make(file, 7)
    plan = "--dropout 1:2:check,2:3:mask"
    plain = run_in_memory(make_config(f"{PLAIN} {plan}"), 3)
    config = make_config(f"{SECURE} {plan} --adversary active --pki {file}")
    active = run_in_memory(config, 3)
    assert active["model_sha256"] == plain["model_sha256"] and active["dropouts"]["planned"] == 2
    assert "ConsistencyCheck" in (config.out / "messages.csv").read_text()


def test_a_client_does_not_take_identities_from_rank_0(make_config, run_in_memory, tmp_path):
    file = tmp_path / "pki.json"
    pki.make(file, 7)
    with pytest.raises(ConfigError, match="does not take it from rank 0"):
        run_in_memory(make_config(f"{SECURE} --adversary active --pki {file}"), 3, own=make_config(SECURE))


def test_placement_does_not_matter(make_config, run_in_memory):
    summaries = [run_in_memory(make_config(f"{SECURE} {PLAN} --threshold 4"), ranks) for ranks in (8, 4, 2)]
    assert len({summary["model_sha256"] for summary in summaries}) == 1
    logical = {json.dumps([summary[key]["logical"] for key in ("bytes_up", "bytes_down")]) for summary in summaries}
    assert len(logical) == 1


# ---- below the threshold ----


def test_below_the_threshold_the_model_stays_and_training_goes_on(make_config, run_in_memory):
    lost = ",".join(f"2:{party}:mask" for party in range(3))
    config = make_config(f"{SECURE} --dropout {lost}")
    summary = run_in_memory(config, 3)
    failed = rows(config)[1]
    assert "4 of 7 parties sent their input" in failed["failed"] and "the threshold is 5" in failed["failed"]
    assert "survivors" not in failed and summary["dropouts"]["failed_rounds"] == 1
    assert rows(config)[0]["epsilon_outside"] == failed["epsilon_outside"], "nothing was released, nothing is spent"
    # the model after the third round is that of a run whose second round never happened: same theta into round 3
    assert rows(config)[2]["survivors"] == 7


def test_a_failed_round_still_showed_rank_0_the_updates_in_the_clear(make_config, run_in_memory):
    lost = ",".join(f"{round}:{party}:mask" for round in (1, 2, 3) for party in (4, 5, 6))
    config = make_config(f"{SECURE} --metrics none --aggregation hybrid --clear-parties 0,1 --dropout {lost}")
    summary = run_in_memory(config, 3)
    assert summary["dropouts"]["failed_rounds"] == 3 and summary["epsilon_outside"] == 0
    worst = json.loads((config.out / "privacy.json").read_text())["worst_party"]
    assert worst == {"party": 0, "rounds_joined": 3} and summary["epsilon_server"] > 0


def test_a_sum_that_was_asked_for_counts_towards_rank_0_even_if_it_failed(make_config, run_in_memory):
    """One answer short of the threshold at the deadline, and it may come late: rank 0 then has the sum."""
    lost = ",".join(f"2:{party}:unmask" for party in range(3))
    config = make_config(f"{SECURE} --metrics none --dropout {lost}")
    summary = run_in_memory(config, 3)
    assert "the threshold is 5" in rows(config)[1]["failed"] and summary["dropouts"]["failed_rounds"] == 1
    whole = run_in_memory(make_config(f"{SECURE} --metrics none"), 3)
    assert summary["epsilon_server"] == pytest.approx(whole["epsilon_server"]), "three sums, one of them late"
    assert summary["epsilon_outside"] < whole["epsilon_outside"] and summary["epsilon_party"] < whole["epsilon_party"]
    assert rows(config)[1]["epsilon_server"] > rows(config)[0]["epsilon_server"]


def test_a_sum_that_was_never_asked_for_costs_nothing(make_config, run_in_memory):
    lost = ",".join(f"2:{party}:mask" for party in range(3))
    config = make_config(f"{SECURE} --metrics none --dropout {lost}")
    run_in_memory(config, 3)
    assert rows(config)[1]["epsilon_server"] == rows(config)[0]["epsilon_server"]


@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_a_round_that_everybody_misses_releases_nothing(aggregation, make_config, run_in_memory):
    lost = ",".join(f"2:{party}:advertise" for party in range(7))
    config = make_config(f"{SECURE} --aggregation {aggregation} --dropout {lost}")
    assert run_in_memory(config, 3)["dropouts"]["failed_rounds"] == 1
    assert "failed" in rows(config)[1] and rows(config)[1]["epsilon_outside"] == rows(config)[0]["epsilon_outside"]


def test_a_silent_party_costs_its_deadline_and_nothing_else(make_config, run_in_memory, monkeypatch):
    say = Client.say

    def silent(self, messages):
        say(self, [m for m in messages if (type(m), m.party, m.round) != (secagg.MaskedInput, 2, 2)])

    planned = run_in_memory(make_config(f"{SECURE} --dropout 2:2:mask"), 3)
    with monkeypatch.context() as patch:
        patch.setattr(Client, "say", silent)
        start = time.monotonic()
        config = make_config(f"{SECURE} --phase-deadline 2")
        summary = run_in_memory(config, 3)
    assert time.monotonic() - start >= 2
    assert summary["dropouts"]["real"] == 1 and rows(config)[1]["survivors"] == 6
    assert summary["model_sha256"] == planned["model_sha256"]


def test_a_lying_party_is_dropped_and_named(make_config, run_in_memory, monkeypatch, capsys):
    import dataclasses

    say = Client.say

    def lying(self, messages):
        for x in messages:
            short = isinstance(x, secagg.MaskedInput) and x.party == 4
            say(self, [dataclasses.replace(x, values=x.values[:-1]) if short else x])

    monkeypatch.setattr(Client, "say", lying)
    config = make_config(SECURE)
    summary = run_in_memory(config, 3)
    assert all(row["survivors"] == 6 for row in rows(config))
    assert summary["dropouts"]["caught"] == 2 and summary["dropouts"]["benched"] == [4], (
        "in the third round it is not asked"
    )
    said = capsys.readouterr().out
    assert said.count("party 4, MaskedInput: sent") == 2 and said.count("left out for the rest of the run") == 1


def test_a_party_that_is_lied_to_ends_the_run(make_config, run_in_memory, monkeypatch):
    from fedmpi.secagg.server import SecAggServer

    send = SecAggServer._ask_shares

    def cheat(self):
        answers = send(self)
        import dataclasses

        return [(p, dataclasses.replace(x, survivors=x.survivors[:2])) for p, x in answers]

    monkeypatch.setattr(SecAggServer, "_ask_shares", cheat)
    with pytest.raises(ProtocolError, match="Unmask: was shown"):
        run_in_memory(make_config(SECURE), 3)


# ---- privacy ----


def test_towards_the_server_secure_is_as_private_as_towards_outside(make_config, run_in_memory):
    plain, secure = (run_in_memory(make_config(f"{flags} --metrics none"), 3) for flags in (PLAIN, SECURE))
    assert secure["epsilon_outside"] == plain["epsilon_outside"]
    assert secure["epsilon_server"] == pytest.approx(secure["epsilon_outside"], rel=1e-6)
    assert secure["epsilon_server"] < plain["epsilon_server"] / 2


def test_dropouts_and_colluders_cost_epsilon_and_a_margin_pays_for_it(make_config, run_in_memory):
    def epsilons(flags):
        summary = run_in_memory(make_config(f"{SECURE} --metrics none {flags}"), 3)
        return summary["epsilon_outside"], summary["epsilon_server"]

    lost = "--dropout 1:0:mask,2:1:mask"
    whole, dropped, colluding = epsilons(""), epsilons(lost), epsilons("--colluding 2")
    assert dropped[0] > whole[0] and dropped[1] > whole[1]
    assert colluding[0] == whole[0] and colluding[1] > whole[1]
    margin = epsilons(f"{lost} --noise-margin 0.2")
    assert margin[0] < 8 < dropped[0], "the target is 8"


def test_union_is_nominal_and_own_is_refused(make_config, run_in_memory):
    summary = run_in_memory(make_config(f"{SECURE} --support union"), 3)
    assert summary["epsilon_outside"] is None and summary["epsilon_kind"] == "nominal"
    with pytest.raises(ConfigError, match="support = own: secure aggregation adds vectors over the same coordinates"):
        make_config(f"{SECURE} --support own")


def test_hybrid_counts_the_clear_ones_as_seen(make_config, run_in_memory):
    hybrid = run_in_memory(make_config(f"{SECURE} --metrics none --aggregation hybrid --clear-parties 1,3"), 3)
    plain = run_in_memory(make_config(f"{PLAIN} --metrics none"), 3)
    assert hybrid["epsilon_server"] == pytest.approx(plain["epsilon_server"]), "the worst party is one in the clear"


# ---- costs ----


def test_costs_are_split_and_add_up(make_config, run_in_memory):
    config = make_config(f"{SECURE} --dropout 1:0:mask")
    summary = run_in_memory(config, 3)
    assert {"DH", "Shamir split", "Shamir combine", "AEAD", "PRG", "encode"} <= set(summary["seconds"])
    costs = [line.split(",") for line in (config.out / "costs.csv").read_text().splitlines()[1:]]
    assert {row[0] for row in costs} == {str(party) for party in range(7)}
    assert {"AdvertiseKeys", "ShareKeys", "MaskedInput", "Unmask"} <= {row[1] for row in costs}
    for cost in ("AEAD", "Shamir split", "MPI", "local work"):
        by_party = sum(float(row[3]) for row in costs if row[2] == cost)
        assert by_party == pytest.approx(summary["seconds"][cost]["cpu"], abs=2e-3)
    phases = {line.split(",")[2] for line in (config.out / "messages.csv").read_text().splitlines()[1:]}
    assert {"AdvertiseKeys", "ShareKeys", "MaskedInput", "Unmask"} <= phases


@pytest.mark.parametrize(
    "flags", ["--aggregation plain", "--preset demo-recsys --method fedmf --parties 7 --items 30 --graph complete"]
)
def test_local_work_is_each_party_s_own_cost_or_shared_equally_where_a_rank_works_for_all_at_once(
    flags, make_config, run_in_memory
):
    config = make_config(flags)
    summary = run_in_memory(config, 3)
    rows = [line.split(",") for line in (config.out / "costs.csv").read_text().splitlines()[1:]]
    own = {
        int(party): float(seconds) for party, phase, cost, seconds in rows if (phase, cost) == ("update", "local work")
    }
    assert set(own) == set(range(config.run.parties)) and all(seconds > 0 for seconds in own.values())
    assert sum(own.values()) == pytest.approx(summary["seconds"]["local work"]["cpu"], abs=2e-3)
    if config.run.method == "fedmf":
        assert own[0] == own[1] == own[2], "of one rank"


def test_the_ledger_follows_the_protocols_size_laws(make_config, run_in_memory):
    import csv

    config = make_config("--aggregation secure --parties 5 --rounds 1")
    run_in_memory(config, 3)
    mechanism = json.loads((config.out / "privacy.json").read_text())["mechanism"]
    n = 5
    laws = {
        "AdvertiseKeys": n * secagg.AdvertiseKeys.wire_size(False),
        "KeyList": n * secagg.KeyList.wire_size(n - 1, False),
        "ShareKeys": n * secagg.ShareKeys.wire_size(n - 1),
        "ShareList": n * secagg.ShareList.wire_size(n - 1),
        "MaskedInput": n * secagg.MaskedInput.wire_size(mechanism["coordinates"], mechanism["bits"]),
        "UnmaskRequest": n * secagg.UnmaskRequest.wire_size(n, 0),
        "Unmask": n * secagg.Unmask.wire_size(n),
    }
    counted = dict.fromkeys(laws, 0)
    with open(config.out / "messages.csv") as stream:
        for row in csv.DictReader(stream):
            if row["message"] in counted:
                counted[row["message"]] += int(row["wire_payload"])
                assert row["wire_payload"] == row["logical_payload"]
    assert counted == laws


# ---- settings ----


WRONG = {
    "--dropout 1.5": "a rate must be at least 0 and below 1",
    "--dropout sometimes": "must be RATE, PHASE=RATE, ROUND:PARTY:PHASE or ROUND+:PARTY:PHASE",
    "--dropout lunch=0.1": "must be RATE, PHASE=RATE",
    "--dropout 1:99:mask": "the party is between 0 and 6",
    "--clear-parties 1 --aggregation hybrid --parties 3": "hybrid: 2 of 3 parties are left for secure aggregation",
    "--clear-parties 77 --aggregation hybrid": "must be between 0 and 6",
    "--clear-parties x --aggregation hybrid": "must be numbers of parties",
    "--threshold 3": "threshold = 3: must be above half",
    "--threshold 8": "threshold = 8",
    "--pki /nonexistent --adversary active": "pki = /nonexistent: cannot be read",
    "--corrupt 0.5 --graph regular --expected-dropout 0.5": "",
}


@pytest.mark.parametrize("flags", WRONG)
def test_settings_that_cannot_work_are_refused_at_the_start(flags, make_config, run_in_memory):
    with pytest.raises((ConfigError, DataError)) as caught:
        run_in_memory(make_config(f"{SECURE} {flags}"), 3)
    assert WRONG[flags] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--adversary active", "needs --pki FILE"),
        (
            "--adversary active --pki x --graph regular",
            "graph = regular: not with adversary active, which --pki implies; it needs --graph complete",
        ),
        ("--adversary active --pki x --aggregation plain", "means nothing under plain"),
        ("--clear-parties 1", "only with aggregation hybrid"),
        ("--min-cohort 2", "min_cohort = 2: secure aggregation needs at least 3"),
        ("--threshold 5 --graph regular", "the regular graph finds its own"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags, said, make_config):
    with pytest.raises(ConfigError, match=said):
        make_config(f"{SECURE} {flags}")


# ---- the plan ----


def test_the_dropout_plan_is_deterministic_and_has_its_rates():
    plan = parse("advertise=0.05,mask=0.2,7:3:unmask", seed=4, parties=500)
    drawn = [plan.phase(round, party) for round in range(1, 21) for party in range(500)]
    again = [parse("advertise=0.05,mask=0.2,7:3:unmask", 4, 500).phase(r, p) for r in range(1, 21) for p in range(500)]
    assert drawn == again
    # 10,000 draws: five deviations of a binomial are below 0.022
    assert abs(drawn.count("AdvertiseKeys") / 10_000 - 0.05) < 0.022
    assert abs(drawn.count("MaskedInput") / 10_000 - 0.95 * 0.2) < 0.022
    assert plan.phase(7, 3) == "Unmask"
    assert parse("0.3", 4, 500).rates == {"MaskedInput": 0.3} and parse("", 4, 5).phase(1, 1) is None


def test_identities_are_kept_apart_and_checked(tmp_path):
    file = tmp_path / "pki.json"
    pki.make(file, 3)
    public = pki.read_public(file, 3)
    identity = pki.read_identity(file, 1, public)
    assert identity.verifies(1, b"text", identity.sign(b"text")) and not identity.verifies(
        0, b"text", identity.sign(b"text")
    )
    key = tmp_path / "pki.json.keys" / "party-00001.key"
    assert key.stat().st_mode & 0o777 == 0o600 and key.read_text().strip() not in file.read_text()
    with pytest.raises(DataError, match="no public key of 32 bytes for party 3"):
        pki.read_public(file, 4)
    key.write_text("00" * 32)
    with pytest.raises(DataError, match="does not fit the public key of party 1"):
        pki.read_identity(file, 1, public)
    key.write_text("zz")
    with pytest.raises(DataError, match="hexadecimal"):
        pki.read_identity(file, 1, public)
    with pytest.raises(DataError, match="exists already"):
        pki.make(file, 3)
    file.write_text("{}")
    with pytest.raises(DataError, match="not a file of public identities"):
        pki.read_public(file, 3)


# ---- metrics as sums ----


@pytest.mark.parametrize("aggregation", ["secure", "hybrid --clear-parties 0,2"])
def test_securesum_gives_the_same_scores_and_nobodys_own(aggregation, make_config, run_in_memory):
    flags = f"--parties 6 --local-epochs 1 --aggregation {aggregation} --dropout 1:3:mask"
    open_ = run_in_memory(make_config(flags), 3)
    config = make_config(f"{flags} --metrics securesum")
    summed = run_in_memory(config, 4)
    for name in ("accuracy", "accuracy_untrained", "accuracy_local_only"):
        assert summed[name] == pytest.approx(open_[name], abs=1e-5)
    assert summed["model_sha256"] == open_["model_sha256"]
    with open(config.out / "messages.csv") as stream:
        rows = list(csv.DictReader(stream))
    assert not {"EvalReport", "TrainReport"} & {row["message"] for row in rows}
    # the references and one evaluation, by all six, beside two rounds in which some go through the protocol
    evaluations = {row["round"] for row in rows if row["purpose"] == "test"}
    assert len(evaluations) == 2
    inputs = sum(int(row["messages"]) for row in rows if row["message"] == "MaskedInput" and row["purpose"] == "test")
    assert inputs == 6 * len(evaluations)
    released = json.loads((config.out / "privacy.json").read_text())["released"]
    assert "the sums of the parties' evaluation metrics, without noise" in released


def test_securesum_needs_the_protocol(make_config):
    with pytest.raises(ConfigError, match="metrics = securesum: needs aggregation secure or hybrid"):
        make_config("--metrics securesum --aggregation plain")


# ---- what an attack on the engine found ----


def test_a_hybrid_round_waits_for_local_work_in_the_clear(make_config, run_in_memory, monkeypatch):
    """A party in the clear is still training when the hidden ones are through with their first phase."""
    from fedmpi.vision.methods.dp_pfeddsu import Method

    work = Method.work

    def slow(self, party, theta, round):
        if party == 0:
            time.sleep(1.5)
        return work(self, party, theta, round)

    quick = run_in_memory(make_config(f"{SECURE} --rounds 1"), 8)
    monkeypatch.setattr(Method, "work", slow)
    flags = "--aggregation hybrid --clear-parties 0 --phase-deadline 0.4 --rounds 1"
    for ranks in (8, 3):  # alone on its rank, and with hidden neighbours that have to wait for it
        summary = run_in_memory(make_config(f"{SECURE} {flags}"), ranks)
        assert summary["dropouts"]["real"] == 0 and summary["model_sha256"] == quick["model_sha256"]


def test_test_figures_that_could_not_be_added_up_are_not_those_of_an_earlier_round(
    make_config, run_in_memory, monkeypatch
):
    whole = Server.sum_of_figures
    monkeypatch.setattr(
        Server, "sum_of_figures", lambda self, round, *rest: whole(self, round, *rest) if round < 3 else None
    )
    config = make_config(f"{SECURE} --metrics securesum --eval-every 1")
    summary = run_in_memory(config, 3)
    assert rows(config)[1]["accuracy"] is not None and summary["accuracy"] is None


@pytest.mark.parametrize("lost, said", [((1,), "are those of 6 of 7 parties"), ((1, 2, 3), "the threshold is 5")])
def test_parties_lost_from_test_figures_are_told(lost, said, make_config, run_in_memory, monkeypatch, capsys):
    say = Client.say

    def silent(self, messages):
        say(self, [m for m in messages if m.party not in lost or (m.round, m.purpose) != (1, Purpose.TEST)])

    monkeypatch.setattr(Client, "say", silent)
    summary = run_in_memory(
        make_config(f"{SECURE} --rounds 1 --metrics securesum --round-deadline 3 --phase-deadline 1"), 3
    )
    told = capsys.readouterr().out
    assert said in told and "test figures of round 1" in told and summary["dropouts"]["real"] >= len(lost)
    assert (summary["accuracy"] is None) == (len(lost) > 2)


def test_sizes_of_cohorts_that_cannot_run_are_refused_before_the_start(make_config, run_in_memory):
    config = make_config(f"{SECURE} --parties 30 --graph regular --expected-dropout 0.3 --sampling 0.5")
    with pytest.raises(ConfigError, match=r"a cohort of \d+ hidden parties may be drawn: .*--min-cohort \d+ would"):
        run_in_memory(config, 3)


def test_in_a_test_nobody_is_in_the_clear_and_waited_for_longer(make_config, run_in_memory, monkeypatch):
    """Sums of test figures hide everybody: who shares updates in the clear has the deadline of a phase like the others."""
    say = Client.say

    def silent(self, messages):
        say(self, [m for m in messages if m.party or (m.round, m.purpose, m.PHASE) != (1, Purpose.TEST, "ShareKeys")])

    monkeypatch.setattr(Client, "say", silent)
    flags = (
        "--rounds 1 --aggregation hybrid --clear-parties 0 --metrics securesum --round-deadline 40 --phase-deadline 1"
    )
    start = time.monotonic()
    assert run_in_memory(make_config(f"{SECURE} {flags}"), 3)["dropouts"]["real"] == 1
    assert time.monotonic() - start < 40
