"""Hosts on this machine: each has a network, a name, processes and mounts of its own (namespaces), and a cable to a switch.

A host is gone with its first process, and everything on it in the same moment. What a rank sees of processes (psutil) and of abstract
sockets is its own host's, as on real ones. In place of ssh there is an agent that asks the tests to start a command on a host: a process
of one host cannot enter another one. `Hosts(folder)` starts them, `stop` ends them; Missing says why they cannot be had.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
ROOT = Path(__file__).parent.parent
NAMES = ("host0", "host1", "host2")
BIN = Path(sys.executable).parent
START = '. launch/job.sh; mpirun_flags; FEDMPI_LAUNCH="mpirun --hostfile MINE"; run_job mpirun "${flags[@]}" "$@"'
# The first process of a host, which also collects those that lost their parent.
INIT = "while :; do sleep 0.2; done"
AGENT = """\
#!{python} -S
import json, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect({path!r})
asked.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
sys.exit(int(asked.recv(9) or b"255"))
"""


class Missing(Exception):
    pass


def do(*command: object) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=os.environ | {"PATH": SBIN}
    )
    if done.returncode:
        raise Missing(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


class Hosts:
    def __init__(self, folder: Path, names: Sequence[str] = NAMES):
        if os.geteuid():
            raise Missing("network namespaces need root")
        lacking = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name, path=SBIN) is None]
        if lacking:
            raise Missing(f"no {', '.join(lacking)} here (Debian: iproute2, util-linux)")
        self.folder, self.agent, self.names = folder, folder / "agent", tuple(names)
        self._inits: dict[str, subprocess.Popen] = {}
        self._environ: dict[str, str] = {}
        self._cut: set[str] = set()
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"10.77.0.{n + 1} {h}\n" for n, h in enumerate(names))
        )
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(folder / "door"))
        self._door.listen()
        self.agent.write_text(AGENT.format(python=sys.executable, path=str(folder / "door")))
        self.agent.chmod(0o755)
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()
        try:
            self._begin("switch")
            self.on_switch("ip", "link", "add", "bridge", "type", "bridge")
            self.on_switch("ip", "link", "set", "bridge", "up")
            for name in names:
                self.start(name)
        except Missing:
            self.stop()
            raise

    def _begin(self, name: str) -> int:
        """A host without a cable; returns the process id of its first process, as seen from here."""
        mounts = f"mount --bind {self.folder}/hosts /etc/hosts && mount -t tmpfs tmpfs /dev/shm"
        settings = f"hostname {name} && {mounts} && ip link set lo up && echo up && {INIT}"
        command = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            [*command, "sh", "-c", settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PATH": SBIN},
        )
        self._inits[name] = process
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "up\n":
            raise Missing(f"no namespaces here: {process.stderr.read().strip()}")
        return self._init(name)

    def _init(self, name: str) -> int:
        parent = self._inits[name].pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])

    def _enter(self, name: str) -> list[str]:
        return ["nsenter", "-t", str(self._init(name)), "--net", "--uts", "--ipc", "--mount", "--pid", f"--wdns={ROOT}"]

    def start(self, name: str) -> None:
        """Also again, after it went down."""
        self._cut.discard(name)
        init, number = self._begin(name), self.names.index(name)
        self._plug_in(name, init, number)
        do(*self._enter(name), "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
        do(*self._enter(name), "ip", "link", "set", "eth0", "up")

    def _plug_in(self, name: str, init: int, number: int) -> None:
        """Gives it an eth0."""
        with contextlib.suppress(Missing):  # of its last life
            self.on_switch("ip", "link", "del", f"port{number}")
        self.on_switch("ip", "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", init)
        self.on_switch("ip", "link", "set", f"port{number}", "master", "bridge", "up")

    def on_switch(self, *command: object) -> None:
        do(
            "nsenter", "-t", self._init("switch"), "--net", *command
        )  # its network alone: process ids are those seen here

    def link(self, name: str, state: str) -> None:
        """The cable's end at the switch: nothing passes, and nobody is told."""
        (self._cut.add if state == "down" else self._cut.discard)(name)
        self.on_switch("ip", "link", "set", f"port{self.names.index(name)}", state)

    def down(self, name: str) -> None:
        """A power failure: the network first, so that no connection is closed."""
        self.link(name, "down")
        self.end(name)

    def end(self, name: str) -> None:
        """All of its processes at once; what they had open is closed, and its peers hear of that."""
        os.kill(self._init(name), 9)
        self._inits.pop(name).wait()

    def mend(self) -> None:
        """Every host as on its first day, so that no test depends on what another one left."""
        for name in self.names:
            if name in self._inits:
                self.end(name)
        for name in self.names:
            self.start(name)

    def popen(self, name: str, command, environ: dict[str, str], **options) -> subprocess.Popen:
        # Process ids begin anew on every host, and the launcher names its files after them: a disk of the host's own for those.
        environ = environ | {"TMPDIR": "/dev/shm"}
        self._environ = environ  # of what the agent starts, too
        return subprocess.Popen([*self._enter(name), *map(str, command)], env=environ, **options)

    def job(self, where: str, *arguments: object, **options) -> subprocess.Popen:
        """`fedmpi` through launch/job.sh; `where` as in host0:1,host1:3: mpirun and rank 0 are on the first of them."""
        ranks = sum(int(host.split(":")[1]) for host in where.split(","))
        mpi = ["--host", where, "--prtemca", "plm_ssh_agent", self.agent, "-n", ranks]
        environ = os.environ | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
        }
        command = ["bash", "-c", START, "job", *mpi, sys.executable, "-m", "fedmpi.main", *arguments]
        return self.popen(where.split(":")[0], command, environ, stdin=subprocess.DEVNULL, **options)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the door is closed
            while True:
                threading.Thread(target=self._start_for, args=self._door.accept()[:1], daemon=True).start()

    def _start_for(self, asked: socket.socket) -> None:
        """What an agent asks for; it waits as ssh does, for as long as the daemon lives."""
        with asked, asked.makefile() as lines, contextlib.suppress(OSError):
            name, *words = json.loads(lines.readline())
            command = [*self._enter(name), "sh", "-c", " ".join(words)]
            done = subprocess.run(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while name in self._cut:  # nothing reaches ssh either
                time.sleep(0.1)
            asked.sendall(str(done.returncode if done.returncode >= 0 else 255).encode())

    def processes(self, name: str) -> dict[int, str]:
        """Of a host, but for its first one and what that waits for."""
        if name not in self._inits:
            return {}
        space = os.readlink(f"/proc/{self._init(name)}/ns/pid")
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                if os.readlink(f"/proc/{pid}/ns/pid") == space and INIT not in words and words not in ("", "sleep 0.2"):
                    found[int(pid)] = words
        return found

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # it has been
            self._door.shutdown(socket.SHUT_RDWR)
        self._server.join()  # closed under its hands, the next socket of that number would be its door
        self._door.close()
        for name in list(self._inits):
            with contextlib.suppress(OSError, IndexError):
                self.end(name)

    def idle(self, name: str, patience: float) -> bool:
        """Whether everything of a job is gone there within so many seconds."""
        deadline = time.monotonic() + patience
        while self.processes(name):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True
