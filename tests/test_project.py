"""fedmpi project: a finished run's counted bytes and CPU seconds on another network."""

import csv
import json

import pytest

from fedmpi.bill import laws
from fedmpi.bill.links import LOOK, PROFILES, Link
from fedmpi.bill.project import RANK_0, WORK, Run, beside, project
from fedmpi.bill.shape import Setting
from fedmpi.errors import ConfigError
from fedmpi.main import main
from fedmpi.transport import ledger
from fedmpi.wire.phases import Phase

SECURE = "--parties 6 --rounds 3 --eval-every 2 --aggregation secure"
STILL = Link("still", up=1e12, down=1e12, latency=0.0, device=0.0)


def phases(row):
    return {waited.phase: waited for waited in row["phases"]}


@pytest.mark.parametrize(
    "flags",
    [
        SECURE,
        "--parties 6 --rounds 3 --aggregation plain",
        "--parties 6 --rounds 3 --aggregation plain --metrics none",
        "--parties 6 --rounds 3 --aggregation hybrid --clear-parties 0,1 --support dense",
    ],
)
def test_every_way_costs_its_latency_and_every_byte_its_time(flags, make_config, run_in_memory):
    """A link on which nothing else takes any time shows the trips; one on which only bytes do, the bytes."""
    config = make_config(flags)
    run_in_memory(config, 3)
    run, bill = Run(config.out), laws.price(Setting(config), 6)
    far = Link("far", up=1e15, down=1e15, latency=1.0, device=0.0)
    rows = list(project(run, far))
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        others = [waited for waited in row["phases"] if waited.phase != RANK_0]
        waits = sum(far.waits(waited.up, far.up) + far.waits(waited.down, far.down) for waited in others)
        latency = 2 * laws.trips(bill.training) * (1 + LOOK)
        assert sum(waited.seconds for waited in others) - waits == pytest.approx(latency, abs=1e-3)
    thin = Link("thin", up=8.0, down=8e15, latency=0.0, device=0.0)
    lengthened = {**phases(next(project(run, thin)))}
    with (config.out / "messages.csv").open() as file:
        sent = [row for row in csv.DictReader(file) if row["round"] == "1" and row["purpose"] == "training"]
    for name, waited in lengthened.items():
        up = [
            int(r["logical_payload"]) + int(r["logical_framing"])
            for r in sent
            if (r["phase"], r["direction"]) == (name, "up")
        ]
        if up and name != "report":
            assert waited.up == max(up)
            due = min(waited.up * 1500 / 1448 + LOOK * (1 + bool(waited.down)), laws.deadline(config, Phase(name)))
            assert waited.seconds == pytest.approx(due)


def test_the_slowest_party_s_cpu_decides_and_the_device_multiplies_it(make_config, run_in_memory):
    config = make_config(SECURE)
    run_in_memory(config, 3)
    run = Run(config.out)
    with (config.out / "costs.csv").open() as file:
        costs = [row for row in csv.DictReader(file) if row["phase"] == "update" and row["cost"] != "MPI"]
    own = {party: sum(float(r["cpu_seconds"]) for r in costs if int(r["party"]) == party) / 3 for party in range(6)}
    slow = Link("slow", up=1e15, down=1e15, latency=0.0, device=10.0)
    for row in project(run, slow):
        assert phases(row)[WORK].cpu == pytest.approx(max(own.values()))
        assert phases(row)[WORK].seconds == pytest.approx(10 * max(own.values()))
        assert phases(row)["MaskedInput"].cpu > 0


def test_everybody_waits_for_rank_0_and_who_is_sent_a_sum_takes_its_step_too(make_config, run_in_memory):
    """Rank 0's seconds are here and there the same; a party's are its device's."""
    slow = Link("slow", up=1e15, down=1e15, latency=0.0, device=10.0)
    for download in ("delta", "full"):
        config = make_config(f"{SECURE} --download {download}")
        seconds = run_in_memory(config, 3)["seconds"]
        rows = list(project(Run(config.out), slow))
        step = min(seconds["step"].values()) / 3
        for row in rows:
            assert phases(row)[RANK_0].seconds == phases(row)[RANK_0].cpu >= step > 0
        assert "model" not in {line["phase"] for line in csv.DictReader((config.out / "costs.csv").open())}
        following = [phases(row)["model"].seconds for row in rows]
        follows = LOOK + (10 * step if download == "delta" else 0)
        assert following == pytest.approx([LOOK, follows, follows], abs=1e-6)


def test_what_a_run_has_counted_of_a_party_that_follows_is_believed(make_config, run_in_memory):
    config = make_config(SECURE)
    run_in_memory(config, 3)
    with (config.out / "costs.csv").open("a") as file:
        file.write("2,model,encode,0.600000\n")
    here = Link("here", up=1e15, down=1e15, latency=0.0)
    found = [phases(row)["model"].seconds for row in project(Run(config.out), here)]
    assert found == pytest.approx([0.2 + LOOK] * 3, abs=1e-6)


def test_the_last_model_comes_with_the_last_test(make_config, run_in_memory):
    config = make_config(SECURE)  # tests after rounds 2 and 3
    run_in_memory(config, 3)
    thin = Link("thin", up=8e15, down=8e3, latency=0.0, device=0.0)
    tests = [row["evaluation_seconds"] for row in project(Run(config.out), thin)]
    first, second, third = tests
    assert first == 0 and third > second + 1, "that of round 2 has been counted with round 3, for which it came"


def test_downloads_belong_to_the_next_round_however_often_one_evaluates(make_config, run_in_memory):
    seen = []
    for every in (1, 0):
        config = make_config(f"--parties 4 --rounds 3 --eval-every {every}")
        run_in_memory(config, 3)
        seen.append([phases(row)["model"].down for row in project(Run(config.out), STILL)])
    assert seen[0] == seen[1]
    assert seen[0][0] < seen[0][1] and seen[0][0] < seen[0][2], "the first model is nobody's download"


def test_a_deadline_ends_a_phase_without_who_is_late(make_config, run_in_memory):
    config = make_config(f"{SECURE} --phase-deadline 50 --round-deadline 500")
    run_in_memory(config, 3)
    thin = Link("thin", up=8.0, down=8e15, latency=0.0, device=1e6)
    row = next(project(Run(config.out), thin))
    found = phases(row)
    assert found["MaskedInput"].seconds == 50 and found["MaskedInput"].late == 6
    assert found[WORK].seconds == 500 and found[WORK].late == 6
    assert row["late"] >= 12


def test_a_run_too_large_for_a_row_each_is_projected_in_the_mean(make_config, run_in_memory, monkeypatch):
    """Its ledger has one row for all parties of a rank."""
    detailed, summed = make_config(SECURE), make_config(SECURE)
    run_in_memory(detailed, 3)
    monkeypatch.setattr(ledger, "MOST_DETAIL", 0)
    monkeypatch.setattr("fedmpi.runtime.build.MOST_DETAIL", 0)
    run_in_memory(summed, 3)
    far = Link("far", up=1e6, down=1e6, latency=0.1, jitter=0.1, device=0.0)
    each, mean = (list(project(Run(config.out), far)) for config in (detailed, summed))
    for one, other in zip(each, mean, strict=True):
        seconds = [
            row["training_seconds"] - phases(row)[RANK_0].seconds for row in (one, other)
        ]  # its own are measured
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)


def test_the_command_says_projected_beside_measured(make_config, run_in_memory, capsys, tmp_path):
    config = make_config(SECURE)
    run_in_memory(config, 3)
    capsys.readouterr()
    file = tmp_path / "projected.json"
    assert main(["project", str(config.out), "--link", "4g", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert all(
        word in said for word in ("local work", "MaskedInput", "a round", "an evaluation", "measured here", "4g")
    )
    rows = json.loads(file.read_text())
    measured = [json.loads(line)["seconds"] for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert [row["measured_seconds"] for row in rows] == measured
    for row in rows:
        assert row["training_seconds"] == pytest.approx(sum(phase["seconds"] for phase in row["phases"].values()))
        assert row["projected_seconds"] > 8 * PROFILES["4g"].latency


def test_a_run_with_a_link_has_projected_beside_measured_in_rows_and_summary(make_config, run_in_memory):
    config = make_config(SECURE)
    summary = run_in_memory(config, 3)
    text = beside(config.out, "wifi")
    assert "link wifi" in text and "local work" in text
    rows = [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all(row["projected_seconds"] > 0 and row["seconds"] > 0 and "epsilon_kind" in row for row in rows)
    after = json.loads((config.out / "summary.json").read_text())
    said = after.pop("projected")
    assert after == json.loads(json.dumps(summary)), "nothing else has changed"
    assert said["link"]["name"] == "wifi" and said["link"]["latency"] == PROFILES["wifi"].latency
    assert said["projected_seconds"] == pytest.approx(sum(row["projected_seconds"] for row in rows), abs=2e-3)
    again = beside(config.out, "lan")
    assert (
        "link lan" in again
        and json.loads((config.out / "summary.json").read_text())["projected"]["link"]["name"] == "lan"
    )


def test_a_link_that_is_none_is_refused_before_a_run_has_a_folder(tmp_path):
    from fedmpi.runtime.start import prepare_run

    out = tmp_path / "run"
    with pytest.raises(ConfigError, match="link = 5g: must be one of lan, wifi, 4g, satellite"):
        prepare_run(["--link", "5g", "--out", str(out)], 3, "none")
    assert not out.exists()


def test_a_folder_that_is_no_finished_run_is_refused_in_one_line(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nothing"):
        assert main(["project", str(folder), "--link", "4g"]) == 2
        said = capsys.readouterr().err
        assert "no finished run there (summary.json" in said and said.count("\n") == 1
    assert main(["project", str(tmp_path), "--link", "5g"]) == 2
    assert "link = 5g: must be one of" in capsys.readouterr().err
