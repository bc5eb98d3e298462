"""Every method keeps the contract; DP-pFedDSU is its equations, and reduces to CENTAUR."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import fedmpi.vision.methods
from fedmpi.algorithm import Algorithm, load_method, method_names
from fedmpi.cli import _texts, resolve
from fedmpi.config import Config, check, for_method, settings_of
from fedmpi.errors import ConfigError
from fedmpi.runtime import build
from fedmpi.vision.reparam import kept
from fedmpi.vision.training import PartyData, batches

pytestmark = pytest.mark.slow

METHODS = method_names(("fedmpi.vision.methods",))


def built(config) -> Algorithm:
    return build.algorithm(config, device="cpu")


def chosen(name: str) -> str:
    """The flags that run a method; one without noise wants to be told so."""
    return f"--method {name}" + (" --epsilon inf" if not load_method(name).sends.kind.adds_noise else "")


# ---- the contract: one test file for all methods, a new one is picked up by its file name ----


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("support", ["own", "shared", "dense"])
def test_contract(name, support, make_config):
    config = make_config(f"{chosen(name)} --support {support}")
    if support not in load_method(name).supports:
        with pytest.raises(ConfigError, match="support"):
            built(config)
        return
    one, two = built(config), built(config)

    # every rank starts from the same vector, and does not hand out its own
    theta = one.initial()
    assert theta.dtype == np.float32 and theta.shape == (one.dimension,)
    assert np.array_equal(theta, two.initial())
    theta[:] = 0
    theta = one.initial()
    assert theta.any()

    # the public support is sorted, distinct, of the promised size, and a function of theta alone
    public = one.public_support(theta)
    if public is not None:
        assert np.all(np.diff(public) > 0) and 0 <= public[0] and public[-1] < one.dimension
        assert len(public) == one.support_size()
        assert np.array_equal(public, two.public_support(theta))

    # local work: an update on its support, the same on every rank, from a read-only vector that stays as it is
    theta.flags.writeable = False
    update = one.work(1, theta, 1)
    assert update.values.shape == (one.support_size(),) and np.isfinite(update.values).all() and update.values.any()
    if update.support is not None:
        assert support == "own" and np.all(np.diff(update.support) > 0) and len(update.support) == one.support_size()
    two.work(0, theta, 1)  # another party on the same rank must not matter
    again = two.work(1, theta, 1)
    assert np.array_equal(update.values, again.values)
    assert set(update.figures) == set(one.report_columns)

    # another round draws other batches
    assert not np.array_equal(built(config).work(1, theta, 2).values, update.values)

    # evaluation and references leave no trace
    before = one.party_state(1)
    score, references = one.evaluate(1, theta, 1), one.references(1, theta)
    assert 0 <= score.correct <= score.total == references.total and 0 <= references.untrained_correct <= score.total
    after = one.party_state(1)
    assert set(before) == set(after) and all(np.array_equal(before[key], after[key]) for key in before)
    assert one.evaluate(1, theta, 1) == score

    # state moves to another rank, and the next round goes on from it
    three = built(config)
    three.load_party_state(1, before)
    assert np.array_equal(three.work(1, theta, 2).values, one.work(1, theta, 2).values)

    # the server's step
    mean = np.full(one.support_size() if public is not None else one.dimension, 0.25)
    moved = one.step(theta, mean, 1.0, public)
    assert moved.dtype == np.float32
    touched = np.ones(one.dimension, bool) if public is None else np.isin(np.arange(one.dimension), public)
    assert np.array_equal(moved[touched], (theta[touched].astype(np.float64) + 0.25).astype(np.float32))
    assert np.array_equal(moved[~touched], theta[~touched])


@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns(name, make_config):
    """On data that a small network can learn, plain averaging of the updates lowers the loss."""
    config = make_config(
        f"{chosen(name)} --support {load_method(name).supports[-1]} --ext-lr 0.05 --ext-epochs 3 --head-lr 0.05"
        + (" --dan-weight 0" if name == "dp-pfeddsu" else "")
    )
    method = built(config)
    theta, losses = method.initial(), []
    support = method.public_support(theta)
    for round in range(1, 7):
        updates = [method.work(party, theta, round) for party in range(4)]
        losses.append(np.mean([update.figures["loss"] for update in updates]))
        theta = method.step(theta, np.mean([update.values for update in updates], axis=0), 1.0, support)
    assert losses[-1] < 0.7 * losses[0]


def test_an_unknown_method_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="method = fedsgd: must be one of centaur, dp-fedavg-fb, dp-pfeddsu"):
        load_method("fedsgd")
    with pytest.raises(ConfigError, match="method = no.such:Thing"):
        load_method("no.such:Thing")


def test_a_method_may_live_outside_the_package():
    assert load_method("fedmpi.vision.methods.centaur:Method") is load_method("centaur")


# ---- a new method is one file, its settings included ----


@pytest.fixture(params=["warm:Method", "warm"])
def warm(request, monkeypatch, tmp_path):
    """The name of a method with two settings of its own: from elsewhere, and found by its file in a folder of methods."""
    source = Path(__file__).parent / "plugins" / "warm.py"
    if ":" in request.param:
        monkeypatch.syspath_prepend(str(source.parent))
    else:
        shutil.copy(source, tmp_path)
        monkeypatch.setattr(fedmpi.vision.methods, "__path__", [*fedmpi.vision.methods.__path__, str(tmp_path)])
        monkeypatch.delitem(sys.modules, "fedmpi.vision.methods.warm", raising=False)
    return request.param


def test_settings_in_a_methods_file_are_flags_and_a_layer_of_the_file(warm, make_config, run_in_memory):
    config = make_config(f"--method {warm} --warmth 0.25 --mood wild --epsilon inf --support dense")
    half, calm, whole = (
        run_in_memory(other, 3)["model_sha256"]
        for other in (
            config,
            make_config(f"--method {warm} --epsilon inf --support dense"),
            make_config("--method centaur --epsilon inf --support dense"),
        )
    )
    assert half == calm != whole, "on every rank: 2 * 0.25 is the 0.5 that is the default"
    said = yaml.safe_load((config.out / "config.yaml").read_text())
    assert said["method"]["warmth"] == 0.25 and said["method"]["mood"] == "wild" and said["method"]["ext_epochs"] == 1
    assert resolve(["--config", str(config.out / "config.yaml")]).method == config.method
    assert resolve(["--resume", str(config.out)]).method == config.method
    with pytest.raises(ConfigError, match="resume: warmth was 0.25 and cannot become 0.5; start a new run for it"):
        resolve(["--resume", str(config.out), "--warmth", "0.5"])
    with pytest.raises(ConfigError, match="resume: method was warm.* and cannot become centaur"):
        resolve(["--resume", str(config.out), "--method", "centaur"])


def test_settings_in_a_methods_file_are_in_help(warm, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        resolve(["--method", warm, "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"Settings of {warm}; --method NAME --help shows those of another." in text
    assert "--warmth FLOAT what the server's step is multiplied by, in every round (default: 0.5)" in text
    assert "--mood {calm,wild} wild: twice as much (default: calm)" in text and "--ext-epochs INT" in text


def test_settings_in_a_methods_file_are_judged_by_it(warm, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"run: {{method: '{warm}'}}\nmethod: {{warmth: hot}}\n")
    for flags, said in (
        (f"--method {warm} --warmth -1", "warmth = -1: must be >= 0"),
        (f"--method {warm} --mood sad", "invalid choice 'sad'"),
        (f"--method {warm} --warmht 1", "--warmht: unknown; did you mean --warmth?"),
        (f"--method {warm} --mu 1", f"--mu: a setting of pmtl-ft; method {warm} has --mood, --warmth, --augment"),
        (f"--config {file}", "mine.yaml: method.warmth = 'hot': must be of type float"),
        (
            "--method centaur --warmth 1",
            "--warmth: unknown" if ":" in warm else "--warmth: a setting of warm; method centaur",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(flags.split())
        assert said in str(caught.value)


@pytest.mark.parametrize(
    "body, said",
    [
        (
            "    @dataclass(frozen=True)\n    class Settings(centaur.Method.Settings):\n        clip: float = 1.0",
            "privacy.clip",
        ),
        ("    class Settings(centaur.Method.Settings):\n        warmth: float = 1.0", "must be a frozen dataclass"),
        ("    class Settings:\n        warmth: float = 1.0", "must be a frozen dataclass"),
    ],
)
def test_settings_that_could_not_be_flags_are_refused(body, said, monkeypatch, tmp_path):
    head = (
        "from dataclasses import dataclass\nfrom fedmpi.vision.methods import centaur\nclass Method(centaur.Method):\n"
    )
    (tmp_path / "unfit.py").write_text(f"{head}{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "unfit", raising=False)
    with pytest.raises(ConfigError, match=f"method = unfit:Method: its .*{said}"):
        resolve(["--method", "unfit:Method"])


@pytest.mark.parametrize("name", method_names())
def test_a_method_documents_its_settings(name):
    kind = settings_of(name)
    assert set(_texts(kind)) == set(kind.__dataclass_fields__)
    assert check(for_method(Config(), name)).method == kind(), "its defaults are in range"


def test_the_settings_of_every_method_are_had_without_torch():
    code = (
        "import sys\nfrom fedmpi.algorithm import method_names\nfrom fedmpi.config import settings_of\n"
        "for name in method_names(): settings_of(name)\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


# ---- DP-pFedDSU is its equations: a slow, literal version with autograd ----


def literal_phase_two(method, data, head, theta, rng):
    """DSU (6) to (11) written down as they stand: masks by sorting, the loss with its norm term, autograd for the rest."""
    settings, clip = method.settings, method.config.privacy.clip
    module = method.net.module.train()
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    start = theta.clone()
    current = theta.clone()

    def mask_of(vector):
        mask = torch.ones_like(vector)
        for span in method.spans:
            layer = vector[span].abs()
            order = torch.argsort(layer, descending=True, stable=True)
            mask[span] = 0
            mask[span.start + order[: kept(layer.numel(), settings.density)]] = 1
        return mask

    fixed = mask_of(theta) if method.support_rule == "shared" else None
    for _ in range(settings.ext_epochs):
        for batch in batches(len(data.train_y), settings.batch_size, rng):
            mask = fixed if fixed is not None else mask_of(current)
            variable = current.clone().requires_grad_(True)
            masked = variable * mask
            if settings.gradient == "straight-through":
                masked = variable + (variable * mask - variable).detach()
            named, at = {}, 0
            for name, shape in shapes.items():
                named[name] = masked[at : at + shape.numel()].view(shape)
                at += shape.numel()
            features = functional_call(module, named, (data.train_x[batch],))
            loss = F.cross_entropy(head(features), data.train_y[batch])
            moved = (variable - start) * mask
            if settings.dan_weight and moved.detach().norm() > 0:
                loss = loss + settings.dan_weight / 2 * (moved.norm() - clip).abs()
            loss.backward()
            current = current - settings.ext_lr * variable.grad
    mask = fixed if fixed is not None else mask_of(current)
    return ((current - start) * mask).numpy(), mask.numpy()


@pytest.mark.parametrize("support", ["own", "shared", "dense"])
@pytest.mark.parametrize("gradient", ["masked", "straight-through"])
@pytest.mark.parametrize("dan", [0.0, 0.2, 5.0])
def test_phase_two_is_the_papers_equations(support, gradient, dan, make_config):
    config = make_config(
        f"--support {support} --gradient {gradient} --dan-weight {dan} --sparse-layers 2 --density 0.1 --ext-epochs 2 "
        "--batch-size 8"
    )
    method = built(config)
    theta = torch.from_numpy(method.initial())
    data, head = method._party(0)
    values, chosen, _ = method.train_extractor(data, head, theta, method._rng("train", 0, 1))
    literal, mask = literal_phase_two(method, data, head, theta, method._rng("train", 0, 1))
    if support == "own":
        assert np.array_equal(chosen, np.flatnonzero(mask))
    if support != "dense":
        literal = literal[np.flatnonzero(mask)]
    assert np.abs(values).max() > 1e-4
    np.testing.assert_allclose(values, literal, rtol=1e-3, atol=2e-6)


def test_outside_the_mask_nothing_moves_the_update(make_config):
    """Masked gradients leave masked weights where they were: with `shared` they never move at all."""
    method = built(make_config("--support dense --sparse-layers 4 --density 0.05"))
    theta = method.initial()
    update = method.work(0, theta, 1).values
    for span in method.spans:
        assert np.count_nonzero(update[span]) <= kept(span.stop - span.start, 0.05)


def test_the_adaptive_norm_pulls_the_update_towards_c(make_config):
    def norm(weight):
        method = built(make_config(f"--clip 0.05 --dan-weight {weight} --ext-epochs 10 --support shared"))
        return np.linalg.norm(method.work(0, method.initial(), 1).values)

    free, held = norm(0), norm(5)
    assert abs(held - 0.05) < abs(free - 0.05)


# ---- reductions ----


def test_the_last_sample_of_many_weighs_as_much_as_the_others(make_config):
    method = built(make_config("--method centaur"))
    data, _ = method._party(0)
    many = torch.rand(257, *data.train_x.shape[1:])
    many[-1] += 50
    method._refresh_statistics(PartyData(many, many[:, 0, 0, 0].long(), many[:2], many[:2, 0, 0, 0].long()))
    first = next(layer for layer in method.net.module.modules() if isinstance(layer, nn.BatchNorm2d))
    convolution = next(layer for layer in method.net.module.modules() if isinstance(layer, nn.Conv2d))
    with torch.no_grad():
        seen = convolution(many).mean((0, 2, 3))
    assert torch.allclose(first.running_mean, seen, rtol=0.02, atol=1e-4)


def test_a_density_that_keeps_every_weight_sends_no_support(make_config, run_in_memory):
    own = run_in_memory(make_config("--support own --density 0.99999 --epsilon inf"), 3)
    dense = run_in_memory(make_config("--support dense --density 0.99999 --epsilon inf"), 3)
    assert own["dropouts"]["failed_rounds"] == 0 and own["model_sha256"] == dense["model_sha256"]


@pytest.mark.parametrize("name", ["dp-pfeddsu", "dp-fedavg-fb"])
def test_no_epoch_on_the_head_is_a_run_too(name, make_config, run_in_memory):
    assert run_in_memory(make_config(f"--method {name} --head-epochs 0 --support dense"), 3)["accuracy"] >= 0


@pytest.mark.parametrize("off", ["--sparse-layers 0", "--density 1"])
@pytest.mark.parametrize("support", ["own", "shared", "dense"])
def test_without_both_parts_it_is_centaur_bit_for_bit(off, support, make_config, run_in_memory):
    ours = run_in_memory(make_config(f"--batch-size 8 --method dp-pfeddsu --dan-weight 0 {off} --support {support}"), 3)
    centaur = run_in_memory(make_config(f"--batch-size 8 --method centaur --support {support}"), 3)
    assert ours["model_sha256"] == centaur["model_sha256"]


def test_each_part_alone_makes_a_difference(make_config, run_in_memory):
    """Lambda = 0 leaves reparameterisation alone, k = 0 leaves the adaptive norm alone; neither is CENTAUR."""
    flags = ["--dan-weight 0", "--dan-weight 0.2 --sparse-layers 0", "--dan-weight 0.2", "--method centaur"]
    hashes = {run_in_memory(make_config(f"--support dense --batch-size 8 {flag}"), 3)["model_sha256"] for flag in flags}
    assert len(hashes) == 4


def test_the_masked_forward_pass_is_used_in_phase_one_too(make_config):
    """DSU (7): theta * M is the actual model. Weights outside the mask cannot change what a head sees."""
    config = make_config("--support shared --sparse-layers 2 --density 0.2")
    method = built(config)
    theta = method.initial()
    public = method.public_support(theta)
    outside = np.setdiff1d(np.arange(method.dimension), public)
    other = theta.copy()
    other[outside] *= np.float32(0.5)  # still below the threshold, so the mask stays
    assert np.array_equal(method.public_support(other), public)
    assert method.evaluate(0, theta, 1) == built(config).evaluate(0, other, 1)
    assert dataclasses.asdict(method.evaluate(0, theta, 1))["total"] > 0
