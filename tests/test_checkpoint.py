"""Checkpoints that were cut short, altered, swapped or lost, disks that are full or gone, and every way to resume a run.

Whatever was done to its files, a resumed run ends with the model of the run that nobody interrupted, or in one line."""

import contextlib
import errno
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpi import files
from fedmpi.cli import resolve
from fedmpi.errors import ConfigError, DataError, FedmpiError, ProtocolError
from fedmpi.privacy.account import fold
from fedmpi.privacy.releases import ReleaseLog, Stepped
from fedmpi.report.sealed import write_sealed, write_sealed_json
from fedmpi.report.terminal import Terminal
from fedmpi.runtime import checkpoint
from fedmpi.runtime.client import Client
from fedmpi.runtime.rank import run_client
from fedmpi.runtime.resume import Ended
from fedmpi.runtime.server import Server, run_server
from fedmpi.runtime.start import start_run
from fedmpi.transport.memory import run_ranks
from fedmpi.wire.messages import GoOn, Ready, Setup, Stop

TOY = """--preset demo-20 --method toy_parties:Remembers --dataset none --support dense --clip 1 --epsilon 8 --parties 4 --rounds 7
--checkpoint-every 2 --aggregation plain"""
RANKS = 3
SERVER = ("server.npz", "server.json")
PARTY = ("parties-00000-00001.npz", "parties-00002-00003.npz")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def plugins():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "plugins"))
        patch.setattr(
            os, "fsync", lambda fd: None
        )  # which takes most of such a small run; tests/test_files.py is about it
        yield


def run(config, ranks=RANKS, owns=None):
    """The whole engine in memory. `owns`: what each client was started for, where they have disks of their own."""
    start = start_run(config, ranks, "in memory", Terminal())

    def rank(endpoint):
        if endpoint.rank == 0:
            return run_server(endpoint, *start)
        return run_client(endpoint, owns[endpoint.rank - 1] if owns else config)

    try:
        return run_ranks(ranks, rank)[0]
    finally:
        start.record.close()


def stop(config, at, **options):
    """Run until round `at`, and die there."""
    whole = Server.round

    def stops(self, round):
        if round == at:
            raise KeyboardInterrupt
        whole(self, round)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "round", stops)
        with pytest.raises(KeyboardInterrupt):
            run(config, **options)


def resume(out, ranks=RANKS, outs=None):
    """Resume OUT, or what the ranks have each in theirs."""
    owns = [resolve(["--resume", str(own)]) for own in outs] if outs else None
    return run(resolve(["--resume", str(out)]), ranks, owns)


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Runs that are made once and copied: by their flags, one that went through, and one that died in round 6 with checkpoints of
    rounds 2 and 4, on one disk or on a disk of each rank."""
    root, made = tmp_path_factory.mktemp("kept"), {}

    def make(flags="", disks=False, through=False):
        key = flags, disks, through
        if key not in made:
            place = root / str(len(made))
            names = ("0", "1", "2") if disks else ("0",)
            configs = [
                resolve([*TOY.split(), *flags.split(), "--cache-dir", str(root / "cache"), "--out", str(place / name)])
                for name in names
            ]
            owns = configs[1:] if disks else None
            made[key] = place, run(configs[0], owns=owns) if through else stop(configs[0], 6, owns=owns)
        return made[key]

    return make


copies = itertools.count()


@pytest.fixture
def cut(kept, tmp_path):
    """A copy of an interrupted run."""

    def copy(flags="", disks=False):
        place = tmp_path / f"copy{next(copies)}"
        shutil.copytree(kept(flags, disks)[0], place)
        return place if disks else place / "0"

    return copy


@pytest.fixture
def through(kept):
    """The summary of the run that nobody interrupted."""
    return lambda flags="": kept(flags, through=True)[1]


def rounds(out):
    """Round -> the names of its files."""
    return {
        int(path.name): {file.name for file in path.iterdir()}
        for path in (out / "checkpoint").iterdir()
        if path.name != "latest"
    }


# ---- what is kept ----


def test_the_last_two_checkpoints_stay_on_every_rank(cut):
    out = cut()
    assert rounds(out) == {2: {*SERVER, *PARTY}, 4: {*SERVER, *PARTY}}
    resume(out)
    assert rounds(out) == {4: {*SERVER, *PARTY}, 6: {*SERVER, *PARTY}}
    assert checkpoint.latest_round(out) == 6


def test_the_one_before_goes_only_when_the_next_is_complete(cut, monkeypatch):
    out = cut()
    write = checkpoint.write_sealed_json

    def dies(path, content):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_sealed_json", dies)
        with pytest.raises(KeyboardInterrupt):
            resume(out)
    assert checkpoint.write_sealed_json is write
    held = rounds(out)
    assert set(SERVER) <= held[2] and set(SERVER) <= held[4] and held[6] & set(SERVER) == {"server.npz"}


# ---- the newest is refused, the one before is used ----


def truncated(path):
    path.write_bytes(path.read_bytes()[:-40])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(bytes(content))


def unsealed(path):
    if path.suffix == ".json":
        state = json.loads(path.read_text())
        del state["seal"]
        path.write_text(json.dumps(state))
    else:
        with np.load(path) as content:
            np.savez(path, **{name: content[name] for name in content if name != "seal"})


def gone(path):
    path.unlink()


def of_the_round_before(path):
    shutil.copy(path.parent.parent / "2" / path.name, path)


DAMAGE = {
    truncated: "is damaged",
    flipped: "is damaged|was changed since the run wrote it",
    unsealed: "has no seal: .*earlier version",
    of_the_round_before: "is of round 2, in the folder of round 4",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", (*SERVER, PARTY[1]))
def test_damage_is_named_and_the_checkpoint_before_is_used(name, damage, cut, through, capsys):
    out = cut()
    damage(out / "checkpoint" / "4" / name)
    assert resume(out)["model_sha256"] == through()["model_sha256"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "is used" in line]
    assert len(lines) == 1 and f"checkpoint/4/{name}" in lines[0]
    assert lines[0].endswith("; the checkpoint of round 2 is used")
    assert any(reason in lines[0] for reason in DAMAGE[damage].split(".*")[0].split("|"))


@pytest.mark.parametrize(
    "field, value", [("dropouts", {"real": 0}), ("references", {}), ("conduct", {}), ("tally", {})]
)
def test_an_edited_history_is_not_believed(field, value, cut, through, capsys):
    out = cut()
    path = out / "checkpoint" / "4" / "server.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {field: {**value, "edited": 1}}))
    assert resume(out)["model_sha256"] == through()["model_sha256"]
    assert "server.json was changed since the run wrote it" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["--seed 5", ""], ids=["of other settings", "of the same settings"])
@pytest.mark.parametrize("names", [SERVER, PARTY, (*SERVER, *PARTY)], ids=["server", "parties", "all"])
def test_a_checkpoint_of_another_run_is_refused(flags, names, cut, through, kept, tmp_path, capsys):
    out, other = cut(), tmp_path / "other"
    stop(resolve([*TOY.split(), *flags.split(), "--out", str(other)]), 5)
    for name in names:
        shutil.copy(other / "checkpoint" / "4" / name, out / "checkpoint" / "4" / name)
    assert resume(out)["model_sha256"] == through()["model_sha256"]
    said = capsys.readouterr().out
    assert "is of another run" in said and "the checkpoint of round 2 is used" in said


def test_files_of_two_checkpoints_of_one_round_do_not_mix(cut, through, capsys):
    out = cut("--entropy os")
    old = cut("--entropy os")
    shutil.rmtree(old / "checkpoint" / "4")
    (old / "checkpoint" / "latest").write_text("2\n")
    stop(resolve(["--resume", str(old)]), 6)  # round 4 once more, by other noise
    shutil.copy(old / "checkpoint" / "4" / "server.npz", out / "checkpoint" / "4" / "server.npz")
    resume(out)
    assert "server.npz does not belong to the server.json beside it" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"", b"four\n", b"\xff\xfe", b"6\n", b"0\n", b"2\n", b"9" * 5000])
def test_what_latest_says_decides_nothing(content, cut, through):
    out = cut()
    latest = out / "checkpoint" / "latest"
    latest.unlink() if content is None else latest.write_bytes(content)
    assert resume(out)["model_sha256"] == through()["model_sha256"]


def test_a_missing_latest_is_said(cut, capsys):
    out = cut()
    (out / "checkpoint" / "latest").unlink()
    resume(out)
    assert "checkpoint/latest is missing; the checkpoint of round 4 is used" in capsys.readouterr().out


def test_a_save_that_was_interrupted_is_no_damage(cut, through, capsys):
    out = cut()
    (out / "checkpoint" / "4" / "server.json").unlink()
    (out / "checkpoint" / "latest").write_text("2\n")
    assert resume(out)["model_sha256"] == through()["model_sha256"]
    assert "is used" not in capsys.readouterr().out


def test_where_none_is_whole_one_line_says_so_and_nothing_is_deleted(cut):
    out = cut()
    truncated(out / "checkpoint" / "4" / "server.npz")
    gone(out / "checkpoint" / "2" / "server.json")
    before = tree(out)
    with pytest.raises(ConfigError) as caught:
        resume(out)
    line = str(caught.value)
    assert "no checkpoint there can be used" in line and "4/server.npz" in line and "2/server.json" in line
    assert "\n" not in line and tree(out) == before


def test_a_log_that_was_set_back_is_not_passed_by_going_back_as_well(cut):
    """The parties' files of round 4 are damaged, and the log is one of before round 4: round 2 would have it forgotten."""
    out = cut("--entropy os")
    flipped(out / "checkpoint" / "4" / PARTY[0])
    held = json.loads((out / "checkpoint" / "2" / "server.json").read_text())["releases"]["bytes"]
    log = out / "releases.jsonl"
    log.write_bytes(log.read_bytes()[:held])
    with pytest.raises(DataError, match="older than the checkpoint"):
        resume(out)


@pytest.mark.parametrize("disks", [False, True], ids=["one disk", "own disks"])
def test_under_secret_noise_all_that_was_released_is_counted(disks, cut):
    place = cut("--entropy os", disks)
    out = place / "0" if disks else place
    flipped((place / "1" if disks else out) / "checkpoint" / "4" / PARTY[0])
    before = fold(ReleaseLog.read(out).events).outside.epsilon(1e-5)
    summary = resume(out, outs=[place / "1", place / "2"] if disks else None)
    events = ReleaseLog.read(out).events
    assert [event.round for event in events if isinstance(event, Stepped)] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    assert fold(events).outside.epsilon(1e-5) == summary["epsilon_outside"] > max(before, 8)


# ---- any byte of any file ----


def anything(data, files):
    """Cut one of these files short, or change one byte of it."""
    path = data.draw(st.sampled_from(files), label="file")
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1), label="at")
    if data.draw(st.booleans(), label="cut short"):
        path.write_bytes(bytes(content[:at]))
    else:
        content[at] ^= data.draw(st.integers(1, 255), label="changed by")
        path.write_bytes(bytes(content))


examples = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@examples
@given(st.data())
def test_whatever_is_done_to_the_newest_the_model_is_the_same(cut, through, data):
    out = cut()
    anything(data, [*sorted((out / "checkpoint" / "4").iterdir()), out / "checkpoint" / "latest"])
    assert resume(out)["model_sha256"] == through()["model_sha256"]


@examples
@given(st.data())
def test_on_disks_of_their_own_too(cut, through, data):
    place = cut(disks=True)
    anything(data, sorted(place.glob("*/checkpoint/4/*")))
    assert resume(place / "0", outs=[place / "1", place / "2"])["model_sha256"] == through()["model_sha256"]


@examples
@given(st.data(), st.booleans())
def test_whatever_is_done_to_all_of_them_it_is_the_same_model_or_one_line(cut, through, data, disks):
    place = cut(disks=disks)
    found = sorted(place.glob("**/checkpoint/**/*"))
    for _ in range(2):
        anything(data, [path for path in found if path.is_file() and path.stat().st_size])
    out, outs = (place / "0", [place / "1", place / "2"]) if disks else (place, None)
    before = tree(place)
    try:
        assert resume(out, outs=outs)["model_sha256"] == through()["model_sha256"]
    except FedmpiError as error:
        assert "\n" not in str(error)
        kept = {name: content for name, content in tree(place).items() if "/4/" in name or "/2/" in name}
        assert kept == {name: before[name] for name in kept} and len(kept) == sum(
            "/4/" in n or "/2/" in n for n in before
        )


# ---- hosts with disks of their own ----


@pytest.mark.parametrize("damage", [truncated, flipped, unsealed, gone], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_whose_disk_is_damaged_takes_everybody_back(rank, damage, cut, through, capsys):
    place = cut(disks=True)
    damage(place / str(rank) / "checkpoint" / "4" / PARTY[rank - 1])
    assert resume(place / "0", outs=[place / "1", place / "2"])["model_sha256"] == through()["model_sha256"]
    said = [line for line in capsys.readouterr().out.splitlines() if "is used" in line]
    assert len(said) == 1 and said[0].endswith(
        f"rank {rank} has no whole checkpoint of round 4, and can go on from round 2; the checkpoint of round 2 is used"
    )
    rows = [json.loads(line)["round"] for line in (place / "0" / "rounds.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5, 6, 7]
    assert all(sorted(rounds(place / str(rank))) == [4, 6] for rank in range(3))


def test_two_ranks_and_rank_0_with_damage_of_their_own(cut, through):
    place = cut(disks=True)
    for rank, name in ((0, "server.npz"), (1, PARTY[0]), (2, PARTY[1])):
        flipped(place / str(rank) / "checkpoint" / "4" / name)
    assert resume(place / "0", outs=[place / "1", place / "2"])["model_sha256"] == through()["model_sha256"]


def test_where_no_round_is_left_that_all_have_one_line_says_so(cut):
    place = cut(disks=True)
    flipped(place / "1" / "checkpoint" / "4" / PARTY[0])
    flipped(place / "0" / "checkpoint" / "2" / "server.npz")
    before = tree(place)
    with pytest.raises(
        DataError, match="rank 1 has no whole checkpoint of round 4, and can go on from round 2; .*server.npz"
    ):
        resume(place / "0", outs=[place / "1", place / "2"])
    kept = {name for name in before if "checkpoint" in name}
    assert {name: content for name, content in tree(place).items() if name in kept} == {
        name: before[name] for name in kept
    }


def test_a_rank_with_nothing_whole_says_what_is_wrong_with_its_newest(cut):
    place = cut(disks=True)
    for round in ("2", "4"):
        truncated(place / "2" / "checkpoint" / round / PARTY[1])
    with pytest.raises(DataError, match=r"2/checkpoint/4/parties-00002-00003.npz is damaged"):
        resume(place / "0", outs=[place / "1", place / "2"])


def ask(out, answers, look=lambda ready: None):
    """The real client of rank 1, resumed in OUT by a rank 0 that names round 4 and answers its Ready with these."""
    own = resolve(["--resume", str(out)])
    start = start_run(own, 2, "in memory", Terminal())

    def rank(endpoint):
        if endpoint.rank:
            return run_client(endpoint, own)
        endpoint.send(1, Setup(config=start.orders.to_text(), parties=(0, 1, 2, 3)))
        ready = endpoint.poll()[1]
        look(ready)
        for message in (*answers, Stop()):
            endpoint.send(1, message)

    try:
        return run_ranks(2, rank)[1]
    finally:
        start.record.close()


def test_a_rank_deletes_nothing_before_it_is_settled(cut):
    out = cut()
    seen = []

    def look(ready):
        seen.append((ready.round, sorted(rounds(out))))

    assert ask(out, [], look) == 0 and sorted(rounds(out)) == [2, 4]
    assert ask(out, [GoOn(2)], look) == 0
    assert seen == [(4, [2, 4])] * 2
    assert rounds(out)[4] == set(SERVER), "its own files of later rounds go with GoOn; rank 0's are rank 0's"


@pytest.mark.parametrize("answer", [GoOn(5), GoOn(6), Ready()], ids=repr)
def test_a_rank_goes_on_from_no_later_round_than_it_said(answer, cut):
    with pytest.raises(ProtocolError, match="expected GoOn of round 4 or before"):
        ask(cut(), [answer])


@pytest.mark.parametrize("round", [0, 1, 3])
def test_nor_further_back_than_its_last_but_one(round, cut):
    with pytest.raises(FedmpiError, match="goes back no further|has no state of party 0"):
        ask(cut(), [GoOn(round)])


def test_a_rank_that_says_more_than_it_was_asked_is_left_out(cut, monkeypatch, capsys):
    ready = Client.say_ready

    def boasts(self):
        self.reach += self.endpoint.rank == 1
        ready(self)

    monkeypatch.setattr(Client, "say_ready", boasts)
    summary = resume(cut())
    assert summary["dropouts"]["benched"] == [0, 1]
    assert "handshake: rank 1 said that it goes on from round 5" in capsys.readouterr().out


def test_a_rank_that_resumes_does_not_join_a_new_run(cut, tmp_path):
    own = resolve(["--resume", str(cut())])
    new = resolve([*TOY.split(), "--out", str(tmp_path / "new")])
    with pytest.raises(ConfigError, match="rank 0 starts a new run; start every rank with --resume, or none"):
        run(new, owns=[own, own])


# ---- disks that are full, gone or read-only ----


@contextlib.contextmanager
def small_disk(path):
    """A disk of its own at `path`, of 1 MB."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if os.getuid() or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk, and not everywhere")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(path):
    """All that is left of the disk."""
    with contextlib.suppress(OSError), open(path / "balloon", "wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


def read_only(path):
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)


def usable_again(path):
    subprocess.run(["mount", "-o", "remount,rw", str(path)], check=True)
    (path / "balloon").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "whose, step, spoil",  # rank 0 keeps a file open, and the system makes no such disk read-only
    [(0, "checkpoint", fill), (0, "round", fill), (1, "checkpoint", fill), (1, "checkpoint", read_only)],
)
def test_a_disk_that_takes_no_more_costs_nothing_but_time(whose, step, spoil, cut, through, tmp_path, monkeypatch):
    """A real disk, rank 0's or a client's, as the run begins round 6 or its checkpoint."""
    place, disk = cut(disks=True), tmp_path / "disk"
    with small_disk(disk):
        shutil.move(place / str(whose), disk / "out")
        outs = [disk / "out" if rank == whose else place / str(rank) for rank in range(3)]
        whole = getattr(Server, step)

        def spoils(self, round):
            if round == 6:
                spoil(disk)
            whole(self, round)

        with monkeypatch.context() as patch:
            patch.setattr(Server, step, spoils)
            with pytest.raises(DataError, match="cannot be written .(No space left|Read-only file system)") as caught:
                resume(outs[0], outs=outs[1:])
        assert "\n" not in str(caught.value)
        if step == "checkpoint":
            assert "checkpoint of round 6: " in str(caught.value)
            assert str(caught.value).endswith("; that of round 4 is whole, and --resume goes on from there")
        usable_again(disk)
        assert not list(disk.rglob("*.tmp"))
        assert resume(outs[0], outs=outs[1:])["model_sha256"] == through()["model_sha256"]


@pytest.mark.parametrize("name", ["server.npz", "server.json", "latest", *PARTY, "releases.jsonl", "rounds.jsonl"])
def test_any_file_that_cannot_be_written_leaves_a_run_to_go_on_with(name, cut, through, monkeypatch):
    """In memory, where nobody may mount: the system refuses to flush this file in round 6."""
    out, flush = cut(), files._flush

    def full(stream):
        said = Path(os.readlink(f"/proc/self/fd/{stream.fileno()}"))
        if name in said.name and (said.parent.name in ("6", "checkpoint") or Server.under_way == 6):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(stream)

    whole = Server.round

    def marks(self, round):
        Server.under_way = round
        whole(self, round)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "under_way", 0, raising=False)
        patch.setattr(Server, "round", marks)
        patch.setattr(files, "_flush", full)
        with pytest.raises(DataError, match=f"{name} cannot be written .No space left on device") as caught:
            resume(out)
    assert "\n" not in str(caught.value)
    assert resume(out)["model_sha256"] == through()["model_sha256"]


def test_a_folder_that_goes_away_is_one_line(cut, monkeypatch):
    out, whole = cut(), Server.round

    def vanishes(self, round):
        if round == 6:
            shutil.rmtree(out)
        whole(self, round)

    monkeypatch.setattr(Server, "round", vanishes)
    with pytest.raises(DataError, match="releases.jsonl cannot be written .No such file"):
        resume(out)


# ---- every way to resume ----


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_on_another_number_of_ranks(ranks, cut, through):
    out = cut()
    assert resume(out, ranks)["model_sha256"] == through()["model_sha256"]


def test_on_another_number_of_ranks_with_a_damaged_file(cut, through):
    out = cut()
    flipped(out / "checkpoint" / "4" / PARTY[0])
    stop(resolve(["--resume", str(out)]), 5, ranks=2)
    assert resume(out, 5)["model_sha256"] == through()["model_sha256"]


@pytest.mark.parametrize("flags", ["", "--aggregation secure --dropout 5:1:mask"])
def test_twice_in_a_row(flags, cut, through):
    out = cut(flags)
    for at, ranks in ((5, 2), (7, 5)):
        stop(resolve(["--resume", str(out)]), at, ranks=ranks)
    assert resume(out)["model_sha256"] == through(flags)["model_sha256"]


@pytest.fixture
def ended(kept, tmp_path):
    place = tmp_path / "ended"
    shutil.copytree(kept(through=True)[0], place)
    return place / "0"


def test_a_run_that_has_ended_is_left_as_it_is(ended, through, capsys):
    before = tree(ended)
    with pytest.raises(Ended) as caught:
        resume(ended)
    assert caught.value.code == 0 and tree(ended) == before
    line = f"{ended} has ended: 7 rounds, model_sha256 {through()['model_sha256']}; nothing to resume"
    assert line in capsys.readouterr().out


def without_model(out):
    (out / "model.npz").unlink()


def half_a_summary(out):
    truncated(out / "summary.json")


def changed_model(out):
    flipped(out / "model.npz")


@pytest.mark.parametrize("damage", [without_model, half_a_summary, changed_model], ids=lambda damage: damage.__name__)
def test_one_that_lacks_its_results_makes_them_again(damage, ended, through):
    model = (ended / "model.npz").read_bytes()
    damage(ended)
    assert resume(ended)["model_sha256"] == through()["model_sha256"]
    assert (ended / "model.npz").read_bytes() == model


def test_a_run_that_is_running_is_not_resumed(cut, monkeypatch):
    out, whole, seen = cut(), Server.round, []

    def also(self, round):
        with pytest.raises(ConfigError, match="another job is at work in it; wait for it, or choose another folder"):
            resume(out)
        seen.append(round)
        whole(self, round)

    monkeypatch.setattr(Server, "round", also)
    resume(out)
    assert seen == [5, 6, 7]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*config.yaml"):
        resume(tmp_path)


def test_a_run_that_had_no_checkpoint_yet(tmp_path):
    config = resolve([*TOY.split(), "--out", str(tmp_path / "run")])
    stop(config, 2)
    whole = run(resolve([*TOY.split(), "--out", str(tmp_path / "whole")]))
    assert resume(config.out)["model_sha256"] == whole["model_sha256"], "from its beginning"


def test_a_run_of_other_settings_is_named(cut):
    out = cut()
    with pytest.raises(ConfigError, match="resume: rounds was 7 and cannot become 9"):
        resolve(["--resume", str(out), "--rounds", "9"])


def test_settings_that_were_changed_in_the_folder_are_found(cut):
    out = cut()
    path = out / "config.yaml"
    path.write_text(path.read_text().replace("server_lr: 1.0", "server_lr: 2.0"))
    with pytest.raises(ConfigError, match="no checkpoint there can be used: .*the settings of this one were changed"):
        resume(out)


# ---- seals ----


def test_a_seal_is_no_signature(cut):
    """It is for damage and slips; who computes it anew is believed, as the documentation says."""
    out = cut()
    path = out / "checkpoint" / "4" / "server.json"
    state = json.loads(path.read_text())
    del state["seal"]
    write_sealed_json(path, state | {"dropouts": {"real": 7}})
    assert resume(out)["dropouts"]["real"] == 7


def test_a_sealed_file_that_is_no_checkpoint_is_refused(cut, through, capsys):
    out = cut()
    write_sealed(out / "checkpoint" / "4" / "server.npz", {"theta": np.zeros(3)})
    assert resume(out)["model_sha256"] == through()["model_sha256"]
    assert "server.npz is of another run" in capsys.readouterr().out
