"""A round of messages without any work: the model down to every client, as many bytes up, through the endpoint and raw.

    mpirun -n 21 python -m benchmarks.transport [--json FILE] [--rounds 50] [--parameters 270000] [--huge]

Raw is mpi4py alone with the same polling and no frames, no ledger, no decoding: the floor. It may do what the endpoint must not, wait inside
MPI until a message has left, which is as fast or faster. Rounds of both kinds alternate in one run, and each begins at a barrier,
so that neither pays for the naps that end the other. A client sends back what it got. --huge sends one frame of 2.5 GiB from rank 1 to rank 0 instead: more than one MPI message may hold.
"""

import statistics
import time

import numpy as np
from mpi4py import MPI

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.transport.endpoint import LONGEST_NAP, SHORTEST_NAP
from fedmpi.transport.mpi import MpiEndpoint, library
from fedmpi.wire.frame import array_bytes
from fedmpi.wire.messages import Model, PlainInput, Stop

PARAMETERS = 270_000
RAW = 9  # the tag of raw messages


def poll_raw(comm, buffer, source) -> int:
    nap, status = SHORTEST_NAP, MPI.Status()
    while True:
        message = comm.Improbe(source, RAW, status)
        if message is not None:
            message.Recv([buffer, MPI.BYTE])
            return status.Get_source()
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP)


def raw_round(comm, theta, buffer) -> None:
    requests = [comm.Isend([theta, MPI.BYTE], dest=rank, tag=RAW) for rank in range(1, comm.size)]
    for _ in range(1, comm.size):
        poll_raw(comm, buffer, MPI.ANY_SOURCE)
    MPI.Request.Waitall(requests)


def endpoint_round(endpoint, theta, number) -> None:
    for rank in range(1, endpoint.size):
        endpoint.send(rank, Model(number, theta=theta))
    for _ in range(1, endpoint.size):
        endpoint.poll()
    endpoint.flush()


def serve(endpoint, comm, parameters: int, rounds: int) -> dict[str, list[float]]:
    theta = np.random.default_rng(0).standard_normal(parameters).astype(np.float32)
    theta.setflags(write=False)  # as the engine's models are
    buffer = bytearray(theta.nbytes)
    times = {"endpoint": [], "raw": []}
    for number in range(rounds + 2):
        for kind in times:
            comm.Barrier()
            start = time.perf_counter()
            if kind == "raw":
                raw_round(comm, theta, buffer)
            else:
                endpoint_round(endpoint, theta, number)
            if number >= 2:  # the first two open connections and warm caches
                times[kind].append(time.perf_counter() - start)
    comm.Barrier()
    for rank in range(1, endpoint.size):
        endpoint.send(rank, Stop())
    endpoint.flush()
    return times


def answer(endpoint, comm, parameters: int) -> None:
    """A client: endpoint rounds and raw rounds take turns, so it knows what comes next."""
    buffer = bytearray(4 * parameters)
    while True:
        comm.Barrier()
        _, message = endpoint.poll()
        if isinstance(message, Stop):
            return
        endpoint.send(0, PlainInput(message.round, endpoint.rank, b"", array_bytes(message.theta, "<f4")))
        endpoint.flush()
        del message  # and with it the place of its frame
        comm.Barrier()
        poll_raw(comm, buffer, 0)
        comm.Isend([buffer, MPI.BYTE], dest=0, tag=RAW).Wait()


def huge(endpoint) -> dict:
    size = 5 * (1 << 29)
    if endpoint.rank == 1:
        endpoint.send(0, PlainInput(1, 1, b"", bytes(size)))
        endpoint.flush()
    elif endpoint.rank == 0:
        start = time.perf_counter()
        _, message = endpoint.poll()
        seconds = time.perf_counter() - start
        if len(message.values) != size:
            raise SystemExit(f"{len(message.values)} bytes arrived, {size} were sent")
        print(f"a frame of {size} bytes arrived whole in {seconds:.1f} s")
        return {"bytes": size, "seconds": seconds}
    return {}


def main() -> None:
    parser = arguments("transport", __doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--huge", action="store_true", help="one frame of 2.5 GiB; needs some 10 GiB of memory")
    options = parser.parse_args()
    endpoint, comm = MpiEndpoint(), MPI.COMM_WORLD
    if endpoint.size < 2:
        parser.error("start it under mpirun with at least 2 ranks")
    facts = machine("mpi4py", "numpy") | {"mpi": library(), "ranks": endpoint.size}
    if endpoint.rank == 0:
        show_machine(facts)
    if options.huge:
        row = huge(endpoint)
        if endpoint.rank == 0:
            save(options.json, facts, huge=row)
        return
    if endpoint.rank:
        answer(endpoint, comm, options.parameters)
        return
    times = serve(endpoint, comm, options.parameters, options.rounds)
    middle = {kind: statistics.median(values) for kind, values in times.items()}
    print(f"\n{options.parameters} float32 down and up, {endpoint.size - 1} clients")
    print(f"{'':<10} {'median [ms]':>12} {'best [ms]':>10} {'ratio':>7}")
    for kind, values in times.items():
        print(
            f"{kind:<10} {1000 * middle[kind]:>12.1f} {1000 * min(values):>10.1f} {middle[kind] / middle['raw']:>7.2f}"
        )
    save(options.json, facts, seconds=times)


if __name__ == "__main__":
    main()
