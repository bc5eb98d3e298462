"""What a rank does not take from rank 0: weaker settings, another job, too little noise, paths, modules, and rounds once more.

Rank 0 lies here as it could over the wire: a Setup of its own making reaches the real client through the in-memory transport."""

import dataclasses
import gc
import json
import math
import os
import sys
import time
import typing
from pathlib import Path

import numpy as np
import pytest

from fedmpi.cli import resolve
from fedmpi.config import LAYERS
from fedmpi.errors import ConfigError, DataError, FedmpiError, ProtocolError, WireError
from fedmpi.privacy import accountant, calibrations
from fedmpi.privacy.accountant import Accountant, calibrate, proven
from fedmpi.runtime import build, checkpoint
from fedmpi.runtime.checkpoint import Counters
from fedmpi.runtime.floor import BY_EFFECT, OWN, STRENGTH, agree
from fedmpi.runtime.rank import run_client
from fedmpi.secagg import pki
from fedmpi.transport.memory import run_ranks
from fedmpi.wire.messages import Checkpoint, GoOn, Ready, Setup, Stop, Tally

TOY = """--preset demo-20 --method toy_parties:Steady --dataset none --support dense --clip 1 --epsilon 1 --entropy os --parties 7
--rounds 9 --aggregation secure"""
PARTIES = tuple(range(7))  # of the one client rank
SESSION = "0f" * 16
MARK = "of this run"


@pytest.fixture(autouse=True)
def plugins(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))
    monkeypatch.chdir(tmp_path)  # where `runs` is, if a rank has no --out


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    file = tmp_path_factory.mktemp("pki") / "pki.json"
    pki.make(file, 7)
    return file


@pytest.fixture
def toy(tmp_path):
    """What a rank was started for."""

    def make(flags="", where=("--out", "own")):
        return resolve([*TOY.split(), "--cache-dir", str(tmp_path / "cache"), *where, *flags.split()])

    return make


def orders(own, multiplier=None, resume_round=0, **changes):
    """A Setup's text as rank 0 likes it: `own`, but for these settings; honest about the noise that they ask for unless told."""
    config = own.as_dict()
    for name, value in changes.items():
        layer = next(layer for layer in config if name in config[layer])
        config[layer][name] = value
    privacy, rounds = config["privacy"], config["run"]["rounds"]
    if multiplier is None:
        target = privacy["epsilon"], privacy["delta"], privacy["sampling"], rounds, privacy["accountant"]
        multiplier = calibrate(*target)
    facts = {"multiplier": multiplier, "session": SESSION, "resume_round": resume_round, "run": SESSION, "absent": []}
    return json.dumps({"config": config, **facts})


def told(own, hosted=PARTIES, **changes):
    return agree(own, Setup(config=orders(own, **changes), parties=hosted), 1, 2)


def serve(own, text, parties=PARTIES, saves=()):
    """The real client from its Setup to its Stop, with these checkpoints in between; its exit code."""

    def rank(endpoint):
        if endpoint.rank:
            return run_client(endpoint, own)
        endpoint.send(1, Setup(config=text, parties=parties))
        ready = endpoint.poll()[1]
        assert isinstance(ready, Ready)
        if own.run.resume:
            endpoint.send(1, GoOn(ready.round))
        for message in (*map(Checkpoint, saves), Stop()):
            endpoint.send(1, message)
            assert isinstance(endpoint.poll()[1], Tally)

    return run_ranks(2, rank)[1]


# ---- weaker settings ----

# setting, what the rank was started with, what rank 0 says
WEAKER = [
    ("adversary", "--pki {pki}", "passive"),
    ("aggregation", "", "plain"),
    ("aggregation", "", "hybrid"),
    ("aggregation", "--aggregation hybrid", "plain"),
    ("clear_parties", "--aggregation hybrid --clear-parties 1", "1,2"),
    ("clear_parties", "--aggregation hybrid --clear-parties 1", "2"),
    ("clear_rule", "--aggregation hybrid", "indicator<=0.5"),
    ("epsilon", "", 1.01),
    ("epsilon", "", math.inf),
    ("epsilon", "", math.nan),
    ("delta", "", 2e-5),
    ("clip", "", 1.01),
    ("entropy", "", "seeded"),
    ("metrics", "", "party"),
    ("metrics", "", "securesum"),
    ("metrics", "--metrics securesum", "party"),
    ("metrics", "--entropy seeded --metrics none", "auto"),
    ("min_cohort", "--min-cohort 5", 4),
    ("colluding", "--colluding 2", 1),
    ("threshold", "", 4),
    ("threshold", "--threshold 6", 5),
    ("threshold", "--threshold 6", 0),
    ("support", "--support shared", "union"),
    ("support", "", "own"),
    ("support", "--support union", "own"),
    ("graph", "", "regular"),
    ("corrupt", "--graph regular", 0.04),
    ("expected_dropout", "--graph regular", 0.06),
    ("noise_margin", "--noise-margin 0.2", 0.1),
    ("accountant", "", "pld"),
    ("on_loss", "", "adopt"),
    ("on_loss", "--on-loss end", "drop"),
    ("denominator", "", "survivors"),
]


@pytest.mark.parametrize("name, flags, value", WEAKER)
def test_a_weaker_setting_is_refused_by_name(name, flags, value, toy, identities):
    own = toy(flags.format(pki=identities))
    text = orders(own, multiplier=50.0, **{name: value})
    with pytest.raises(
        ConfigError, match=f"^{name} = .*so says rank 0, and it protects less than .*this rank's own"
    ) as caught:
        serve(own, text)
    assert "\n" not in str(caught.value)


def test_every_setting_that_protects_is_in_that_list():
    assert {name for name, _, _ in WEAKER} == {*STRENGTH, *BY_EFFECT}


STRONGER = [
    ("aggregation", "--aggregation plain", "secure"),
    ("aggregation", "--aggregation hybrid --clear-parties 1", "hybrid"),
    ("clear_parties", "--aggregation hybrid --clear-parties 1,2", "2"),
    ("epsilon", "", 0.5),
    ("delta", "", 1e-6),
    ("clip", "", 0.5),
    ("entropy", "--entropy seeded", "os"),
    ("metrics", "", "none"),
    ("metrics", "--metrics party", "securesum"),
    ("min_cohort", "", 5),
    ("colluding", "", 1),
    ("threshold", "", 5),
    ("threshold", "", 6),
    ("threshold", "--threshold 4", 0),
    ("support", "--support shared", "dense"),
    ("graph", "--graph regular", "complete"),
    ("corrupt", "--graph regular", 0.1),
    ("expected_dropout", "--graph regular", 0.01),
    ("noise_margin", "", 0.1),
    ("accountant", "--accountant pld", "rdp"),
    ("denominator", "--denominator survivors", "expected"),
]


@pytest.mark.parametrize("name, flags, value", STRONGER)
def test_a_stronger_setting_is_taken(name, flags, value, toy):
    own = toy(flags)
    assert serve(own, orders(own, **{name: value})) == 0
    assert value in [getattr(layer, name, None) for layer in vars(told(own, **{name: value}).config).values()]


def test_a_downgrade_gets_nothing_from_a_rank_that_was_started_with_identities(toy, identities):
    """The attack as it was: plain and without noise, or unsigned keys."""
    own = toy(f"--pki {identities}")
    assert own.aggregation.adversary == "active"
    assert serve(own, orders(own)) == 0
    for lie in ({"aggregation": "plain", "adversary": "passive", "multiplier": 0.0}, {"adversary": "passive"}):
        with pytest.raises(ConfigError, match="protects less"):
            serve(own, orders(own, **lie))


def test_an_active_server_is_not_met_without_identities_of_ones_own(toy, identities):
    with pytest.raises(ConfigError, match="started without --pki, and does not take it from rank 0"):
        serve(toy(), orders(toy(), adversary="active", pki=str(identities)))


# ---- another job ----


def another(hint, value):
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is typing.Literal:
        return next(other for other in typing.get_args(hint) if other != value)
    return {bool: lambda: not value, int: lambda: value + 1, float: lambda: value / 2 or 0.25}.get(
        hint, lambda: f"{value}x"
    )()


@pytest.mark.parametrize("method", ["dp-pfeddsu", "fedmmf-lr"])
def test_any_other_difference_is_another_job(method):
    own = resolve(["--method", method, "--out", "own"])
    changed = 0
    for layer in LAYERS:
        for name, hint in typing.get_type_hints(type(getattr(own, layer)), include_extras=True).items():
            if name not in (*STRENGTH, *BY_EFFECT, *OWN.get(layer, ())):
                with pytest.raises(ConfigError, match=f"^{name} = .*so says rank 0, and this rank was started for"):
                    told(own, multiplier=99.0, **{name: another(hint, getattr(getattr(own, layer), name))})
                changed += 1
    assert changed > 25


def test_what_is_each_ranks_own_may_differ_and_stays_its_own(toy):
    own = toy("--data-dir mine --round-deadline 5 --keep-parties")
    other = {"data_dir": "/theirs", "cache_dir": "/theirs", "out": "/theirs", "device": "cuda:7", "threads": "9"}
    other |= {"pki": "/theirs", "preset": "demo", "resume": "/theirs", "round_deadline": 1.0, "phase_deadline": 1.0}
    found = told(own, **other, keep_parties=False, checkpoint_every=1).config
    assert found == dataclasses.replace(own, run=dataclasses.replace(own.run, out=str(Path("own").absolute())))


@pytest.mark.parametrize(
    "parties", [(), (2, 3), (3, 2), (2, 2), (-1, 0), (6, 7), (0, 1, 1, 2), tuple(range(6)), tuple(range(8))]
)
def test_a_rank_hosts_whom_its_place_says_and_nobody_else(parties, toy):
    with pytest.raises(ConfigError, match="^parties = .*this rank.s place is with 0 to 6"):
        told(toy(), hosted=parties)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        "[" * 100_000,
        '{"config": 3}',
        '{"config": {"run": []}}',
        '{"config": {"run": {"method": []}}}',
    ],
)
def test_a_setup_that_is_none_is_one_line(text, toy):
    with pytest.raises(FedmpiError) as caught:
        serve(toy(), text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "field, value",
    [
        *(("multiplier", value) for value in (-1, math.nan, math.inf, "5", True, None, [5])),
        *(("absent", value) for value in (None, 3, "3", [0.5], ["3"], [True])),
        *((name, value) for name in ("session", "run") for value in ("", "0f" * 15, "zz" * 16, 5)),
        *(("resume_round", value) for value in (-1, 1.5, True, "1", None)),
        ("more", 1),
    ],
)
def test_orders_of_another_kind_are_refused(field, value, toy):
    fields = json.loads(orders(toy())) | {field: value}
    with pytest.raises(WireError, match="Setup: sigma, session and resume_round must be"):
        serve(toy(), json.dumps(fields))


def test_a_setting_that_there_is_not_imports_no_method_to_find_its_owner(toy, monkeypatch):
    monkeypatch.setattr("fedmpi.config.whose", lambda name: pytest.fail("asked every method"))
    fields = json.loads(orders(toy()))
    fields["config"]["method"]["density"] = 1
    with pytest.raises(ConfigError, match="^method.density: .*no such setting; is the same fedmpi installed on rank 0"):
        serve(toy(), json.dumps(fields))


def test_what_rank_0_says_is_one_line_whatever_it_says(toy):
    lies = {
        "dropout": "\x1b[2J\n" * 999,
        "dataset": "a\nb",
        "clear_parties": "0\r\n,x",
        "aggregation": "a\nb",
        "method": "\n:\n",
    }
    for name, value in lies.items():
        with pytest.raises(ConfigError) as caught:
            told(toy("--aggregation hybrid"), **{name: value})
        assert name in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 500


# ---- sigma ----


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--accountant pld",
        "--sampling 0.5",
        pytest.param("--sampling 0.5 --accountant pld", marks=pytest.mark.slow),
    ],
)
def test_too_little_noise_is_refused(flags, toy):
    own = toy(flags)
    privacy = own.privacy
    sigma = calibrate(privacy.epsilon, privacy.delta, privacy.sampling, own.run.rounds, privacy.accountant)
    assert serve(own, orders(own, multiplier=sigma)) == 0 == serve(own, orders(own, multiplier=2 * sigma))
    for less in (0.0, 0.999 * sigma):
        with pytest.raises(ConfigError, match=rf"^sigma = {less:g}: so says rank 0, and"):
            serve(own, orders(own, multiplier=less))


def test_where_no_epsilon_is_asked_for_no_noise_is(toy):
    own = toy("--epsilon inf")
    assert serve(own, orders(own, multiplier=0.0)) == 0


@pytest.mark.parametrize("q", [1.0, 0.9, 0.3, 0.01, 1e-5])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 5.0, 300.0])
@pytest.mark.parametrize("rounds", [1, 10_000])
def test_a_rank_finds_the_epsilon_that_the_account_finds(q, multiplier, rounds):
    account = Accountant("rdp")
    account.spend(multiplier, q, rounds)
    assert proven(multiplier, 1e-5, q, rounds) == pytest.approx(account.epsilon(1e-5), rel=1e-7, abs=1e-12)


def test_no_noise_proves_nothing_and_endless_noise_everything():
    assert proven(0.0, 1e-5, 0.5, 3) == math.inf == proven(1e-200, 1e-5, 0.5, 3)
    assert proven(1e200, 1e-5, 0.5, 3) == 0.0


def test_a_search_is_done_once_a_host_and_again_where_its_entry_is_damaged(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(calibrations, "calibrate", lambda *target: asked.append(target) or 4.5)
    target = 1.0, 1e-5, 0.5, 9, "pld"
    assert [calibrations.calibrated(tmp_path, *target) for _ in range(3)] == [4.5] * 3 and len(asked) == 1
    (entry,) = tmp_path.glob("*.json")
    whole = entry.read_text()
    for damaged in ("", "[]", "{}", whole[:-9], whole.replace("4.5", "0.5"), whole.replace("9,", "8,")):
        entry.write_text(damaged)
        assert calibrations.calibrated(tmp_path, *target) == 4.5
    assert len(asked) == 7
    calibrations.calibrated(tmp_path, 1.0, 1e-5, 0.5, 10, "pld")
    assert len(asked) == 8, "another target"
    assert calibrations.calibrated(tmp_path / "entry.json" / "none", *target) == 4.5


def test_ranks_hold_noise_against_their_settings_without_the_library(toy, monkeypatch):
    """It would cost each of them seconds."""
    for name in ("_calibrate_sampled", "_sampled_rdp"):
        monkeypatch.setattr(accountant, name, lambda *_: pytest.fail("asked dp-accounting"))
    own = toy("--sampling 0.5")
    assert told(own, multiplier=50.0).multiplier == 50.0


# ---- paths and modules ----


def tree(folder):
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def victim(tmp_path):
    """A folder that rank 0 names and that is none of its business: what the attack deleted was every folder in `checkpoint`."""
    folder = tmp_path / "victim"
    for name in (
        "config.yaml",
        "checkpoint/7/parties-00000-00006.npz",
        "checkpoint/7/thesis.tex",
        "checkpoint/10/server.npz",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    return folder


@pytest.mark.parametrize("where", [("--out", "own"), ("--resume", "own")])
def test_rank_0_names_no_folder_of_this_rank(where, toy, victim):
    if "--resume" in where:
        serve(toy("--checkpoint-every 4"), orders(toy()), saves=[4])
    before, own = tree(victim), toy(where=where)
    lie = {name: str(victim) for name in ("out", "resume", "data_dir", "cache_dir", "pki")}
    assert serve(own, orders(own, **lie, resume_round=4 if "--resume" in where else 0), saves=[8]) == 0
    assert tree(victim) == before and Path("own/checkpoint/8/parties-00000-00006.npz").exists()


@pytest.mark.parametrize(
    "suffix, fits", [("", 1), ("-2", 1), ("-17", 1), ("-0", 0), ("-2/..", 0), ("-x", 0), ("x", 0), ("-2\n", 0)]
)
def test_without_out_the_folder_is_beside_this_ranks_other_runs(suffix, fits, toy, victim):
    own = toy(where=())
    name = "demo-20-toy_parties-Steady-s0"
    text = orders(own, out=f"{victim}/{name}{suffix}")
    if not fits:
        with pytest.raises(ConfigError, match=f"so rank 0 names the run's folder, expected {name} or {name}-2"):
            serve(own, text, saves=[1])
        return
    before = tree(victim)
    assert serve(own, text, saves=[1]) == 0
    assert tree(victim) == before and (Path("runs") / f"{name}{suffix}" / "checkpoint" / "1").is_dir()


@pytest.mark.parametrize("out", [None, "", "/", "..", "/etc/demo-20", "demo-20-toy_parties-Steady-s1"])
def test_any_other_folder_is_refused(out, toy):
    with pytest.raises(ConfigError, match="so rank 0 names the run's folder"):
        serve(toy(where=()), orders(toy(where=()), out=out))
    assert not Path("runs").exists()


def test_a_module_that_rank_0_names_is_not_imported(toy, tmp_path, monkeypatch):
    (tmp_path / "canary_of_rank_0.py").write_text("open('sung', 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for method in ("canary_of_rank_0:Method", "dp-pfeddsu", ["canary_of_rank_0:Method"]):
        with pytest.raises(ConfigError, match="^method = .*this rank was started for toy_parties:Steady"):
            serve(toy(), orders(toy(), method=method))
    assert "canary_of_rank_0" not in sys.modules and not (tmp_path / "sung").exists()


def test_data_is_prepared_where_this_rank_keeps_it(tmp_path):
    flags = "--preset demo-recsys --method fedmf --items 20 --parties 7 --ratings 100 --out own --cache-dir mine"
    own = resolve(flags.split())
    assert serve(own, orders(own, cache_dir=str(tmp_path / "theirs"), data_dir="/nonexistent")) == 0
    assert (tmp_path / "mine" / "prepared").is_dir() and not (tmp_path / "theirs").exists()


# ---- going on ----


@pytest.fixture
def saved(toy):
    """A rank that was asked for these checkpoints, and what it is resumed with."""

    def save(*rounds):
        serve(toy(), orders(toy()), saves=rounds)
        return resolve(["--resume", "own"])

    return save


def rounds(out="own"):
    return sorted(int(path.name) for path in Path(out, "checkpoint").iterdir())


def test_a_rank_keeps_its_last_two_checkpoints(saved):
    assert saved(1, 2, 4, 6).run.resume == "own", "and the settings to go on with"
    assert rounds() == [4, 6]


def test_a_checkpoint_is_of_a_round_of_the_run(toy):
    with pytest.raises(ProtocolError, match="rank 0 asked for a checkpoint of round 10 after round 0"):
        serve(toy(), orders(toy()), saves=[10])


def test_a_rank_goes_back_by_one_checkpoint_and_no_more(saved):
    own = saved(2, 4, 6)
    for round in (0, 2, 3):
        with pytest.raises(ConfigError, match=f"^resume_round = {round}: .*it holds checkpoints of rounds 4 and 6"):
            serve(own, orders(own, resume_round=round))
    assert serve(own, orders(own, resume_round=6)) == 0 and rounds() == [4, 6]
    assert serve(own, orders(own, resume_round=4)) == 0 and rounds() == [4]
    with pytest.raises(ConfigError, match="resume_round = 0"):
        serve(own, orders(own))
    with pytest.raises(DataError, match="has no state of party 0"):
        serve(own, orders(own, resume_round=2))


def test_before_its_second_checkpoint_a_rank_can_begin_anew(saved):
    own = saved(2)
    assert serve(own, orders(own)) == 0 and not Path("own/checkpoint/2").exists()


def test_only_a_rank_that_was_told_to_goes_on(toy, saved):
    saved(2)
    with pytest.raises(ConfigError, match="^resume_round = 2: .*this rank was started without --resume"):
        serve(toy(), orders(toy(), resume_round=2))
    with pytest.raises(ConfigError, match="^out = .*own: holds another run's checkpoint of round 2"):
        serve(toy(), orders(toy()))


def test_a_rank_knows_how_far_it_was(toy):
    own = toy()
    method = build.algorithm(own)
    assert checkpoint.restore_parties(own, method, PARTIES, 0, MARK) == Counters(0, -1)
    checkpoint.save_parties(own, method, PARTIES, 3, Counters(3, 2), MARK)
    checkpoint.save_parties(own, method, (5, 6), 3, Counters(2, 3), MARK)
    assert checkpoint.restore_parties(own, method, (3,), 3, MARK) == Counters(3, 2)
    assert checkpoint.restore_parties(own, method, (4, 5), 3, MARK) == Counters(3, 3), "of several ranks, the furthest"


def test_ranks_that_are_threads_read_their_checkpoints_at_once(toy):
    """numpy reads a header by a parser of Python's that is not safe in several threads; what switches between them is the collector."""
    own = toy()
    method = build.algorithm(own)
    checkpoint.save_parties(own, method, PARTIES, 3, Counters(), MARK)
    gives_way = lambda phase, info: time.sleep(0)  # noqa: E731
    before = gc.get_threshold()
    gc.callbacks.append(gives_way)
    gc.set_threshold(20)
    try:
        run_ranks(4, lambda endpoint: [checkpoint.restore_parties(own, method, PARTIES, 3, MARK) for _ in range(40)])
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(gives_way)


def test_ranks_that_share_a_folder_and_change_places_go_on(toy):
    """Three ranks saved; two go on, from the checkpoint before, and the files of the later one are not mixed with theirs."""
    own = toy()
    method = build.algorithm(own)
    for round in (2, 4, 6):
        for block in ((0, 1, 2), (3, 4), (5, 6)):
            checkpoint.save_parties(own, method, block, round, Counters(round, round), MARK)
    for block in ((0, 1, 2, 3), (4, 5, 6)):
        assert checkpoint.restore_parties(own, method, block, 4, MARK) == Counters(4, 4)
    assert rounds() == [4]
    for block in ((0, 1, 2, 3), (4, 5, 6)):
        checkpoint.save_parties(own, method, block, 6, Counters(6, 6), MARK)
    assert rounds() == [4, 6] and len(list(checkpoint.folder(own, 6).iterdir())) == 2


def test_nothing_is_deleted_that_the_run_did_not_make(toy, victim):
    own = toy(where=("--out", "own"))
    method, folder = build.algorithm(own), Path("own/checkpoint")
    checkpoint.save_parties(own, method, PARTIES, 2, Counters(), MARK)
    (folder / "2" / "thesis.tex").write_text("precious")
    (folder / "notes").mkdir()
    (folder / "007").mkdir()
    (folder / "007" / "server.npz").write_text("precious")
    (folder / "1").symlink_to(victim / "checkpoint" / "7")
    (folder / "2" / "parties-00000-00001.npz").mkdir()
    before = tree(victim)
    for round in (4, 6, 8):
        checkpoint.save_parties(own, method, PARTIES, round, Counters(), MARK)
        checkpoint.save_server(own, round, {"theta": np.zeros(1)}, {}, MARK)
    checkpoint.restore_parties(own, method, PARTIES, 6, MARK)
    assert tree(victim) == before
    assert {path.name for path in folder.iterdir()} == {"1", "2", "6", "007", "8", "notes", "latest"}
    assert {path.name for path in (folder / "2").iterdir()} == {"thesis.tex", "parties-00000-00001.npz"}
    for round in ("6", "8"):
        assert {"server.npz", "server.json"} <= {path.name for path in (folder / round).iterdir()}, "rank 0's own"
    os.rename(folder, "elsewhere")
    folder.symlink_to(Path("elsewhere").absolute())
    checkpoint.restore_parties(own, method, PARTIES, 6, MARK)
    assert Path("elsewhere/6/parties-00000-00006.npz").exists()
