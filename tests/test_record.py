"""What a run says on the way: of clipping once, after the first round, and loudly only where it costs the run."""

import json

import pytest


def said(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "clipping:" in line]


def test_updates_that_are_mostly_cut_are_warned_of_once(make_config, run_in_memory, capsys):
    config = make_config("--rounds 3 --clip 0.0001 --epsilon inf")
    run_in_memory(config, 3)
    first = json.loads((config.out / "rounds.jsonl").read_text().splitlines()[0])
    (line,) = said(capsys)
    times = f"{first['update_norm'] / 0.0001:.2g}"
    assert line == (
        f"warning: clipping: 100% of the updates of round 1 were longer than C = 0.0001, their mean norm {times} times that; "
        "what is beyond C is lost: a larger --clip keeps more of it, and noise grows with it"
    )


def test_updates_that_are_cut_a_little_are_told_without_a_warning(make_config, run_in_memory, capsys):
    probe = make_config("--clip 9 --epsilon inf")
    run_in_memory(probe, 3)
    norm = json.loads((probe.out / "rounds.jsonl").read_text().splitlines()[0])["update_norm"]
    said(capsys)
    run_in_memory(make_config(f"--clip {norm:.6f} --epsilon inf"), 3)  # the mean: of four parties, some are above
    (line,) = said(capsys)
    assert line.startswith("clipping: ") and "their mean norm 1 times that; what is beyond C is lost" in line


@pytest.mark.parametrize(
    "flags", ["--clip 9", "--method fedrep --support dense", "--method local-only --support dense"]
)
def test_where_nothing_is_cut_nothing_is_said(flags, make_config, run_in_memory, capsys):
    run_in_memory(make_config(f"{flags} --epsilon inf"), 3)
    assert said(capsys) == []


@pytest.mark.parametrize("flags", ["--metrics none", "--metrics securesum --aggregation secure"])
def test_where_norms_stay_home_that_is_said_instead(flags, make_config, run_in_memory, capsys):
    run_in_memory(make_config(f"--clip 0.0001 --epsilon inf {flags}"), 3)
    assert said(capsys) == [
        "clipping: norms of updates stay home with these metrics, so how much C cuts is not known here"
    ]


def test_a_method_whose_bound_is_that_of_each_value_is_left_out(make_config, run_in_memory, capsys):
    run_in_memory(make_config("--preset demo-recsys --method fedmf --items 30 --ratings 80 --factors 3 --clip 0.01"), 3)
    assert said(capsys) == []


def test_a_round_that_failed_before_any_report_does_not_count_as_the_first(make_config, run_in_memory, capsys):
    config = make_config("--rounds 6 --parties 4 --sampling 0.5 --min-cohort 3 --clip 0.0001 --epsilon inf")
    run_in_memory(config, 3)
    rows = [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    first = next(row["round"] for row in rows if "clipped" in row)
    assert first > 1, "the case that this is about"
    (line,) = said(capsys)
    assert f"of the updates of round {first} were" in line


@pytest.mark.parametrize("flags", ["", "--preset demo-recsys --method fedmf --items 30 --ratings 80 --factors 3"])
def test_figures_of_validation_data_are_not_taken_for_those_of_a_test(flags, make_config, run_in_memory, capsys):
    tested = run_in_memory(make_config(flags), 3)
    assert tested["evaluated_on"] == "test" and "validation data" not in capsys.readouterr().out
    tuned = run_in_memory(make_config(f"{flags} --validation-fraction 0.3"), 3)
    assert tuned["evaluated_on"] == "validation" and tuned["data_crc32"] != tested["data_crc32"]
    assert "every figure below is of validation data" in capsys.readouterr().out
