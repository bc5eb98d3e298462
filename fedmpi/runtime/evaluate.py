"""The sum of everybody's test figures, from their own reports."""

import time
from collections.abc import Callable

import numpy as np

from fedmpi.errors import TransportError
from fedmpi.log import log
from fedmpi.runtime.mailbox import Mailbox, Out
from fedmpi.wire.messages import EvalReport
from fedmpi.wire.phases import Purpose

Plausible = Callable[[np.ndarray], np.ndarray]


def add_reports(
    mailbox: Mailbox, round: int, asked: tuple[int, ...], columns: int, plausible: Plausible
) -> tuple[np.ndarray | None, int]:
    """(the figures of the parties whose report came and can be, added in party order, or None without any; how many these are).
    `plausible`: which rows of figures can be what the method measures."""
    reports: dict[int, np.ndarray] = {}
    missing = set(asked)
    mailbox.conduct.begin(f"test figures of round {round}")
    deadline = time.monotonic() + mailbox.patience
    log.debug("test figures of round %d: waiting for parties %s", round, asked)
    while missing:
        arrived = mailbox.take_of(round, Purpose.TRAINING, deadline)
        if arrived is None:
            if missing == set(asked):
                named = ", ".join(map(str, sorted(missing)[:10]))
                raise TransportError(f"no answer within {mailbox.patience:g} s (round_deadline); missing: {named}")
            break
        out = arrived if isinstance(arrived, Out) else None
        if not isinstance(arrived, Out):
            source, message = arrived
            if not isinstance(message, EvalReport):
                out = mailbox.let_go(source)  # of the round that was just trained, and too late for it
            elif wrong := _wrong(message, missing, columns, plausible):
                out = mailbox.blame(source, wrong)
            else:
                reports.update(zip(message.parties, message.figures))
                missing.difference_update(message.parties)
        if out is not None:
            missing.difference_update(out.parties)
            for party in out.parties:
                reports.pop(party, None)
    if not reports:
        return None, 0
    return np.stack([reports[party] for party in sorted(reports)]).sum(axis=0), len(reports)


def _wrong(message: EvalReport, missing: set[int], columns: int, plausible: Plausible) -> str:
    """What cannot be about a report: it would be in everybody's mean."""
    if not message.parties:
        return "sent a report of nobody"
    if len(set(message.parties)) < len(message.parties) or not missing.issuperset(message.parties):
        return "reported a party's test twice, or unasked"
    if message.figures.shape != (len(message.parties), columns):
        return f"sent {message.figures.shape[1]} test figures a party, expected {columns}"
    wrong = np.flatnonzero(~plausible(message.figures))
    if wrong.size:
        return f"sent test figures of party {message.parties[wrong[0]]} that cannot be"
    return ""
