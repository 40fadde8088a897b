"""How fast is a training step: against a plain script of the published recipe, and against its matrix products alone?

The plain script trains the same draft on the same batches and anchors with one dense attention mask and the logits of
every slot at once (arXiv:2602.06036), features given; `in the loop` also runs the target in each step, as it does. The
products are those of our step, recorded and run again with nothing around them. All alternate in one process.

Run:    python tests/benchmarks/bench_train.py
        python tests/benchmarks/bench_train.py --block-sizes 8 --rounds 1 train.threads=1
Cost:   about six minutes on two idle CPU cores, plus the features of 200 conversations the first time.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from draftlab import blocks, cli, config, features, train
from draftlab.config import Run
from draftlab.draft import Draft, adapt
from draftlab.init import initialise
from draftlab.target import Target, load_target

SHAPE = ["corpus.conversations=200", "train.batch_size=4", "train.anchors=32", "eval.offline_conversations=1"]
STEPS = 4
"""Of each way in each round; the first one warms up."""
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}


class Products(TorchDispatchMode):
    """Shapes and strides of every matrix product under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            operands = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.seen.append(tuple((x.shape, x.stride(), x.dtype) for x in operands))
        return function(*args, **(kwargs or {}))

    def again(self) -> float:
        """Seconds that the recorded products take by themselves."""
        made: dict[tuple, torch.Tensor] = {}
        for operand in {operand for pair in self.seen for operand in pair}:
            shape, stride, dtype = operand
            made[operand] = torch.empty_strided(shape, stride, dtype=dtype).normal_()
        began = time.perf_counter()
        for a, b in self.seen:
            made[a] @ made[b]
        return time.perf_counter() - began


class Plain:
    """The published recipe, straightforwardly: dense mask, all logits in float32, AdamW."""

    def __init__(self, run: Run, prepared: train.Prepared, target: Target, in_the_loop: bool) -> None:
        self.run, self.prepared, self.target, self.in_the_loop = run, prepared, target, in_the_loop
        spec = adapt(target.config, run.draft, target.mask_token_id)
        self.data = features.open_store(Path(prepared.store), spec.target_layer_ids)
        self.draft = Draft(spec, "dense")
        initialise(self.draft, target, "random", run.seed, torch.zeros(1, 8, dtype=torch.int64))
        self.optimizer = torch.optim.AdamW(self.draft.parameters(), lr=run.train.lr)
        self.weights = blocks.position_weights(spec.block_size, run.gamma)
        self.step = 0

    def __call__(self) -> float:
        """One step; supervised tokens a second."""
        run, began = self.run, time.perf_counter()
        pairs = train.rows_of_step(self.step, run.train.batch_size, self.prepared.train_rows, run.seed)
        batch = self.data.batch([row for _, row in pairs])
        if self.in_the_loop:
            batch.features, _ = self.target.tapped(batch.ids, batch.lengths, self.draft.spec.target_layer_ids)
        anchors, valid = blocks.sample_anchors(
            blocks.anchor_candidates(batch.supervised, batch.lengths), run.train.anchors,
            [(run.seed, epoch, row) for epoch, row in pairs],
        )  # fmt: skip
        part = train.make_blocks(batch, anchors, valid, self.draft.spec, self.weights)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.draft(batch.features, self.target.ends.embedding(part.tokens), anchors)
            logits = hidden @ self.target.ends.head.weight.T
        losses = F.cross_entropy(logits.float().flatten(0, -2), part.labels.flatten(), reduction="none")
        self.optimizer.zero_grad()
        ((losses * part.weights.flatten()).sum() / part.weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), run.train.clip)
        self.optimizer.step()
        self.step += 1
        return int((part.weights > 0).sum()) / (time.perf_counter() - began)


def ours(run: Run, prepared: train.Prepared) -> list[float]:
    """Supervised tokens a second of each step of a run."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        train.train(
            run, prepared, rank=0, world_size=1, workdir=Path(folder),
            report=lambda now: found.append(now.metrics["tokens_per_second"]),
        )  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.add_argument("--block-sizes", type=cli.integers, default=[8, 16], metavar="N,N,...")
    parser.add_argument("--vocab", type=int, default=8192, help="of the draft with a reduced vocabulary")
    parser.add_argument("--rounds", type=int, default=3, help="each way runs this often")
    args = parser.parse_args(argv)
    base = config.load(args.config, [*SHAPE, f"train.steps={STEPS}", f"train.eval_every={STEPS}", *args.overrides])
    if base.train.threads:
        torch.set_num_threads(base.train.threads)
    train.REPORT_SECONDS = -1.0  # every step
    runs = {
        (size, vocab): base.replace({"draft.block_size": size, "draft.vocab": vocab})
        for size in args.block_sizes
        for vocab in (None, args.vocab)
    }
    prepared = train.prepare({str(key): run for key, run in runs.items()}, print)
    target = load_target(base.target)
    for size in args.block_sizes:
        ways: dict[str, Callable[[], list[float]]] = {}
        for name, in_the_loop in (("plain", False), ("plain, target in the loop", True)):
            step = Plain(runs[size, None], prepared, target, in_the_loop)
            ways[name] = lambda step=step: [step() for _ in range(STEPS)]
        for name, vocab in (("draftlab", None), (f"draftlab, vocab {args.vocab}", args.vocab)):
            ways[name] = lambda vocab=vocab: ours(runs[size, vocab], prepared)
        with Products() as products:
            ours(runs[size, None].replace({"train.steps": 1}), prepared)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        alone = []
        for _ in range(args.rounds):
            for name, way in ways.items():
                rates[name] += way()[1:]
            alone.append(products.again())
        report(size, base, rates, median(alone))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")
    return 0


def report(size: int, run: Run, rates: dict[str, list[float]], products: float) -> None:
    """One block size's table."""
    shape = f"{run.train.batch_size} sequences x {run.train.anchors} anchors"
    print(f"\nblock size {size}, {shape}, {torch.get_num_threads()} threads, supervised tokens/s (medians)")
    for name, values in rates.items():
        print(f"  {name:28} {median(values):8.0f}  x {median(values) / median(rates['plain']):.2f} of plain")
    print(f"  the step's matrix products alone take {products * 1e3:.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
