"""Question: is speculative decoding with this draft what the target alone writes: word for word, or, sampled, as often?

Varies: nothing. Greedy: every prompt is decoded speculatively and by transformers' `generate`. Sampled at temperature 1,
    in both modes: the tiny target's exact probabilities against the frequencies of --draws texts (chi-square), and the
    checkpoint's target alone against speculative decoding, --samples texts each (two-sample chi-square). A rule that is
    broken on purpose, which replaces rejected tokens from q instead of the residual, has to fail the first test.
Run:    python evals/losslessness.py --ckpt CKPT
        python evals/losslessness.py --ckpt CKPT --dtype bfloat16 --prompts humaneval:20 eval.max_new_tokens=32
    CKPT as in evals/acceptance.py.
Writes: nothing; each divergence is a line: prompt, position, both tokens, the target's top-2 logit gap there; each
    distribution test is a line with its p-values, one a place in the text.
Cost:   20 minutes for the default 164 + 40 prompts of 64 tokens on two CPU cores, and 8 for the distributions.
Source: arXiv:2602.06036: greedy verification changes no token; arXiv:2211.17192: nor does rejection sampling change the
    distribution. In bfloat16 kernels of another shape may break a tie otherwise, which is why a divergence comes with
    its gap; in float32 none is expected.
Exit:   0; 1 for any divergence in float32, a distribution that differs, or a broken rule that goes unnoticed; 2 for what
    the user can mend.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np

from draftlab import cli, config

if TYPE_CHECKING:
    from draftlab.decode import Trace
    from draftlab.draft import Draft
    from draftlab.target import Target

PLACES = 3
"""Tokens of each text that are counted: the prefill's and two of the rounds'."""
LOWEST = 0.001
"""p-values below it are a difference: seen once in a thousand tests where there is none."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.set_defaults(config=None)
    parser.add_argument("--ckpt", required=True, help="folder, MLflow run id, models:/ URI, or hub id")
    parser.add_argument("--prompts", default="humaneval:164,heldout:40", help="as in evals/acceptance.py, by comma")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of target and draft")
    parser.add_argument("--draws", type=int, default=200_000, help="texts of the tiny target; 0 skips the test")
    parser.add_argument("--samples", type=int, default=1000, help="texts of the checkpoint's target; 0 skips the test")
    args = parser.parse_args(argv)
    overrides = [*args.overrides, f"target.dtype={args.dtype}"]
    base = config.load(args.config or config.DEFAULT_CONFIG, overrides)

    with cli.Progress("loading the draft and its target") as say, tempfile.TemporaryDirectory() as fetched:
        say(f"losslessness of {args.ckpt} in {args.dtype}")
        from draftlab import decode, drafts, evaluation  # slow: after the first line is out
        from draftlab.target import load_target
        from draftlab.tracking import Store

        store = Store(base.tracking, Path("outputs"))
        draft, info, run = drafts.load_draft(args.ckpt, args.config, overrides, store, Path(fetched))
        target = load_target(run.target)
        drafts.check_target(draft, info, target)
        draft, limit = draft.to(target.device, target.dtype), run.eval.max_new_tokens
        named = [
            (f"{source} {n}", target.chat(messages))
            for source in args.prompts.split(",")
            for n, messages in enumerate(evaluation.load_prompts(source, run, target, say))
        ]
        for _, prompt in named:
            decode.check_prompt(target, prompt, limit)
        say(f"{len(named)} prompts, at most {limit} new tokens each", doing="decoding")
        found, tokens, rounds, said = 0, 0, 0, time.monotonic()
        for n, (name, prompt) in enumerate(named, 1):
            trace = decode.decode_speculative(target, draft, [prompt], limit)[0]
            first = decode.divergence(target, prompt, trace.tokens, decode.generate(target, prompt, limit))
            if first is not None:
                found += 1
                tokens_there = f"{first.ours}, generate {first.theirs}"
                say(f"{name} diverges at token {first.position}: {tokens_there}, gap {first.gap:.2g}")
            tokens, rounds = tokens + len(trace.tokens), rounds + len(trace.rounds)
            if time.monotonic() - said > 10 or n == len(named):
                said = time.monotonic()
                say(f"{n} of {len(named)} prompts, {tokens} tokens in {rounds} rounds, {found} diverge")
        lossless = not found or args.dtype != "float32"
        if args.draws:
            lossless &= _check_exactly(args.draws, say)
        if args.samples:
            lossless &= _check_samples(target, draft, named[0][1], args.samples, say)
    return 0 if lossless else 1


def _check_exactly(draws: int, say: Callable) -> bool:
    """Do the tiny target's sampled texts have its probabilities, and does a broken rule show?"""
    from draftlab import decode, metrics
    from draftlab.draft import Draft, adapt
    from draftlab.target import load_target

    target = load_target(config.TargetConfig(model="tiny", dtype="float32", device="cpu"))
    chosen = config.DraftConfig(block_size=3, num_hidden_layers=2, target_layer_ids=[0, 2])
    draft, prompt = Draft(adapt(target.config, chosen, target.mask_token_id)).eval(), [75]
    draft.reset(5)  # of a dozen random drafts one that agrees with this target comparatively often: 2 in 10 tokens
    expected = draws * _exact(target, prompt)

    def p_values(mode: str) -> list[float]:
        sampling = decode.Sampling(temperature=1.0, mode=mode)
        found = _counts(target, prompt, draws, 1000, lambda ids, limit, streams: decode.decode_speculative(
            target, draft, ids, limit, None, sampling, streams))  # fmt: skip
        return [metrics.chi_square(*place) for place in zip(found, expected)]

    say(f"the tiny target: {draws} texts each way", doing="sampling")
    good = [_said(say, f"{mode} against exact probabilities", p_values(mode)) for mode in decode.MODES]
    with patch.object(decode, "reject", _without_residual(decode.reject)):
        caught = not _said(say, "a rule without the residual against exact probabilities", p_values("rejection"))
    return all(good) and caught


def _check_samples(target: Target, draft: Draft, prompt: Sequence[int], samples: int, say: Callable) -> bool:
    """Does speculative decoding with the checkpoint write what the target alone writes, as often?"""
    from draftlab import decode, metrics

    sampling, prompt = decode.Sampling(temperature=1.0), prompt[-16:]
    say(f"{target.name}: {samples} texts each way, after the end of the first prompt", doing="sampling")
    alone = _counts(target, prompt, samples, 50, lambda ids, limit, streams: decode.decode_target(
        target, ids, limit, replace(sampling, seed=1), streams))  # fmt: skip
    good = []
    for mode in decode.MODES:
        found = _counts(target, prompt, samples, 50, lambda ids, limit, streams: decode.decode_speculative(
            target, draft, ids, limit, None, replace(sampling, mode=mode), streams))  # fmt: skip
        p_values = [metrics.two_samples(*place) for place in zip(found, alone)]
        good.append(_said(say, f"{mode} against the target alone", p_values))
    return all(good)


def _counts(
    target: Target, prompt: Sequence[int], draws: int, batch: int, decode: Callable[..., list[Trace]]
) -> np.ndarray:
    """(PLACES, V + 1) how often each token stood at each place; last, how often the text had ended before."""
    counts = np.zeros((PLACES, target.vocab_size + 1), int)
    for start in range(0, draws, batch):
        streams = range(start, min(start + batch, draws))
        for trace in decode([prompt] * len(streams), PLACES + 2, streams):
            tokens = trace.tokens[:PLACES] + [target.vocab_size] * (PLACES - len(trace.tokens))
            counts[range(PLACES), tokens] += 1
    return counts


def _exact(target: Target, prompt: Sequence[int]) -> np.ndarray:
    """(PLACES, V + 1) probabilities of what `_counts` counts, by summing over all texts before each place."""
    import torch

    texts, weights, rows = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64), []
    for place in range(PLACES):
        with torch.inference_mode():
            q = torch.cat([target.model(part).logits[:, -1].double().softmax(-1) for part in texts.split(3000)])
        q = weights[:, None] * q
        rows.append(torch.cat([q.sum(0), 1 - q.sum()[None]]))
        if place < PLACES - 1:
            ends = torch.tensor(sorted(target.eos_token_ids))
            going = torch.ones_like(q, dtype=torch.bool).index_fill_(1, ends, False)
            before, tokens = going.nonzero().T
            texts, weights = torch.cat([texts[before], tokens[:, None]], dim=1), q[before, tokens]
    return torch.stack(rows).clamp(min=0).numpy()


def _without_residual(reject: Callable) -> Callable:
    """The usual mistake: a rejected guess is replaced by a sample of q."""
    from draftlab.decode import draw

    def broken(guesses, p, q, stake, keep, replace):
        accepted, answers = reject(guesses, p, q, stake, keep, replace)
        fresh = draw(q.take_along_dim(accepted[:, None, None], 1)[:, 0], replace)
        return accepted, answers.scatter(1, accepted[:, None], fresh[:, None])

    return broken


def _said(say: Callable, what: str, p_values: list[float]) -> bool:
    """Say p-values; True where none shows a difference."""
    same = min(p_values) >= LOWEST
    say(f"{what}: {'no difference' if same else 'they differ'}, p {', '.join(f'{p:.2g}' for p in p_values)}")
    return same


if __name__ == "__main__":
    cli.main(main)
