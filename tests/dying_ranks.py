"""Runs in memory whose ranks die, fall silent or speak late at a named moment: a rank is a thread there."""

from fedmpi.cli import resolve
from fedmpi.report.terminal import Terminal
from fedmpi.runtime.rank import run_client
from fedmpi.runtime.server import run_server
from fedmpi.runtime.start import start_run
from fedmpi.transport.memory import run_ranks

TOY = "--dataset none --support dense --graph complete --parties 8 --rounds 6 --eval-every 2 --checkpoint-every 2 "
TOY += "--phase-deadline 20 --round-deadline 60"


def player(folder, method="benchmarks.dying:Method"):
    """What the fixture `play` is: a run in this folder, by flags, with ranks that die."""

    def run(flags="", faults=None, ranks=5, name="run", dozing=None):
        """`faults`: {rank: (message or `work`, round)} of who dies; `dozing`: {rank: (message, round, seconds)} of who falls silent. Returns
        the summary."""
        config = resolve([*TOY.split(), "--method", method, "--out", str(folder / name), *flags.split()])
        start = start_run(config, ranks, "in memory", Terminal())

        def rank(endpoint):
            if endpoint.rank == 0:
                return run_server(endpoint, *start)
            if endpoint.rank in (faults or {}):
                doom(endpoint, *faults[endpoint.rank])
            if endpoint.rank in (dozing or {}):
                doom(endpoint, *dozing[endpoint.rank][:2], lambda: endpoint.fall_silent(dozing[endpoint.rank][2]))
            return run_client(endpoint, config)

        try:
            return run_ranks(ranks, rank)[0]
        finally:
            start.record.close()

    return run


def doom(endpoint, what, round, act=None):
    """The rank dies as it is about to send this message, or as soon as it has come."""
    send, poll, acts = endpoint._dispatch, endpoint.poll, [act or endpoint.die]

    def strike(message):
        if acts and type(message).__name__ == what and round in (0, message.round):
            acts.pop()()

    def dying_dispatch(rank, message):
        strike(message)
        return send(rank, message)

    def dying_poll(timeout=None):
        arrived = poll(timeout)
        if arrived is not None:
            strike(arrived[1])
        return arrived

    endpoint._dispatch, endpoint.poll = dying_dispatch, dying_poll


def plain(plan):
    """The flags of the same run in the clear, with what was lost as its plan."""
    return "--aggregation plain" + (f" --dropout {','.join(plan)}" if plan else "")


def sums(folder, name):
    """Every sum of a run of `benchmarks.dying`."""
    return (folder / name / "sums").read_text().split()
