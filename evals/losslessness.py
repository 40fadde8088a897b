"""Question: is speculative decoding with this draft what the target alone writes: word for word, or, sampled, as often?

Varies: nothing. Greedy: the first turn of each prompt is decoded speculatively and by transformers' `generate`. Sampled
    at temperature 1, in both modes: the tiny target's exact probabilities against the frequencies of --draws texts
    (chi-square), and the checkpoint's target alone against speculative decoding, --samples texts each (two-sample
    chi-square). A rule that is broken on purpose, which replaces rejected tokens from q instead of the residual, has to
    fail the first test.
Run:    python evals/losslessness.py --ckpt CKPT
        python evals/losslessness.py --ckpt CKPT --dtype bfloat16 --prompts humaneval:20 eval.max_new_tokens=32
        python evals/losslessness.py --ckpt CKPT eval.schedule=confidence
    CKPT as in evals/acceptance.py; HumanEval's prompts, in the default, need '.[test]'.
Writes: nothing; each divergence is a line: prompt, position, both tokens, the target's top-2 logit gap there; each
    distribution test is a line with its p-values, one a place in the text.
Cost:   20 minutes for the default 164 + 40 prompts of 64 tokens on two CPU cores, and 8 for the distributions.
Source: arXiv:2602.06036: greedy verification changes no token; arXiv:2211.17192: nor does rejection sampling change the
    distribution. In bfloat16 kernels of another shape may break a tie otherwise, which is why a divergence comes with
    its gap; in float32 none is expected.
Exit:   0; 1 for any divergence in float32, a distribution that differs, or a broken rule that goes unnoticed; 2 for
    what the user can mend.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from draftlab import cli, config
from draftlab.errors import UserError

FEWEST = 100
"""Texts of a distribution test."""
UNUSED = {
    "eval.temperature": "here it is 0 word for word, and 1 in the distributions",
    "eval.batch_size": "here it is 1, as `generate` has it beside",
    "eval.mode": "both are tested",
    "eval.top_k": "the distributions are whole",
    "eval.top_p": "the distributions are whole",
    "eval.block_sizes": "it is the draft's own",
}
"""Settings that this script has settled."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.set_defaults(config=None)
    parser.add_argument("--ckpt", required=True, help="folder, MLflow run id, models:/ URI, or hub id")
    parser.add_argument("--prompts", default="humaneval:164,heldout:40", help="as in evals/acceptance.py, by comma")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of target and draft")
    parser.add_argument("--draws", type=int, default=200_000, help="texts of the tiny target; 0 skips the test")
    parser.add_argument("--samples", type=int, default=1000, help="texts of the checkpoint's target; 0 skips the test")
    args = parser.parse_args(argv)
    for option, texts in (("--draws", args.draws), ("--samples", args.samples)):
        if texts and texts < FEWEST:
            parser.error(f"{option}: expected 0, or {FEWEST} texts at least for a test to tell anything, got {texts}")
    cli.check_taken(args.overrides, {"target.dtype": "--dtype"})
    cli.check_unused(args.overrides, UNUSED)
    overrides = [*args.overrides, f"target.dtype={args.dtype}"]
    base = config.load(args.config or config.DEFAULT_CONFIG, overrides)

    with cli.Progress("loading the draft and its target") as say, tempfile.TemporaryDirectory() as fetched:
        say(f"losslessness of {args.ckpt} in {args.dtype}")
        from draftlab import decode, drafts, sampled, surface  # slow: after the first line is out
        from draftlab.prompts import load_prompts
        from draftlab.target import load_target
        from draftlab.tracking import Store

        opened = functools.partial(Store, base.tracking, Path("outputs"))
        draft, info, run = drafts.load_draft(args.ckpt, args.config, overrides, opened, Path(fetched))
        target = load_target(run.target)
        drafts.check_target(draft, info, target)
        draft, limit = draft.to(target.device, target.dtype), run.eval.max_new_tokens
        prompts = load_prompts(args.prompts, run, target, say)
        template = {} if run.eval.thinking is None else {"enable_thinking": run.eval.thinking}
        named = [
            (prompt.where, target.chat(prompt.messages(system=run.eval.system), **template)) for prompt in prompts
        ]
        for name, prompt in named:
            try:
                decode.check_prompt(target, prompt, limit, draft)
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
        schedule = None
        if run.eval.schedule == "confidence":
            decode.check_confidence(draft, args.ckpt)
            schedule = surface.schedule(target, draft, [ids for _, ids in named], draft.spec.block_size, 1, say)
        say(f"{len(named)} prompts, at most {limit} new tokens each", doing="decoding")
        found, tokens, rounds, said = 0, 0, 0, time.monotonic()
        for n, (name, prompt) in enumerate(named, 1):
            (trace,) = decode.decode_speculative(target, draft, [prompt], limit, schedule=schedule)
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
            lossless &= sampled.check_exactly(args.draws, say)
        if args.samples:
            lossless &= sampled.check_samples(target, draft, named[0][1][-16:], args.samples, say, schedule)
    return 0 if lossless else 1


if __name__ == "__main__":
    cli.main(main)
