"""A job over three hosts, through launch/job.sh, and what becomes of it when one of them is lost. Rank 0 and mpirun are on host0."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from three_hosts import BIN, Hosts, Missing

from fedmpi.cli import resolve

pytestmark = [pytest.mark.netns, pytest.mark.launch, pytest.mark.slow]
DEADLINE, LIMIT = 7, 90  # seconds; no job here needs so many, and none may hang
SETTINGS = (
    "--method benchmarks.dying:Method --dataset none --support dense --graph complete --parties 10 --threshold 6 --rounds 12 "
    f"--eval-every 4 --checkpoint-every 2 --rank-deadline {DEADLINE} --phase-deadline 20 --round-deadline 60"
).split()
CALM = ("--rank-deadline", "20")  # where nobody is to be lost by silence, on a busy machine either
ALL = "host0:1,host1:3,host2:2"  # ranks 4 and 5, parties 6 to 9, are on host2


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    if "Open MPI" not in subprocess.getoutput(f"{BIN}/mpirun --version"):
        pytest.skip("the mpirun beside this Python is not Open MPI's")
    try:
        hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    except Missing as missing:
        pytest.skip(str(missing))
    yield hosts
    hosts.stop()


@pytest.fixture
def hosts(machines):
    yield machines
    machines.mend()


class Job:
    """`fedmpi` over some hosts; `said` is what came of it, stdout and stderr."""

    def __init__(self, hosts: Hosts, where: str, out: Path, *arguments: object):
        self.hosts, self.out, self.log = hosts, out, out.with_name(f"{out.name}-{time.monotonic_ns()}.said")
        with self.log.open("w") as log:
            self._process = hosts.job(where, *arguments, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for_round(self, number: int) -> None:
        rows, deadline = self.out / "rounds.jsonl", time.monotonic() + LIMIT
        while not rows.exists() or len(rows.read_text().splitlines()) < number:
            assert self._process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def end(self) -> int:
        try:
            return self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            pytest.fail(f"hangs\n{self.said}")

    def summary(self) -> dict:
        return json.loads((self.out / "summary.json").read_text())


@pytest.fixture
def planned(run_in_memory, tmp_path):
    """The model of a run that loses this by plan: one host, no processes, no protocol."""

    def run(plan):
        dropout = ["--dropout", ",".join(plan)] if plan else []
        config = resolve([*SETTINGS, "--aggregation", "plain", *dropout, "--out", str(tmp_path / "planned")])
        return run_in_memory(config, 3)["model_sha256"]

    return run


def test_three_hosts_give_the_model_of_one_and_a_cable_that_is_out_for_a_moment_costs_nothing(hosts, planned, tmp_path):
    job = Job(hosts, ALL, tmp_path / "run", *SETTINGS, *CALM, "--out", tmp_path / "run")
    job.wait_for_round(3)
    assert {"python"} <= {Path(words.split()[0]).name for words in hosts.processes("host2").values()}
    hosts.link("host2", "down")
    time.sleep(3)
    hosts.link("host2", "up")
    assert job.end() == 0, job.said
    assert job.summary()["dropouts"]["lost"]["ranks"] == []
    assert job.summary()["model_sha256"] == planned([])
    assert all(hosts.idle(name, 3) for name in ("host0", "host1", "host2"))


@pytest.mark.parametrize("what, on_loss", [("host", "drop"), ("host", "adopt"), ("link", "drop")])
def test_a_host_that_falls_silent_is_lost_and_the_run_goes_on(what, on_loss, hosts, planned, tmp_path):
    """Its power or its cable: nobody hears a connection close."""
    job = Job(hosts, ALL, tmp_path / "run", *SETTINGS, "--on-loss", on_loss, "--out", tmp_path / "run")
    job.wait_for_round(3)
    began = time.monotonic()
    if what == "host":
        hosts.down("host2")
    else:
        hosts.link("host2", "down")
    assert job.end() == 0, job.said
    # The deadline, the rounds that are left, and five seconds for the launcher.
    assert time.monotonic() - began < 6 * DEADLINE, job.said
    summary = job.summary()
    lost = summary["dropouts"]["lost"]
    assert {loss["rank"]: loss["parties"] for loss in lost["ranks"]} == {4: [6, 7], 5: [8, 9]}, job.said
    assert {loss["why"] for loss in lost["ranks"]} == {f"has not been heard of for {DEADLINE} s"}
    assert all(f"rank {rank} has not been heard of for {DEADLINE} s; parties" in job.said for rank in (4, 5))
    assert ("taken over by rank" in job.said) == (on_loss == "adopt")
    assert summary["model_sha256"] == planned(lost["plan"])
    assert hosts.idle("host0", 3) and hosts.idle("host1", 3), "nor is an ssh to the lost host left"
    if what == "link":  # who lives on there ends by itself, its daemon included
        assert hosts.idle("host2", began + 8 * DEADLINE - time.monotonic()), hosts.processes("host2")


def test_a_host_whose_connections_close_ends_the_job_which_goes_on_elsewhere(hosts, planned, tmp_path):
    """As one that is shut down, or a daemon that is killed. Open MPI's launcher cannot do without it, and may say 0."""
    out = tmp_path / "run"
    job = Job(hosts, ALL, out, *SETTINGS, *CALM, "--on-loss", "drop", "--out", out)
    job.wait_for_round(5)
    hosts.end("host2")
    code = job.end()
    assert code in (1, 255), "255: of ssh, if that is what the launcher looks at first"
    assert re.search(rf"^launch: exit code {code}; to go on: mpirun --hostfile MINE --resume {out}$", job.said, re.M)
    assert not (out / "summary.json").exists()
    assert hosts.idle("host0", 5) and hosts.idle("host1", 5), "or they would still hold the run's folder"
    again = Job(hosts, "host0:1,host1:3", out, "--resume", out)
    assert again.end() == 0, again.said
    # Rank 0 lives on for some tenths of a second, and a checkpoint of that time knows who was lost.
    assert again.summary()["model_sha256"] == planned(again.summary()["dropouts"]["lost"]["plan"])
