"""What a job says while it runs, where nobody watches."""

import pytest

from fedmpi.report import terminal


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def lines(monkeypatch, capsys):
    """What a run of such rounds prints, as lines; `about` is what the rows say beside round and seconds."""
    monkeypatch.setattr(terminal, "screen_behind_launcher", lambda environ: None)
    monkeypatch.delenv("FEDMPI_PROGRESS", raising=False)

    def run(seconds, rounds, about=lambda round: {"loss": 0.5}, first=1):
        clock = Clock()
        shown = terminal.Terminal(clock)
        clock.now += 500  # data is read, and parties train alone for the closing table, before the first round
        epsilon = {"epsilon_outside": None, "epsilon_nominal": 1.314, "epsilon_kind": "simulated"}
        for round in range(first, rounds + 1):
            clock.now += seconds
            shown.progress({"round": round, "seconds": seconds} | epsilon | about(round), rounds)
        return capsys.readouterr().out.splitlines()

    return run


def rounds_of(said):
    return [int(line.split("/")[0].removeprefix("round ")) for line in said]


def test_quick_rounds_have_a_line_a_minute_and_the_last_one(lines):
    assert rounds_of(lines(seconds=25, rounds=10)) == [3, 6, 9, 10]


def test_slow_rounds_have_a_line_each(lines):
    assert rounds_of(lines(seconds=90, rounds=4)) == [1, 2, 3, 4]


@pytest.mark.parametrize("rounds", [1, 30])
def test_a_run_of_less_than_a_minute_has_one_line(rounds, lines):
    assert rounds_of(lines(seconds=1.5, rounds=rounds)) == [rounds]


def test_a_line_says_where_the_run_is_what_it_reached_and_how_long_it_takes(lines):
    def about(round):
        return {"loss": 0.4124} | ({"accuracy": 0.812} if round == 10 else {})

    said = lines(seconds=5, rounds=30, about=about)
    assert said[0] == "round 12/30  loss 0.412  accuracy 81.20 %  ε 1.31 simulated  5.0 s a round, 90 s left"
    assert said[-1] == "round 30/30  loss 0.412  accuracy 81.20 %  ε 1.31 simulated  5.0 s a round"


def test_rating_runs_say_their_error_and_runs_without_figures_what_they_have(lines):
    assert lines(60, 200, lambda round: {"rmse": 0.91234})[0] == (
        "round 1/200  rmse 0.9123  ε 1.31 simulated  60 s a round, 3.3 h left"
    )
    none = {"epsilon_nominal": None, "epsilon_kind": "none", "skipped": "cohort below min_cohort (3)"}
    assert lines(70, 41, lambda round: none)[0] == "round 1/41  ε none  70 s a round, 47 min left"


def test_the_time_left_of_a_resumed_run_is_that_of_its_own_rounds(lines):
    said = lines(seconds=30, rounds=24, first=21)
    assert rounds_of(said) == [22, 24] and said[0].endswith("30 s a round, 60 s left")


def test_who_wants_silence_has_it(lines, monkeypatch):
    monkeypatch.setenv("FEDMPI_PROGRESS", "0")
    assert lines(seconds=90, rounds=3) == []


def test_a_person_at_a_terminal_has_the_bar_and_no_lines(lines, monkeypatch, tmp_path):
    screen = tmp_path / "screen"
    monkeypatch.setattr(terminal, "screen_behind_launcher", lambda environ: str(screen))
    assert lines(seconds=90, rounds=3) == []
    assert "3/3" in screen.read_text()


class Gone:
    """A stdout whose reader, or whose disk, is gone."""

    encoding = "utf-8"

    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error

    def isatty(self):
        return False


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        BrokenPipeError(),
        OSError(5, "Input/output error"),
        UnicodeEncodeError("ascii", "ε", 0, 1, "x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_run_goes_on_when_nobody_can_be_told(error, make_config, run_in_memory, monkeypatch):
    config = make_config("--rounds 2")
    monkeypatch.setattr("sys.stdout", Gone(error))
    run_in_memory(config, 3)
    assert (config.out / "model.npz").exists() and (config.out / "summary.json").exists()


def test_the_closing_table_has_a_row_for_everything_that_was_asked(make_config, run_in_memory):
    from fedmpi.privacy.account import fold
    from fedmpi.privacy.releases import ReleaseLog
    from fedmpi.report.terminal import closing_rows

    config = make_config("--local-epochs 1 --aggregation hybrid --clear-parties 1 --parties 6 --dropout 1:2:mask")
    summary = run_in_memory(config, 3)
    rows = {
        label.strip(): value
        for label, value, _ in closing_rows(summary, fold(ReleaseLog.read(config.out).events).statement())
    }
    assert rows["accuracy"] == f"{100 * summary['accuracy']:.2f} %"
    assert {"untrained extractor", "local only", "memory", "time  DH", "time  Shamir split", "time  PRG"} <= set(rows)
    assert rows["ε outside"] == f"{summary['epsilon_outside']:.4g}" and rows["ε server"] == "none"
    assert (
        rows["ε party"] == f"{summary['epsilon_party']:.4g}"
        and rows["ε nominal"] == f"{summary['epsilon_nominal']:.4g}"
    )
    assert rows["kind"] == "simulated" and rows["dropouts"] == "1 + 0"
    assert rows["model"] == summary["model_sha256"][:16]
    assert {"bytes up", "bytes down"} <= set(rows)
