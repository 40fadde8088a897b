"""The trials of a sweep: all combinations of the varied values or some of them, made comparable, and what they cost.

A key that is varied is dotted and has values; or it is any word and has variations: names, each with the dotted keys
that change together. Trials that differ in nothing but their seed are of one arm.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from draftlab import features
from draftlab.config import Run, word
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError

PROBE = "gate"
"""The trial that comes before the others of a sweep and puts the target's layers in order; an arm of its own."""

Vary = Mapping[str, Sequence[Any] | Mapping[str, Mapping[str, Any]]]
"""Dotted key -> its values; or word -> name of a variation -> dotted key -> value."""


@dataclass(frozen=True)
class Trial:
    """One training run of a sweep."""

    name: str
    """Unique in the sweep and fit for a folder."""
    arm: str
    """The name without the seed."""
    point: tuple[int, ...]
    """The place of each varied value among its key's."""
    values: dict[str, Any]
    """The last part of each varied key -> its value, or the variation's name, as a table shows it."""
    run: Run


def trials(
    base: Run, vary: Vary, probe: Mapping[str, Any] | None = None, proposed: Sequence[int] | None = None
) -> dict[str, Trial]:
    """The trials by name: those to be run, or for Optuna those among which it chooses.

    Args:
        base: what all of them share; its `search` says which and what is equal.
        vary: what is varied.
        probe: the settings of PROBE, which comes first where a trial has draft.layer_choice=gate; its
            draft.target_layer_ids are the candidates.
        proposed: the candidates in the order that PROBE proposes, of which such a trial taps the first ones. None,
            before that is known, leaves them as they stand: enough to check and to estimate by.

    Raises:
        UserError: naming the trial that has an unknown key, a wrong value or stands there twice; settings of the
            search that contradict each other.
    """
    search = base.search
    points = list(itertools.product(*(range(len(values)) for values in vary.values())))
    _check(base, len(points))
    if search.method == "random":
        drawn = np.random.default_rng(base.seed).permutation(len(points))[: search.samples]
        points = [points[i] for i in drawn]
    seeds = search.seeds or [base.seed]
    found: dict[str, Trial] = {}
    for point, seed in itertools.product(points, seeds):
        changes, parts, values = {"seed": seed}, [], {}
        for (key, several), place in zip(vary.items(), point, strict=True):
            value, column = list(several)[place], key.rpartition(".")[2]
            named = isinstance(several, Mapping)
            changes |= several[value] if named else {key: value}
            values[column] = value if isinstance(value, int | float | str) else word(value)
            if len(several) > 1:
                parts.append(value if named else f"{column}_{word(value)}")
        arm = re.sub(r"[^\w-]", "_", "-".join(parts)) or "draft"
        name = arm if len(seeds) == 1 else f"{arm}-seed_{seed}"
        if name in found:
            raise UserError(f"trial {name} would be tried twice")
        try:
            run = base.replace(changes)
            choices = [key for key in ("draft.layer_choice", "draft.num_target_layers") if key in changes]
            if choices and (ids := run.draft.target_layer_ids) is not None:
                raise UserError(f"draft.target_layer_ids={ids} is set, beside which {choices[0]} would change nothing")
            if probe and run.draft.layer_choice == "gate":
                run = _tapping(run, proposed or probe["draft.target_layer_ids"])
            found[name] = Trial(name, arm, point, values, run)
        except UserError as error:
            raise UserError(f"trial {name}: {error}") from error
    if probe and any(trial.run.draft.layer_choice == "gate" for trial in found.values()):
        try:
            columns = [key.rpartition(".")[2] for key in vary]
            first = Trial(PROBE, PROBE, (), dict.fromkeys(columns, PROBE), base.replace(dict(probe)))
        except UserError as error:
            raise UserError(f"trial {PROBE}: {error}") from error
        found = {PROBE: first, **found}
    return _equal_tokens(found) if search.budget == "tokens" else found


def count(base: Run, trials: Mapping[str, Trial]) -> int:
    """How many of the trials are run."""
    return base.search.samples + (PROBE in trials) if base.search.method == "optuna" else len(trials)


def _tapping(run: Run, order: Sequence[int]) -> Run:
    """The run with the first draft.num_target_layers of these layers."""
    count = run.draft.num_target_layers
    if count > len(order):
        raise UserError(f"draft.num_target_layers: the gate has {len(order)} layers to choose from, got {count}")
    return run.replace({"draft.target_layer_ids": sorted(order[:count])})


def _check(base: Run, combinations: int) -> None:
    search = base.search
    if search.method == "grid" and search.samples is not None:
        raise UserError("search.samples: a grid has all combinations; expected search.method=random or optuna with it")
    if search.method != "grid" and not 1 <= (search.samples or 0) <= combinations:
        raise UserError(
            f"search.method={search.method}: expected search.samples of 1 to {combinations}, the number of "
            f"combinations, got {search.samples}"
        )
    if search.method != "grid" and combinations == 1:
        raise UserError(f"search.method={search.method}: expected several values to choose from, got one")
    if search.method == "optuna" and len(search.seeds or ()) > 1:
        raise UserError("search.seeds: optuna searches with one seed; compare what it finds in a grid with several")
    if search.scheduler == "asha":
        _check_asha(base)
    if (search.budget == "time") != (base.train.seconds is not None):
        raise UserError(
            f"search.budget=time and train.seconds go together, got {search.budget} and {base.train.seconds}"
        )


def _check_asha(base: Run) -> None:
    if len(base.search.seeds or ()) > 1:
        raise UserError(
            "search.seeds: asha takes one seed, for it would stop a choice's weaker seeds and leave the better ones "
            "to speak for it; compare what it finds without it, with several"
        )
    config, grace = base.train, base.search.grace
    first = math.ceil(grace * config.steps / config.eval_every) * config.eval_every
    if config.seconds is None and first >= config.steps:
        raise UserError(
            f"search.scheduler=asha: expected an evaluation after search.grace={grace} of the training and before its "
            f"end, got train.eval_every={config.eval_every} and train.steps={config.steps}"
        )


def _equal_tokens(trials: dict[str, Trial]) -> dict[str, Trial]:
    """The trials with as many anchors as bring each the supervised tokens of that with the largest blocks."""
    shapes = {name: trial.run.draft for name, trial in trials.items()}
    drafted = {name: draft.block_size - (draft.variant != "dspark") for name, draft in shapes.items()}
    equal = {}
    for name, trial in trials.items():
        anchors = round(trial.run.train.anchors * max(drafted.values()) / drafted[name])
        equal[name] = replace(trial, run=trial.run.replace({"train.anchors": anchors}))
    return equal


@dataclass(frozen=True)
class Cost:
    """What a trial is expected to take, within a factor of two or so."""

    operations: float
    """Floating-point operations of one worker's matrix products, in all steps."""
    limit: float | None
    """Seconds of training, where they are given (train.seconds)."""
    memory: float
    """Bytes of one worker."""
    disk: float
    """Bytes of its checkpoints, in its folder and in MLflow."""

    def seconds(self, flops: float) -> float:
        """Training, on workers that do so many operations a second (`matrix_speed`)."""
        return START_SECONDS + (self.limit or self.operations / flops / EFFICIENCY)


WORKER_BYTES = 0.5e9
"""Python, torch and Ray."""

START_SECONDS = 12.0
"""Until a trial's workers train."""

EFFICIENCY = 0.75
"""Share of a step that is matrix products at full speed (experiments/LOG.md)."""


def cost(run: Run, target_config: Any, device: torch.device) -> Cost:
    """What a trial takes.

    Args:
        target_config: the target's configuration of transformers.
        device: where it trains.
    """
    spec, config = adapt(target_config, run.draft, mask_token_id=0), run.train
    with torch.device("meta"):
        draft = Draft(spec)
        target = AutoModelForCausalLM.from_config(target_config)
    sizes = {name: parameter.numel() for name, parameter in draft.named_parameters()}
    weights = sum(sizes.values())
    read = sum(size for name, size in sizes.items() if name == "fc.weight" or "_proj_target" in name)  # by the context
    blocks = config.batch_size * config.anchors / config.workers
    slots, context = blocks * spec.block_size, config.batch_size * run.corpus.max_length / config.workers
    width = spec.num_attention_heads * spec.head_dim
    products = (
        (weights - read) * slots
        + read * context
        + (spec.draft_vocab_size or spec.vocab_size) * spec.hidden_size * blocks * spec.drafted_tokens
        + 2 * slots * run.corpus.max_length * width * spec.num_hidden_layers
    )
    flex = run.draft.attention == "flex" or run.draft.attention == "auto" and device.type == "cuda"
    scores = 0 if flex else spec.num_attention_heads * run.corpus.max_length
    per_slot = (10 * spec.hidden_size + 4 * spec.intermediate_size + scores) * spec.num_hidden_layers
    activations = (2 if flex and config.dtype == "bfloat16" else 4) * per_slot * slots / config.accumulation
    target_bytes = sum(p.numel() for p in target.parameters()) * (2 if run.target.dtype == "bfloat16" else 4)
    return Cost(
        operations=config.steps * 6 * products,
        limit=config.seconds,
        memory=WORKER_BYTES + target_bytes + 16 * weights + activations,
        # The best and the last with their optimizer state; the best draft again here and in MLflow.
        disk=(2 * 12 + 2 * 4) * weights,
    )


def matrix_speed(run: Run, device: torch.device, threads: int) -> float:
    """Floating-point operations per second of a large matrix product, measured now."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(1024, 1024, device=device, dtype=getattr(torch, run.train.dtype))
        times = []
        for _ in range(8):
            began = time.perf_counter()
            (x @ x).sum().item()
            times.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return 2 * 1024**3 / sorted(times)[len(times) // 2]


def feature_bytes(trials: Mapping[str, Trial], target_config: Any, conversations: int) -> int:
    """Disk space of the stored features that all trials share, at most."""
    run = next(iter(trials.values())).run
    if run.features.mode == "online":
        return 0
    layers = set(run.features.layers or ())
    for trial in trials.values():
        layers.update(adapt(target_config, trial.run.draft, mask_token_id=0).target_layer_ids)
    tokens = conversations * run.corpus.max_length
    return features.estimate_bytes(tokens, sorted(layers), target_config.hidden_size, run.features.last_hidden)
