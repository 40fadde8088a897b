"""What scripts share: arguments, exit codes, and progress that is never silent for long."""

import errno
import os
import shutil
import re
import signal
import time

import pytest

from draftlab import cli, config, sweep
from draftlab.errors import UserError


def exit_code(body):
    with pytest.raises(SystemExit) as caught:
        cli.main(body)
    return caught.value.code


@pytest.mark.parametrize("result, code", [(None, 0), (0, 0), (1, 1), (3, 3)])
def test_a_script_exits_with_what_its_main_returns(result, code):
    seen = []
    assert exit_code(lambda argv: seen.append(argv) or result) == code
    assert seen == [None]  # argparse then reads the command line


def test_a_user_error_is_one_line_and_exit_code_2(capsys):
    def body(argv):
        raise UserError("expected 8, got 7")

    assert exit_code(body) == 2
    out, err = capsys.readouterr()
    assert err == "error: expected 8, got 7\n" and not out


def test_ctrl_c_is_exit_code_130_without_a_traceback(capsys):
    def body(argv):
        raise KeyboardInterrupt

    assert exit_code(body) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_programming_error_keeps_its_traceback():
    def body(argv):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.main(body)


def test_a_run_parser_takes_a_config_and_overrides_in_any_order():
    parser = cli.run_parser("What it is.")
    parser.add_argument("--out")
    nothing = parser.parse_args([])
    assert (nothing.config, nothing.overrides) == (config.DEFAULT_CONFIG, [])
    orders = (
        "a.b=1 c=2 --config x.yaml --out o",
        "--config x.yaml a.b=1 --out o c=2",
        "--out o --config x.yaml a.b=1 c=2",
    )
    for line in orders:
        args = parser.parse_args(line.split())
        assert (str(args.config), args.overrides, args.out) == ("x.yaml", ["a.b=1", "c=2"], "o")


def test_help_shows_the_scripts_docstring_as_it_was_written(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run_parser("Question:  one\nCost:      two").parse_args(["--help"])
    assert caught.value.code == 0
    assert "Question:  one\nCost:      two" in capsys.readouterr().out


def test_an_unknown_option_is_an_error_of_one_line():
    with pytest.raises(UserError, match="^unrecognized arguments: --confg.*--help tells more$"):
        cli.run_parser("x").parse_args(["--confg", "x.yaml"])


def test_progress_prints_each_line_with_the_time_since_the_start(capsys):
    progress = cli.Progress("work")
    progress("loading")
    progress("training", doing="training trial a")
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\[ *0:0\d\] loading", first)
    assert re.fullmatch(r"\[ *0:0\d\] training", second)


def test_a_silent_stretch_is_filled_by_what_is_being_done(capsys):
    with cli.Progress("waiting for the target", beat=0.1) as progress:
        time.sleep(1.3)
        progress("there", doing="decoding")
        time.sleep(1.3)
    time.sleep(1.2)
    lines = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "... waiting for the target"
    assert lines[lines.index("there") + 1 :] == ["... decoding"] * (len(lines) - lines.index("there") - 1)
    assert lines[-1] == "... decoding"


def test_no_heartbeat_comes_while_lines_do(capsys):
    with cli.Progress("work", beat=1.5) as progress:
        for i in range(5):
            progress(f"line {i}")
            time.sleep(0.4)
    assert [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()] == [f"line {i}" for i in range(5)]


def test_the_default_heartbeat_is_well_within_half_a_minute():
    assert cli.Progress("work").beat <= 25


def test_a_full_disk_is_one_line_and_exit_code_2(capsys):
    def body(argv):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/layer_001.bin")

    with pytest.raises(SystemExit) as caught:
        cli.main(body)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: /cache/layer_001.bin: No space left on device\n"


def test_a_disk_that_is_full_while_a_folder_is_copied_is_one_line_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "model.safetensors").touch()

    def full(source, to, **_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))

    def body(argv):
        shutil.copytree(tmp_path / "from", tmp_path / "to", copy_function=full)

    with pytest.raises(SystemExit) as caught:
        cli.main(body)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "No space left on device" in said and said.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_script_that_is_told_to_stop_puts_away_once_and_exits_with_130(number):
    seen = []

    def body(argv):
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        except KeyboardInterrupt:
            os.kill(os.getpid(), number)  # impatience changes nothing
            time.sleep(0.1)
            seen.append("put away")
            raise

    before = signal.signal(number, signal.default_int_handler)  # a job in the background starts with SIGINT ignored
    try:
        assert exit_code(body) == 130 and seen == ["put away"]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_signal_that_was_ignored_stays_ignored_as_nohup_wants_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert exit_code(lambda argv: os.kill(os.getpid(), signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def asked(monkeypatch):
    """What a script asks, not run: (what it varies, the base), after `script(argv)`."""
    seen = []
    monkeypatch.setattr(sweep, "start", lambda question, base, out, say: seen.append((question, base)) or 0)
    return seen


COURSES = {"plain": {"train.lr": 1e-3}, "long": {"train.lr": 1e-4, "train.steps": 9}}


def course(*argv):
    script = cli.Sweep("course", "Question: which course?")
    script.vary("--courses", "course", COURSES)
    return script.run(["--config", str(config.CONFIGS / "tiny.yaml"), *argv])


def test_variations_are_chosen_by_their_names(asked):
    course()
    course("--courses", "long, plain")
    course("--courses", "long")
    assert [question.vary["course"] for question, _ in asked] == [COURSES, COURSES, {"long": COURSES["long"]}]
    assert list(asked[1][0].vary["course"]) == ["long", "plain"]


@pytest.mark.parametrize(
    "argv, complaint",
    [
        (["--courses", "plain,lng"], "argument --courses: expected some of plain, long, got 'lng'"),
        (["--courses", "plain,plain"], "argument --courses: plain stands there twice"),
        (["train.steps=3"], "override 'train.steps=3': --courses is what sets that here"),
    ],
)
def test_what_variations_do_not_leave_open_is_refused(asked, argv, complaint):
    with pytest.raises(UserError, match=re.escape(complaint)):
        course(*argv)
    assert not asked


@pytest.mark.parametrize(
    "argv, budget, seconds",
    [([], "time", 60.0), (["--budget=time", "train.seconds=5"], "time", 5.0), (["--budget=steps"], "steps", None)],
)
def test_a_scripts_own_seconds_give_way_to_another_budget(asked, argv, budget, seconds):
    defaults = {"search": {"budget": "time"}, "train": {"seconds": 60.0}}
    script = cli.Sweep("timed", "Question: which?", defaults)
    script.run(["--config", str(config.CONFIGS / "tiny.yaml"), *argv])
    _, base = asked[0]
    assert (base.search.budget, base.train.seconds) == (budget, seconds) and defaults["train"]


def test_a_setting_that_no_chosen_variation_has_is_free(asked):
    course("--courses", "plain", "train.steps=3")
    assert asked[0][1].train.steps == 3


def test_an_override_of_what_an_option_sets_is_refused():
    cli.check_taken(["eval.prompts=3"], {"target.dtype": "--dtype"})
    with pytest.raises(UserError, match="^override 'target.dtype=bfloat16': --dtype is what sets that here"):
        cli.check_taken(["eval.prompts=3", "target.dtype=bfloat16"], {"target.dtype": "--dtype"})


def test_values_by_comma_are_numbers_where_they_can_be():
    assert cli.several("4, 8,inf,0.5,uniform") == [4, 8, float("inf"), 0.5, "uniform"]
