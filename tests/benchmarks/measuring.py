"""What the benchmarks share: their device, their clock, ways that take turns, and where the time goes."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch

from draftlab import cli, config, train
from draftlab.config import Run
from draftlab.target import Target, cache_root

Measured = TypeVar("Measured")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of a run with `--device`."""
    result = cli.run_parser(doc)
    result.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return result


def start(args: argparse.Namespace, settings: Sequence[str] = ()) -> Run | None:
    """The run to measure, said; None, said too, where the device is missing.

    Args:
        settings: the benchmark's own, which overrides replace.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: --device cuda was asked for, and this machine has no GPU")
        return None
    run = config.load(args.config, [*settings, f"target.device={args.device}", *args.overrides])
    if run.train.threads:
        torch.set_num_threads(run.train.threads)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"{run.target.model} in {run.target.dtype}, {name}, torch {torch.__version__}")
    return run


def now() -> float:
    """Seconds on the clock, when the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def alternate(ways: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """What each way gave in each round. They take turns, there and back; a first round only warms up."""
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            value = ways[name]()
            if number:
                found[name].append(value)
    return found


@contextmanager
def own_cache() -> Iterator[Path]:
    """A new cache folder, in which only the targets and corpora are there already."""
    with tempfile.TemporaryDirectory() as folder:
        for kept in ("targets", "corpora"):
            if (cache_root() / kept).is_dir():
                (Path(folder) / kept).symlink_to(cache_root() / kept)
        with patch.dict(os.environ, DRAFTLAB_CACHE=folder):
            yield Path(folder)


class Parts:
    """While it is open, the seconds that some functions take, less those of the ones inside them.

    Args:
        places: (part, owner, name) of each function; parts may have several.
    """

    def __init__(self, *places: tuple[str, object, str]) -> None:
        self.places = places

    def __enter__(self) -> Parts:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner, self._patches = [0.0], ExitStack()
        for part, owner, name in self.places:
            self._patches.enter_context(patch.object(owner, name, self._timed(part, getattr(owner, name))))
        self.restart()
        return self

    def restart(self) -> None:
        """Forget what was measured; not inside one of the functions."""
        self.seconds.clear()
        self._began = now()

    def __exit__(self, *_: object) -> None:
        self.total = now() - self._began
        self._patches.close()

    @property
    def rest(self) -> float:
        """Seconds in none of them."""
        return self.total - sum(self.seconds.values())

    def _timed(self, part: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            began = now()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                spent = now() - began
                self.seconds[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        return timed


class Steps:
    """draftlab's training, a step a call.

    Args:
        prepared: as `train.prepare` gave it.
        data: other batches than the prepared ones.
        rank, world_size: this worker among all, as in `train.train`.
    """

    def __init__(
        self, run: Run, prepared: train.Prepared, target: Target, data: object | None = None,
        rank: int = 0, world_size: int = 1,
    ) -> None:  # fmt: skip
        with ExitStack() as stack:
            stack.enter_context(patch.object(train, "load_target", lambda _: target))
            if data is not None:
                stack.enter_context(patch.object(train._Loop, "_open", lambda *_: data))
            self.loop = train._Loop(run, prepared, rank, world_size, None, Path())

    def __call__(self) -> tuple[int, float]:
        """Supervised tokens and seconds of one step."""
        began = now()
        numbers = self.loop._train_step()
        spent = now() - began
        self.loop.step, self.loop.seconds = self.loop.step + 1, self.loop.seconds + spent
        return int(numbers["valid_slots"]), spent
