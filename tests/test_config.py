"""Settings: presets, files and flags, and every wrong value refused by name."""

import dataclasses
import importlib.resources
import subprocess
import sys
import typing

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.aggregation.protocol import ProtocolRules, Session
from fedmpi.algorithm import method_names
from fedmpi.cli import _by_tyro, _plain, presets, resolve
from fedmpi.config import LAYERS, Config, for_method, from_dict, settings_of, whose
from fedmpi.errors import ConfigError
from fedmpi.privacy.encoding import Encoding
from fedmpi.report.record import Record
from fedmpi.report.terminal import Terminal


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_resolves_and_says_what_it_is(name):
    config = resolve(["--preset", name])
    assert config.run.preset == name
    assert presets()[name]


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_setting_of_a_preset_is_somebodys(name):
    """What a method does not have is left out of a preset, so that a wrong name would go unseen."""
    settings = yaml.safe_load((importlib.resources.files("fedmpi") / "presets" / f"{name}.yaml").read_text())
    assert all(whose(setting) for setting in settings["method"])
    for method, own in settings.get("methods", {}).items():
        assert method in method_names() and set(own.get("method", {})) <= set(settings_of(method).__dataclass_fields__)
        assert resolve(["--preset", name, "--method", method]).run.method == method


def test_a_preset_serves_other_methods_as_far_as_they_have_its_settings(tmp_path):
    config = resolve(["--preset", "cifar10-s5", "--method", "centaur"])
    assert config.method.network == "resnet20" and not hasattr(config.method, "density")
    file = tmp_path / "mine.yaml"
    file.write_text("run: {method: dp-pfeddsu}\nmethod: {density: 0.5, ext_lr: 0.5}\n")
    assert resolve(["--config", str(file)]).method.density == 0.5
    other = resolve(["--config", str(file), "--method", "pmtl-ft", "--mu", "2"])
    assert (other.run.method, other.method.ext_lr, other.method.mu) == ("pmtl-ft", 0.5, 2)
    file.write_text("run: {method: dp-pfeddsu}\nmethod: {densty: 0.5}\n")
    with pytest.raises(ConfigError, match="unknown setting method.densty; did you mean density"):
        resolve(["--config", str(file), "--method", "pmtl-ft"])


def test_the_paper_presets_are_the_papers_settings():
    config = resolve(["--preset", "cifar10-s5"])
    assert (config.run.parties, config.run.rounds, config.data.classes_per_party) == (20, 100, 5)
    assert (config.privacy.epsilon, config.privacy.clip, config.privacy.delta) == (1, 0.01, 1e-5)
    training = config.method
    assert (training.head_epochs, training.ext_epochs, training.head_lr, training.ext_lr) == (15, 5, 0.01, 0.01)
    assert (training.sparse_layers, training.density, training.dan_weight) == (4, 0.05, 0.2)
    assert config.server.server_lr == 1
    rounds_parties = {n: (c.run.rounds, c.run.parties) for n in presets() for c in [resolve(["--preset", n])]}
    assert {rounds_parties[f"emnist-s{s}"] for s in (5, 10)} == {(50, 20)}
    assert {rounds_parties[f"cifar100-s{s}"] for s in (3, 5, 10)} == {(100, 100)}
    assert {rounds_parties[f"cifar10-s{s}"] for s in (2, 5, 10)} == {(100, 20)}


def test_the_demo_is_where_sharing_can_pay_and_the_papers_parties_are_a_preset_of_their_own():
    """200 devices under a noise that dp-pfeddsu was measured to bear; `demo-20` is what the default run was before."""
    config = resolve([])
    assert (config.run.preset, config.run.parties, config.aggregation.graph) == ("demo", 200, "regular")
    assert config.privacy.delta < 1 / config.run.parties
    before = resolve(["--preset", "demo-20"])
    assert (before.run.parties, before.run.rounds, before.data.partition, before.data.classes_per_party) == (
        20,
        30,
        "classes",
        5,
    )
    assert (before.privacy.epsilon, before.privacy.clip, before.aggregation.graph) == (8, 0.01, "complete")


@pytest.mark.parametrize("parties", [3, 5, 20, 100, 200])
def test_the_demos_graph_serves_any_number_of_parties(parties):
    """`--parties 20` is one flag: it must not take a second one to be run."""
    rules = ProtocolRules(resolve(["--parties", str(parties)])).of(Session(1), parties, Encoding(1.0, 4, 8, 1))
    assert 2 <= rules.degree < parties and rules.threshold > (rules.degree + 1) / 2


def test_flags_override_the_file_and_the_file_the_preset(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("run: {rounds: 7, parties: 9}\nprivacy: {epsilon: 2, delta: 1e-6}\n")
    config = resolve(["--preset", "cifar10-s2", "--config", str(file), "--rounds", "3"])
    assert (config.run.rounds, config.run.parties) == (3, 9)
    assert (config.privacy.epsilon, config.privacy.delta) == (2.0, 1e-6)
    assert config.method.network == "resnet20"


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    config = resolve(["--preset", "emnist-s10", "--seed", "5", "--epsilon", "inf", "--data-dir", "/somewhere"])
    text = yaml.safe_dump(config.as_dict())
    assert from_dict(yaml.safe_load(text), Config(), "text") == config


def run_of(flags, tmp_path, name="run"):
    """The config.yaml that a run with these flags leaves, and the configuration that it is of."""
    config = resolve([*flags.split(), "--out", str(tmp_path / name)])
    Record(config, "none", Terminal()).open(0)
    return config.out / "config.yaml", config


def test_the_configuration_of_a_run_starts_another_as_it_is(tmp_path):
    file, config = run_of("--preset cifar10-s5 --rounds 3 --epsilon 2", tmp_path)
    again = resolve(["--config", str(file)])
    assert again.run.out is None and again.run.resume is None
    assert again.run.preset == "cifar10-s5", "the name of what it is"
    assert dataclasses.replace(again, run=dataclasses.replace(again.run, out=config.run.out)) == config
    Record(resolve(["--config", str(file), "--out", str(tmp_path / "second")]), "none", Terminal()).open(0)
    # and the first one can still be gone on with
    assert resolve(["--resume", str(config.out)]).run.resume == str(config.out)


def test_a_run_of_before_is_not_taken_for_the_place_of_another(tmp_path):
    file, config = run_of("--preset cifar10-s5 --rounds 3", tmp_path)
    file.write_text(yaml.safe_dump(config.as_dict()))  # as it was written before: with `out` and `resume`
    again = resolve(["--config", str(file)])
    assert (again.run.out, again.run.rounds, again.run.preset) == (None, 3, "cifar10-s5")
    assert resolve(["--resume", str(config.out), "--round-deadline", "9"]).run.rounds == 3


def test_a_file_of_ones_own_may_say_where_the_run_goes_but_not_resume(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("run: {out: here, rounds: 7}\n")
    assert resolve(["--config", str(file)]).run.out == "here"
    file.write_text("run: {resume: there}\n")  # would go on with a run without a look at what it was
    with pytest.raises(ConfigError, match="run.resume = there: only the flag can say that, --resume there"):
        resolve(["--config", str(file)])


def test_a_file_that_names_a_preset_starts_from_it(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("run: {preset: cifar10-s2, rounds: 7}\n")
    config = resolve(["--config", str(file)])
    assert (config.run.preset, config.run.rounds) == ("cifar10-s2", 7)
    assert (config.method.network, config.data.classes_per_party) == ("resnet20", 2)
    assert resolve(["--preset", "cifar10-s2", "--config", str(file)]) == config
    with pytest.raises(
        ConfigError, match="preset = demo: .*mine.yaml starts from preset cifar10-s2; leave one of them out"
    ):
        resolve(["--preset", "demo", "--config", str(file)])


def test_a_preset_cannot_change_a_run_that_is_resumed(tmp_path):
    file, config = run_of("--preset demo --epsilon 3", tmp_path)
    assert resolve(["--preset", "demo", "--epsilon", "3", "--resume", str(config.out)]).privacy.epsilon == 3
    with pytest.raises(ConfigError, match="resume: epsilon was 3.0 and cannot become"):
        resolve(["--preset", "demo", "--resume", str(config.out)])


def test_the_folder_of_a_method_from_elsewhere_has_a_name_for_every_file_system():
    elsewhere = "fedmpi.vision.methods.centaur:Method"
    assert resolve(["--method", elsewhere]).out.as_posix() == "runs/demo-fedmpi.vision.methods.centaur-Method-s0"
    assert resolve(["--method", "dp-pfedhome", "--seed", "3"]).out.as_posix() == "runs/demo-dp-pfedhome-s3"
    assert resolve(["--method", elsewhere, "--out", "a:b"]).out.as_posix() == "a:b", "as it was asked for"


def test_every_field_is_a_flag_of_its_own():
    names = [f.name for layer in LAYERS.values() for f in dataclasses.fields(layer)]
    assert len(names) == len(set(names))


WRONG_FLAGS = [
    ("--preset nope", "preset = nope: must be one of cifar10-s10"),
    ("--epsilon -1", "epsilon = -1: must be > 0"),
    ("--epsilon nan", "epsilon = nan"),
    ("--epsilon x", "--epsilon: could not convert string to float: 'x'"),
    ("--delta 0", "delta = 0: must be >= 1e-10"),
    ("--delta 1e-30", "delta = 1e-30: must be >= 1e-10"),
    ("--delta 1", "delta = 1: must be >= 1e-10 and <= 0.5"),
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
    ("--preset demo-20 --min-cohort 30", "min_cohort = 30: must be <= parties (20)"),
    ("--no-such-thing 1", "--no-such-thing: unknown (see fedmpi --help)"),
    ("--epsilonn 1", "--epsilonn: unknown; did you mean --epsilon?"),
    ("--epsilonn=1", "--epsilonn: unknown; did you mean --epsilon?"),
    ("--no-augmentt", "--no-augmentt: unknown; did you mean --no-augment?"),
    ("--datadir x", "--datadir: unknown; did you mean --data-dir?"),
    ("--confg mine.yaml", "--confg: unknown; did you mean --config?"),
    (
        "--data_dirr x --rouns 3",
        "--data_dirr: unknown; did you mean --data-dir? --rouns: unknown; did you mean --rounds?",
    ),
    ("--mu 1", "--mu: a setting of pmtl-ft; method dp-pfeddsu has --gradient, --dan-weight, --density"),
    ("--method ppsgd --no-item-bias", "--no-item-bias: a setting of fedmf, fedmmf-fm"),
    ("--method no.such:Thing", "method = no.such:Thing: No module named"),
    ("--method fedmpi.errors:ConfigError", "method = fedmpi.errors:ConfigError: its Settings must be"),
    ("--rounds 3 more", "more"),
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
    ("run: {round: 3}", "unknown setting run.round; did you mean rounds?"),
    (
        "method: {validation_fraction: 0.1}",
        "method.validation_fraction belongs to another layer, data.validation_fraction",
    ),
    ("run: {zzz: 3}", "unknown setting run.zzz, allowed: preset"),
    ("method: {densty: 0.5}", "unknown setting method.densty; did you mean density?"),
    ("method: {mu: 1}", "method.mu: a setting of pmtl-ft; method dp-pfeddsu has gradient, dan_weight, density"),
    (
        "run: {method: ppsgd}\nmethod: {density: 1}",
        "method.density: a setting of dp-pfeddsu; method ppsgd has personal_",
    ),
    ("method: {density: 2}", "density = 2: must be > 0 and <= 1"),
    ("method: 5", "method must hold named settings"),
    ("run: {method: nope}", "method = nope: must be one of centaur"),
    ("training: {density: 0.5}", "training.density belongs to another layer, method.density"),
    ("model: {network: cnn}", "model.network belongs to another layer, method.network"),
    ("ratings: {items: 40}", "ratings.items belongs to another layer, data.items"),
    ("ratings: {factors: 40}", "ratings.factors: a setting of fedmf, fedmmf-fm"),
    ("training: {densty: 0.5}", "unknown setting training.densty; did you mean density?"),
    ("training: 5", "training must hold named settings"),
    ("misc: {a: 1}", "unknown layer 'misc', allowed: run"),
    ("[1, 2]", "expected settings grouped by layer"),
    ("aggregation: {support: all}", "aggregation.support = all: must be one of own, union, shared, dense"),
    ("privacy: {epsilon: -2}", "epsilon = -2: must be > 0"),
    ("run: {rounds: 3", "line 2: not YAML"),
    ("run: {preset: nope}", "preset = nope: must be one of cifar10-s10"),
    ("run: {preset: [demo]}", "preset = ['demo']: must be one of cifar10-s10"),
    ("run: 5", "run must hold named settings"),
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


def test_help_reads_as_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        resolve(["--preset", "cifar10-s5", "--help"])
    lines = [line.strip(" │") for line in capsys.readouterr().out.splitlines()]
    text = " ".join(lines)
    assert "{None}" not in text and "(default: None)" not in text and "(default: '')" not in text
    assert "--out PATH the run's folder (default: runs/<preset>-<method>-s<seed>) --resume PATH" in " ".join(
        text.split()
    )
    assert "--rounds INT T, global rounds (default: 100)" in " ".join(text.split()), "of the preset that was asked for"
    assert "what is trained and shared: centaur, dp-fedavg-fb, " in text
    # a text is broken where the box ends, not where its source line did
    assert "samples_per_party for itself and" in text and not any(
        line.endswith("its samples_per_party for") for line in lines
    )
    assert "mpirun -n 21 python -m fedmpi.main --config runs/NAME/config.yaml --seed 1" in lines


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom fedmpi.cli import resolve\n"
        "try: resolve(['--help'])\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_run_has_no_more_rounds_than_a_message_can_name():
    from fedmpi.config import MOST_ROUNDS
    from fedmpi.wire.frame import MAX_ROUND

    assert MOST_ROUNDS == MAX_ROUND
    with pytest.raises(ConfigError, match="rounds = 4.29497e.09: must be"):
        resolve(["--rounds", str(MAX_ROUND + 1)])


def test_a_file_that_says_something_twice_is_refused(tmp_path):
    """The first would be lost, and with it, here, the secret noise."""
    file = tmp_path / "mine.yaml"
    file.write_text("privacy: {entropy: os}\nrun: {rounds: 3}\nprivacy: {epsilon: 2}\n")
    with pytest.raises(ConfigError, match="mine.yaml line 3: .*privacy stands there twice"):
        resolve(["--config", str(file)])
    file.write_text("privacy: {epsilon: 1, epsilon: 2}\n")
    with pytest.raises(ConfigError, match="epsilon stands there twice"):
        resolve(["--config", str(file)])


def test_two_presets_or_files_are_refused():
    with pytest.raises(ConfigError, match="--preset was given as demo and as demo-20"):
        resolve(["--preset", "demo", "--preset=demo-20"])


def test_a_method_whose_file_leaves_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"method = leaves:Method: leaves left by sys.exit\(0\) as it was imported"):
        resolve(["--method", "leaves:Method"])


# ---- flags are read without the library that says what is wrong with them ----

WORDS = [
    "1",
    "-1",
    "0",
    "0.5",
    "-0.5",
    "1e-5",
    "inf",
    "nan",
    "x",
    "",
    " 3",
    "1_0",
    "None",
    "none",
    "True",
    "-x",
    "--",
    "a=b",
    "os",
    "own",
]


@st.composite
def flags(draw):
    """A method, and flags of every layer, right and wrong, as somebody could type them."""
    method = draw(st.sampled_from(method_names()))
    base = for_method(Config(), method)
    hints = {
        name: hint
        for layer in LAYERS
        for name, hint in typing.get_type_hints(type(getattr(base, layer))).items()
        if name != "method"
    }
    argv = []
    for name in draw(st.lists(st.sampled_from([*hints, "nonsense"]), max_size=6)):
        hint = hints.get(name, str)
        spelled = "--" + draw(st.sampled_from(["", "no_"] if hint is bool else [""] * 9 + ["no_"])) + name
        spelled = draw(st.sampled_from([spelled, spelled.replace("_", "-")]))
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        value = draw(st.sampled_from([*choices, *choices, *WORDS]) | st.integers(0, 99).map(str))
        form = draw(
            st.sampled_from(["bare"] * 4 if hint is bool else ["two", "one"]) | st.sampled_from(["bare", "two", "one"])
        )
        argv += {"bare": [spelled], "two": [spelled, value], "one": [f"{spelled}={value}"]}[form]
    return base, argv


@given(flags())
def test_flags_are_read_as_the_library_would_read_them(given):
    base, argv = given
    read = _plain(argv, base)
    try:
        expected = _by_tyro(argv, base)
    except ConfigError:
        assert read is None, "it would have been refused"
    else:
        assert read is None or repr(read) == repr(expected)  # a number that is none is not equal to itself


@pytest.mark.parametrize("method", method_names())
def test_every_setting_can_be_given_as_a_plain_flag(method):
    base = for_method(Config(), method)
    for layer in LAYERS:
        for name, value in dataclasses.asdict(getattr(base, layer)).items():
            said = [f"--{name}={value}"] if not isinstance(value, bool) else [f"--{'' if value else 'no-'}{name}"]
            if value is not None:
                assert _plain(said, base) == _plain(said[0].split("=", 1), base) == base


def test_who_types_it_right_does_not_wait_for_the_library():
    """Twenty ranks on two cores read the command line, each for itself."""
    code = (
        "import sys\nfrom fedmpi.cli import resolve\n"
        "resolve('--preset demo-20 --rounds 3 --epsilon=2 --keep-parties --data_dir x --no-augment'.split())\n"
        "sys.exit('tyro' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_file_of_identities_means_an_active_adversary():
    """Given for nothing, it would let its owner believe that keys are signed."""
    assert resolve(["--preset", "demo-20", "--pki", "x"]).aggregation.adversary == "active"
    assert resolve(["--preset", "demo-20"]).aggregation.adversary == "passive"
    for flags, said in (
        ("--pki x --graph regular", "graph = regular: not with adversary active, which --pki implies"),
        (
            "--pki x --aggregation plain",
            "adversary = active, which --pki implies: means nothing under plain aggregation",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve(["--preset", "demo-20", *flags.split()])
