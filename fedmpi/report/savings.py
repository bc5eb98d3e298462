"""What a hybrid run saved: its clear parties at the price that its hidden ones paid in the same run."""

from typing import Any

from fedmpi.transport.ledger import Ledger
from fedmpi.wire.phases import Cost, Phase

PROTOCOL_PHASES = (
    Phase.ADVERTISE_KEYS,
    Phase.SHARE_KEYS,
    Phase.MASKED_INPUT,
    Phase.CONSISTENCY_CHECK,
    Phase.UNMASK,
)
PROTOCOL_COSTS = tuple(cost for cost in Cost if cost not in (Cost.AGGREGATE, Cost.LOCAL_WORK))


def hybrid_savings(ledger: Ledger, cpu: dict[str, float], clear: int, parties: int) -> dict[str, Any]:
    """How many went which way, and what the clear ones would have cost on top had they been hidden too.

    Logical bytes, payload and framing, over the whole run, and CPU seconds of the protocol over all ranks. A clear party's
    own encoding is in the seconds of both, so the saving is stated as no more than it was.
    """
    hidden = parties - clear

    def total(direction: str, phases: tuple[str, ...]) -> int:
        return sum(ledger.summary(direction, phases)[name] for name in ("logical_payload", "logical_framing"))

    found: dict[str, Any] = {"clear": clear, "hidden": hidden}
    if not hidden:
        return found | dict.fromkeys(("bytes_saved_up", "bytes_saved_down", "cpu_seconds_saved"))
    scale = clear / hidden
    seconds = sum(cpu.get(cost, 0.0) for cost in PROTOCOL_COSTS)
    return found | {
        "bytes_saved_up": round(total("up", PROTOCOL_PHASES) * scale - total("up", (Phase.UPDATE,))),
        "bytes_saved_down": round(total("down", PROTOCOL_PHASES) * scale),
        "cpu_seconds_saved": round(seconds * scale, 3),
    }
