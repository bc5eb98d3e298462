"""Data sets, what each party holds of them, and the prepared files that ranks map."""


def one_line(error: BaseException) -> str:
    """What an error says, for use within a message."""
    return " ".join(str(error).split()) or type(error).__name__
