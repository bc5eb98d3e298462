"""Command line to Config: preset, then --config file, then flags. Every rank reads its own, so tyro, a library of 0.1 s, is
asked only for --help and for what is wrong."""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import textwrap
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from fedmpi.config import LAYERS, Config, check, for_method, from_dict, own_settings, settings_of, whose
from fedmpi.errors import ConfigError

PRESETS = Path(__file__).parent / "presets"


def presets() -> dict[str, str]:
    """Every preset and the comment that opens it."""
    found = {}
    for path in sorted(PRESETS.glob("*.yaml"), key=lambda path: path.name):
        first = path.read_text().splitlines()[0]
        found[path.stem] = first.removeprefix("#").strip()
    return found


def resolve(argv: list[str]) -> Config:
    """The checked configuration that `argv` asks for. --help and --presets print and raise SystemExit(0)."""
    if "--presets" in argv:
        width = max(map(len, presets()))
        print("\n".join(f"{name:<{width}}  {about}" for name, about in presets().items()))
        raise SystemExit(0)
    base = Config()
    preset, argv = _take_option(argv, "--preset", once=True)
    resume, _ = _take_option(argv, "--resume")
    file, argv = _take_option(argv, "--config", once=True)
    settings = _read(Path(file)) if file is not None else {}
    named = _said(settings, "preset")
    if resume is not None:
        # A resumed run is the same run: its own resolved configuration comes first.
        own = Path(resume) / "config.yaml"
        base = from_dict(_read(own), base, str(own))
    elif preset is not None and named not in (None, preset):
        raise ConfigError(f"preset = {preset}: {file} starts from preset {named}; leave one of them out")
    else:
        preset = preset or named or base.run.preset
    saved = base
    start = {} if preset is None else _preset(preset)
    of_file = _said(settings, "method")
    method = _take_option(argv, "--method")[0] or of_file or _said(start, "method") or base.run.method
    base = from_dict(_fitting(start, method), for_method(base, method), f"preset {preset}")
    if of_file not in (None, method):  # a file about another method: it must be right for that one
        from_dict(settings, base, str(file))
        settings = _fitting(settings, method)
    config = check(_signed(_flags(argv, from_dict(settings, base, str(file)))))
    if resume is not None:
        _refuse_changes(saved, config)
    return config


def _signed(config: Config) -> Config:
    """Who names a file of identities wants messages to be signed: it would be there for nothing under a passive adversary."""
    if config.aggregation.pki is None:
        return config
    return dataclasses.replace(config, aggregation=dataclasses.replace(config.aggregation, adversary="active"))


# What may differ when a run is resumed: where it computes and is kept, not what is computed.
MAY_CHANGE = {
    "run": ("out", "resume", "checkpoint_every", "keep_parties", "round_deadline", "link"),
    "data": ("data_dir", "cache_dir"),
}


def _refuse_changes(saved: Config, config: Config) -> None:
    """The noise was calibrated, and part of epsilon spent, for the run as it was; another run needs a folder of its own."""
    for layer, before in saved.as_dict().items():
        for name, value in config.as_dict()[layer].items():
            if value != before[name] and layer != "machine" and name not in MAY_CHANGE.get(layer, ()):
                raise ConfigError(
                    f"resume: {name} was {before[name]} and cannot become {value}; start a new run for it"
                )


def _preset(name: str) -> dict:
    if name not in presets():
        raise ConfigError(f"preset = {name}: must be one of {', '.join(presets())}")
    settings = yaml.safe_load((PRESETS / f"{name}.yaml").read_text()) or {}
    return settings | {"run": settings.get("run", {}) | {"preset": name}}


def _fitting(settings: dict, method: str) -> dict:
    """Settings that were written for several methods, as far as they are this one's: what it does not have is left out,
    and what they say under `methods` for it goes before."""
    own = settings.get("methods", {}).get(method, {})
    layers = {layer: settings.get(layer, {}) | own.get(layer, {}) for layer in settings | own if layer != "methods"}
    has = settings_of(method).__dataclass_fields__
    return layers | {
        "run": layers.get("run", {}) | {"method": method},
        "method": {name: value for name, value in layers.get("method", {}).items() if name in has},
    }


def _refuse_repeated(node: yaml.Node | None) -> None:
    """A key that stands twice: the first would be lost without a word."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} stands there twice", key.start_mark
                    )
                seen.add(key.value)
            _refuse_repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_repeated(value)


def _read(path: Path) -> dict:
    """The settings of a file as they stand there; `from_dict` judges them."""
    try:
        text = path.read_text()
        _refuse_repeated(yaml.compose(text, yaml.SafeLoader))
        settings = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise ConfigError(f"{path}{line}: not YAML ({getattr(error, 'problem', None) or 'unreadable text'})") from None
    return _without_place(settings or {}, path)


def _without_place(settings: dict, path: Path) -> dict:
    """Without the folder of the run that wrote the file: a run that is made from it has another.

    A run's config.yaml used to hold `out`, and `resume` beside it; a person's own file may say `out`, and never says `resume`.
    """
    resume = _said(settings, "resume")
    if resume is not None:
        raise ConfigError(f"{path}: run.resume = {resume}: only the flag can say that, --resume {resume}")
    if not (isinstance(settings, dict) and isinstance(settings.get("run"), dict) and "resume" in settings["run"]):
        return settings
    return settings | {"run": {name: value for name, value in settings["run"].items() if name not in ("out", "resume")}}


def _said(settings: dict, name: str) -> str | None:
    """A setting of the layer `run` that must be known before the others are read; None if the file does not say."""
    run = settings.get("run") if isinstance(settings, dict) else None
    value = run.get(name) if isinstance(run, dict) else None
    return None if value is None else str(value)


def _take_option(argv: list[str], name: str, once: bool = False) -> tuple[str | None, list[str]]:
    """The last value of an option that must be known before the others are parsed, and argv without it. `once`: a second one that
    differs is an error, because all that the first stands for would be lost."""
    values: list[str] = []
    rest: list[str] = []
    index = 0
    while index < len(argv):
        if argv[index] == name:
            if index + 1 == len(argv):
                raise ConfigError(f"{name} needs a value")
            values.append(argv[index + 1])
            index += 2
        elif argv[index].startswith(name + "="):
            values.append(argv[index].partition("=")[2])
            index += 1
        else:
            rest.append(argv[index])
            index += 1
    if once and len(set(values)) > 1:
        raise ConfigError(f"{name} was given as {' and as '.join(dict.fromkeys(values))}; leave all but one out")
    return values[-1] if values else None, rest


def _flags(argv: list[str], base: Config) -> Config:
    read = _plain(argv, base)
    return _by_tyro(argv, base) if read is None else read


def _plain(argv: list[str], base: Config) -> Config | None:
    """`base` with flags that are as they should be: --name value, --name=value, --name and --no-name. None for anything else,
    so that there is one place that knows what is wrong with it."""
    homes = {
        name: (layer, hint)
        for layer in LAYERS
        for name, hint in typing.get_type_hints(type(getattr(base, layer))).items()
    }
    changed: dict[str, dict[str, Any]] = {layer: {} for layer in LAYERS}
    words = iter(argv)
    for word in words:
        flag, assigned, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        layer, hint = homes.get(name) or homes.get(name.removeprefix("no_"), ("", None))
        try:
            if not (flag.startswith("--") and layer) or (hint is not bool and name not in homes):
                return None
            if hint is bool and not assigned:
                changed[layer][name if name in homes else name.removeprefix("no_")] = name in homes
            else:
                changed[layer][name] = _value(text if assigned else next(words), hint, bare=not assigned)
        except (ValueError, StopIteration):
            return None
    return dataclasses.replace(
        base, **{layer: dataclasses.replace(getattr(base, layer), **values) for layer, values in changed.items()}
    )


def _value(text: str, hint: Any, bare: bool) -> Any:
    """A word as its option's type; ValueError for one that takes more than a look. `bare`: it stands by itself, where another
    option could stand."""
    if hint in (int, float) and not (bare and text.startswith("-")):
        return hint(text)
    if typing.get_origin(hint) is Literal and text in typing.get_args(hint):
        return text
    if (hint is str or (hint == (str | None) and text != "None")) and not (bare and text.startswith("-")):
        return text
    raise ValueError


def _by_tyro(argv: list[str], base: Config) -> Config:
    import tyro

    # Once the settings of the method are in it, the type of a configuration is known only now.
    omit: Any = tyro.conf.OmitArgPrefixes
    if any(word in ("-h", "--help") for word in argv):
        tyro.cli(omit[_shown(base)], args=["--help"], prog="fedmpi", description=_help())
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(omit[Config], args=argv, default=base, prog="fedmpi")
    except SystemExit as stop:
        if not stop.code:
            raise
    raise ConfigError(_unknown(argv, base) or _one_line(said.getvalue()))


def _help() -> str:
    start = "  mpirun -n 21 python -m fedmpi.main"  # a line that begins with a letter would be joined to the one before
    return (
        f"{Config.__doc__}\n\nSettings come from the preset, then from the --config file, then from the flags.\n\n"
        "Examples:\n"
        f"{start}\n"
        f"{start} --preset cifar10-s5 --data-dir DIR --epsilon 4\n"
        f"{start} --config runs/NAME/config.yaml --seed 1\n"
        f"{start} --resume runs/NAME\n"
        f"{start} --presets"
    )


def _shown(base: Config) -> type:
    """Config as --help shows it. tyro would break every text where its source line ends, print {None}|STR for what may be left
    out, name a second default behind one that is described, and not know of the option that is read before it."""
    import tyro

    from fedmpi.algorithm import method_names

    def option(name: str, hint: Any, text: str, value: Any) -> tuple:
        path = hint == (str | None)
        unset = "" if value in (None, "") else None  # otherwise tyro's own words
        shown = tyro.conf.arg(help=text, metavar="PATH" if path else None, help_behavior_hint=unset)
        return name, Annotated[str if path else hint, shown], dataclasses.field(default="" if value is None else value)

    layers: list[tuple] = []
    for layer in LAYERS:
        values = getattr(base, layer)
        kind, about = type(values), LAYERS[layer].__doc__
        texts = _texts(kind)
        if layer == "run":
            texts["method"] += f": {', '.join(method_names())}, or module:Class"
        if layer == "method":
            about = f"Settings of {base.run.method}; --method NAME --help shows those of another."
        hints = typing.get_type_hints(kind)
        options = [option(name, hint, texts.get(name, ""), getattr(values, name)) for name, hint in hints.items()]
        if layer == "run":
            file = "settings to go on with: a YAML file, grouped as below; a run's config.yaml is one"
            options.insert(1, option("config", str | None, file, None))
        shown = dataclasses.make_dataclass(kind.__name__, options, namespace={"__doc__": about})
        layers.append((layer, shown, dataclasses.field(default_factory=shown)))
    return dataclasses.make_dataclass("Config", layers)


def _texts(kind: type) -> dict[str, str]:
    """What stands below each field of a layer, in its class or in one that it inherits from, as one paragraph."""
    texts: dict[str, str] = {}
    for part in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


def _options(config: Config) -> list[str]:
    """Every option as it is typed."""
    hints = {
        name: hint for layer in LAYERS for name, hint in typing.get_type_hints(type(getattr(config, layer))).items()
    }
    names = [*hints, *(f"no_{name}" for name, hint in hints.items() if hint is bool)]
    return ["--help", "--presets", "--version", "--config", *map(_typed, names)]


def _typed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _unknown(argv: list[str], config: Config) -> str:
    """The options that there are not: whose each is, or the one that was probably meant; empty if all are known."""
    known, said, foreign = _options(config), [], False
    for word in argv:
        name = word.partition("=")[0]
        if name.startswith("--") and name.replace("_", "-") not in known:
            others = whose(name.replace("-", "_").removeprefix("__").removeprefix("no_"))
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            why = f"unknown; did you mean {near[0]}?" if near else "unknown (see fedmpi --help)"
            said.append(f"{name}: {others + ';' if others else why}")
            foreign |= bool(others)
    return " ".join([*said, own_settings(config.run.method, _typed)] if foreign else said)


def _one_line(box: str) -> str:
    """The sentence inside tyro's framed error: a title, a rule, the sentence, a rule, a hint."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        bare = line.strip(" │├┤")
        if line.lstrip().startswith(("╭", "╰")) or (bare and not bare.strip("-─")):
            sections.append([])
        else:
            sections[-1].append(bare)
    text = " ".join(" ".join(sections[min(1, len(sections) - 1)]).split()).rstrip(".")
    return f"{text} (fedmpi --help lists every option)"
