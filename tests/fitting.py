"""Flags for a test that runs whichever method it is given."""

from fedmpi.config import settings_of


def fitting(method: str, flags: str) -> str:
    """Those of these `--name value` flags that the method has."""
    words = flags.split()
    pairs = zip(words[::2], words[1::2])
    has = settings_of(method).__dataclass_fields__
    return " ".join(f"{name} {value}" for name, value in pairs if name.removeprefix("--").replace("-", "_") in has)


def method_of(flags: str) -> str | None:
    """The method that these flags name last; None if they name none."""
    words = flags.split()
    named = [value for name, value in zip(words, words[1:]) if name == "--method"]
    return named[-1] if named else None
