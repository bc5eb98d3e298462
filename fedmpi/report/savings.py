"""What a hybrid run saved: its clear parties at the price that its hidden ones paid in the same run."""

PROTOCOL_PHASES = ("AdvertiseKeys", "ShareKeys", "MaskedInput", "ConsistencyCheck", "Unmask")
PROTOCOL_COSTS = ("encode", "DH", "Shamir split", "AEAD", "PRG", "MPI", "Shamir combine")


def hybrid_savings(ledger, cpu: dict[str, float], clear: int, parties: int) -> dict:
    """How many went which way, and what the clear ones would have cost on top had they been hidden too.

    Logical bytes, payload and framing, over the whole run, and CPU seconds of the protocol over all ranks. A clear party's
    own encoding is in the seconds of both, so the saving is stated as no more than it was.
    """
    hidden = parties - clear

    def total(direction: str, phases) -> int:
        return sum(ledger.summary(direction, phases)[name] for name in ("logical_payload", "logical_framing"))

    protocol = {way: total(way, PROTOCOL_PHASES) for way in ("up", "down")}
    in_clear = {"up": total("up", ("update",)), "down": 0}
    seconds = sum(cpu.get(cost, 0.0) for cost in PROTOCOL_COSTS)
    scale = clear / hidden if hidden else None
    return {
        "clear": clear,
        "hidden": hidden,
        "bytes_saved_up": round(protocol["up"] * scale - in_clear["up"]) if hidden else None,
        "bytes_saved_down": round(protocol["down"] * scale) if hidden else None,
        "cpu_seconds_saved": round(seconds * scale, 3) if hidden else None,
    }
