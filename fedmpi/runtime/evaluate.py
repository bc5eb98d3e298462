"""The sum of everybody's test figures, from their own reports."""

import time

import numpy as np

from fedmpi.errors import ProtocolError, TransportError
from fedmpi.runtime.mailbox import Mailbox
from fedmpi.wire.messages import EvalReport
from fedmpi.wire.phases import Phase, Purpose


def add_reports(mailbox: Mailbox, round: int, everyone: tuple[int, ...], columns: int) -> np.ndarray:
    """Every party's own figures, added in party order; the deadline names who is still missing."""
    reports: dict[int, EvalReport] = {}  # by the rank's first party
    missing = set(everyone)
    deadline = time.monotonic() + mailbox.patience
    while missing:
        message = mailbox.take_of(round, Purpose.TRAINING, deadline)
        if message is None:
            named = ", ".join(map(str, sorted(missing)[:10]))
            raise TransportError(f"no answer within {mailbox.patience:g} s (round_deadline); missing: {named}")
        if isinstance(message, EvalReport) and message.parties:
            _check(message, missing, columns)
            reports[message.parties[0]] = message
            missing.difference_update(message.parties)
    return np.concatenate([reports[first].figures for first in sorted(reports)]).sum(axis=0)


def _check(message: EvalReport, missing: set[int], columns: int) -> None:
    """Everybody's figures are in the mean, so one that cannot be ends the run."""
    what = ""
    if len(set(message.parties)) < len(message.parties) or not set(message.parties) <= missing:
        what = "reported twice"
    elif message.figures.shape != (len(message.parties), columns):
        what = f"sent {message.figures.shape[1]} test figures a party, expected {columns}"
    elif not np.isfinite(message.figures).all():
        what = "sent a test figure that is not a finite number"
    if what:
        raise ProtocolError(what, party=message.parties[0], phase=Phase.EVALUATION)
