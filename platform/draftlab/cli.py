"""What every script shares: arguments, one-line errors, exit codes, progress."""

from __future__ import annotations

import argparse
import errno
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from draftlab import config
from draftlab.errors import UserError


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


def sweep_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser for scripts that sweep: a run, the sweep's folder, and going on with it."""
    result = run_parser(doc)
    result.add_argument("--out", type=Path, help="the sweep's folder; must not exist yet")
    result.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with an interrupted sweep")
    return result


def eval_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser for scripts that decode prompts with drafts."""
    result = run_parser(doc)
    result.set_defaults(config=None)
    result.add_argument("--ckpt", action="append", required=True, help="folder, MLflow run id, models:/ URI, or hub id")
    names = "heldout, humaneval, gsm8k, math500, mbpp, mt-bench, alpaca"
    result.add_argument(
        "--prompts", default="heldout", help=f"by comma: {names}, or .jsonl[.gz] files; :N behind one takes N of it"
    )
    result.add_argument("--out", type=Path, help="results folder")
    return result


def out_folder(script: str, args: argparse.Namespace) -> Path:
    """Where a script of an `eval_parser` writes: --out, or a folder named by the time."""
    return args.out or Path("outputs") / script / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")


def run_sweep(experiment: str, args: argparse.Namespace, vary: Mapping[str, Sequence[Any]]) -> int:
    """Start or resume a sweep as the arguments of a `sweep_parser` say; the script's exit code.

    Args:
        experiment: the script's name.
        vary: dotted key -> its values; every combination is a trial.
    """
    if args.resume and (args.out or args.overrides):
        raise UserError("--resume takes everything from the folder; expected no --out and no overrides")
    with Progress("loading torch, Ray and MLflow") as say:
        if args.resume:
            say(f"going on with {args.resume}")
            from draftlab import sweep  # slow: after the first line is out

            return sweep.resume(args.resume, say)
        base = config.load(args.config, args.overrides)
        values = "; ".join(f"{key} {', '.join(map(str, several))}" for key, several in vary.items())
        say(f"{experiment} for {base.target.model}: {values or f'draft.block_size {base.draft.block_size}'}")
        from draftlab import sweep

        return sweep.start(experiment, base, vary, args.out, say)


def integers(text: str) -> list[int]:
    """The type of an option that takes several whole numbers, by comma."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers like 4,8,16, got {text!r}") from None


def main(body: Callable[[Sequence[str] | None], int | None]) -> None:
    """Run a script's `main(argv)`: a UserError or a full disk is one line and exit code 2, Ctrl-C is 130."""
    try:
        code = body(None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
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
