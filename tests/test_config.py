"""Settings: presets, files and flags, and every wrong value refused by name."""

import dataclasses
import subprocess
import sys

import pytest
import yaml

from fedmpi.cli import presets, resolve
from fedmpi.config import LAYERS, Config, from_dict
from fedmpi.errors import ConfigError


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_resolves_and_says_what_it_is(name):
    config = resolve(["--preset", name])
    assert config.run.preset == name
    assert presets()[name]


def test_the_paper_presets_are_the_papers_settings():
    config = resolve(["--preset", "cifar10-s5"])
    assert (config.run.parties, config.run.rounds, config.data.classes_per_party) == (20, 100, 5)
    assert (config.privacy.epsilon, config.privacy.clip, config.privacy.delta) == (1, 0.01, 1e-5)
    training = config.training
    assert (training.head_epochs, training.ext_epochs, training.head_lr, training.ext_lr) == (15, 5, 0.01, 0.01)
    assert (training.sparse_layers, training.density, training.dan_weight) == (4, 0.05, 0.2)
    assert config.server.server_lr == 1
    rounds_parties = {n: (c.run.rounds, c.run.parties) for n in presets() for c in [resolve(["--preset", n])]}
    assert {rounds_parties[f"emnist-s{s}"] for s in (5, 10)} == {(50, 20)}
    assert {rounds_parties[f"cifar100-s{s}"] for s in (3, 5, 10)} == {(100, 100)}
    assert {rounds_parties[f"cifar10-s{s}"] for s in (2, 5, 10)} == {(100, 20)}


def test_flags_override_the_file_and_the_file_the_preset(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("run: {rounds: 7, parties: 9}\nprivacy: {epsilon: 2, delta: 1e-6}\n")
    config = resolve(["--preset", "cifar10-s2", "--config", str(file), "--rounds", "3"])
    assert (config.run.rounds, config.run.parties) == (3, 9)
    assert (config.privacy.epsilon, config.privacy.delta) == (2.0, 1e-6)
    assert config.model.network == "resnet20"


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    config = resolve(["--preset", "emnist-s10", "--seed", "5", "--epsilon", "inf", "--data-dir", "/somewhere"])
    text = yaml.safe_dump(config.as_dict())
    assert from_dict(yaml.safe_load(text), Config(), "text") == config


def test_every_field_is_a_flag_of_its_own():
    names = [f.name for layer in LAYERS.values() for f in dataclasses.fields(layer)]
    assert len(names) == len(set(names))


WRONG_FLAGS = [
    ("--preset nope", "preset = nope: must be one of cifar10-s10"),
    ("--epsilon -1", "epsilon = -1: must be > 0"),
    ("--epsilon nan", "epsilon = nan"),
    ("--epsilon x", "--epsilon: could not convert string to float: 'x'"),
    ("--delta 0", "delta = 0: must be > 0"),
    ("--delta 1", "delta = 1: must be > 0 and <= 0.5"),
    ("--parties 0", "parties = 0: must be >= 1"),
    ("--parties 2.5", "--parties"),
    ("--rounds -3", "rounds = -3: must be >= 1"),
    ("--seed -1", "seed = -1: must be >= 0"),
    ("--clip 0", "clip = 0: must be > 0"),
    ("--clip inf", "clip = inf"),
    ("--sampling 1.5", "sampling = 1.5: must be > 0 and <= 1"),
    ("--batch-size 1", "batch_size = 1: must be >= 2"),
    ("--density 0", "density = 0: must be > 0 and <= 1"),
    ("--support everything", "invalid choice 'everything'"),
    ("--aggregation secret", "invalid choice 'secret'"),
    ("--bits 99", "bits = 99"),
    ("--threads many", "threads = many: must be auto or a number >= 1"),
    ("--min-cohort 30", "min_cohort = 30: must be <= parties (20)"),
    ("--no-such-thing 1", "--no-such-thing"),
    ("--rounds", "--rounds"),
    ("--preset", "--preset needs a value"),
    ("--config missing.yaml", "cannot read missing.yaml: No such file"),
    ("--resume missing", "cannot read missing/config.yaml"),
]


@pytest.mark.parametrize("flags, said", WRONG_FLAGS, ids=[flags for flags, _ in WRONG_FLAGS])
def test_a_wrong_flag_is_refused_in_one_line_that_names_it(flags, said):
    with pytest.raises(ConfigError) as caught:
        resolve(flags.split())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


WRONG_FILES = [
    ("run: {rounds: many}", "run.rounds = 'many': must be of type int"),
    ("run: {rounds: true}", "run.rounds = True: must be of type int"),
    ("run: {round: 3}", "unknown setting run.round, allowed: preset"),
    ("training: 5", "training must hold named settings"),
    ("misc: {a: 1}", "unknown layer 'misc', allowed: run"),
    ("[1, 2]", "expected settings grouped by layer"),
    ("aggregation: {support: all}", "aggregation.support = all: must be one of own, union, shared, dense"),
    ("privacy: {epsilon: -2}", "epsilon = -2: must be > 0"),
    ("run: {rounds: 3", "line 2: not YAML"),
    ("run: !!python/object:os.system {}", "not YAML"),
]


@pytest.mark.parametrize("text, said", WRONG_FILES, ids=[said for _, said in WRONG_FILES])
def test_a_wrong_file_is_refused_in_one_line(text, said, tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        resolve(["--config", str(file)])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_is_grouped_and_names_every_option_of_the_contract(capsys):
    with pytest.raises(SystemExit) as stop:
        resolve(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for (
        option
    ) in "preset config out seed rounds parties method aggregation support epsilon entropy resume data-dir".split():
        assert f"--{option}" in text
    for layer in LAYERS:
        assert f"{layer} options" in text


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom fedmpi.cli import resolve\n"
        "try: resolve(['--help'])\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
