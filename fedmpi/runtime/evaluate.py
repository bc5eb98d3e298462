"""The sum of everybody's test figures, from their own reports."""

import time

import numpy as np

from fedmpi.errors import TransportError
from fedmpi.runtime.mailbox import Mailbox
from fedmpi.wire.messages import EvalReport
from fedmpi.wire.phases import Purpose


def add_reports(mailbox: Mailbox, round: int, everyone: tuple[int, ...]) -> np.ndarray:
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
            reports[message.parties[0]] = message
            missing.difference_update(message.parties)
    return np.concatenate([reports[first].figures for first in sorted(reports)]).sum(axis=0)
