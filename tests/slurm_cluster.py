"""A SLURM cluster of one node on this machine, with everything in a folder: its own munge, ports and settings. Nothing outside is
touched. `Cluster(folder)` starts it and `stop` ends it; Missing says why it cannot be had."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
DAEMONS = ("munged", "slurmctld", "slurmd")
SETTINGS = """\
ClusterName=fedmpi
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# cred_expire: also how long a job that was queued again waits, two minutes by default
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
MpiDefault=none
KillWait=5
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=32 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Missing(Exception):
    pass


class Cluster:
    def __init__(self, folder: Path):
        lacking = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=SBIN) is None]
        if lacking:
            raise Missing(f"no {', '.join(lacking)} here (Debian: slurm-wlm, munge)")
        self.folder = folder
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SBIN}
        for name in [name for name in self.environ if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"]:
            del self.environ[name]
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        folder.chmod(0o755)  # munge wants its socket where everybody can reach it
        ports = [free_port(), free_port()]
        facts = {"host": os.uname().nodename.split(".")[0], "user": getpass.getuser(), "folder": folder}
        (folder / "slurm.conf").write_text(SETTINGS.format(ctld_port=ports[0], d_port=ports[1], **facts))
        self.daemons = []
        munged = f"munged --foreground --force --key-file={folder}/key --socket={folder}/munge.socket"
        try:
            self.start(
                f"{munged} --pid-file={folder}/munge.pid --log-file={folder}/munge.log --seed-file={folder}/munge.seed"
            )
            self.wait_for(lambda: (folder / "munge.socket").exists(), "munged does not answer")
            self.start("slurmctld -D")
            self.start("slurmd -D")
            self.wait_for(lambda: "idle" in self.run("sinfo", "--noheader").stdout, "the node is not idle")
        except BaseException:
            self.stop()
            raise

    def start(self, command: str) -> None:
        log = open(self.folder / f"{command.split()[0]}.out", "w")
        self.daemons.append(
            subprocess.Popen(
                command.split(),
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )

    def wait_for(self, there, what: str, patience: float = 30) -> None:
        deadline = time.monotonic() + patience
        while not there():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self.daemons):
                logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.out")))
                raise Missing(f"{what}:\n{logs}")
            time.sleep(0.2)

    def run(self, *command, timeout: float = 60, **environ) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*map(str, command)],
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=Path(__file__).parent.parent,
        )

    def has(self, mpi: str) -> bool:
        """Whether its srun can start ranks by this PMI, for which the library must be there as well as the plugin."""
        return self.run("srun", f"--mpi={mpi}", "--ntasks=1", "true", timeout=20).returncode == 0

    def stop(self) -> None:
        if len(self.daemons) == 3:
            self.run("scancel", "--user", getpass.getuser())
            self.run("scancel", "--user", getpass.getuser(), "--signal=KILL", "--full")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
