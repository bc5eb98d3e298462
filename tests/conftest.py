import os
import threading
import time

import pytest
from hypothesis import settings

# Before torch is imported anywhere: results must not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time where a red run stops a landing; new ones with every run elsewhere.
# No deadline anywhere: how long an example takes says how busy the machine is.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=15)  # launch/check.sh
settings.load_profile(os.environ.get("FEDMPI_EXAMPLES") or ("ci" if os.environ.get("CI") else "here"))


def pytest_collection_modifyitems(items):
    """Whatever starts the whole engine is slow: launch/check.sh leaves it out."""
    for item in items:
        if {"run_in_memory", "play"} & {*item.fixturenames}:
            item.add_marker("slow")


# What a test is marked with that may not be skipped here, as .ci/run says: FEDMPI_REQUIRE=slurm,netns
REQUIRED = set(filter(None, os.environ.get("FEDMPI_REQUIRE", "").split(",")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    needed = REQUIRED & {mark.name for mark in item.iter_markers()}
    if report.skipped and needed:
        report.outcome = "failed"
        report.longrepr = f"FEDMPI_REQUIRE={','.join(sorted(needed))}: may not be skipped ({call.excinfo.value})"
    return report


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One cache of prepared data for the whole session, away from the user's."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_config(cache, tmp_path):
    """A Config from flags, small and quick unless they say otherwise; from preset demo-20, whose parties split the data."""
    from fitting import fitting, method_of

    from fedmpi.cli import resolve

    small = "--rounds 2 --parties 4 --local-epochs 0 --samples-per-party 20 --threads 1 --aggregation plain"
    counter = iter(range(1000))

    def make(flags: str = ""):
        out = tmp_path / f"run{next(counter)}"
        short = fitting(method_of(flags) or "dp-pfeddsu", "--head-epochs 2 --ext-epochs 1")
        where = ["--cache-dir", str(cache), "--out", str(out)]
        preset = [] if "--preset" in flags else ["--preset", "demo-20"]
        return resolve([*preset, *small.split(), *short.split(), *where, *flags.split()])

    return make


@pytest.fixture
def run_in_memory():
    """The whole engine inside one process: the same server and client code over the in-memory transport."""
    from fedmpi.report.terminal import Terminal
    from fedmpi.runtime.rank import run_client
    from fedmpi.runtime.server import run_server
    from fedmpi.runtime.start import start_run
    from fedmpi.transport.memory import run_ranks

    def run(config, ranks: int, own=None, **options):
        """`own`: what the clients were started for, where it is not what rank 0 was."""
        start = start_run(config, ranks, "in memory", Terminal())

        def rank(endpoint):
            return run_server(endpoint, *start) if endpoint.rank == 0 else run_client(endpoint, own or config)

        try:
            return run_ranks(ranks, rank, **options)[0]
        finally:
            start.record.close()

    return run


@pytest.fixture
def play(tmp_path):
    """Run `benchmarks.dying` in memory, with ranks that die or doze: `dying_ranks.player`."""
    from dying_ranks import player

    return player(tmp_path)


@pytest.fixture
def woken(monkeypatch):
    """An event that is set as a round begins."""
    from fedmpi.runtime.server import Server

    event, whole = threading.Event(), Server.round

    def at(number):
        def round(self, round):
            if round == number:
                event.set()
                time.sleep(0.3)
            whole(self, round)

        monkeypatch.setattr(Server, "round", round)
        return event

    yield at
    event.set()
