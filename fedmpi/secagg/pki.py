"""Identity keys for an active adversary: a public file that everybody has, and private keys that stay with their party.

    python -m fedmpi.secagg.pki FILE --parties N

writes FILE (the public keys, JSON) and FILE.keys/party-00000.key and so on (private, one per party, mode 600). Give every
host FILE and the keys of the parties that it hosts. Both are read at launch by each rank itself, never from rank 0: keys that
the server hands out would be keys that the server chose.
"""

import argparse
import json
import os
import secrets
from pathlib import Path

from fedmpi.crypto.keys import signing_public
from fedmpi.errors import DataError
from fedmpi.secagg.party import Identity

FORMAT = "fedmpi-pki/1"


def make(path: Path, parties: int) -> None:
    folder = _key_folder(path)
    if path.exists() or folder.exists():
        raise DataError(f"{path} or {folder} exists already; identities are not overwritten")
    folder.mkdir(mode=0o700, parents=True)
    public = {}
    for party in range(parties):
        private = secrets.token_bytes(32)
        file = os.open(_key_file(path, party), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w") as stream:
            stream.write(private.hex() + "\n")
        public[str(party)] = signing_public(private).hex()
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(json.dumps({"format": FORMAT, "parties": public}, indent=1) + "\n")
    scratch.replace(path)


def read_public(path: Path, parties: int) -> dict[int, bytes]:
    """Every party's public identity; DataError if one is missing."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT!r}")
        public = {int(party): bytes.fromhex(key) for party, key in content["parties"].items()}
    except OSError as error:
        raise DataError(f"pki = {path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"pki = {path}: not a file of public identities ({error})") from None
    missing = [party for party in range(parties) if len(public.get(party, b"")) != 32]
    if missing:
        raise DataError(f"pki = {path}: no public key of 32 bytes for party {missing[0]}")
    return public


def read_identity(path: Path, party: int, public: dict[int, bytes]) -> Identity:
    file = _key_file(path, party)
    try:
        private = bytes.fromhex(file.read_text())
    except OSError as error:
        raise DataError(f"the identity key {file} cannot be read ({error.strerror})") from None
    except ValueError:
        raise DataError(f"the identity key {file} is not 32 bytes in hexadecimal") from None
    if len(private) != 32 or signing_public(private) != public.get(party):
        raise DataError(f"the identity key {file} does not fit the public key of party {party} in {path}")
    return Identity(private, public)


def _key_folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.keys")


def _key_file(path: Path, party: int) -> Path:
    return _key_folder(path) / f"party-{party:05d}.key"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fedmpi.secagg.pki", description="Make identity keys.")
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="the public keys go here, the private ones to FILE.keys/"
    )
    parser.add_argument("--parties", type=int, required=True)
    options = parser.parse_args()
    if options.parties < 1:
        parser.error("--parties must be 1 or more")
    try:
        make(options.file, options.parties)
    except (DataError, OSError) as error:
        parser.exit(2, f"fedmpi: {error}\n")


if __name__ == "__main__":
    main()
