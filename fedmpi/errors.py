"""What can go wrong, by who must act on it. Every message is one line: what was wrong, where, what would be right."""

from dataclasses import dataclass


class FedmpiError(Exception):
    """An expected failure. It reaches the user as one line and exit code 2, never as a traceback."""


class ConfigError(FedmpiError):
    """A setting that cannot be used: named with its value and what is allowed."""


class DataError(FedmpiError):
    """A data file that is missing, damaged or not what it claims to be."""


class WriteError(DataError, OSError):
    """A file that could not be written: the disk is full, gone or read-only. An OSError too, for who can do without the file."""

    def __init__(self, path: object, error: OSError):
        OSError.__init__(self, error.errno, error.strerror or str(error))
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} cannot be written ({self.strerror})"


class WireError(FedmpiError):
    """Bytes that are not a message of this protocol."""


class CryptoError(FedmpiError):
    """A key, share or ciphertext that cannot be used. The message never holds a secret."""


class TransportError(FedmpiError):
    """A rank that died or went silent."""


@dataclass(frozen=True)
class Fault:
    """Who was caught, in which phase, at what; as a string the line that says so."""

    party: int | None
    phase: str | None
    what: str
    certain: bool = True  # whether nobody else can be to blame

    def __str__(self) -> str:
        where = f"party {self.party}" if self.party is not None else "a party"
        return f"{where}, {self.phase}: {self.what}" if self.phase else f"{where}: {self.what}"


class ProtocolError(FedmpiError):
    """A party that broke the protocol: who, in which phase, and what was expected of it."""

    def __init__(self, message: str, *, party: int | None = None, phase: str | None = None):
        self.fault = Fault(party, phase, message)
        super().__init__(str(self.fault))
