"""The bill: what the size laws say before a run is what the ledger says after it."""

import csv
import json
import subprocess
import sys
from collections import Counter

import pytest

from fedmpi.algorithm import folder_of, method_names
from fedmpi.bill import laws
from fedmpi.bill.links import PROFILES, Link, find
from fedmpi.bill.shape import Setting
from fedmpi.errors import ConfigError
from fedmpi.main import main
from fedmpi.secagg import pki
from fedmpi.wire.frame import FRAMING

IMAGES = "--parties 6 --rounds 3 --eval-every 2"
RATINGS = "--preset demo-recsys --parties 12 --rounds 3 --eval-every 2 --items 30 --graph complete"
HEAD = 24  # bytes by which an expectation may be off: a code's head and its padding

SETTINGS = [
    f"{IMAGES} --support shared",
    f"{IMAGES} --support dense",
    f"{IMAGES} --support own",
    f"{IMAGES} --support union",
    f"{IMAGES} --support shared --download full",
    f"{IMAGES} --support shared --aggregation secure",
    f"{IMAGES} --support union --aggregation secure",
    f"{IMAGES} --support shared --aggregation secure --metrics securesum",
    f"{IMAGES} --support shared --aggregation secure --metrics securesum --pki PKI",
    f"{IMAGES} --support dense --aggregation hybrid --clear-parties 0,3",
    f"{IMAGES} --support dense --method centaur --parties 70 --samples-per-party 10 --classes-per-party 2 --rounds 2 "
    "--aggregation secure --graph regular",
    f"{IMAGES} --support dense --method centaur --download full --aggregation secure",
    f"{IMAGES} --support dense --method fedavg --epsilon inf",
    f"{IMAGES} --support shared --aggregation secure --keys batch:16",
    f"{IMAGES} --support shared --aggregation secure --keys batch:2",
    f"{IMAGES} --support union --aggregation secure --keys batch:2",
    f"{IMAGES} --support dense --aggregation secure --metrics securesum --pki PKI --keys batch:2",
    f"{IMAGES} --support dense --aggregation hybrid --clear-parties 0,3 --keys batch:3",
    f"{RATINGS} --method fedmf --aggregation plain --support own",
    f"{RATINGS} --method fedmf --aggregation secure",
    f"{RATINGS} --method fedmf --aggregation secure --download full",
    f"{RATINGS} --method fed-lr --optimizer adam --server-lr 0.05 --download full",
]


def counted(config, evaluation):
    """(messages, payload bytes) by name and direction, of all parties on links of their own."""
    number, payload = Counter(), Counter()
    with (config.out / "messages.csv").open() as file:
        for row in csv.DictReader(file):
            of_test = row["purpose"] == "test" or row["phase"] == "evaluation"
            if row["phase"] in ("setup", "bookkeeping") or of_test != evaluation or (of_test and row["round"] == "0"):
                continue  # round 0 measures the references, which have columns of their own
            key = row["message"], row["direction"]
            number[key] += int(row["logical_framing"]) // FRAMING
            payload[key] += int(row["logical_payload"])
    return {key: (number[key], payload[key]) for key in number if number[key]}


def union_of(config):
    """How many coordinates a run's unions had, in the mean: what no law knows."""
    if config.aggregation.support != "union":
        return None
    events = map(json.loads, (config.out / "releases.jsonl").read_text().splitlines())
    found = [event["coordinates"] for event in events if event.get("coordinates")]
    return round(sum(found) / len(found))


@pytest.mark.parametrize("flags", SETTINGS)
def test_the_law_is_the_ledger(flags, make_config, run_in_memory, tmp_path):
    if "PKI" in flags:
        pki.make(tmp_path / "pki.json", 6)
    config = make_config(flags.replace("PKI", str(tmp_path / "pki.json")))
    run_in_memory(config, 3)
    bill = laws.price(Setting(config), config.run.parties, union_of(config))
    rounds = {False: config.run.rounds, True: (config.run.rounds + 1) // 2}
    for evaluation, lines in ((False, bill.training), (True, bill.evaluation)):
        found = counted(config, evaluation)
        assert {(line.message, line.direction) for line in lines} == set(found)
        for key, (number, payload) in found.items():
            of_it = [
                line for line in lines if (line.message, line.direction) == key
            ]  # one for each length of a batch of keys
            numbers = [x.share * config.run.parties * rounds[evaluation] * x.number * x.often for x in of_it]
            assert number == pytest.approx(sum(numbers), rel=1e-12), key
            law = sum(count * line.payload for count, line in zip(numbers, of_it))
            (sign,) = {line.sign for line in of_it}
            if sign == laws.EXACT:
                assert payload == pytest.approx(law, rel=1e-12), key
            elif sign == laws.EXPECTED:
                assert payload / number == pytest.approx(law / number, rel=0.02, abs=HEAD), key
            else:
                assert payload <= law, key


def priced(config, parties=None):
    return laws.price(Setting(config), parties or config.run.parties)


def headline(bill):
    return laws.total(bill.training, "up"), laws.total(bill.training, "down"), laws.trips(bill.training)


def test_who_is_drawn_seldom_is_brought_what_it_missed(make_config, run_in_memory):
    """In the mean over many rounds: what was not sent to a party while it was away comes when it is drawn."""
    config = make_config(
        "--parties 12 --support shared --sampling 0.5 --min-cohort 1 --rounds 40 --eval-every 0 --head-epochs 0"
    )
    run_in_memory(config, 3)
    lines = {line.message: line for line in priced(config).training}
    found = counted(config, False)
    train, _ = found["Train", "down"]
    for name in ("Delta", "Model"):
        number = found.get((name, "down"), (0, 0))[0]
        assert number / train == pytest.approx(lines[name].number if name in lines else 0, abs=0.25), name


def test_a_round_costs_the_same_however_often_one_evaluates(make_config):
    assert len({headline(priced(make_config(f"--eval-every {every}"))) for every in (0, 1, 7)}) == 1
    silent = priced(make_config("--metrics none"))
    assert not silent.evaluation and silent.training


def test_trips_are_what_somebody_waits_for(make_config):
    many = {
        "--aggregation plain": 1,
        "--aggregation plain --support union": 2,
        "--aggregation secure": 4,
        "--aggregation secure --support union": 5,
        "--aggregation secure --keys batch:16": 2,
        "--aggregation secure --support union --keys batch:16": 3,
        "--aggregation hybrid --clear-parties 0": 4,
        "--aggregation plain --metrics none": 1,
    }
    for flags, trips in many.items():
        assert laws.trips(priced(make_config(flags)).training) == trips, flags
    assert laws.trips(priced(make_config("--aggregation secure --metrics securesum")).evaluation) == 4


def test_an_active_adversary_costs_signatures_and_a_trip_more(make_config, tmp_path):
    config = make_config(f"--aggregation secure --pki {tmp_path / 'not-read'}")
    bill = priced(config)
    assert laws.trips(bill.training) == 5
    assert {"SurvivorList", "ConsistencyCheck"} <= {line.message for line in bill.training}


def test_more_neighbours_cost_more_and_a_regular_graph_has_few(make_config):
    complete, regular = (
        Setting(make_config(f"--aggregation secure --graph {graph}")) for graph in ("complete", "regular")
    )
    up = [laws.total(laws.price(complete, parties).training, "up") for parties in (20, 200, 2000)]
    assert up == sorted(up)
    assert laws.price(complete, 2000).degree == 1999 and laws.price(regular, 2000).degree < 60


def test_who_shares_in_the_clear_by_its_data_cannot_be_priced(make_config):
    config = make_config("--preset demo-recsys --method fedmmf-lr --aggregation hybrid --clear-rule indicator<=0.1")
    with pytest.raises(ConfigError, match="list --clear-parties"):
        priced(config)


# ---- links ----


def test_the_slowest_of_many_is_later_and_by_the_stated_quantile():
    link = Link("x", up=8e6, down=16e6, latency=0.1, jitter=1.0, device=2.0)
    assert link.slowest(1) == pytest.approx(0.693, abs=1e-3), "the median of an exponential"
    below = (1 - 2.718281828459045 ** -link.slowest(50)) ** 50
    assert below == pytest.approx(0.5)
    looked_for = 0.005  # on two ways
    assert link.seconds(2, 1448, 1448, 3.0) == pytest.approx(0.2 + looked_for + 0.0015 + 0.00075 + 6.0), "with headers"
    alone, together = link.phase(1, [(0, 0, 0)]), link.phase(1, [(0, 0, 0), (14480, 0, 0)])
    assert together - alone == pytest.approx(0.015 + link.slowest(2) - link.slowest(1))


def test_what_is_long_waits_for_tcp_to_open_its_window_and_for_mpi_to_be_asked_for_the_rest():
    link = Link("x", up=8e6, down=8e6, latency=0.1)  # a byte a microsecond, and 0.2 s until there is an answer
    first, second = (
        0.2 - 0.01448,
        0.2 - 0.02896,
    )  # of which the link is idle while ten packets, and twenty, are answered
    assert link.waits(14_480, 8e6) == 0
    assert link.waits(14_481, 8e6) == pytest.approx(first)
    assert link.waits(43_441, 8e6) == link.waits(65_536, 8e6) == pytest.approx(first + second)
    assert link.waits(65_537, 8e6) == link.waits(140_000, 8e6) == pytest.approx(first + second + 0.2), (
        "asked for the rest"
    )
    most = link.waits(1e9, 8e6)
    assert link.waits(1e6, 8e6) == most, "from then on answers come before the link has run dry"
    assert most < link.waits(1e9, 80e6), "a wider link waits more often"
    near = Link("near", up=8e6, down=8e6, latency=0.0)
    assert near.waits(1e9, 8e6) == 0 and near.moving(1448e6, 8e6) == pytest.approx(1500)
    jittery = Link("jittery", up=8e6, down=8e6, latency=0.05, jitter=0.05)
    assert jittery.waits(1e6, 8e6) == pytest.approx(most), "an answer is as late as the delays of both ways"


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_profile_is_found_and_says_what_it_assumes(name):
    assert find(name).name == name and "assumed" in find(name).said()


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("up: 1e6\ndown: 1e6\n", "latency is missing"),
        ("up: 0\ndown: 1e6\nlatency: 0.1\n", "up = 0: must be a number above 0"),
        ("up: fast\ndown: 1e6\nlatency: 0.1\n", "up = fast"),
        ("up: 1e6\ndown: 1e6\nlatency: -1\n", "latency = -1: must be a number of 0 or more"),
        ("up: 1e6\ndown: 1e6\nlatency: 1\nspeed: 3\n", "unknown field speed"),
        ("[1, 2]", "must hold named numbers"),
        ("{", "cannot be read as YAML or JSON"),
    ],
)
def test_a_file_of_a_link_is_read_or_refused_by_name(text, wrong, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=wrong):
        find(str(path))
    path.write_text('{"up": 1000000, "down": "2e6", "latency": 0.1, "device": 4}')
    assert find(str(path)) == Link("mine", 1e6, 2e6, 0.1, device=4.0)
    with pytest.raises(ConfigError, match="must be one of lan, wifi, 4g, satellite"):
        find("5g")


# ---- the command ----


def test_the_command_prints_a_table_for_each_number_of_parties(capsys, tmp_path):
    rows = tmp_path / "bill.json"
    flags = "--preset demo-recsys --parties 20 200 --link 4g --json"
    assert main(["cost", *flags.split(), str(rows)]) == 0
    said = capsys.readouterr().out
    assert "20 parties" in said and "200 parties" in said and "4 trips" in said and "link 4g" in said
    totals = [row for row in json.loads(rows.read_text()) if row["phase"] == "total"]
    assert [(row["parties"], row["of"]) for row in totals] == [
        (20, "training"), (20, "evaluation"), (200, "training"), (200, "evaluation"),
    ]  # fmt: skip
    assert all(row["transfer_seconds"] > 0 for row in totals)


def test_a_phase_that_outlasts_its_deadline_is_said(capsys, tmp_path):
    slow = tmp_path / "slow.yaml"
    slow.write_text("up: 100\ndown: 1e6\nlatency: 0.5\n")
    assert main(["cost", "--preset", "demo-recsys", "--link", str(slow)]) == 0
    assert (
        "MaskedInput is not over when its deadline is (60 s): raise --phase-deadline above" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "flags, wrong",
    [
        ("--parties twenty", "parties = twenty: must be a number"),
        ("--parties", "--parties needs a value"),
        ("--preset demo-recsys --link 5g", "link = 5g: must be one of"),
        ("--preset demo-recsys --parties 2", "min_cohort = 3: must be <= parties"),
        ("--preset ml100k --method fed-lr", "say where the data are with --data-dir"),
        ("--method nothing", "method = nothing: must be one of"),
        ("--preset demo-recsys --colour red", "--colour: unknown"),
    ],
)
def test_what_cannot_be_priced_is_said_in_one_line(flags, wrong, capsys):
    assert main(["cost", *flags.split()]) == 2
    said = capsys.readouterr().err
    assert wrong in said and said.count("\n") == 1


@pytest.mark.parametrize("method", [name for name in method_names() if folder_of(name) == "fedmpi.vision.methods"])
def test_a_method_for_images_is_priced_without_torch(method):
    """Which takes seconds to import: an answer is to be there in one."""
    code = (
        "import sys; from fedmpi.main import main;"
        f"assert main('cost --method {method} --epsilon inf --support dense --network resnet20'.split()) == 0;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'sklearn', 'mpi4py')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_data_that_are_not_there_do_not_keep_a_setting_from_being_priced(capsys):
    assert main(["cost", "--preset", "cifar10-s5", "--data-dir", "nowhere", "--parties", "20"]) == 0
    assert "cifar10, 20 parties" in capsys.readouterr().out


def test_help_is_for_a_person(capsys):
    assert main(["cost", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--link NAME|FILE" in said and "fedmpi cost --parties 20 200 2000" in said


@pytest.mark.parametrize(
    "text",
    [
        f"up: 1{'0' * 400}\ndown: 1e6\nlatency: 0.1\n",
        "up: 1e6\ndown: 1e6\nlatency: 2026-99-99\n",
        "[" * 5000,
        "up: 1e-320\ndown: 1e6\nlatency: 0\n",  # seconds that are no number
        "up: 1e6\ndown: 1e6\nlatency: 1e308\njitter: 1e308\n",
    ],
)
def test_a_link_that_cannot_be_is_a_line(text, tmp_path):
    from fedmpi.bill.links import find
    from fedmpi.errors import ConfigError

    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="mine.yaml"):
        find(str(tmp_path / "mine.yaml"))
