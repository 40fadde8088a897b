"""What every script shares: arguments, one-line errors, exit codes, progress."""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import functools
import itertools
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from draftlab import config
from draftlab.errors import UserError

Variation = tuple[str, dict[str, Any]]
"""A name, and the settings that it stands for: dotted key -> value."""
Values = list[Any] | dict[str, dict[str, Any]]
"""Of a setting; or variations by name."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser with the script's docstring as its help."""
    return _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


class _Parser(argparse.ArgumentParser):
    """Options and overrides may stand in any order; a wrong one is an error like any other."""

    parse_args = argparse.ArgumentParser.parse_intermixed_args

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help tells more")


def run_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser for scripts that take a run: `--config FILE` and dotted overrides."""
    result = parser(doc)
    default = config.DEFAULT_CONFIG
    result.add_argument("--config", type=Path, default=default, help="YAML of differences from the defaults")
    result.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as draft.block_size=8")
    return result


def eval_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser for scripts that decode prompts with drafts."""
    result = run_parser(doc)
    result.set_defaults(config=None)
    result.add_argument("--ckpt", action="append", required=True, help="folder, MLflow run id, models:/ URI, or hub id")
    names = "heldout, humaneval, gsm8k, math500, mbpp, mt-bench, alpaca"
    result.add_argument(
        "--prompts", default="heldout",
        help=f"by comma: {names}, or .jsonl[.gz] files; each gives eval.prompts of its prompts, with :N behind it N",
    )  # fmt: skip
    result.add_argument("--out", type=Path, help="results folder")
    return result


def out_folder(script: str, args: argparse.Namespace) -> Path:
    """Where a script of an `eval_parser` writes: --out, or a folder named by the time."""
    return args.out or Path("outputs") / script / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")


class Sweep:
    """A script that sweeps: its arguments, and from them the whole run.

    Args:
        experiment: the script's name.
        doc: its docstring; the first line is the question that it answers.
        defaults: section -> settings in which the script differs from the defaults; a config or an override wins.
        baseline: the arm that the others are compared with, unless search.baseline names another.
        probe: settings of a trial that comes first and proposes the layers of those with draft.layer_choice=gate.
    """

    FLAGS = {
        "--search": "search.method={}",
        "--samples": "search.samples={}",
        "--scheduler": "search.scheduler={}",
        "--seeds": "search.seeds=[{}]",
        "--budget": "search.budget={}",
        "--time-budget": "search.time_budget={}",
        "--decode-sizes": "eval.block_sizes=[{}]",
        "--rank-by": "search.rank_by={}",
        "--baseline": "search.baseline='{}'",
        "--max-concurrent": "cluster.max_concurrent={}",
    }
    """Short names of settings."""

    def __init__(
        self,
        experiment: str,
        doc: str | None,
        defaults: dict[str, Any] | None = None,
        baseline: str | None = None,
        probe: dict[str, Any] | None = None,
    ) -> None:
        self.experiment, self.defaults, self.baseline, self.probe = experiment, defaults or {}, baseline, probe
        question = (doc or "").partition("\n")[0].removeprefix("Question: ")
        self.question = question[:1].upper() + question[1:]
        self.factors: dict[str, tuple[str, Values]] = {}
        self.parser = run_parser(doc)
        self.parser.set_defaults(config=None)
        self.parser.add_argument("--out", type=Path, help="the sweep's folder, new or empty")
        self.parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with an interrupted sweep")
        self.parser.add_argument("--dry-run", action="store_true", help="show the trials and what they cost, and stop")
        for flag, setting in self.FLAGS.items():
            self.parser.add_argument(flag, help=setting.format("..."))

    def vary(
        self, option: str, key: str, values: Values, read: Callable[[str], Variation] | None = None, between: str = ","
    ) -> None:
        """Offer a setting to sweep over, or variations of several settings that change together.

        Args:
            option: e.g. --block-sizes; takes other values, or names of variations.
            key: dotted; or any word, the table's column, where there are variations.
            values: of the key, or variations, unless others are given.
            read: makes a variation of what stands for it in the option; None knows the names in `values` alone.
            between: stands between two variations.
        """
        parse: Callable[[str], Values] = several
        if isinstance(values, dict):
            parse = functools.partial(_variations, read=read or functools.partial(_known, values), between=between)
        shown = f"{between} ".join(map(config.word, values))
        self.parser.add_argument(option, type=parse, metavar=f"A{between}B", help=f"{key}; by default {shown}")
        self.factors[option] = key, values

    def run(self, argv: Sequence[str] | None) -> int:
        """Start or resume the sweep, or only show it; the script's exit code."""
        args = self.parser.parse_args(argv)
        given = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if value}
        overrides = given.pop("--overrides", [])
        if args.resume:
            if besides := [*(option for option in given if option != "--resume"), *overrides]:
                raise UserError(f"--resume takes everything from the folder; expected nothing else, got {besides[0]}")
            with Progress("loading torch, Ray and MLflow") as say:
                say(f"going on with {args.resume}")
                from draftlab import sweep  # slow: after the first line is out

                return sweep.resume(args.resume, say)
        settings = [self.FLAGS[flag].format(value) for flag, value in given.items() if flag in self.FLAGS]
        vary = {key: given.get(option, values) for option, (key, values) in self.factors.items()}
        taken = {
            setting: option
            for option, (key, _) in self.factors.items()
            for setting in (itertools.chain(*vary[key].values()) if isinstance(vary[key], dict) else [key])
        }
        taken |= {self.FLAGS[flag].partition("=")[0]: flag for flag in given if flag in self.FLAGS}
        check_taken(overrides, taken)
        with Progress("loading torch, Ray and MLflow") as say:
            defaults = copy.deepcopy(self.defaults)
            if given.get("--search") == "grid":  # all combinations, not the script's own number of samples
                defaults.get("search", {}).pop("samples", None)
            if given.get("--budget") in ("steps", "tokens"):  # not the script's own seconds
                defaults.get("train", {}).pop("seconds", None)
            base = config.load(args.config or config.DEFAULT_CONFIG, [*settings, *overrides], defaults)
            values = "; ".join(f"{key} {', '.join(map(config.word, several))}" for key, several in vary.items())
            say(f"{self.experiment} for {base.target.model}: {values or f'draft.block_size {base.draft.block_size}'}")
            from draftlab import sweep

            question = sweep.Question(self.experiment, self.question, vary, self.baseline, self.probe)
            return sweep.dry_run(question, base, say) if args.dry_run else sweep.start(question, base, args.out, say)


def check_taken(overrides: Sequence[str], taken: Mapping[str, str]) -> None:
    """Refuse an override that would be ignored, for an option sets it.

    Args:
        taken: dotted key -> the option.

    Raises:
        UserError: naming both.
    """
    reasons = {key: f"{option} is what sets that here; expected it alone" for key, option in taken.items()}
    check_unused(overrides, reasons)


def check_unused(overrides: Sequence[str], reasons: Mapping[str, str]) -> None:
    """Refuse an override that would be ignored.

    Args:
        reasons: dotted key -> why it would be.

    Raises:
        UserError: naming the override, with the reason.
    """
    for override in overrides:
        if reason := reasons.get(override.partition("=")[0]):
            raise UserError(f"override {override!r}: {reason}")


def check_own_sizes(overrides: Sequence[str]) -> None:
    """Refuse eval.block_sizes where every draft is decoded with its own.

    Raises:
        UserError: it is among the overrides.
    """
    if any(override.startswith("eval.block_sizes=") for override in overrides):
        raise UserError("eval.block_sizes: here each draft is decoded with its own; evals/acceptance.py takes others")


def integers(text: str) -> list[int]:
    """Whole numbers by comma, e.g. `4,8,16`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers like 4,8,16, got {text!r}") from None


def several(text: str) -> list[Any]:
    """Numbers and words by comma, e.g. `4,8,inf` or `uniform,early`."""
    return [_value(part.strip()) for part in text.split(",")]


def _variations(text: str, read: Callable[[str], Variation], between: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, settings in (read(part.strip()) for part in text.split(between)):
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} stands there twice")
        found[name] = settings
    return found


def _known(variations: dict[str, dict[str, Any]], name: str) -> Variation:
    if name not in variations:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(variations)}, got {name!r}")
    return name, variations[name]


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def main(body: Callable[[Sequence[str] | None], int | None]) -> None:
    """Run a script's `main(argv)`: a UserError or a full disk is one line and exit code 2, Ctrl-C (and such) is 130."""
    try:
        with stoppable():
            code = body(None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except shutil.Error as error:  # of a folder that was copied: its first file that was not
        *_, reason = error.args[0][0]
        print(f"error: {reason}", file=sys.stderr)
        code = 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(f"error: {error.filename or 'writing'}: {error.strerror}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code or 0)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, once; then nothing disturbs the putting away.

    A signal that was ignored before stays so: that is what nohup is for.
    """

    def stop(_number: int, _frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in numbers if signal.getsignal(each) is not signal.SIG_IGN}
    for each in before:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Progress:
    """Lines on standard output with the time since the start; never silent for long.

    While the context is open, a line repeats what is being done whenever nothing was said for `beat` seconds.

    Args:
        what: the work, as the heartbeat names it.
        beat: seconds of silence before a heartbeat.
    """

    def __init__(self, what: str, beat: float = 15.0) -> None:
        self.what, self.beat = what, beat
        self._start = self._last = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, text: str, *, doing: str | None = None) -> None:
        """Print a line; `doing` renames the work for the heartbeats that follow."""
        with self._lock:
            self.what = doing or self.what
            self._last = time.monotonic()
            print(f"[{self._clock()}] {text}", flush=True)

    def __enter__(self) -> Progress:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        return f"{minutes:3d}:{seconds:02d}"

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            if time.monotonic() - self._last >= self.beat:
                self(f"... {self.what}")
