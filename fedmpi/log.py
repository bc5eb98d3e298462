"""--log DIR: a file per rank with what it did when and what it waited for, for the day on which a job hangs.

Messages by type, round, party and length, phases and waits; never what is in a message. Without --log nothing is formatted.
"""

import logging
import time
from pathlib import Path

from fedmpi.errors import ConfigError
from fedmpi.files import make_folder

log = logging.getLogger("fedmpi")
log.addHandler(logging.NullHandler())
log.propagate = False


class _Line(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{whole}.{int(record.msecs):03d}"


def open_log(folder: str | None, rank: int) -> None:
    """From now on this rank writes to its file; one that is there is gone on with."""
    if folder is None:
        return
    path = Path(folder) / f"rank-{rank:05d}.log"
    try:
        make_folder(path.parent.absolute())
        handler = logging.FileHandler(path)
    except OSError as error:
        raise ConfigError(f"log = {folder}: {path} cannot be written ({error.strerror or error})") from None
    handler.setFormatter(_Line("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
