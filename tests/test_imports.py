"""Who may import whom: the architecture, held by a test."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fedmpi"

# Known to everybody: how things go wrong, how files are written, where chance comes from.
COMMON = {"log", "errors", "files", "randomness"}
# package -> the packages of fedmpi that it may import, besides these and itself
ALLOWED = {
    "errors": set(),
    "files": set(),
    "randomness": {"crypto"},  # for the secret source
    "crypto": set(),
    "wire": set(),
    "privacy": set(),
    "data": set(),
    "secagg": {"crypto", "wire"},
    "transport": {"wire"},
    "aggregation": {"wire", "secagg", "crypto", "privacy", "config"},
    "vision": {"privacy", "data", "config", "algorithm"},
    "recsys": {"privacy", "data", "config", "algorithm", "attacks"},  # attacks: a party tries them on itself
    "attacks": set(),
    "report": {"privacy", "config", "transport", "wire"},  # transport, wire: the ledger and the names of its phases
    "bill": {
        "aggregation",
        "algorithm",
        "cli",
        "config",
        "data",  # how large an image is, and how many items there are
        "privacy",
        "runtime",  # how a setting becomes a method and a mechanism
        "secagg",
        "wire",
    },
    "liars": {
        "aggregation",
        "algorithm",
        "cli",
        "config",
        "crypto",
        "privacy",
        "report",
        "runtime",
        "secagg",
        "transport",
        "wire",
    },
    "model": {"report", "runtime"},  # what reads images or ratings is imported when a model asks for it, so never torch
}
THIRD_PARTY = {
    "mpi4py": {"transport/mpi.py"},
    "torch": {"vision", "data/images/libraries.py"},
    "Crypto": {"crypto"},
    "cryptography": {"crypto"},
}


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "fedmpi":
                yield from (
                    f"fedmpi.{alias.name}"
                    for alias in node.names
                    if (ROOT / alias.name).with_suffix(".py").exists() or (ROOT / alias.name).is_dir()
                )


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_knows_only_what_it_may(package):
    strangers = {
        f"{path.name}: {name}"
        for path in ((ROOT / package).rglob("*.py") if (ROOT / package).is_dir() else [ROOT / f"{package}.py"])
        for name in imports(path)
        if name.startswith("fedmpi.") and name.split(".")[1] not in ALLOWED[package] | COMMON | {package}
    }
    assert not strangers


def test_nothing_but_the_command_line_knows_the_liars():
    """What they play against is the product as it is without them."""
    strangers = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for name in imports(path)
        if name.startswith("fedmpi.liars") and path.relative_to(ROOT).parts[0] != "liars"
    }
    assert strangers == {"main.py"}


def test_nothing_but_the_command_line_knows_the_bill():
    """Nobody pays for it who did not ask; that a --link is one is said before a run starts."""
    strangers = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for name in imports(path)
        if name.startswith("fedmpi.bill") and path.relative_to(ROOT).parts[0] != "bill"
    }
    assert strangers == {"main.py", "runtime/start.py"}


@pytest.mark.parametrize("library", sorted(THIRD_PARTY))
def test_a_library_is_imported_only_where_it_belongs(library):
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for name in imports(path)
        if name.split(".")[0] == library
    }
    assert all(any(name == home or name.startswith(f"{home}/") for home in THIRD_PARTY[library]) for name in found)


def test_nothing_unpickles():
    assert not [path for path in ROOT.rglob("*.py") if {"pickle", "marshal", "shelve"} & set(imports(path))]


def test_the_engine_starts_without_torch():
    """A recommender, or a benchmark of the protocol, must not wait for an import that it does not need."""
    code = (
        "import sys, fedmpi.runtime.server, fedmpi.runtime.client, fedmpi.runtime.start, fedmpi.aggregation.plain;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'sklearn', 'scipy', 'dp_accounting', 'mpi4py')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent).returncode == 0
