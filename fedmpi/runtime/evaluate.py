"""Rank 0 asks everybody to test the current model, and has the sum of their figures: from reports, or through the protocol."""

import time

import numpy as np

from fedmpi.errors import TransportError
from fedmpi.runtime import metrics
from fedmpi.runtime.gather import Gathering
from fedmpi.wire.messages import EvalReport, Evaluate


def ask_everyone(server, round: int, columns: int) -> np.ndarray | None:
    """The sum of every party's figures; None where metrics stay home, or could not be had. Round 0: the references."""
    kind, run = server.config.privacy.shown, server.config.run
    everyone = tuple(range(run.parties))
    if kind == "none":
        if run.keep_parties and round == run.rounds:
            server.send_model(Evaluate, round, everyone)  # for the parts that they keep; nobody answers
        return None
    server.send_model(Evaluate, round, everyone)
    with server.watch("evaluation" if round else "references"):
        return (
            _add_up(server, round, everyone, columns) if kind == "securesum" else _add_reports(server, round, everyone)
        )


def _add_up(server, round: int, everyone: tuple[int, ...], columns: int) -> np.ndarray | None:
    """The sum through the protocol, over whoever is left at its end."""
    encoding = metrics.encoding(columns)
    gathering = Gathering(server, round + metrics.EVALUATION, everyone)
    outcome = gathering.sum(metrics.for_everyone(server.aggregator), encoding)
    server.dropouts += outcome.dropouts
    heard = len(outcome.sum.survivors) if outcome.sum else 0
    for line in outcome.complaints:
        server.record.terminal.warn(f"test figures of round {round}: {line}")
    if 0 < heard < len(everyone):
        server.record.terminal.warn(f"test figures of round {round} are those of {heard} of {len(everyone)} parties")
    return None if outcome.sum is None else encoding.decode(outcome.sum.total)


def _add_reports(server, round: int, everyone: tuple[int, ...]) -> np.ndarray:
    """Every party's own figures, added in party order; the deadline names who is still missing."""
    reports: dict[int, EvalReport] = {}  # by the rank's first party
    missing = set(everyone)
    wait = server.config.run.round_deadline
    deadline = time.monotonic() + wait
    while missing:
        arrived = server.poll(deadline)
        if arrived is None:
            named = ", ".join(map(str, sorted(missing)[:10]))
            raise TransportError(f"no answer within {wait:g} s (round_deadline); missing: {named}")
        message = arrived[1]
        if isinstance(message, EvalReport) and message.round == round and message.parties:
            reports[message.parties[0]] = message
            missing.difference_update(message.parties)
        # anything else is late: the last words of a party that was dropped
    return np.concatenate([reports[first].figures for first in sorted(reports)]).sum(axis=0)
