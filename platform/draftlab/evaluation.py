"""Real decoding of prompts: traces of the target and of every draft, and what they say.

Everything runs in one process, batch by batch, the target and the drafts by turns in alternating order, so that all of
them meet the same machine in the same mood.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from draftlab import checkpoint, metrics, offline, surface
from draftlab.config import EvalConfig, digest
from draftlab.decode import (
    Round,
    Sampling,
    Trace,
    check_confidence,
    check_prompt,
    decode_speculative,
    decode_target,
    divergence,
)
from draftlab.draft import Draft
from draftlab.errors import UserError, first_line
from draftlab.prompts import Prompt
from draftlab.schedule import Schedule, fit_temperatures, reach
from draftlab.target import Target

Say = Callable[..., None]
Decode = Callable[[Sequence["Case"], int], list[Trace]]

WARM_UP_TOKENS = 16
FIRST_BUCKET = 16
"""Tokens in the first bucket of context lengths and positions; each next one ends at twice as many."""


@dataclass(frozen=True)
class Case:
    """One turn of a prompt, to be answered."""

    prompt: int
    """Index of the prompt."""
    turn: int
    """1 is the first."""
    domain: str
    where: str
    ids: list[int]
    """The conversation up to here, by the chat template; its earlier answers are the target's own."""
    reason: str | None = None
    """Why there is nothing to decode: an earlier answer failed."""

    @property
    def stream(self) -> int:
        """Which of the seed's streams of draws the answer takes, whatever else is decoded."""
        return self.prompt << 8 | self.turn


@dataclass(frozen=True)
class Pair:
    """One case's two traces; of repeats the typical one."""

    case: Case
    target: Trace
    draft: Trace


@dataclass(frozen=True)
class Evaluation:
    """What decoding said about one draft at one block size and schedule."""

    metrics: dict[str, float]
    """Flat; `X_low` and `X_high` are the 95% interval of `X`. Unknown is NaN."""
    survival: list[float]
    """P(the first k drafted tokens are all accepted), for every drafted token of a block."""
    conditional_acceptance: list[float]
    """P(slot k is accepted | those before it were), for every drafted token."""
    first_failure: list[int]
    """Rounds that failed first at the first, second, .. drafted token, then those that accepted the whole block."""
    breakdown: list[dict[str, Any]]
    """A row a domain, turn, bucket of context lengths and bucket of positions in the output."""
    prompts: list[dict[str, Any]]
    """A row a turn of a prompt; `status` is `ok` or `failed` with a `reason`."""
    provenance: dict[str, Any]
    """Protocol, prompts, target, checkpoint, machine and versions."""
    traces: list[Pair]
    """Every round of the cases that went well."""
    confidence: dict[str, list[float]] = field(default_factory=dict)
    """Of a draft with a confidence head: its `confidence_scores`, slot by slot."""


MEASURES: dict[str, tuple[Callable[[Sequence[Pair]], np.ndarray], Callable[[np.ndarray], np.ndarray | float]]] = {
    "acceptance_length": (lambda pairs: metrics.acceptance_items([p.draft for p in pairs]), metrics.ratio),
    "acceptance_length_macro": (
        lambda pairs: metrics.acceptance_items([p.draft for p in pairs]),
        metrics.macro_statistic,
    ),
    "speedup": (
        lambda pairs: metrics.speedup_items([p.target for p in pairs], [p.draft for p in pairs]),
        metrics.speedup_statistic,
    ),
    "speedup_end_to_end": (
        lambda pairs: metrics.speedup_items([p.target for p in pairs], [p.draft for p in pairs], end_to_end=True),
        metrics.speedup_statistic,
    ),
}
"""What has an interval: items of each case, and the statistic of their sums by prompt."""

COUNTS = ("drafted_tokens", "prompts", "answers", "failed", "rounds", "new_tokens", "divergences")


def evaluate(
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Prompt],
    config: EvalConfig,
    say: Say,
    seed: int = 0,
    checkpoints: Mapping[str, str] | None = None,
    block_sizes: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
) -> dict[str, Evaluation]:
    """Decode every prompt with the target alone and with each draft, at one or several block sizes and schedules.

    A case on which one of them fails is reported as failed and left out of that draft's numbers, no others.

    Args:
        drafts: name -> draft, of the target's dtype and on its device.
        prompts: each turn is decoded after the target's own greedy answers to those before it, for all drafts alike.
        say: progress.
        seed: of the bootstrap and of sampling.
        checkpoints: name -> checkpoint hash, for the record.
        block_sizes: that every draft is decoded with; None is the size that each was trained with.
        schedules: values of config.schedule that every draft is decoded with; None is that alone.

    Returns:
        Name -> its evaluation; with several block sizes the names are `NAME b=B`, with several schedules
        `NAME SCHEDULE`.

    Raises:
        UserError: before decoding: nothing to decode, a draft for another target, weights that are not finite, a prompt
            longer than a model's positions, a chat template without the thinking mode that is asked for, a schedule for
            a draft without a confidence head.
    """
    entrants = _entrants(drafts, checkpoints or {}, block_sizes, schedules or [config.schedule])
    _check(target, entrants.values(), prompts, config)
    sampling = sampling_of(config, seed)
    cases = _cases(target, entrants.values(), prompts, config, say)
    asked = [case.ids for case in cases if case.ids]
    plans = {
        name: surface.schedule(target, entrant.draft, asked, entrant.block_size, config.batch_size, say, sampling)
        for name, entrant in entrants.items()
        if entrant.schedule == "confidence"
    }
    decoders: dict[str | None, Decode] = {None: _decoder(target, None, sampling)}
    decoders |= {name: _decoder(target, entrant, sampling, plans.get(name)) for name, entrant in entrants.items()}
    traces = _by_turns(decoders, cases, config, say)
    record = _provenance(target, cases, config, sampling, seed)
    result = {}
    for name, entrant in entrants.items():
        rows, pairs = _rows(target, cases, traces[None], traces[name], greedy=not sampling.temperature)
        own, size = [pair.draft for pair in pairs], entrant.slots
        values, scores = _metrics(pairs, rows, size, config.bootstrap, seed), {}
        if entrant.draft.spec.confidence:
            scores = confidence_scores(own, size, entrant.draft.spec.confidence_temperatures)
            values |= {f"confidence_{kind}": float(by_slot[-1]) for kind, by_slot in scores.items()}
        if not sampling.temperature and name not in plans:
            texts = [(pair.case.ids, pair.target.tokens, pair.draft) for pair in pairs]
            try:
                values |= offline.agreement(target, entrant.draft, texts, entrant.block_size)
            except Exception as error:  # what was decoded stands without it
                say(f"{name}: no offline acceptance ({type(error).__name__}: {first_line(error)})")
        result[name] = Evaluation(
            metrics=values,
            survival=metrics.survival(own, size).tolist(),
            conditional_acceptance=metrics.conditional_acceptance(own, size).tolist(),
            first_failure=metrics.first_failure(own, size).tolist(),
            breakdown=_breakdown(pairs, config.bootstrap, seed),
            prompts=rows,
            provenance=record | entrant.record() | ({"round_seconds": plans[name].seconds} if name in plans else {}),
            traces=pairs,
            confidence={kind: by_slot[:-1].tolist() for kind, by_slot in scores.items()},
        )
    return result


def confidence_scores(
    traces: Sequence[Trace], slots: int, temperatures: Sequence[float] | None
) -> dict[str, np.ndarray]:
    """`metrics.confidence_scores` of decoded rounds; of a calibrated draft also `raw_ece`, without its temperatures.

    Args:
        slots: tokens that a round may commit.
        temperatures: of the confidence head; None is not calibrated.
    """
    logits, accepted = metrics.confidence_items(traces, slots)
    found = metrics.confidence_scores(reach(logits, temperatures), accepted)
    if temperatures is not None:
        found["raw_ece"] = metrics.confidence_scores(reach(logits), accepted)["ece"]
    return found


def calibrate(found: Evaluation) -> tuple[list[float], dict[str, np.ndarray]]:
    """Temperatures of a draft's confidence head, from whole blocks that were decoded.

    Returns:
        One a slot, fitted on the later half of each domain's prompts; and the `confidence_scores` with them, of the
        earlier halves.

    Raises:
        UserError: nothing was decoded in the later halves.
    """
    slots, halves = len(found.survival) + 1, ([], [])
    domains: dict[str, dict[int, None]] = {}
    for row in found.prompts:
        domains.setdefault(row["domain"], {})[row["prompt"]] = None
    later = {prompt for asked in domains.values() for prompt in list(asked)[(len(asked) + 1) // 2 :]}
    for pair in found.traces:
        halves[pair.case.prompt in later].append(pair.draft)
    logits, accepted = metrics.confidence_items(halves[1], slots)
    if not len(logits):
        raise UserError(f"calibration: expected rounds in both halves of {found.metrics['prompts']} prompts, got none")
    temperatures = fit_temperatures(logits, accepted)
    return temperatures, confidence_scores(halves[0], slots, temperatures)


def sampling_of(config: EvalConfig, seed: int) -> Sampling:
    """How tokens are chosen, by the configuration."""
    return Sampling(config.temperature, config.top_k, config.top_p, config.mode, seed)


def survival_by_domain(evaluation: Evaluation) -> dict[str, list[float]]:
    """Domain -> P(the first k drafted tokens are all accepted), as far as `Evaluation.survival` goes."""
    size, by_domain = len(evaluation.survival) + 1, {}
    for pair in evaluation.traces:
        by_domain.setdefault(pair.case.domain, []).append(pair.draft)
    return {domain: metrics.survival(traces, size).tolist() for domain, traces in by_domain.items()}


def exit_code(evaluations: Iterable[Evaluation]) -> int:
    """Of a script: 1 if a prompt failed, or in float32 an output was not the target's own; else 0."""
    for found in evaluations:
        if found.metrics["failed"] or (found.metrics["divergences"] and found.provenance["dtype"] == "float32"):
            return 1
    return 0


def describe(evaluation: Evaluation) -> str:
    """The metrics for a terminal, one a line, with their intervals; then by group, then failures and divergences."""
    values, lines = evaluation.metrics, []
    for name, value in values.items():
        if name.endswith(("_low", "_high")):
            continue
        text = f"{value:.0f}" if name in COUNTS else f"{value:.3f}"
        lines.append(f"{name:28} {text}{_span(values, name)}")
    lines.append(f"{'survival':28} {' '.join(f'{value:.3f}' for value in evaluation.survival)}")
    for kind, by_slot in evaluation.confidence.items():
        lines.append(f"{f'confidence {kind} by slot':28} {' '.join(f'{value:.3f}' for value in by_slot)}")
    lines.append(f"{'by':9} {'group':19} {'answers':>7} {'rounds':>7}  acceptance length       speedup")
    for row in evaluation.breakdown:
        names = ("acceptance_length", "speedup")
        cells = [f"{row[name]:.3f}{_span(row, name)}" if name in row else "" for name in names]
        shape = f"{row['by']:9} {row['group']:19} {row['answers']:7} {row['rounds']:7}"
        lines.append(f"{shape}  {cells[0]:23} {cells[1]}".rstrip())
    for row in evaluation.prompts:
        name = f"{row['where']}, turn {row['turn']}" if row["turn"] > 1 else row["where"]
        if row["status"] != "ok":
            lines.append(f"{name} failed: {row['reason']}")
        elif row["divergence"] is not None:
            lines.append(f"{name} diverges: {json.dumps(row['divergence'])}")
    return "\n".join(lines)


def _span(values: Mapping[str, Any], name: str) -> str:
    low, high = (values.get(f"{name}_{end}", math.nan) for end in ("low", "high"))
    return f"  [{low:.3f}, {high:.3f}]" if math.isfinite(low) else ""


# ---- what is decoded


@dataclass(frozen=True)
class _Entrant:
    """A draft at a block size, its blocks verified by a schedule."""

    name: str
    draft: Draft
    block_size: int
    schedule: str
    checkpoint: str | None

    @property
    def slots(self) -> int:
        """Tokens that a round may commit: the block size, or one more in the layout `next`."""
        return self.block_size + 1 - self.draft.spec.first_slot

    def record(self) -> dict[str, Any]:
        trained = self.draft.spec.block_size
        return {"draft": self.name, "checkpoint": self.checkpoint} | {
            "block_size": self.block_size, "trained_block_size": trained, "schedule": self.schedule
        }  # fmt: skip


def _entrants(
    drafts: Mapping[str, Draft],
    checkpoints: Mapping[str, str],
    block_sizes: Sequence[int] | None,
    schedules: Sequence[str],
) -> dict[str, _Entrant]:
    if too_small := [size for size in block_sizes or () if size < 2]:
        raise UserError(f"block size: expected at least 2 (an anchor and a drafted token), got {too_small[0]}")
    for name, draft in drafts.items():
        if max(block_sizes or (0,)) > (positions := draft.spec.max_position_embeddings):
            raise UserError(f"block size: {name} has {positions} positions, got {max(block_sizes)}")
    entrants = {}
    for (name, draft), size, schedule in product(drafts.items(), block_sizes or (None,), schedules):
        full = name + (f" b={size}" if len(block_sizes or ()) > 1 else "")
        full += f" {schedule}" if len(schedules) > 1 else ""
        entrants[full] = _Entrant(name, draft, size or draft.spec.block_size, schedule, checkpoints.get(name))
    return entrants


def check(target: Target, prompts: Sequence[Prompt], config: EvalConfig) -> None:
    """Refuse what the target can't decode, whatever the draft.

    Raises:
        UserError: a prompt longer than its positions, a chat template without the thinking mode or the system turn that
            is asked for, a temperature that can't be sampled at.
    """
    _check_settings(target, config)
    for prompt in prompts:
        _check_ids(target, prompt.where, _ids(target, prompt, (), config), config)


def _check_settings(target: Target, config: EvalConfig) -> None:
    sampling_of(config, 0)
    if config.thinking is not None and "enable_thinking" not in str(target.tokenizer.chat_template):
        raise UserError(f"eval.thinking={config.thinking}: the chat template of {target.name} has no thinking mode")


def _check_ids(target: Target, where: str, ids: Sequence[int], config: EvalConfig, draft: Draft | None = None) -> None:
    try:
        check_prompt(target, ids, config.max_new_tokens, draft)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _ids(target: Target, prompt: Prompt, answers: Sequence[str], config: EvalConfig) -> list[int]:
    """The tokens of a prompt's next turn after the answers to those before it."""
    template = {} if config.thinking is None else {"enable_thinking": config.thinking}
    return target.chat(prompt.messages(answers, config.system), **template)


def _check(target: Target, entrants: Collection[_Entrant], prompts: Sequence[Prompt], config: EvalConfig) -> None:
    if not entrants or not prompts:
        raise UserError(f"expected at least one draft and one prompt, got {len(entrants)} and {len(prompts)}")
    _check_settings(target, config)
    for entrant in entrants:
        if entrant.schedule == "confidence":
            check_confidence(entrant.draft, entrant.name)
    models = {entrant.name: entrant.draft for entrant in entrants}
    for draft in models.values():
        checkpoint.check_target(draft.spec, target)
    for name, model in {**models, "the target": target.model}.items():
        for tensor, values in model.state_dict().items():
            if not torch.isfinite(values).all():
                raise UserError(f"{name}: {tensor} holds NaN or infinite weights")


def _cases(
    target: Target, entrants: Collection[_Entrant], prompts: Sequence[Prompt], config: EvalConfig, say: Say
) -> list[Case]:
    """Every turn of every prompt, each after the target's own greedy answers to the turns before it."""
    answers: list[list[str]] = [[] for _ in prompts]

    def ask(index: int, reason: str | None = None) -> Case:
        prompt, turn = prompts[index], len(answers[index])
        ids = [] if reason else _ids(target, prompt, answers[index], config)
        return Case(index, turn + 1, prompt.domain, prompt.where, ids, reason)

    cases = latest = [ask(index) for index in range(len(prompts))]
    for case in cases:
        for entrant in entrants:
            _check_ids(target, case.where, case.ids, config, entrant.draft)
    alone = _decoder(target, None, Sampling())
    while going := [case for case in latest if case.turn < len(prompts[case.prompt].turns)]:
        say(f"the target answers turn {going[0].turn} of {len(going)} prompts", doing="answering earlier turns")
        latest = []
        for batch in _parts(going, config.batch_size):
            for case, answer in zip(batch, _attempt(alone, batch, config.max_new_tokens), strict=True):
                failed = isinstance(answer, str)
                text = "" if failed else target.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                answers[case.prompt].append(text)
                latest.append(ask(case.prompt, f"turn {case.turn}: {answer}" if failed else None))
        cases = cases + latest
    return sorted(cases, key=lambda case: (case.prompt, case.turn))


def _by_turns(
    decoders: Mapping[str | None, Decode], cases: Sequence[Case], config: EvalConfig, say: Say
) -> dict[str | None, list[list[Trace | str]]]:
    """Decoder -> for each case its repeats, or why there is none."""
    traces: dict[str | None, list[list[Trace | str]]] = {name: [[] for _ in cases] for name in decoders}
    places = {(case.prompt, case.turn): place for place, case in enumerate(cases)}
    batches = _parts(cases, config.batch_size)
    names = ", ".join(filter(None, decoders))
    say(f"decoding {len(cases)} prompts: the target alone and {names}", doing="decoding prompts")
    for decode in decoders.values():
        _attempt(decode, batches[0], min(WARM_UP_TOKENS, config.max_new_tokens))
    turns = [(repeat, number) for repeat in range(config.repeats) for number in range(len(batches))]
    done, total, said = 0, len(turns) * len(decoders), time.monotonic()
    for repeat, number in turns:
        for name in list(decoders) if (repeat + number) % 2 == 0 else list(decoders)[::-1]:
            found = _attempt(decoders[name], batches[number], config.max_new_tokens)
            for case, trace in zip(batches[number], found, strict=True):
                traces[name][places[case.prompt, case.turn]].append(trace)
            done += 1
            if time.monotonic() - said > 5 or done == total:
                said = time.monotonic()
                say(f"decoded {done} of {total} {'texts' if config.batch_size == 1 else 'batches of texts'}")
    return traces


def _decoder(
    target: Target, entrant: _Entrant | None, sampling: Sampling, schedule: Schedule | None = None
) -> Decode:
    """Cases, token limit -> their traces; by the target alone, or with a draft."""

    def decode(cases: Sequence[Case], limit: int) -> list[Trace]:
        ids, streams = [case.ids for case in cases], [case.stream for case in cases]
        if entrant is None:
            return decode_target(target, ids, limit, sampling, streams)
        return decode_speculative(target, entrant.draft, ids, limit, entrant.block_size, sampling, streams, schedule)

    return decode


def _attempt(decode: Decode, cases: Sequence[Case], limit: int) -> list[Trace | str]:
    """For each case of a batch its trace, or why there is none: a case that fails costs no other."""
    if going := [case for case in cases if case.reason is None]:
        try:
            found = iter(decode(going, limit))
            return [case.reason or next(found) for case in cases]
        except Exception as error:  # whatever it is
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if len(going) <= 1:
        return [case.reason or reason for case in cases]
    # Whoever fails alone leaves; the others are decoded together again, since times depend on the batch.
    alone = [case.reason or _attempt(decode, [case], limit)[0] for case in cases]
    left = [replace(case, reason=trace if isinstance(trace, str) else None) for case, trace in zip(cases, alone)]
    if all(case.reason == before.reason for case, before in zip(left, cases)):
        return [case.reason or f"in a batch of {len(going)}: {reason}" for case in cases]
    return _attempt(decode, left, limit)


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


# ---- what it says


def _rows(
    target: Target,
    cases: Sequence[Case],
    target_repeats: Sequence[Sequence[Trace | str]],
    draft_repeats: Sequence[Sequence[Trace | str]],
    greedy: bool,
) -> tuple[list[dict[str, Any]], list[Pair]]:
    """A row a case, and the traces of those that went well."""
    rows, pairs = [], []
    for case, alone, drafted in zip(cases, target_repeats, draft_repeats, strict=True):
        row: dict[str, Any] = {
            "prompt": case.prompt, "domain": case.domain, "turn": case.turn, "where": case.where,
            "status": "ok", "reason": None, "prompt_tokens": len(case.ids),
        }  # fmt: skip
        rows.append(row)
        broken = [f"{who}: {trace}" for who, repeats in (("target", alone), ("draft", drafted)) for trace in repeats
                  if isinstance(trace, str)]  # fmt: skip
        if broken:
            row |= {"status": "failed", "reason": case.reason or broken[0]}
            continue
        a, b = metrics.typical(alone), metrics.typical(drafted)
        pairs.append(Pair(case, a, b))
        first = divergence(target, case.ids, b.tokens, a.tokens) if greedy else None
        row |= {
            "new_tokens": len(b.tokens),
            "ends": "eos" if b.tokens[-1] in target.eos_token_ids else "limit",
            "rounds": len(b.rounds),
            "acceptance_length": metrics.acceptance_length([b]),
            "speedup": metrics.speedup([a], [b]),
            "target_seconds": a.seconds,
            "draft_seconds": b.seconds,
            "divergence": first and asdict(first),
            "text": target.tokenizer.decode(b.tokens),
        }
    return rows, pairs


def _metrics(
    pairs: Sequence[Pair], rows: Sequence[dict[str, Any]], block_size: int, resamples: int, seed: int
) -> dict[str, float]:
    targets, drafts = [pair.target for pair in pairs], [pair.draft for pair in pairs]
    values: dict[str, float] = {"drafted_tokens": block_size - 1}
    for name in MEASURES:
        values |= _measure(name, pairs, resamples, seed)
    values |= metrics.call_times(targets, drafts)
    values["speedup_of_calls"] = metrics.speedup_of_calls(values["acceptance_length"], values)
    values["rows_per_call"] = metrics.rows_per_call(drafts)
    values["verified_tokens"] = metrics.verified_tokens(drafts)
    values["full_block_fraction"] = metrics.full_block_fraction(drafts, block_size)
    values["divergences"] = sum(row.get("divergence") is not None for row in rows)
    values["prompts"] = len({row["prompt"] for row in rows})
    values["answers"] = len(pairs)
    values["failed"] = len(rows) - len(pairs)
    values["rounds"] = sum(len(trace.rounds) for trace in drafts)
    values["new_tokens"] = sum(len(trace.tokens) for trace in drafts)
    return values


def _breakdown(pairs: Sequence[Pair], resamples: int, seed: int) -> list[dict[str, Any]]:
    """Acceptance and speedup by group; by position no speedup, for the target's tokens are not timed one by one."""
    groups: dict[tuple[str, Any], list[Pair]] = {}
    for pair in pairs:
        case = pair.case
        for key in (("domain", case.domain), ("turn", case.turn), ("context", _bucket(len(case.ids)))):
            groups.setdefault(key, []).append(pair)
        parts: dict[int, list[Round]] = {}
        position = 1  # the prefill gives the first token
        for one in pair.draft.rounds:
            parts.setdefault(_bucket(position), []).append(one)
            position += one.committed
        for bucket, rounds in parts.items():
            part = Pair(case, pair.target, replace(pair.draft, rounds=rounds))
            groups.setdefault(("position", bucket), []).append(part)
    rows, order = [], ("domain", "turn", "context", "position")
    for (by, key), some in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        group = f"{key // 2 if key > FIRST_BUCKET else 0}-{key - 1}" if by in ("context", "position") else str(key)
        row = {"by": by, "group": group, "answers": len(some), "rounds": sum(len(p.draft.rounds) for p in some)}
        for name in ("acceptance_length",) if by == "position" else ("acceptance_length", "speedup"):
            row |= _measure(name, some, resamples, seed)
        rows.append(row)
    return rows


def _bucket(tokens: int) -> int:
    """The end of the bucket that a number of tokens falls in: 16, 32, 64, ..."""
    return max(FIRST_BUCKET, 1 << tokens.bit_length())


def _measure(name: str, pairs: Sequence[Pair], resamples: int, seed: int) -> dict[str, float]:
    items_of, statistic = MEASURES[name]
    items = by_prompt(pairs, items_of(pairs))
    low, high = metrics.bootstrap(statistic, items, resamples, seed)
    return {name: float(statistic(items)), f"{name}_low": low, f"{name}_high": high}


def by_prompt(pairs: Sequence[Pair], items: np.ndarray) -> np.ndarray:
    """Items (cases, n) summed over each prompt's turns, (P, n): turns of a conversation are no independent draws."""
    prompts, index = np.unique(np.array([pair.case.prompt for pair in pairs], int), return_inverse=True)
    sums = np.zeros((len(prompts), items.shape[1]))
    np.add.at(sums, index, items)
    return sums


def _provenance(
    target: Target, cases: Sequence[Case], config: EvalConfig, sampling: Sampling, seed: int
) -> dict[str, Any]:
    cuda = target.device.type == "cuda"
    return {
        "protocol": sampling.protocol,
        "prompts_hash": digest([list(case.ids) for case in cases]),
        "domains": list(dict.fromkeys(case.domain for case in cases)),
        "target": {"name": target.name, "revision": target.revision, "fingerprint": target.fingerprint},
        "max_new_tokens": config.max_new_tokens,
        "batch_size": config.batch_size,
        "thinking": config.thinking,
        "system": config.system,
        "repeats": config.repeats,
        "seed": seed,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if cuda else f"cpu {platform.machine()}",
        "threads": torch.get_num_threads(),
        **checkpoint.provenance(),
    }
