"""The bill: what the size laws say before a run is what the ledger says after it."""

import csv
import json
from collections import Counter

import pytest

from fedmpi.bill import laws
from fedmpi.bill.shape import Setting
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
    f"{IMAGES} --support dense --aggregation hybrid --clear-parties 0,3",
    f"{IMAGES} --support dense --method centaur --parties 70 --samples-per-party 10 --classes-per-party 2 --rounds 2 "
    "--aggregation secure --graph regular",
    f"{IMAGES} --support dense --method centaur --download full --aggregation secure",
    f"{IMAGES} --support dense --method fedavg --epsilon inf",
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
def test_the_law_is_the_ledger(flags, make_config, run_in_memory):
    config = make_config(flags)
    run_in_memory(config, 3)
    bill = laws.price(Setting(config), config.run.parties, union_of(config))
    rounds = {False: config.run.rounds, True: (config.run.rounds + 1) // 2}
    for evaluation, lines in ((False, bill.training), (True, bill.evaluation)):
        found = counted(config, evaluation)
        assert {(line.message, line.direction) for line in lines} == set(found)
        for line in lines:
            number, payload = found[line.message, line.direction]
            assert number == line.share * config.run.parties * rounds[evaluation] * line.number, line
            each = payload / number
            if line.sign == laws.EXACT:
                assert each == line.payload, line
            elif line.sign == laws.EXPECTED:
                assert each == pytest.approx(line.payload, rel=0.02, abs=HEAD), line
            else:
                assert each <= line.payload, line
