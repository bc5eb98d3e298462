"""The names by which bytes and seconds are counted: what a round is for, the phases of a run, what the protocol costs."""

from enum import Enum, IntEnum


class _Name(str, Enum):  # noqa: UP042  (Python 3.10 has no StrEnum)
    """Also the plain string that it is written as."""

    def __str__(self) -> str:
        return str(self.value)


class Purpose(IntEnum):
    """What a round of the protocol adds up. Both kinds count by the run's rounds, and their keys have nothing in common."""

    TRAINING = 0  # updates
    TEST = 1  # test figures


class Phase(_Name):
    """Every phase that a ledger can name, in the order of a run. Ledger rows carry the place, so the order is part of the format."""

    SETUP = "setup"
    MODEL = "model"
    SUPPORT = "support"
    ADVERTISE_KEYS = "AdvertiseKeys"
    SHARE_KEYS = "ShareKeys"
    MASKED_INPUT = "MaskedInput"
    CONSISTENCY_CHECK = "ConsistencyCheck"
    UNMASK = "Unmask"
    UPDATE = "update"
    REPORT = "report"
    EVALUATION = "evaluation"
    BOOKKEEPING = "bookkeeping"


class Cost(_Name):
    """What a meter is told that it measures, as a round goes."""

    ENCODE = "encode"
    DH = "DH"
    SHAMIR_SPLIT = "Shamir split"
    AEAD = "AEAD"
    PRG = "PRG"
    MPI = "MPI"
    AGGREGATE = "aggregate"
    SHAMIR_COMBINE = "Shamir combine"
    LOCAL_WORK = "local work"  # training on one's own data, which is no part of the protocol
