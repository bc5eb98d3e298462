"""A run's files: whole or not there, their owner's alone, and on the disk before what they stand for happens."""

import json
import os
import stat

import numpy as np
import pytest

from fedmpi import files
from fedmpi.cli import resolve


def modes(root):
    return {
        str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode)
        for path in (root, *root.rglob("*"))
        if path.exists()
    }


def test_a_run_is_its_owner_s_alone(make_config, run_in_memory, tmp_path):
    before = os.umask(0o022)
    try:
        config = make_config("--rounds 3 --checkpoint-every 2 --entropy os --aggregation plain")
        run_in_memory(config, 3)
    finally:
        os.umask(before)
    found = modes(config.out)
    assert {"checkpoint/2/parties-00000-00001.npz", "releases.jsonl", "summary.json", "rounds.jsonl"} <= set(found)
    assert not {name: oct(mode) for name, mode in found.items() if mode & 0o077}


def test_what_is_written_is_on_the_disk_before_the_call_returns(tmp_path, monkeypatch):
    """In order: the content, then its name in the folder."""
    seen = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (seen.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda *names: (seen.append("rename"), replace(*names)))
    for write, value in ((files.write_text, "x"), (files.write_json, {}), (files.write_arrays, {"a": np.zeros(2)})):
        seen.clear()
        write(tmp_path / "file", value)
        assert seen == ["file", "rename", "folder"]
    seen.clear()
    files.append_line(tmp_path / "file", "y")
    assert seen == ["file"]
    seen.clear()
    files.write_text(tmp_path / "new" / "deep" / "file", "x")
    assert seen == ["folder", "folder", "file", "rename", "folder"]


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    files.write_text(tmp_path / "file", "first")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        files.write_text(tmp_path / "file", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "first"


def test_the_account_is_on_the_disk_before_the_parties_are_asked(make_config, run_in_memory, monkeypatch):
    from fedmpi.runtime.server import Server

    config = make_config("--entropy os --aggregation secure")
    ask, seen = Server.send_model, []

    def asks(self, kind, round, *parties):
        last = json.loads((config.out / "releases.jsonl").read_text().splitlines()[-1])
        seen.append((round, last["event"], last["round"]))
        ask(self, kind, round, *parties)

    monkeypatch.setattr(Server, "send_model", asks)
    run_in_memory(config, 3)
    assert seen == [(1, "asked", 1), (2, "asked", 2)]


def test_identity_keys_are_their_owner_s_alone(tmp_path):
    from fedmpi.secagg import pki

    pki.make(tmp_path / "ids", 2)
    keys = modes(tmp_path / "ids.keys")
    assert len(keys) == 3 and not [mode for mode in keys.values() if mode & 0o077]


def test_resuming_needs_no_more_than_the_owner_s_files(make_config, run_in_memory):
    config = make_config("--rounds 3 --checkpoint-every 2")
    whole = run_in_memory(config, 3)["model_sha256"]
    (config.out / "summary.json").unlink()  # as if it had been interrupted
    assert run_in_memory(resolve(["--resume", str(config.out)]), 3)["model_sha256"] == whole
