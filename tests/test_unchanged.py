"""What runs compute, before and after a change of structure: hashes, scores, bytes and claims from a table that was made before.

    python tests/test_unchanged.py > tests/vectors/unchanged.json      (re)makes the table

Bits depend on the CPU family and on library versions: elsewhere than where the table was made hashes and scores are not compared.
"""

import collections
import csv
import json
import os
import platform
import sys
from pathlib import Path

import pytest

TABLE = Path(__file__).parent / "vectors" / "unchanged.json"
SMALL = "--preset demo-20 --rounds 2 --parties 6 --head-epochs 2 --ext-epochs 1 --local-epochs 1 --samples-per-party 20 --threads 1"
RATES = "--preset demo-recsys --rounds 2 --parties 12 --items 40 --threads 1 --eval-every 1"
VISION = "centaur dp-fedavg-fb dp-pfeddsu dp-pfedhome fedavg fedrep local-only pmtl-ft ppsgd".split()
RATING = "fed-fm fed-lr fed-nn fedmf fedmmf-fm fedmmf-lr fedmmf-nn local-fm local-lr local-nn".split()
UNNOISED = ("fedavg", "fedrep", "local-only")


def cases() -> dict[str, tuple[int, str]]:
    """name -> (ranks, flags)"""
    found = {}

    def add(name: str, ranks: int, flags: str) -> None:
        found[f"{name} on {ranks}"] = (ranks, flags)

    for method in VISION:
        support = "--support shared" if method == "dp-pfeddsu" else "--support dense"
        base = f"{SMALL} --method {method} {support}" + (" --epsilon inf" if method in UNNOISED else "")
        add(f"{method} plain", 2, f"{base} --aggregation plain")
        add(f"{method} secure", 4, f"{base} --aggregation secure")
        add(f"{method} hybrid", 3, f"{base} --aggregation hybrid --clear-parties 1,4")
    for method in RATING:
        base = f"{RATES} --method {method}"
        add(f"{method} plain", 2, f"{base} --aggregation plain --support own")
        add(f"{method} secure", 4, f"{base} --aggregation secure --support dense")
        add(f"{method} hybrid", 3, f"{base} --aggregation hybrid --support dense --clear-parties 1,4,5")
    dsu = f"{SMALL} --method dp-pfeddsu"
    for support in ("own", "union", "shared", "dense"):
        add(f"dsu {support} plain", 3, f"{dsu} --aggregation plain --support {support}")
    add("dsu union secure", 3, f"{dsu} --aggregation secure --support union --min-cohort 3")
    add("dsu union dropout", 3, f"{dsu} --aggregation secure --support union --dropout 1:2:advertise,2:1:mask")
    for aggregation in ("plain", "secure"):
        add(
            f"dsu dropout {aggregation}",
            3,
            f"{dsu} --aggregation {aggregation} --dropout 1:2:share,2:0:mask,2:3:unmask",
        )
        add(f"fedmf dropout {aggregation}", 3, f"{RATES} --method fedmf --aggregation {aggregation} --dropout 0.1")
    add("dsu sampled", 3, f"{dsu} --aggregation secure --parties 8 --sampling 0.4 --rounds 4")
    add("dsu sampled plain", 3, f"{dsu} --aggregation plain --parties 8 --sampling 0.4 --rounds 4 --min-cohort 4")
    add("dsu sampled lost", 3, f"{dsu} --aggregation secure --parties 8 --sampling 0.6 --rounds 4 --dropout mask=0.2")
    add(
        "dsu sampled without noise",
        3,
        f"{dsu} --aggregation secure --parties 8 --sampling 0.3 --rounds 4 --epsilon inf",
    )
    add("dsu failed", 3, f"{dsu} --aggregation secure --dropout 1:0:mask,1:1:mask,1:2:mask,1:3:unmask")
    add("dsu margin", 3, f"{dsu} --aggregation secure --noise-margin 0.3 --colluding 1")
    add("dsu survivors", 3, f"{dsu} --aggregation secure --denominator survivors --dropout 0.1")
    add("dsu securesum", 3, f"{dsu} --aggregation secure --metrics securesum --eval-every 1")
    add("dsu hybrid securesum", 3, f"{dsu} --aggregation hybrid --clear-parties 2 --metrics securesum --dropout 0.1")
    add("dsu regular", 5, f"{dsu} --parties 40 --samples-per-party 8 --aggregation secure --graph regular")
    add("dsu pld", 2, f"{dsu} --aggregation plain --accountant pld --sampling 0.5")
    add("dsu validation", 2, f"{dsu} --aggregation plain --validation-fraction 0.2 --augment --norm group")
    add("fedmf raters", 3, f"{RATES} --method fedmf --aggregation secure --min-raters 3 --rater-margin 1 --rounds 3")
    add("fedmmf rule", 3, f"{RATES} --method fedmmf-lr --aggregation hybrid --clear-rule indicator<=0.5,recovery<=0.9")
    for os_run in ("plain", "secure", "hybrid --clear-parties 2"):
        add(f"dsu os {os_run}", 3, f"{dsu} --entropy os --aggregation {os_run} --dropout 2:3:mask")
    presets = Path(__file__).parent.parent / "fedmpi" / "presets"
    for path in sorted(presets.glob("*.yaml")):
        if path.stem in ("demo", "demo-20"):
            continue
        rates = path.stem in ("demo-recsys", "lastfm", "ml100k", "ml1m", "ml10m")
        shape = (
            RATES.split(" ", 2)[2] + " --dataset generated"
            if rates
            else SMALL.split(" ", 2)[2] + " --dataset digits --network cnn"
        )
        add(
            f"preset {path.stem}",
            3,
            f"--preset {path.stem} {shape}" + ("" if rates else " --partition drawn --classes-per-party 3"),
        )
    return found


def here() -> str:
    import numpy
    import torch

    return f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__} numpy {numpy.__version__}"


EXACT = (
    "epsilon_kind",
    "epsilon_reason",
    "private",
    "delta",
    "dropouts",
    "rounds",
    "parties",
    "ranks",
)
BITS = (
    "model_sha256",
    "accuracy",
    "accuracy_untrained",
    "accuracy_local_only",
    "rmse",
    "mae",
    "rmse_party_mean",
    "rmse_private_model",
)
CLOSE = ("epsilon_outside", "epsilon_server", "epsilon_party", "epsilon_nominal")


def logical_bytes(ledger: Path) -> dict[str, int]:
    """By phase and direction. Not those that hold a configuration's text or a stopwatch's digits."""
    total: collections.Counter = collections.Counter()
    with ledger.open() as lines:
        for row in csv.DictReader(lines):
            if row["phase"] not in ("setup", "bookkeeping"):
                total[f"{row['phase']} {row['direction']}"] += int(row["logical_payload"]) + int(row["logical_framing"])
    return dict(total)


def result(ranks: int, flags: str, folder: Path) -> dict:
    from fedmpi.cli import resolve
    from fedmpi.report.terminal import Terminal
    from fedmpi.runtime.client import run_client
    from fedmpi.runtime.server import run_server
    from fedmpi.runtime.start import start_run
    from fedmpi.transport.memory import run_ranks

    config = resolve([*flags.split(), "--cache-dir", str(folder / "cache"), "--out", str(folder / "run")])
    start = start_run(config, ranks, "in memory", Terminal())

    def rank(endpoint):
        return run_server(endpoint, *start) if endpoint.rank == 0 else run_client(endpoint)

    try:
        summary = run_ranks(ranks, rank)[0]
    finally:
        start.record.close()
    kept = {name: summary[name] for name in (*EXACT, *BITS, *CLOSE) if name in summary}
    if "os" in flags.split():
        kept = {name: value for name, value in kept.items() if name not in BITS}
    kept["bytes"] = logical_bytes(folder / "run" / "messages.csv")
    statement = json.loads((folder / "run" / "privacy.json").read_text())
    return kept | {
        name: statement[name] for name in ("trust", "released", "mechanism", "worst_party", "rounds_accounted")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_a_run_is_as_it_was(name, tmp_path, cache, monkeypatch):
    saved = json.loads(TABLE.read_text())
    (tmp_path / "cache").symlink_to(cache)
    found, expected = result(*cases()[name], tmp_path), saved["runs"][name]
    assert set(found) == set(expected)
    for field, value in expected.items():
        if field in CLOSE:
            assert found[field] == (None if value is None else pytest.approx(value, rel=1e-9)), field
        elif field == "mechanism":
            assert found[field] == {
                key: pytest.approx(part) if isinstance(part, float) else part for key, part in value.items()
            }
        elif field not in BITS or here() == saved["made on"]:
            assert found[field] == value, field


if __name__ == "__main__":
    import contextlib
    import tempfile

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs = {}
    with tempfile.TemporaryDirectory() as top, contextlib.redirect_stdout(sys.stderr):
        (Path(top) / "cache").mkdir()
        for number, (name, (ranks, flags)) in enumerate(cases().items()):
            folder = Path(top) / str(number)
            folder.mkdir()
            (folder / "cache").symlink_to(Path(top) / "cache")
            try:
                runs[name] = result(ranks, flags, folder)
            except Exception as error:
                print("FAILED", name, error)
    sys.stdout.write(json.dumps({"made on": here(), "runs": runs}, indent=0, sort_keys=True) + "\n")
