"""Where do a training step and a decoding round spend their time, and how do time and memory grow with the shape?

A step and a round by part, and from there one thing at a time: context, block size, anchors, draft layers, the draft's
vocabulary; and workers, which share the batch and the threads. Then the peak memory of a step by vocabulary and
anchors, its logits in chunks (`loss.chunk_rows`) and all at once. Batches are random numbers of the shape; draft and
texts are untrained, which changes no time of a call.

Run:    python tests/benchmarks/profile_step.py
        python tests/benchmarks/profile_step.py --out outputs/profile draft.block_size=16
        python tests/benchmarks/profile_step.py --device cuda
Writes: profile.png in --out; the tables are printed.
Cost:   about four minutes on two idle CPU cores.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import json
import re
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from measuring import Parts, Steps, parser, start
from torch import distributed

from draftlab import blocks, cli, decode, draft, report, train
from draftlab.config import Run
from draftlab.draft import Draft, adapt
from draftlab.features import Batch
from draftlab.target import Target, load_target

STEPS = 3
"""Steps behind a figure, after one that warms up."""
ROUNDS = 8
"""Rounds behind a figure."""
WHOLE = 1_000_000
"""Rows of logits at once: more than any step has."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("outputs/profile"), help="folder of the figure")
    options.add_argument("--quick", action="store_true", help="two values of everything instead of three or four")
    args = options.parse_args(argv)
    run = start(args, ["draft.init=random"])
    if run is None:
        return 0
    target = load_target(run.target)
    sizes = grid(run, target.vocab_size, args.quick)
    training, decoding, memory = steps(run, target, sizes), rounds(run, target, sizes), peaks(run, target, sizes)
    if args.device == "cpu":  # a GPU is one worker's
        training = pd.concat([training, by_workers(run, 1 if args.quick else STEPS)], ignore_index=True)
    titles = ("A training step, ms", "A decoding round, ms", "Peak memory")
    for title, frame in zip(titles, (training, decoding, memory)):
        print(f"\n{title}\n{frame.to_string(index=False, float_format='%.1f', na_rep='')}")
    args.out.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(report.STYLE):
        figure(training, decoding, memory).savefig(args.out / "profile.png")
    print(f"\n{args.out / 'profile.png'}")
    return 0


def grid(run: Run, vocab_size: int, quick: bool) -> dict[str, list[int]]:
    """Setting -> its values, the run's own in the middle of most."""
    size, anchors, layers = run.draft.block_size, run.train.anchors, run.draft.num_hidden_layers
    values = {
        "corpus.max_length": [run.corpus.max_length * by // 4 for by in (1, 2, 4, 8)],
        "draft.block_size": sorted({max(2, size // 2), size, 2 * size}),
        "train.anchors": [anchors, 2 * anchors, 4 * anchors],
        "draft.num_hidden_layers": sorted({1, layers, layers + 2}),
        "draft.vocab": sorted({run.draft.vocab or vocab_size, vocab_size // 3, vocab_size}),
    }
    return {key: several[:: len(several) - 1] if quick else several for key, several in values.items()}


def points(run: Run, sizes: dict[str, list[int]], without: str = "") -> list[tuple[dict[str, Any], Run]]:
    """(what varies and its value, the run) of the run itself and of every other value of one setting at a time."""
    found: list[tuple[dict[str, Any], Run]] = [({"varied": "", "value": None}, run)]
    for key, several in sizes.items():
        if key != without:
            found += [({"varied": key, "value": value}, run.replace({key: value})) for value in several]
    return found


# ---- training


class Random:
    """Batches of random numbers, every row of full length and supervised, as `features.Features`."""

    def __init__(self, target: Target, run: Run) -> None:
        self.layer_ids = adapt(target.config, run.draft, target.mask_token_id).target_layer_ids
        n, length = run.train.batch_size, run.corpus.max_length
        random = torch.Generator().manual_seed(0)
        features = torch.randn(n, length, len(self.layer_ids) * target.hidden_size, generator=random)
        self.made = Batch(
            ids=torch.randint(run.draft.vocab or target.vocab_size, (n, length), generator=random),
            supervised=torch.ones(n, length, dtype=torch.bool),
            lengths=torch.full((n,), length),
            features=features.bfloat16(),
            rows=torch.arange(n),
            last_hidden=None,
        )

    def batch(self, rows: Sequence[int]) -> Batch:
        """The same one, whatever the rows."""
        return self.made


def loop(run: Run, target: Target, rank: int = 0, world_size: int = 1) -> Steps:
    """Training on random batches, after a step that warmed up; rank and world_size as in `train.train`."""
    prepared = train.Prepared(
        target={}, corpus={}, train_rows=tuple(range(64)), heldout_rows=(), store=None,
        vocabulary=tuple(range(run.draft.vocab or 0)), provenance={},
    )  # fmt: skip
    share = run.replace({"train.batch_size": run.train.batch_size // world_size})
    step = Steps(run, prepared, target, Random(target, share), rank, world_size)
    step()
    return step


def measured(step: Steps, count: int) -> dict[str, float]:
    """Milliseconds of a training step by part."""
    found = []
    for _ in range(count):
        with training_parts(step) as parts:
            step()
        found.append({**parts.seconds, "rest": parts.rest})
    return in_ms(found)


def steps(run: Run, target: Target, sizes: dict[str, list[int]]) -> pd.DataFrame:
    """Milliseconds of a training step by part, a row a shape."""
    return pd.DataFrame([point | measured(loop(shaped, target), STEPS) for point, shaped in points(run, sizes)])


def by_workers(run: Run, count: int) -> pd.DataFrame:
    """The same step by 1, 2 and 4 workers, processes of this machine that share its threads; as the first sees it."""
    rows = []
    for workers in (1, 2, 4):
        if run.train.batch_size % workers == 0 and workers <= torch.get_num_threads():
            with tempfile.TemporaryDirectory() as folder:
                threads = torch.get_num_threads() // workers
                torch.multiprocessing.spawn(worker, (workers, threads, run, count, Path(folder)), nprocs=workers)
                row = json.loads((Path(folder) / "row.json").read_text())
            rows.append({"varied": "train.workers", "value": workers} | row)
    return pd.DataFrame(rows)


def worker(rank: int, world_size: int, threads: int, run: Run, count: int, folder: Path) -> None:
    """One process; the first writes what it measured into row.json."""
    torch.set_num_threads(threads)
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world_size)
    try:
        row = measured(loop(run, load_target(run.target), rank, world_size), count)
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        (folder / "row.json").write_text(json.dumps(row))


def training_parts(step: Steps) -> Parts:
    """A step by part; the backward pass through the head is done in its forward pass (see draftlab.loss)."""
    attention = draft._backend(step.loop.draft.attention, step.loop.device)
    return Parts(
        ("batch, anchors", step.loop.data, "batch"),
        ("batch, anchors", blocks, "sample_anchors"),
        ("batch, anchors", train, "make_blocks"),
        ("batch, anchors", train, "_coverage"),
        ("context", Draft, "contexts"),
        ("q, k, v", draft.Attention, "queries"),
        ("q, k, v", draft.Attention, "keys_values"),
        ("attention", attention, "__init__"),
        ("attention", attention, "__call__"),
        ("MLP", draft.MLP, "forward"),
        ("other layers", step.loop, "_hidden"),
        ("head, loss and its gradient", train, "through_head"),
        ("backward", torch.Tensor, "backward"),
        ("optimizer", torch.nn.utils, "clip_grad_norm_"),
        ("optimizer", step.loop.optimizer, "step"),
    )


def peaks(run: Run, target: Target, sizes: dict[str, list[int]]) -> pd.DataFrame:
    """Megabytes that a step needs beyond weights and optimizer state, logits in chunks and all at once."""
    rows = []
    for vocab in sizes["draft.vocab"]:
        for anchors in sizes["train.anchors"]:
            row = {"vocabulary": vocab, "anchors": anchors}
            for name, chunk in (("chunked MB", run.loss.chunk_rows), ("at once MB", WHOLE)):
                shaped = run.replace({"draft.vocab": vocab, "train.anchors": anchors, "loss.chunk_rows": chunk})
                row[name] = peak(loop(shaped, target))
            rows.append(row)
    return pd.DataFrame(rows)


def peak(step: Steps) -> float:
    """Most megabytes at once that a step adds; NaN where the system doesn't tell."""
    step.loop.optimizer.zero_grad(set_to_none=True)  # a step's own gradients are of what it adds
    gc.collect()
    if step.loop.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier steps freed is the system's again
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size from now on
        before = resident("VmRSS")
        step()
        return resident("VmHWM") - before
    except (OSError, AttributeError):
        return float("nan")


def resident(name: str) -> float:
    """A line of Linux's /proc/self/status, in megabytes."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1e3


# ---- decoding


class Enough(Exception):
    """Leaves a decoding whose rounds have been counted."""


def rounds(run: Run, target: Target, sizes: dict[str, list[int]]) -> pd.DataFrame:
    """Milliseconds of a decoding round by part, a row a shape; the context is `corpus.max_length`."""
    target = copy.copy(target)
    target.eos_token_ids = frozenset()  # calls are timed; the texts don't matter and should not end
    rows = []
    for point, shaped in points(run, sizes, without="train.anchors"):
        model = Draft(adapt(target.config, shaped.draft, target.mask_token_id))
        if shaped.draft.vocab:
            model.set_vocabulary(torch.arange(shaped.draft.vocab))
        model.reset(run.seed)
        model = model.to(target.device, target.dtype).eval()
        prompt = (torch.arange(shaped.corpus.max_length) % target.vocab_size).tolist()
        found = [one_round(target, model, prompt) for _ in range(STEPS + 1)][1:]
        rows.append(point | in_ms(found))
    return pd.DataFrame(rows)


def one_round(target: Target, model: Draft, prompt: list[int]) -> dict[str, float]:
    """Mean seconds of a round by part, after one that warms up; blocks are whole, since no text gets near its limit."""
    calls = count()
    with decoding_parts(target, model) as parts, contextlib.suppress(Enough):
        propose = model.propose

        def counted(*args) -> torch.Tensor:
            call = next(calls)
            if call == 1:
                parts.restart()
            if call == 1 + ROUNDS:
                raise Enough
            return propose(*args)

        with patch.object(model, "propose", counted):
            decode.decode_speculative(target, model, [prompt], (ROUNDS + 3) * model.spec.block_size)
    return {part: seconds / ROUNDS for part, seconds in {**parts.seconds, "rest": parts.rest}.items()}


def decoding_parts(target: Target, model: Draft) -> Parts:
    """A round by part."""
    return Parts(
        ("draft", model, "propose"),
        ("draft's head", decode, "_guess"),
        ("target", target, "forward"),
        ("target's head, decision", decode, "_verify"),
        ("draft's cache", model, "extend"),
        ("bookkeeping", decode, "_commit"),
    )


# ---- what is shown


def in_ms(found: list[dict[str, float]]) -> dict[str, float]:
    """Median milliseconds of each part and of all."""
    parts = {part: 1e3 * median(one.get(part, 0.0) for one in found) for part in found[0]}
    return {"all": 1e3 * median(sum(one.values()) for one in found), **parts}


def figure(training: pd.DataFrame, decoding: pd.DataFrame, memory: pd.DataFrame) -> Figure:
    """A row each for the step and the round: by part, then growth; memory in the place that is left."""
    drawn = Figure(figsize=(18, 6.4))
    axes = drawn.subplots(2, 7)
    for row, (frame, title) in zip(axes, ((training, "training step"), (decoding, "decoding round"))):
        parts = [name for name in frame.columns if name not in ("varied", "value", "all")]
        row[0].barh(parts[::-1], frame.loc[0, parts[::-1]].astype(float), color=report.INK)
        row[0].set_title(f"{title}: {frame.loc[0, 'all']:.0f} ms")
        row[0].set_xlabel("ms")
        for axis, (key, some) in zip(row[1:], frame[frame["varied"] != ""].groupby("varied", sort=False)):
            axis.plot(some["value"].astype(float), some["all"], color=report.INK, marker="o", markersize=4)
            axis.set_ylim(0, 1.1 * some["all"].max())
            axis.set_xlabel("context" if key == "corpus.max_length" else key)
            axis.set_ylabel(f"ms a {title.split()[1]}")
    for axis in axes[:, 1:].flat:
        axis.set_visible(axis.has_data() or axis is axes[1, -1])
    names = ("chunked MB", report.INK), ("at once MB", report.BAD)
    for name, color in names:
        axes[1, -1].plot(memory["vocabulary"] * memory["anchors"], memory[name], "o", color=color, label=name[:-3])
    axes[1, -1].set_ylim(0)
    axes[1, -1].set_xlabel("vocabulary x anchors")
    axes[1, -1].set_ylabel("MB at the peak of a step")
    axes[1, -1].legend()
    return drawn


if __name__ == "__main__":
    cli.main(main)
