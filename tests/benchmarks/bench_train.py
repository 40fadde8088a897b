"""How fast is a training step: against a plain script of the published recipe, and against its matrix products alone?

The plain script trains the same draft on the same batches and anchors with one dense attention mask and the logits of
every slot at once (arXiv:2602.06036), features given; `in the loop` also runs the target in each step, as it does. The
products are those of the same step of ours, recorded and run again with nothing around them. All take turns in one
process. `compiled` is train.compile=true, where there is a C++ compiler. What comes before the steps is not counted: to
compile, and to store the features once (`bench_quality.py` tells what that costs).

Run:    python tests/benchmarks/bench_train.py
        python tests/benchmarks/bench_train.py --block-sizes 8 --rounds 1 train.threads=1
        python tests/benchmarks/bench_train.py --device cuda
Cost:   about six minutes on two idle CPU cores, two of them compiling, plus the features of 200 conversations the first
    time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from measuring import Steps, alternate, now, parser, start
from torch.utils._python_dispatch import TorchDispatchMode

from draftlab import blocks, cli, features, train
from draftlab.config import LossConfig, Run
from draftlab.draft import Draft, adapt
from draftlab.init import initialise
from draftlab.target import Target, load_target

SHAPE = ["corpus.conversations=200", "train.batch_size=4", "train.anchors=32", "draft.vocab=null"]
SETTLED = {
    "draft.block_size": "--block-sizes names them",
    "draft.vocab": "--vocab is the reduced one, beside the whole",
    "train.compile": "steps are timed with and without",
    **dict.fromkeys(
        [f"loss.{name}" for name in LossConfig.model_fields if name != "chunk_rows"]
        + ["draft.variant", "draft.markov_head", "draft.confidence", "draft.conditioning", "train.anchor_choice"],
        "the plain script knows the published recipe alone",
    ),
}
"""Settings that would not hold for all that are compared."""
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}


class Products(TorchDispatchMode):
    """The operands of every matrix product under it: shapes, strides, and which are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            operands = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.seen.append([(x.shape, x.stride(), x.dtype, x.device, x.data_ptr()) for x in operands])
        return function(*args, **(kwargs or {}))

    def again(self) -> tuple[int, float]:
        """No tokens, and the seconds that the recorded products take by themselves."""
        made: dict[tuple, torch.Tensor] = {}
        for operand in {operand for pair in self.seen for operand in pair}:
            shape, stride, dtype, device, _ = operand
            made[operand] = torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_()
        began = now()
        for a, b in self.seen:
            made[a] @ made[b]
        return 0, now() - began


class ProductsAlone:
    """The matrix products of a training's steps, a step a call, timed by themselves.

    With attention by torch's own products: FlexAttention's can't be recorded.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __call__(self) -> tuple[int, float]:
        """No tokens, and the seconds of the next step's products."""
        with Products() as products:
            self.steps()
        return products.again()


class Plain:
    """The published recipe, straightforwardly: dense mask, all logits in float32, AdamW."""

    def __init__(self, run: Run, prepared: train.Prepared, target: Target, in_the_loop: bool) -> None:
        self.run, self.prepared, self.target, self.in_the_loop = run, prepared, target, in_the_loop
        spec = adapt(target.config, run.draft, target.mask_token_id)
        self.data = features.open_store(Path(prepared.store), spec.target_layer_ids)
        self.draft = Draft(spec, "dense")
        initialise(self.draft, target, "random", run.seed, torch.zeros(1, 8, dtype=torch.int64))
        self.draft.to(target.device)
        config = run.train
        self.optimizer = torch.optim.AdamW(
            self.draft.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay,
            fused=True,
        )  # fmt: skip
        self.weights = blocks.position_weights(spec.block_size, run.gamma)
        self.step, self.seconds = 0, 0.0

    def __call__(self) -> tuple[int, float]:
        """Supervised tokens and seconds of one step."""
        run, began = self.run, now()
        pairs = train.rows_of_step(self.step, run.train.batch_size, self.prepared.train_rows, run.seed)
        batch = self.data.batch([row for _, row in pairs]).to(self.target.device)
        if self.in_the_loop:
            batch.features, _ = self.target.tapped(batch.ids, batch.lengths, self.draft.spec.target_layer_ids)
        anchors, valid = blocks.sample_anchors(
            blocks.anchor_candidates(batch.supervised, batch.lengths), run.train.anchors,
            [(run.seed, epoch, row) for epoch, row in pairs],
        )  # fmt: skip
        part = train.make_blocks(batch, anchors, valid, self.draft.spec, self.weights)
        dtype = getattr(torch, run.train.dtype)
        with torch.autocast(self.target.device.type, dtype, enabled=dtype != torch.float32):
            features_, embeds = batch.features.to(dtype), self.target.ends.embedding(part.tokens).to(dtype)
            hidden = self.draft(features_, embeds, anchors)
            logits = hidden.to(self.target.dtype) @ self.target.ends.head.weight.T
        losses = F.cross_entropy(logits.float().flatten(0, -2), part.labels.flatten(), reduction="none")
        if run.train.seconds:  # a training, not a step to be timed: the published schedule
            progress = min(1.0, self.seconds / run.train.seconds)
            self.optimizer.param_groups[0]["lr"] = train.learning_rate(progress * run.train.steps, run.train)
        self.optimizer.zero_grad()
        ((losses * part.weights.flatten()).sum() / part.weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), run.train.clip)
        self.optimizer.step()
        spent = now() - began
        self.step, self.seconds = self.step + 1, self.seconds + spent
        return int((part.weights > 0).sum()), spent


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--block-sizes", type=cli.integers, default=[8, 16], metavar="N,N,...")
    options.add_argument("--vocab", type=int, default=8192, help="of the draft with a reduced vocabulary")
    options.add_argument("--rounds", type=int, default=7, help="steps of each way that count")
    args = options.parse_args(argv)
    cli.check_unused(args.overrides, SETTLED)
    base = start(args, SHAPE)
    if base is None:
        return 0
    variants = {"draftlab": {}, f"draftlab, vocab {args.vocab}": {"draft.vocab": args.vocab}}
    if train.has_compiler():
        variants |= {f"{name}, compiled": {**some, "train.compile": True} for name, some in variants.items()}
    runs = {
        (size, name): base.replace({"draft.block_size": size, **settings})
        for size in args.block_sizes
        for name, settings in variants.items()
    }
    with cli.Progress("preparing") as say:
        prepared = train.prepare({str(key): run for key, run in runs.items()}, say)
    target = load_target(base.target)
    for size in args.block_sizes:
        whole = runs[size, "draftlab"]
        ways = {
            "plain": Plain(whole, prepared, target, in_the_loop=False),
            "plain, target in the loop": Plain(whole, prepared, target, in_the_loop=True),
            **{name: Steps(runs[size, name], prepared, target) for name in variants},
            "products alone": ProductsAlone(Steps(whole.replace({"draft.attention": "split"}), prepared, target)),
        }
        report(size, base, alternate(ways, args.rounds))
    return 0


def report(size: int, run: Run, found: dict[str, list[tuple[int, float]]]) -> None:
    """One block size's table."""
    print(f"\nblock size {size}, {run.train.batch_size} sequences x {run.train.anchors} anchors: medians of "
          f"{len(found['plain'])} steps")  # fmt: skip
    print(f"{'':30} {'ms':>7} {'supervised tokens/s':>20} {'of plain':>9} {'of in the loop':>15} {'of products':>12}")
    seconds = {name: [spent for _, spent in steps] for name, steps in found.items()}
    rates = {name: [tokens / spent for tokens, spent in steps] for name, steps in found.items()}

    def of(values: dict[str, list[float]], name: str, other: str) -> float:
        """The two ways' ratio, step by step: the batches differ, but a step has the same one in every way."""
        return median(own / theirs for own, theirs in zip(values[name], values[other], strict=True))

    for name in found:
        line = f"{name:30} {median(seconds[name]) * 1e3:7.0f}"
        if median(rates[name]):
            line += f" {median(rates[name]):20.0f} {of(rates, name, 'plain'):8.2f}x"
            line += f" {of(rates, name, 'plain, target in the loop'):14.2f}x"
        if name.startswith("draftlab") and "vocab" not in name:
            line += f" {of(seconds, name, 'products alone'):11.2f}x"
        print(line)


if __name__ == "__main__":
    cli.main(main)
