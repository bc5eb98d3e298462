"""fedmpi attack: every attack holds as promised, and would be seen to if it did not."""

import json
import sys

import pytest
from test_launch import MPIRUN, environ, launch  # noqa: F401

from fedmpi import main as command
from fedmpi.config import from_dict
from fedmpi.liars.command import ATTACKS
from fedmpi.liars.protocol import many_lists
from fedmpi.liars.stage import CANARY
from fedmpi.runtime import client, floor
from fedmpi.runtime.build import Orders
from fedmpi.runtime.mailbox import Mailbox
from fedmpi.runtime.tallies import Tallies
from fedmpi.secagg.party import Identity

SERVER = [name for name, attack in ATTACKS.items() if attack.side == "server"]
CLIENT = [name for name, attack in ATTACKS.items() if attack.side == "client"]
READS = ("puppets", "survivors")  # what a passive adversary is trusted not to do
BY_ORDERS = ("downgrade", "unsigned", "sigma", "paths", "module")


@pytest.fixture
def attack(tmp_path, capsys, monkeypatch):
    """The command as it is typed; returns (exit code, its rows by adversary, what it printed, what it said was wrong)."""
    for name in command.RANK:
        monkeypatch.delenv(name, raising=False)

    def attack(*words):
        file = tmp_path / "rows.json"
        file.unlink(missing_ok=True)
        code = command.main(["attack", *words, *(["--json", str(file)] if words else [])])
        rows = json.loads(file.read_text()) if file.exists() else []
        return code, {row["adversary"]: row for row in rows}, *capsys.readouterr()

    return attack


# ---- the command ----


def test_without_a_name_it_lists_the_attacks_a_line_each(attack):
    code, _, out, _ = attack()
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines[: len(ATTACKS)]] == list(ATTACKS)
    assert all(f"  {ATTACKS[line.split()[0]].side}  " in line for line in lines[: len(ATTACKS)])


def test_help_says_what_it_does(capsys):
    assert command.main(["attack", "--help"]) == 0 and "fedmpi attack all" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["downgrad"], "attack = downgrad: unknown; did you mean downgrade?"),
        (["nothing-like-it-at-all"], "unknown; there are downgrade, unsigned"),
        (["--parties", "5"], "--parties: name the attack first"),
        (["garbage", "--ranks", "2"], "2 ranks are not enough for an attack"),
        (["garbage", "--ranks", "many"], "invalid int value"),
        (["garbage", "--nonsense", "3"], "--nonsense: unknown"),
        (["garbage", "--resume", "runs/x"], "--resume: an attack is played against a run of its own"),
        (["garbage", "--ranks", "9"], "parties = 6: must be at least the number of client ranks"),
        (["downgrade", "--aggregation", "plain"], "this attack is on secure aggregation"),
        (["unsigned", "--adversary", "passive"], "on ranks with identities"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, attack):
    code, _, _, err = attack(*words)
    assert code == 2 and err.startswith("fedmpi: ") and said in err and err.count("\n") == 1


@pytest.mark.slow
def test_all_of_them_are_a_table_and_rows_of_json(attack, tmp_path, monkeypatch):
    few = {name: ATTACKS[name] for name in ("downgrade", "unsigned", "puppets", "tally")}
    monkeypatch.setattr("fedmpi.liars.command.ATTACKS", few)
    code, _, out, _ = attack("all")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert code == 0 and out.rstrip().endswith("everything held as promised")
    assert [(row["attack"], row["adversary"]) for row in rows] == [
        ("downgrade", "passive"),
        ("downgrade", "active"),
        ("unsigned", "active"),
        ("puppets", "passive"),
        ("puppets", "active"),
        ("tally", "passive"),
        ("tally", "active"),
    ]
    assert all(row["attack"] in out and not row["broken"] and row["tried"] for row in rows)


@pytest.mark.slow
def test_a_run_of_ones_own_is_attacked_with_its_own_options(attack, tmp_path):
    out = tmp_path / "kept"
    code, rows, _, _ = attack("garbage", "--parties", "9", "--rounds", "1", "--dropout", "1:5:mask", "--out", str(out))
    assert code == 0 and "parties 0, 1, 2 left out of round 1;" in rows["passive"]["got"]
    assert len(list(out.rglob("summary.json"))) == 4, "a run and the one to compare it with, under either adversary"


@pytest.mark.slow
def test_identities_of_ones_own_are_the_only_ones_that_are_tried(attack, tmp_path):
    from fedmpi.secagg import pki

    pki.make(tmp_path / "pki", 6)
    code, rows, _, _ = attack("puppets", "--pki", str(tmp_path / "pki"))
    assert code == 0 and list(rows) == ["active"] and rows["active"]["verdict"] == "held"


# ---- every attack ----


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVER)
def test_a_lying_server_gets_what_is_promised_and_no_more(name, attack):
    code, rows, out, _ = attack(name)
    assert code == 0 and set(rows) == set(ATTACKS[name].adversaries)
    for adversary, row in rows.items():
        assert row["tried"] and not row["broken"]
        assert row["verdict"] == ("not promised" if (adversary, name in READS) == ("passive", True) else "held")
        if adversary == "active":
            assert row["answers"] and all(" refused: " in line for line in row["answers"])
        assert all(line in out for line in row["answers"]) and row["got"] in out


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENT)
def test_a_lying_client_is_named_and_changes_nothing_but_its_own_part(name, attack):
    code, rows, _, _ = attack(name)
    assert code == 0 and set(rows) == {"passive", "active"}
    for row in rows.values():
        assert (
            row["verdict"] == "held"
            and row["got"].startswith("nothing: it was named")
            and "model is as if" in row["got"]
        )
        assert any("rank 1 " in line or "party 0" in line for line in row["answers"])


@pytest.mark.slow
def test_what_passive_does_not_promise_is_really_had(attack):
    _, rows, _, _ = attack("puppets")
    assert "party 0's exact update: [" in rows["passive"]["got"]
    assert "all 16 numbers are those that its machine put in" in rows["passive"]["got"]
    assert rows["active"]["got"].startswith("nothing")
    _, rows, _, _ = attack("survivors")
    assert "sum of parties 0, 1, 2 alone, 3 where the threshold is 4" in rows["passive"]["got"]
    assert rows["passive"]["got"].endswith("exactly what their machines put in")
    assert rows["active"]["got"].startswith("nothing")


@pytest.mark.parametrize("parties", range(3, 40))
def test_lists_of_survivors_leave_nobody_out_of_too_few(parties):
    threshold = parties // 2 + 1
    few, lists = many_lists(parties, threshold)
    assert bool(few) == (parties >= 5)
    for party, shown in lists.items():
        assert len(shown) == threshold and party in shown and set(few) <= set(shown)
        missing = sum(party not in other for other in lists.values())
        assert party in few or missing >= threshold
    assert len(few) < threshold


# ---- a verdict can be BROKEN ----


def as_told(own, setup, *_):
    """A rank that believes whatever rank 0 says."""
    fields = json.loads(setup.config)
    return Orders(from_dict(fields.pop("config"), own, "Setup"), **fields)


def broken(found):
    code, rows, out, _ = found
    wrong = [row for row in rows.values() if row["broken"]]
    assert code == 1 and wrong and "BROKEN" in out and all(row["verdict"] == "BROKEN" for row in wrong)
    return wrong[0]["got"]


GOT = {
    "downgrade": "12 updates in the clear and without noise, party 0's [1, 0, 0, 0 ...]",
    "unsigned": "a run without signatures of 3 ranks",
    "sigma": "updates with a tenth of their noise of 3 ranks",
    "paths": "files there were made, changed or deleted",
    "module": "its module was imported by rank 1, 2, 3",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_ORDERS)
def test_a_rank_that_believes_its_orders_is_broken(name, attack, monkeypatch):
    monkeypatch.setattr(floor, "agree", as_told)
    assert GOT[name] in broken(attack(name))
    sys.modules.pop(CANARY, None)


@pytest.mark.slow
def test_a_rank_that_takes_its_identities_from_rank_0_is_broken(attack, monkeypatch):
    monkeypatch.setattr(floor, "agree", as_told)
    assert broken(attack("paths", "--adversary", "active")) == "rank 1, 2, 3 looked for its files there"


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_a_party_that_takes_any_signature_is_broken(name, attack, monkeypatch):
    monkeypatch.setattr(Identity, "verifies", lambda *_: True)
    assert broken(attack(name, "--adversary", "active")).startswith("got ")


@pytest.mark.slow
def test_sums_that_are_not_bound_to_a_model_are_broken(attack, monkeypatch):
    for module in ("runtime.mirror", "runtime.server", "liars.rounds"):
        monkeypatch.setattr(f"fedmpi.{module}.digest", lambda theta: bytes(32))
    assert "who saw different models" in broken(attack("models", "--adversary", "passive"))


@pytest.mark.slow
def test_a_rank_that_answers_twice_is_broken(attack, monkeypatch):
    begin = client.Client.begin

    def forgets(self, *of):
        begin(self, *of)
        self.trained = 0

    monkeypatch.setattr(client.Client, "begin", forgets)
    assert "second answers, as party" in broken(attack("again", "--adversary", "passive"))


@pytest.mark.slow
def test_a_rank_0_that_a_client_can_stop_or_deceive_is_broken(attack, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Tallies, "_check_rows", lambda *_: None)
        assert broken(attack("tally", "--adversary", "passive")).startswith("it ended the run: ")
    with monkeypatch.context() as patch:
        patch.setattr(Mailbox, "_not_hosted", lambda *_: None)
        broken(attack("foreign", "--adversary", "passive", "--round-deadline", "2", "--phase-deadline", "1"))


# ---- over MPI ----


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun")
@pytest.mark.parametrize("name", ["puppets", "flood"])
def test_under_mpirun_the_liar_is_a_rank_of_the_job(name, launch, tmp_path):  # noqa: F811
    code, out, err = launch(4, "attack", name, "--json", tmp_path / "rows.json")
    assert code == 0, err
    rows = {row["adversary"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert set(rows) == {"passive", "active"} and not any(row["broken"] for row in rows.values())
    assert out.count("everything held as promised") == 1 and "Traceback" not in err
    if name == "puppets":
        assert "rank 1 refused: party 0, AdvertiseKeys: was shown keys of party 1 that it did not sign" in out
        assert "exact update" in rows["passive"]["got"] and "not compared" in rows["passive"]["got"]
    else:
        assert "rank 1 sends far more than it was asked for" in out
