"""What a finished run leaves: the model by name, and a loader whose predictions are those that the run was scored by."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fitting import fitting, method_of
from torch.nn import functional as F

import fedmpi.model
from fedmpi.algorithm import load_method, method_names
from fedmpi.cli import resolve
from fedmpi.errors import ConfigError, DataError
from fedmpi.report.sealed import read_sealed, vector_sha256, write_sealed
from fedmpi.runtime import build
from fedmpi.vision.base import ImageMethod

IMAGES = method_names(("fedmpi.vision.methods",))
RATINGS = method_names(("fedmpi.recsys.methods",))

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.fixture
def make_ratings(cache, tmp_path):
    counter = iter(range(1000))

    def make(flags: str = ""):
        small = (
            "--preset demo-recsys --parties 9 --items 30 --ratings 240 --rounds 2 --eval-every 2 --aggregation plain "
            "--support own --graph complete "
        ) + fitting(method_of(flags) or "fedmf", "--factors 3 --mask-epochs 5")
        out = tmp_path / f"ratings{next(counter)}"
        return resolve([*small.split(), "--cache-dir", str(cache), "--out", str(out), *flags.split()])

    return make


@pytest.fixture
def config_of(make_config, make_ratings):
    """The small configuration of any method of the registry."""

    def make(name: str, flags: str = ""):
        if name in RATINGS:
            return make_ratings(f"--method {name} {flags}")
        free = " --epsilon inf" if not load_method(name).sends.kind.adds_noise else ""
        return make_config(f"--method {name} --support shared {fitting(name, '--density 0.3')}{free} {flags}")

    return make


def changed(path: Path, **arrays) -> None:
    """The file with other arrays, and a seal that fits them."""
    write_sealed(path, read_sealed(path) | arrays)


# ---- every method ----


@pytest.mark.parametrize("name", [*IMAGES, *RATINGS])
def test_every_methods_model_gives_the_scores_of_its_run(name, config_of, monkeypatch, run_in_memory):
    config, last = config_of(name, "--keep-parties"), {}
    original = ImageMethod.evaluate

    def evaluate(self, party, theta, round):
        last[party] = original(self, party, theta, round)
        return last[party]

    monkeypatch.setattr(ImageMethod, "evaluate", evaluate)
    summary = run_in_memory(config, 3)
    model = fedmpi.model.load(config.out)
    assert model.sha256 == summary["model_sha256"] == vector_sha256(model.arrays["theta"])
    assert model.meta["method"] == name and model.meta["dataset"] == config.data.dataset
    found = model.evaluate()
    assert set(found) == set(load_method(name).scores)
    for score, value in found.items():
        assert value == pytest.approx(summary[score], abs=1e-9)
    assert [party.number for party in model.parties()] == list(range(config.run.parties))
    for number, score in last.items():  # accuracy is coarse, the loss is not
        images, labels = model.party(number).test_data()
        said = torch.from_numpy(model.party(number).scores(images))
        assert float(F.cross_entropy(said, torch.from_numpy(np.array(labels)))) == score.loss


@pytest.mark.parametrize("name", [*IMAGES, *RATINGS])
def test_every_coordinate_of_a_shared_vector_has_one_name(name, config_of):
    method = build.algorithm(config_of(name), device="cpu")
    named = method.shared_arrays(np.arange(method.dimension))
    if method.task == "recommendation" and not method.shares:
        assert not named
        return
    places = np.concatenate([part.ravel() for part in named.values()])
    assert np.array_equal(np.sort(places), np.arange(method.dimension))
    assert not set(named) & {"theta", "meta", "seal", "forward", "item_ids", "item_features"}


@pytest.mark.parametrize("name", ["centaur", "pmtl-ft", "fedmf"])
def test_metrics_that_stay_home_keep_the_same_parts(name, config_of, run_in_memory):
    loud, quiet = config_of(name, "--keep-parties"), config_of(name, "--keep-parties --metrics none")
    scores = run_in_memory(loud, 3)
    silent = run_in_memory(quiet, 3)
    (score, *_) = load_method(name).scores
    assert silent[score] is None and silent["model_sha256"] == scores["model_sha256"]
    assert fedmpi.model.load(quiet.out).evaluate()[score] == pytest.approx(scores[score], abs=1e-9)


def test_a_party_that_finished_at_home_keeps_its_own_extractor(config_of, run_in_memory):
    config = config_of("dp-pfedhome", "--keep-parties --epsilon 0.5 --noise-budget 0.01 --home-rounds 1")
    summary = run_in_memory(config, 3)
    model = fedmpi.model.load(config.out)
    parts = model.party(0).parts
    assert not np.array_equal(parts["weights"], model.arrays["theta"])
    assert model.evaluate()["accuracy"] == summary["accuracy"]


def test_the_last_test_is_not_done_twice_to_keep_its_outcome(config_of, monkeypatch, run_in_memory):
    config, asked = config_of("local-only", "--keep-parties"), []
    kind = load_method("local-only")
    original = kind.make_ready
    monkeypatch.setattr(kind, "make_ready", lambda self, *args: asked.append(args[0]) or original(self, *args))
    run_in_memory(config, 3)
    assert sorted(asked) == list(range(config.run.parties))


@pytest.mark.parametrize("name", ["ppsgd", "fedmmf-nn"])
def test_placement_changes_nothing_in_what_is_kept(name, config_of, run_in_memory):
    two, three = config_of(name, "--keep-parties"), config_of(name, "--keep-parties")
    run_in_memory(two, 2)
    run_in_memory(three, 3)
    one, other = fedmpi.model.load(two.out), fedmpi.model.load(three.out)
    for a, b in zip(one.parties(), other.parties(), strict=True):
        assert a.number == b.number and set(a.parts) == set(b.parts)
        assert all(np.array_equal(a.parts[part], b.parts[part]) for part in a.parts)
        assert all(np.array_equal(a.state[part], b.state[part]) for part in a.state)


def test_a_resumed_run_leaves_the_model_of_one_that_was_not_interrupted(
    config_of, make_config, monkeypatch, run_in_memory
):
    from fedmpi.runtime.server import Server

    whole = config_of("dp-pfeddsu", "--rounds 3 --checkpoint-every 1 --keep-parties")
    summary = run_in_memory(whole, 3)
    cut = config_of("dp-pfeddsu", "--rounds 3 --checkpoint-every 1")
    original = Server.round

    def stop(self, round):
        if round == 3:
            raise KeyboardInterrupt
        original(self, round)

    monkeypatch.setattr(Server, "round", stop)
    with pytest.raises(KeyboardInterrupt):
        run_in_memory(cut, 3)
    assert not (cut.out / "model.npz").exists()
    monkeypatch.undo()
    resumed = resolve(["--resume", str(cut.out), "--keep-parties"])  # it may be asked for later
    again = run_in_memory(resumed, 4)
    assert again["model_sha256"] == summary["model_sha256"]
    assert fedmpi.model.load(cut.out).evaluate()["accuracy"] == again["accuracy"] == summary["accuracy"]


# ---- what is in the file ----


def test_the_file_is_read_without_fedmpi_and_without_pickle(config_of, run_in_memory):
    config = config_of("dp-fedavg-fb", "--network resnet20")
    summary = run_in_memory(config, 2)
    with np.load(config.out / "model.npz", allow_pickle=False) as content:
        arrays = dict(content)
    meta = json.loads(str(arrays["meta"]))
    assert meta["network"] == "resnet20" and meta["image_shape"] == [1, 8, 8] and meta["classes"] == 10
    assert meta["model_sha256"] == summary["model_sha256"]
    assert arrays["conv1.weight"].shape == (16, 1, 3, 3) and arrays["head.weight"].shape == (10, 64)
    together = np.concatenate([arrays[name].ravel() for name in meta["shared"]])
    assert np.array_equal(together, arrays["theta"])


def test_a_model_that_is_handed_on_names_no_seed_and_no_folder(config_of, run_in_memory):
    config = config_of("centaur", "--seed 424242")
    run_in_memory(config, 2)
    text = str(read_sealed(config.out / "model.npz")["meta"])
    assert json.loads((config.out / "summary.json").read_text())["data_crc32"] not in text
    assert "424242" not in text and str(config.out.parent) not in text and config.data.cache_dir not in text


def test_rating_parameters_have_the_papers_names(config_of, run_in_memory):
    config = config_of("fedmmf-lr")
    run_in_memory(config, 2)
    model = fedmpi.model.load(config.out)
    assert {name: part.shape for name, part in model.shared.items()} == {
        "item_factors": (30, 3),
        "item_bias": (30,),
        "raters": (30,),
    }
    assert model.meta["settings"]["party_solver"] == "posterior" and model.meta["scale"] == [1.0, 5.0, 1.0]
    config = config_of("fed-nn", "--mask-hidden 4")
    run_in_memory(config, 2)
    shared = fedmpi.model.load(config.out).shared
    assert set(shared) == {"constant", "outer", "shift", "inner"} and shared["inner"].shape[1] == 4


def test_the_extractor_is_the_masked_one_that_was_tested(config_of, run_in_memory):
    config = config_of("dp-pfeddsu", "--sparse-layers 2 --density 0.2 --keep-parties")
    run_in_memory(config, 3)
    model, method = fedmpi.model.load(config.out), build.algorithm(config, device="cpu")
    extractor = model.extractor()
    forward = method.forward_weights(torch.from_numpy(model.arrays["theta"].copy()))
    flat = torch.cat([parameter.detach().ravel() for parameter in extractor.parameters()])
    assert torch.equal(flat, forward) and not np.array_equal(flat.numpy(), model.arrays["theta"])
    assert extractor.training and not model.party(1).extractor().training

    # statistics of a party's training images are that party's
    ours = model.extractor(build.open_store(config).shard(1).train_x).eval()
    kept = model.party(1).extractor()
    for name, value in kept.state_dict().items():
        if "running" in name:
            assert torch.equal(ours.state_dict()[name], value) and value.abs().sum() > 0


def test_a_run_without_kept_parties_says_how_to_have_them(config_of, run_in_memory):
    config = config_of("centaur")
    run_in_memory(config, 3)
    assert not (config.out / "parties").exists()
    model = fedmpi.model.load(config.out)
    assert model.parties() == []
    with pytest.raises(DataError, match="--keep-parties"):
        model.party(0)
    with pytest.raises(DataError, match="0 of 4 parties; run with --keep-parties"):
        model.evaluate()


def test_a_model_of_an_earlier_version_still_predicts(config_of, run_in_memory):
    """Its settings were called after the layer that they stood in, which held those of every rating method."""
    config = config_of("fedmmf-fm", "--keep-parties --mask-rank 2")
    run_in_memory(config, 2)
    model, items = fedmpi.model.load(config.out), np.arange(30)
    before = model.meta | {"ratings": model.meta["settings"]}
    del before["settings"]
    changed(config.out / "model.npz", meta=np.array(json.dumps(before)))
    old = fedmpi.model.load(config.out)
    assert "settings" not in old.meta and np.array_equal(old.party(3).predict(items), model.party(3).predict(items))


def test_a_partys_part_stays_with_its_rank_and_its_owner(config_of, run_in_memory):
    config = config_of("centaur", "--keep-parties")
    before = os.umask(0)
    try:
        run_in_memory(config, 3)
    finally:
        os.umask(before)
    folder = config.out / "parties"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == ["parties-00000-00001.npz", "parties-00002-00003.npz"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    files[0].unlink()  # it lies on another host
    model = fedmpi.model.load(config.out)
    assert [party.number for party in model.parties()] == [2, 3] and len(model.party(3).predict(_zeros(model))) == 2
    with pytest.raises(DataError, match="nothing of party 0"):
        model.party(0)


def _zeros(model):
    return np.zeros((2, *model.meta["image_shape"]), np.uint8)


def test_a_method_from_elsewhere_leaves_its_vector(make_config, run_in_memory):
    config = make_config("--method benchmarks.toy:Method --dataset none --support dense --keep-parties")
    summary = run_in_memory(config, 3)
    model = fedmpi.model.load(config.out)
    assert set(model.shared) == {"theta"} and model.sha256 == summary["model_sha256"]
    assert len(model.parties()) == 4
    with pytest.raises(ConfigError, match="nothing predicts with them"):
        model.extractor()


# ---- what is refused ----


@pytest.fixture
def small_run(config_of, run_in_memory):
    config = config_of("centaur", "--keep-parties")
    run_in_memory(config, 3)
    return config.out


def test_a_damaged_file_is_one_line(small_run):
    path = small_run / "model.npz"
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", whole[:200] + bytes(200) + whole[400:], b"not an archive"):
        path.write_bytes(broken)
        with pytest.raises(DataError) as caught:
            fedmpi.model.load(small_run)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(DataError, match="no model.npz there; a run writes it when it ends"):
        fedmpi.model.load(small_run)
    with pytest.raises(DataError, match="cannot be read"):
        fedmpi.model.load(path)


def test_an_altered_file_is_found(small_run):
    path = small_run / "model.npz"
    arrays = read_sealed(path)
    with np.load(path) as content:
        seal = content["seal"]
    name = json.loads(str(arrays["meta"]))["shared"][0]
    for part in (name, "theta"):  # as somebody who does not know of the seal would
        np.savez(path, **(arrays | {part: arrays[part] + np.float32(1)}), seal=seal)
        with pytest.raises(DataError, match="was changed since the run wrote it"):
            fedmpi.model.load(small_run)
    other = arrays["theta"] + np.float32(1)
    write_sealed(path, arrays | {"theta": other})
    with pytest.raises(DataError, match="holds another model .* than its meta names"):
        fedmpi.model.load(small_run)
    meta = json.loads(str(arrays["meta"])) | {"model_sha256": vector_sha256(other)}
    changed(path, meta=np.array(json.dumps(meta)))
    with pytest.raises(DataError, match="holds another model .* than summary.json names"):
        fedmpi.model.load(small_run)
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="no seal"):
        fedmpi.model.load(small_run)


def test_parts_of_another_model_and_of_no_model_are_refused(small_run):
    path = small_run / "parties" / "parties-00000-00001.npz"
    changed(path, model_sha256=np.array("0" * 64))
    with pytest.raises(DataError, match="belongs to another model"):
        fedmpi.model.load(small_run).party(0)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="is damaged"):
        fedmpi.model.load(small_run).parties()


def test_inputs_that_would_be_misread_are_refused(small_run, config_of, run_in_memory):
    model = fedmpi.model.load(small_run)
    party = model.party(0)
    for wrong in (_zeros(model) / 255, _zeros(model)[:, 0], _zeros(model)[:0], np.zeros((2, 3, 8, 8), np.uint8)):
        with pytest.raises(DataError, match=r"this model takes \(N, 1, 8, 8\) of uint8"):
            party.predict(wrong)
    assert party.scores(_zeros(model)).shape == (2, 10)
    config = config_of("fedmf", "--keep-parties")
    run_in_memory(config, 2)
    model = fedmpi.model.load(config.out)
    for wrong in (np.array([30]), np.array([-1]), np.array([0.5]), np.array([[1]])):
        with pytest.raises(DataError, match="whole numbers from 0 to 29"):
            model.party(0).predict(wrong)
    with pytest.raises(ConfigError, match="method = fedmf: a model of ratings has no extractor"):
        model.extractor()


def test_other_data_than_the_runs_is_not_tested_on(small_run, config_of):
    text = (small_run / "config.yaml").read_text()
    (small_run / "config.yaml").write_text(text.replace("samples_per_party: 20", "samples_per_party: 19"))
    with pytest.raises(DataError, match="is not the data that"):
        fedmpi.model.load(small_run).evaluate()


# ---- as the README shows it ----


@pytest.mark.parametrize("name", ["images", "ratings"])
def test_ten_lines_give_the_figure_of_the_run(name, cache, tmp_path, monkeypatch, capsys, run_in_memory):
    (snippet,) = [code for code in re.findall("```python\n(.*?)```", README, re.S) if f'load("runs/{name}")' in code]
    assert len(snippet.strip().splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    flags = {
        "images": "--rounds 2 --parties 6 --eval-every 0 --local-epochs 0",
        "ratings": "--preset demo-recsys --parties 20 --rounds 3 --method fedmmf-fm",
    }[name]
    run_in_memory(resolve([*flags.split(), "--keep-parties", "--cache-dir", str(cache), "--out", f"runs/{name}"]), 3)
    capsys.readouterr()
    exec(compile(snippet, "snippet", "exec"), {})
    ours, said = map(float, capsys.readouterr().out.split())
    assert ours == pytest.approx(said, abs=1e-9)


def test_the_loader_imports_no_torch_before_it_is_needed():
    code = "import sys, fedmpi.model; sys.exit(any(name in sys.modules for name in ('torch', 'sklearn', 'mpi4py')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
