"""Training: what a driver prepares once, and one worker's loop. Knows neither Ray nor MLflow.

Every random choice is a function of (seed, step, row), never of a stream's state: so a resumed run, another number of
workers or another accumulation sees the same data and the same anchors.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

from draftlab import blocks, checkpoint, features, metrics
from draftlab.config import Run, TrainConfig
from draftlab.corpus import Corpus, load_corpus
from draftlab.draft import Draft, DraftSpec, adapt
from draftlab.errors import UserError
from draftlab.features import Batch, Features
from draftlab.init import check_layers, initialise
from draftlab.loss import check_vocabulary, through_head
from draftlab.target import Ends, Head, Target, check_layer_ids, find_device, load_target, load_target_config

REPORT_SECONDS = 5.0
"""Between two reports of a running loop."""


@dataclass(frozen=True)
class Prepared:
    """What all trials of a sweep share: the target's facts, the split, the features on disk."""

    target: dict[str, Any]
    """name, revision, fingerprint, mask_token_id."""
    corpus: dict[str, Any]
    """fingerprint, source, supervised_tokens."""
    train_rows: tuple[int, ...]
    heldout_rows: tuple[int, ...]
    store: str | None
    """Folder of the stored features; None when the target runs in the loop."""
    vocabulary: tuple[int, ...]
    """The most frequent tokens of the answers to train on, most frequent first: as many as a run's draft.vocab asks."""
    provenance: dict[str, Any]
    """Versions, git state and command of the driver: a Ray worker's own command says nothing."""


@dataclass(frozen=True)
class Report:
    """What a worker tells while it trains."""

    step: int
    metrics: dict[str, float]
    checkpoint: Path | None
    """A complete checkpoint, on rank 0 at evaluation steps; the receiver takes it before the loop goes on."""


def prepare(
    runs: dict[str, Run], say: Callable[..., None], ready: Callable[[Target, Corpus], None] = lambda *_: None
) -> Prepared:
    """Check every run against the target, load the corpus, and build the features that all of them need.

    Args:
        runs: name -> run; they share target, corpus and feature settings.
        ready: is given both before the features are built, and may refuse them.

    Raises:
        UserError: naming the run that is wrong, before any long work.
    """
    first = next(iter(runs.values()))
    shape = load_target_config(first.target)
    layers: set[int] = set()
    if first.features.layers is not None:
        layers.update(check_layer_ids(first.features.layers, shape.num_hidden_layers, "features.layers"))
    for name, run in runs.items():
        if (run.target, run.corpus, run.features) != (first.target, first.corpus, first.features):
            raise UserError(f"trial {name}: target, corpus and features must be the same for all trials")
        try:
            layers.update(check(run, shape))
        except UserError as error:
            raise UserError(f"trial {name}: {error}") from error
    say(f"target {first.target.model}: loading", doing="loading the target")
    target = load_target(first.target)
    if any(run.draft.init == "target_layers" for run in runs.values()):
        check_layers(target)
    corpus = load_corpus(first.corpus, target, say)
    for name, run in runs.items():
        if (run.train.conversations or 0) > len(corpus.train):
            raise UserError(
                f"trial {name}: train.conversations: expected at most the {len(corpus.train)} to train on, "
                f"got {run.train.conversations}"
            )
    for purpose, rows in (("train on", corpus.train), ("hold out", corpus.heldout)):
        if not any(corpus.rows[i].supervised[1:].any() for i in rows):
            raise UserError(f"corpus {corpus.source}: no row to {purpose} has a supervised token after its first")
    ready(target, corpus)
    store = None
    if first.features.mode == "stored":
        store = str(features.build(target, corpus, tuple(sorted(layers)), first.features, say))
    return Prepared(
        target={
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint,
            "mask_token_id": target.mask_token_id,
        },
        corpus={
            "fingerprint": corpus.fingerprint,
            "source": corpus.source,
            "supervised_tokens": int(sum(corpus.rows[i].supervised.sum() for i in corpus.train)),
        },
        train_rows=tuple(corpus.train),
        # Prompts are decoded from the lowest hashes on (Corpus.prompts); the best checkpoint is chosen by the others.
        heldout_rows=tuple(sorted(corpus.heldout, key=lambda i: corpus.rows[i].key, reverse=True)),
        store=store,
        vocabulary=frequent_tokens(corpus, max(run.draft.vocab or 0 for run in runs.values()), target.vocab_size),
        provenance=checkpoint.provenance(),
    )


def check(run: Run, target: PreTrainedConfig) -> tuple[int, ...]:
    """The layers that a run taps, when it is one that can be trained on this target.

    Args:
        target: text configuration of the target.

    Raises:
        UserError: it can't, by what is known without the target's weights.
    """
    if run.cluster.address == "local":  # elsewhere the workers may have a GPU that the driver lacks
        _check_machine(run, find_device(run.target.device))
    if run.draft.block_size > run.corpus.max_length:
        raise UserError(
            f"draft.block_size: expected at most corpus.max_length={run.corpus.max_length}, got {run.draft.block_size}"
        )
    if run.eval.schedule == "confidence" and not run.draft.confidence:
        raise UserError("eval.schedule=confidence: needs draft.confidence=true, got false")
    check_vocabulary(run.loss, run.draft.vocab or target.vocab_size)
    spec = adapt(target, run.draft, mask_token_id=0)
    if (size := max(run.eval.block_sizes or [0])) > spec.max_position_embeddings:
        raise UserError(f"eval.block_sizes: the draft has {spec.max_position_embeddings} positions, got {size}")
    return spec.target_layer_ids


def _check_machine(run: Run, device: torch.device) -> None:
    if run.draft.attention == "flex" and device.type == "cpu":
        raise UserError("draft.attention=flex: can't be trained on a CPU, expected auto, split or dense")
    if run.train.compile and not has_compiler():
        raise UserError(f"train.compile=true: needs a C++ compiler, and there is no {_compiler()}")


def has_compiler() -> bool:
    """Whether there is the C++ compiler that torch.compile uses."""
    return shutil.which(_compiler()) is not None


def _compiler() -> str:
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def frequent_tokens(corpus: Corpus, count: int, vocab_size: int) -> tuple[int, ...]:
    """The `count` most frequent tokens of the answers to train on, most frequent first.

    Those equally frequent go by id, so do those that don't occur: tokenizers give the common ones the lower ids.
    """
    answers = np.concatenate([row.ids[row.supervised] for row in (corpus.rows[i] for i in corpus.train)])
    counts = np.bincount(answers, minlength=vocab_size)
    return tuple(np.argsort(-counts, kind="stable")[:count].tolist())


def learning_rate(step: float, config: TrainConfig) -> float:
    """Learning rate of a step: linear warm-up, then the schedule's shape.

    Args:
        step: 0-based; a fraction of one where time counts instead of steps.
    """
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return config.lr * min(1.0, (step + 1) / warmup)
    if config.schedule == "cosine":
        progress = (step - warmup) / max(config.steps - warmup, 1)
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "wsd":
        falling = max(round(config.decay * config.steps), 1)
        return config.lr * min(1.0, (config.steps - step) / falling)
    return config.lr


def training_rows(rows: Sequence[int], count: int | None) -> tuple[int, ...]:
    """`count` of the rows at random, the same for every run, more always holding fewer; None is all."""
    if count is None:
        return tuple(rows)
    return tuple(rows[i] for i in sorted(np.random.default_rng(0).permutation(len(rows))[:count]))


def rows_of_step(step: int, batch_size: int, train_rows: Sequence[int], seed: int) -> list[tuple[int, int]]:
    """The step's (epoch, row) pairs: consecutive pieces of one fresh permutation an epoch."""
    count = len(train_rows)
    pairs = []
    for place in range(step * batch_size, (step + 1) * batch_size):
        epoch, within = divmod(place, count)
        pairs.append((epoch, train_rows[_permutation(seed, epoch, count)[within]]))
    return pairs


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


@dataclass
class Blocks:
    """One micro-batch, ready for the draft."""

    batch: Batch
    first: int
    """The first drafted slot."""
    anchors: Tensor
    tokens: Tensor
    labels: Tensor
    previous: Tensor
    """(N, A, B) int64: the token before each label."""
    supervised: Tensor
    """(N, A, B) bool: the label is a supervised token inside the sequence, of a valid anchor."""
    weights: Tensor
    """(N, A, B) float32: the slot's position weight where it counts, else 0."""


def make_blocks(batch: Batch, anchors: Tensor, valid: Tensor, spec: DraftSpec, position_weights: Tensor) -> Blocks:
    """Inputs, labels and weights of a batch's blocks; position_weights is (B,), or (N, 1, B) for each row its own."""
    size = spec.block_size
    before = (blocks.block_positions(anchors, size) - spec.first_slot).clamp(0, batch.ids.shape[1] - 1)
    texts = batch.ids, batch.supervised, batch.lengths
    labels, mask = blocks.block_labels(*texts, anchors, valid, size, spec.first_slot)
    return Blocks(
        batch=batch,
        first=spec.first_slot,
        anchors=anchors,
        tokens=blocks.block_tokens(batch.ids, anchors, size, spec.mask_token_id),
        labels=labels,
        previous=batch.ids.gather(1, before.flatten(1)).view_as(labels),
        supervised=mask,
        weights=mask * position_weights.to(mask.device),
    )


def train(
    run: Run,
    prepared: Prepared,
    *,
    rank: int,
    world_size: int,
    report: Callable[[Report], None],
    workdir: Path,
    resume: Path | None = None,
) -> None:
    """One worker's training run, from the first step or from a checkpoint to the last step.

    Args:
        rank, world_size: this worker among all; torch.distributed is up when world_size > 1.
        report: called about every 5 s on every rank alike, and at evaluation steps with a checkpoint.
        workdir: where checkpoints are written before `report` takes them.
        resume: a checkpoint folder that an earlier `report` carried.

    Raises:
        FloatingPointError: the loss or the gradient is no longer finite.
    """
    _Loop(run, prepared, rank, world_size, report, Path(workdir)).run_from(resume)


class _Loop:
    def __init__(self, run, prepared, rank, world_size, report, workdir) -> None:
        self.run, self.prepared, self.report, self.workdir = run, prepared, report, workdir
        self.rank, self.world_size = rank, world_size
        self.main = rank == 0
        target = load_target(run.target)
        self.device = target.device
        _check_machine(run, self.device)
        spec = adapt(target.config, run.draft, target.mask_token_id)
        self.data = self._open(target, spec)
        self.draft = Draft(spec, run.draft.attention)
        text = self.data.batch(prepared.train_rows[:4])
        sample = text.ids[:, : int(text.lengths.min())]
        initialise(self.draft, target, run.draft.init, run.seed, sample)
        if run.draft.vocab is not None:
            self.draft.set_vocabulary(torch.tensor(prepared.vocabulary[: run.draft.vocab]))
        if run.draft.conditioning == "none":
            self.draft.disconnect()
        self.ends: Ends = target.ends
        self.draft.to(self.device)
        self.head = self.draft.head(self.ends.head)
        config = run.train
        model = torch.compile(self.draft, dynamic=True) if config.compile else self.draft
        self.model = DistributedDataParallel(model) if world_size > 1 else model
        self.optimizer = torch.optim.AdamW(
            self.draft.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay,
            fused=True,
        )
        self.rows = training_rows(prepared.train_rows, config.conversations)
        self.step, self.seconds, self.supervised_tokens, self.empty_steps = 0, 0.0, 0, 0

    def _open(self, target: Target, spec: DraftSpec) -> Features:
        if self.prepared.store is not None:
            return features.open_store(Path(self.prepared.store), spec.target_layer_ids, bool(self.run.loss.distilled))
        quiet = lambda *_, **__: None  # noqa: E731
        corpus = load_corpus(self.run.corpus, target, quiet)
        if corpus.fingerprint != self.prepared.corpus["fingerprint"]:
            raise UserError(f"the corpus on this machine ({corpus.source}) is another than the driver's")
        return features.OnlineFeatures(target, corpus, spec.target_layer_ids, bool(self.run.loss.distilled))

    def run_from(self, resume: Path | None) -> None:
        if resume is not None:
            self._restore(resume)
        config = self.run.train
        said = time.monotonic()
        while self._progress() < 1:
            began = time.monotonic()
            numbers = self._train_step()
            (seconds,) = self._sum([time.monotonic() - began])
            self.seconds += seconds / self.world_size  # the same on all ranks, which must end together
            self.step += 1
            numbers |= {"train_seconds": self.seconds, "progress": self._progress()}
            if self.step % config.eval_every == 0 or self._progress() == 1:
                self.report(Report(self.step, numbers | self._evaluate(), self._save()))
                said = time.monotonic()
            elif self._agree(time.monotonic() - said > REPORT_SECONDS):
                self.report(Report(self.step, numbers, None))
                said = time.monotonic()

    def _progress(self) -> float:
        """How much of the training is done, 0 to 1."""
        config = self.run.train
        return min(1.0, self.seconds / config.seconds if config.seconds else self.step / config.steps)

    def _agree(self, mine: bool) -> bool:
        """Rank 0's decision, on all ranks: every rank reports the same number of times."""
        return bool(self._sum([float(mine and self.main)])[0])

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all workers, in float64."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def _micro_batches(self) -> Iterator[Blocks]:
        config = self.run.train
        pairs = rows_of_step(self.step, config.batch_size, self.rows, self.run.seed)
        size = config.batch_size // (self.world_size * config.accumulation)
        mine = pairs[self.rank * size * config.accumulation :][: size * config.accumulation]
        for start in range(0, len(mine), size):
            part = mine[start : start + size]
            batch = self.data.batch([row for _, row in part]).to(self.device)
            candidates = blocks.anchor_candidates(batch.supervised, batch.lengths)
            if config.anchor_choice == "blocks":
                candidates = blocks.block_starts(candidates, self.draft.spec.block_size)
            seeds = [(self.run.seed, epoch, row) for epoch, row in part]
            anchors, valid = blocks.sample_anchors(candidates, config.anchors, seeds)
            spec, gammas = self.draft.spec, [self.run.gamma_at(epoch) for epoch, _ in part]
            decay = [blocks.position_weights(spec.block_size, gamma, spec.first_slot) for gamma in gammas]
            part = make_blocks(batch, anchors, valid, spec, torch.stack(decay)[:, None])
            part.weights *= self.head.rows(part.labels)[1]  # a token that the draft can't guess teaches nothing
            yield part

    def _train_step(self) -> dict[str, float]:
        config = self.run.train
        began = time.monotonic()
        parts = list(self._micro_batches())
        # The denominator spans all splits and workers, so it must be known before the first backward pass.
        touched, available = map(sum, zip(*(_coverage(part) for part in parts), strict=True))
        weight = float(sum(self._denominator(part) for part in parts))
        slots = sum(int((part.weights > 0).sum()) for part in parts)
        weight, slots, touched, available = self._sum([weight, slots, touched, available])
        lr = learning_rate(self._progress() * config.steps if config.seconds else self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss, terms = 0.0, 0.0
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with nullcontext() if last or self.world_size == 1 else self.model.no_sync():
                numerator, by_slot = self._numerator(part)
                # DDP averages over the workers; the loss is a sum over them, divided once.
                objective = numerator * (self.world_size / max(weight, 1e-9))
                if last and self.run.loss.gate_entropy:
                    objective = objective + self.run.loss.gate_entropy * self.draft.mix_entropy()
                objective.backward()
            loss += numerator.item()
            terms += by_slot
        loss, *flat = self._sum([loss, *terms.flatten().tolist()])
        loss = loss / weight if weight else 0.0
        norm = float(torch.nn.utils.clip_grad_norm_(self.draft.parameters(), config.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(f"step {self.step + 1}: loss {loss}, gradient norm {norm}; lower train.lr?")
        if slots:
            self.optimizer.step()
        else:  # nothing to learn from: not even weight decay or momentum moves the weights
            self.empty_steps += 1
        self.supervised_tokens += int(slots)
        return {
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "coverage": touched / available if available else 0.0,
            "valid_slots": slots,
            "supervised_tokens": self.supervised_tokens,
            "empty_steps": self.empty_steps,
            "tokens_per_second": slots / (time.monotonic() - began),
            **self._by_term(np.reshape(flat, terms.shape), weight),
            **({} if self.draft.layer_mix() is None else {"mix_entropy": self.draft.mix_entropy().item()}),
        }

    def _denominator(self, part: Blocks) -> Tensor:
        """What the loss is divided by: the slots' weights; with D-PACE the anchors, whatever their slots weigh."""
        if self.run.loss.positions == "dpace":
            return part.supervised.any(-1).sum()
        return part.weights.sum(dtype=torch.float64)

    def _numerator(self, part: Blocks) -> tuple[Tensor, Tensor]:
        """The weighted sum of the loss, and by slot (B, 1 + terms) the weights' sum and the weighted terms' sums."""
        hidden = self._hidden(self.model, part)
        counts = part.weights > 0
        row, position, slot = _labels(part)
        head, config, batch, dtype = self.head, self.run.loss, part.batch, self.head.weight.dtype

        def dynamic(cross_entropy: Tensor) -> Tensor:
            probabilities = torch.zeros_like(part.weights)  # so it stays for a token that the draft can't guess
            probabilities[counts] = (-cross_entropy).exp()
            return blocks.dynamic_weights(probabilities, part.supervised)[counts]

        options = {"softcap": head.softcap, "reweigh": dynamic if config.positions == "dpace" else None}
        if config.distilled:
            options["teacher"] = batch.last_hidden[row, position - 1].to(dtype)
        if self.draft.spec.markov_head is not None:
            options["latent"] = self._latents(hidden, part)[counts].to(dtype)
            options["markov"] = self.draft.markov_head.markov_w2.weight.to(dtype)
        labels, _ = head.rows(part.labels[counts])
        numerator, terms, weights = through_head(
            hidden[counts].to(dtype), labels, part.weights[counts], head.weight, config, **options
        )
        if config.confidence:
            with self._autocast():
                scores = self.draft.confidence(hidden, part.previous)[counts].float()
            acceptance = 1 - terms[:, self._terms.index("tv")]
            misjudged = F.binary_cross_entropy_with_logits(scores, acceptance, reduction="none")
            numerator = numerator + config.confidence * (weights * misjudged).sum()
            terms = torch.cat([terms, misjudged.detach()[:, None]], dim=1)
        sums = torch.cat([part.weights[counts][:, None], weights[:, None] * terms], dim=1).double()
        return numerator, sums.new_zeros(part.labels.shape[-1], sums.shape[1]).index_add_(0, slot, sums).cpu()

    @property
    def _terms(self) -> list[str]:
        """Names of the loss's terms, in the order of their sums."""
        return ["ce", *self.run.loss.distilled, *(["confidence"] if self.run.loss.confidence else [])]

    def _by_term(self, sums: np.ndarray, weight: float) -> dict[str, float]:
        """Each term of the loss by itself where there are several, and by slot on request."""
        config = self.run.loss
        names = self._terms
        weights, terms = sums[:, 0], sums[:, 1:]
        result = {}
        if config.distilled and weight:
            result = {f"loss_{name}": total / weight for name, total in zip(names, terms.sum(0).tolist())}
        if config.log_slots:
            for k in np.flatnonzero(weights):
                means = (terms[k] / weights[k]).tolist()
                result |= {f"loss_{name}_slot_{k}": mean for name, mean in zip(names, means)}
        return result

    def _autocast(self) -> torch.autocast:
        dtype = getattr(torch, self.run.train.dtype)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def _latents(self, hidden: Tensor, part: Blocks) -> Tensor:
        """(N, A, B, r) the Markov head's latents, each slot after the data's own tokens."""
        with self._autocast():
            return self.draft.markov_head(hidden, part.previous)

    def _hidden(self, model: torch.nn.Module, part: Blocks) -> Tensor:
        dtype = getattr(torch, self.run.train.dtype)
        with self._autocast():
            return model(part.batch.features.to(dtype), self.ends.embedding(part.tokens).to(dtype), part.anchors)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Held-out acceptance without decoding, over deterministic anchors; every worker scores its share."""
        config, spec = self.run.eval, self.draft.spec
        rows = self.prepared.heldout_rows[: config.offline_conversations][self.rank :: self.world_size]
        everywhere = blocks.position_weights(spec.block_size, math.inf, spec.first_slot)
        totals = np.zeros((2, spec.drafted_tokens + 1))  # committed tokens and rounds, then passed and reached by slot
        known = np.zeros(2)  # tokens that the draft's vocabulary holds, of how many
        for start in range(0, len(rows), 8):
            batch = self.data.batch(rows[start : start + 8]).to(self.device)
            candidates = blocks.anchor_candidates(batch.supervised, batch.lengths)
            anchors, valid = blocks.spread_anchors(candidates, config.offline_anchors)
            part = make_blocks(batch, anchors, valid, spec, everywhere)
            hidden = self._hidden(self.draft, part)
            latents = None if spec.markov_head is None else self._latents(hidden, part)
            correct = leading_correct(hidden, part, self.draft, self.head, self.run.loss.chunk_rows, latents)
            valid = labels_there(batch, anchors, valid, spec)
            totals[:, 0] += metrics.offline_acceptance(correct, valid)
            totals[:, 1:] += metrics.offline_slot_counts(correct, valid)
            answers = self.head.rows(batch.ids[batch.supervised])[1]
            known += int(answers.sum()), len(answers)
        (tokens, *passed), (rounds, *reached) = np.reshape(self._sum(totals.ravel().tolist()), totals.shape)
        survival = metrics.survival_curve(np.array(passed), np.array(reached))
        result = {"heldout_acceptance_length": tokens / rounds} if rounds else {}
        covered, answers = self._sum(known.tolist())
        result |= {"heldout_vocab_coverage": covered / answers} if answers else {}
        return result | {f"heldout_survival_{k}": float(p) for k, p in enumerate(survival, 1) if np.isfinite(p)}

    def _save(self) -> Path | None:
        if not self.main:
            return None
        folder = self.workdir / f"step_{self.step:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint.save(folder / "draft", self.draft, self.run, self.prepared.target, self.prepared.provenance)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "supervised_tokens": self.supervised_tokens,
            "empty_steps": self.empty_steps,
            "optimizer": self.optimizer.state_dict(),
            "prepared": asdict(self.prepared),
        }
        torch.save(state, folder / "trainer.pt")
        return folder

    def _restore(self, folder: Path) -> None:
        try:
            state = torch.load(folder / "trainer.pt", map_location=self.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"checkpoint {folder}: trainer.pt is missing or damaged ({reason})") from error
        if state["prepared"]["corpus"] != self.prepared.corpus or state["prepared"]["target"] != self.prepared.target:
            raise UserError(f"{folder}: this checkpoint was trained on another target or corpus")
        draft, info = checkpoint.load(folder / "draft")
        if info.run != self.run:
            raise UserError(f"{folder}: this checkpoint was trained with another configuration")
        self.draft.load_state_dict(draft.state_dict())
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.supervised_tokens, self.empty_steps = state["supervised_tokens"], state["empty_steps"]


def leading_correct(
    hidden: Tensor, part: Blocks, draft: Draft, head: Head, chunk_rows: int, latents: Tensor | None = None
) -> np.ndarray:
    """(N, A, drafted tokens) bool: is the token the data's? The head is only asked where all earlier ones were.

    So a Markov head that was told the data's tokens was told its own draft's.

    Args:
        hidden: (N, A, B, D) the draft's.
        head: the draft's part of the target's head.
        chunk_rows: most rows of the head's logits at once.
        latents: (N, A, B, r) of the draft's Markov head, where it has one, told `part.previous`.
    """
    correct = torch.zeros(part.labels.shape, dtype=torch.bool, device=hidden.device)
    alive = part.weights[..., part.first] > 0
    for slot in range(part.first, part.labels.shape[-1]):
        alive = alive & (part.weights[..., slot] > 0)
        if not alive.any():
            break
        rows = hidden[:, :, slot][alive].to(head.weight.dtype).split(chunk_rows)
        told = repeat(None) if latents is None else latents[:, :, slot][alive].split(chunk_rows)
        guess = torch.cat([head.best(draft.logits(head, *pair)) for pair in zip(rows, told)])
        right = torch.zeros_like(alive)
        right[alive] = guess == part.labels[:, :, slot][alive]
        correct[..., slot] = alive = right
    return correct[..., part.first :].cpu().numpy()


def labels_there(batch: Batch, anchors: Tensor, valid: Tensor, spec: DraftSpec) -> np.ndarray:
    """(N, A, drafted tokens + 1) bool: is each drafted slot's label, and last the token behind the block, supervised
    and inside the sequence? As `metrics.offline_committed` takes it."""
    text = batch.ids, batch.supervised, batch.lengths
    _, mask = blocks.block_labels(*text, anchors, valid, spec.block_size + 1, spec.first_slot)
    return mask[..., spec.first_slot :].cpu().numpy()


def _coverage(part: Blocks) -> tuple[int, int]:
    """Distinct supervised tokens that some slot predicts, and all of the batch's supervised tokens."""
    row, position, _ = _labels(part)
    touched = torch.zeros_like(part.batch.supervised)
    touched[row, position] = True
    return int(touched.sum()), int(part.batch.supervised.sum())


def _labels(part: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Row, position and slot of every label that counts, each (R,), in the order of `x[part.weights > 0]`."""
    row, anchor, slot = (part.weights > 0).nonzero(as_tuple=True)
    return row, part.anchors[row, anchor] + slot + 1 - part.first, slot
