"""Keys for several rounds and the bill, attacked: what worked, and does no more."""

import subprocess
import sys
from pathlib import Path

import pytest
from dying_ranks import sums

from fedmpi.errors import ConfigError
from fedmpi.runtime.client import Client
from fedmpi.wire.message import speakers

TOY = "--method toy_parties:Steady --dataset none --parties 7 --support dense --graph complete"


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))


# ---- the losses as a plan, under the same --keys ----


@pytest.mark.parametrize("what, round", [("AdvertiseKeys", 1), ("ShareBatch", 1), ("KeyList", 5)])
@pytest.mark.parametrize("kind", ["plain", "secure"])
def test_the_same_run_with_the_plan_of_its_losses_has_the_same_model(what, round, kind, play, tmp_path):
    """Lost when keys are made and taken over after that: back in the next round, which makes new keys. The plan says that it has none."""
    lost = play("--on-loss adopt --keys batch:4", {3: (what, round)})
    plan = ",".join(lost["dropouts"]["lost"]["plan"])
    planned = play(f"--aggregation {kind} --keys batch:4 --dropout {plan}", name="planned", ranks=2)
    assert sums(tmp_path, "run") == sums(tmp_path, "planned")
    assert lost["model_sha256"] == planned["model_sha256"]


def test_the_same_run_with_the_plan_of_who_was_late_has_the_same_model(make_config, run_in_memory, monkeypatch):
    """A round fails, so that all make new keys, and who sat out is back."""
    say = Client.say

    def silent(message):
        where = type(message).__name__, message.round, speakers(message)
        return where in (("ShareBatch", 1, (2,)), ("MaskedInput", 2, (0,)), ("MaskedInput", 2, (1,)))

    with monkeypatch.context() as patch:
        patch.setattr(Client, "say", lambda self, spoken: say(self, [m for m in spoken if not silent(m)]))
        flags = (
            f"{TOY} --aggregation secure --rounds 6 --keys batch:6 --threshold 5 --phase-deadline 1 --round-deadline 5"
        )
        summary = run_in_memory(make_config(flags), 4)
    plan = ",".join(summary["dropouts"]["lost"]["plan"])
    assert plan == "1:2:mask,2:0:mask,2:1:mask,2:2:mask"
    again = run_in_memory(make_config(f"{flags} --phase-deadline 30 --dropout {plan}"), 4)
    assert again["epsilon_outside"] == summary["epsilon_outside"]
    assert again["model_sha256"] == summary["model_sha256"]


# ---- fedmpi attack ----


@pytest.mark.parametrize("what", ["models", "replay", "dealer"])
def test_the_attacks_hold_under_batches(what, capsys):
    from fedmpi.liars.command import main

    assert main([what, "--keys", "batch:4"]) == 0, capsys.readouterr().out


# ---- a person's mistake ----


@pytest.mark.parametrize("parties", ["99999999999999999999", "1000000000000"])
def test_a_number_of_parties_that_cannot_be_is_one_line(parties):
    from fedmpi.bill.command import main

    with pytest.raises(ConfigError):
        main(["--parties", parties])


@pytest.mark.parametrize("file", ["messages.csv", "costs.csv"])
def test_a_damaged_run_is_not_projected(file, make_config, run_in_memory, capsys):
    config = make_config("--aggregation secure --keys batch:2")
    run_in_memory(config, 2)
    path = config.out / file
    path.write_text("" if file == "costs.csv" else path.read_text() + "junk\n")
    command = [sys.executable, "-m", "fedmpi.main", "project", str(config.out), "--link", "4g"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr


# ---- figures ----


def test_a_mean_over_rounds_is_one(make_config, run_in_memory):
    """`project` heads its table with `in the mean over rounds`; keys of a batch are in it as if every round made them."""
    config = make_config("--aggregation secure --parties 4 --rounds 4 --keys batch:4 --eval-every 0")
    run_in_memory(config, 3)
    command = [sys.executable, "-m", "fedmpi.main", "project", str(config.out), "--link", "4g"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    row = next(line.split() for line in said.splitlines() if line.split()[:1] == ["AdvertiseKeys"])
    assert "in the mean over rounds" in said and row[1:3] == ["21", "B"], row  # 84 B, in one round of four


def test_what_a_run_refuses_is_not_priced():
    from fedmpi.bill.command import main

    with pytest.raises(ConfigError, match="shrink"):
        main(["--shrink", "9"])


@pytest.mark.parametrize(
    "flags",
    ["--method local-only --epsilon inf", "--parties 4 --aggregation hybrid --clear-parties 0,1,2,3"],
)
def test_no_keys_are_spoken_of_where_none_are_made(flags, capsys):
    from fedmpi.bill.command import main

    assert main([*flags.split(), "--keys", "batch:4"]) == 0
    assert "keys: made once" not in capsys.readouterr().out


def test_no_torch_is_imported_for_a_bill():
    code = (
        "import sys; from fedmpi.bill.command import main; main(['--preset', 'demo-20']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"
