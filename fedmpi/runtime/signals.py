"""Signals that ask a run to end: SIGUSR1 (SLURM's warning before the time limit), SIGTERM, and SIGINT (Ctrl-C).

Rank 0 decides. The first one ends the run after the round that is under way, with a checkpoint, and with exit code AGAIN; SIGTERM or
SIGINT after that end it at once, as a failure does. Before the first round there is nothing to lose, and the first one does.
Client ranks may get the same signals, from a launcher or a batch system that sends them to everybody: they wait for what rank 0
makes of it.
"""

import contextlib
import os
import signal
import time
from types import FrameType
from typing import NoReturn

NUMBERS = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT
#: The exit code of a run that a signal ended and that can be gone on with: EX_TEMPFAIL of sysexits.h, "try again".
AGAIN = 75
#: Seconds within which a second signal is the first one, come another way: SLURM and a launch script may both send it.
ONCE = 1.0
#: Seconds before SIGTERM is answered: a launcher that ends a failed job sends it before SIGKILL, within a second, and who failed has spoken.
MOMENT = 1.5


class Ended(BaseException):
    """A signal has ended the run. As KeyboardInterrupt no Exception: nobody shall take it for a failure of their own."""

    def __init__(self, by: str, in_good_order: bool = False):
        self.by = by
        self.in_good_order = in_good_order  # whether everybody was told, and has left
        super().__init__(by)


class _Asked:
    def __init__(self) -> None:
        self.by: str | None = None  # the signal's name
        self.at = 0.0
        self.round: int | None = None  # the one under way; None: not begun
        self.last = 0  # the run's last round
        self.moment = MOMENT

    def __call__(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self.by is None:
            self.by, self.at = name, now
            if number == signal.SIGTERM:
                time.sleep(self.moment)
            if self.round is None:
                raise Ended(name)
            _say(f"{name}: {self._what_follows()}; SIGTERM or Ctrl-C now end it at once")
        elif number != signal.SIGUSR1 and now > self.at + ONCE:
            raise KeyboardInterrupt

    def _what_follows(self) -> str:
        if self.round == self.last:
            return f"round {self.round} is the last one, the run finishes"
        return f"ending after round {self.round} with a checkpoint"


_asked = _Asked()


def heed() -> None:
    """On rank 0, from now on."""
    for number in NUMBERS:
        signal.signal(number, _asked)


def leave_to_rank_0() -> None:
    """On a client, from now on. Its second SIGTERM is meant for it."""
    for number in signal.SIGUSR1, signal.SIGINT:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def end_before(round: int, last: int) -> bool:
    """Whether a signal has asked for the end; otherwise this round is now under way, and is finished first."""
    _asked.round, _asked.last = round, last
    return _asked.by is not None


def end() -> NoReturn:
    raise Ended(_asked.by or "a signal", in_good_order=True)


def ignore() -> None:
    """The run is at its end: nothing that comes now makes it another one."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _say(line: str) -> None:
    """Past Python's buffers, which the signal may have interrupted in the middle of a line."""
    with contextlib.suppress(OSError):
        os.write(2, f"fedmpi: {line}\n".encode())
