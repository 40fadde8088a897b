"""Is the target's own decoding, which speedups are measured against, as fast as transformers' `generate`?

And where does a speculative round spend its time: how much of it in no forward at all? Everything alternates in one
process, prompt by prompt.

Run:    python tests/benchmarks/bench_decode.py
        python tests/benchmarks/bench_decode.py target.dtype=float32 draft.block_size=16
Cost:   about a minute on two idle CPU cores.
Exit:   1 when decoding by itself takes over 5 % longer than `generate` (ratio of medians), writes another text, or
    bookkeeping (all of a round that is no forward of the draft or the target, heads included) takes 5 % of the rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from unittest.mock import patch

import torch

from draftlab import cli, config
from draftlab.decode import decode_speculative, decode_target, generate
from draftlab.draft import Draft, adapt
from draftlab.metrics import call_times
from draftlab.target import Head, load_target

QUESTIONS = ("Why is the sky blue?", "Write a short poem about a llama.")
TOKENS, REPEATS, ALLOWED = 32, 4, 1.05


def main(argv: Sequence[str] | None = None) -> int:
    args = cli.run_parser(__doc__).parse_args(argv)
    run = config.load(args.config, args.overrides)
    target = load_target(run.target)
    draft = Draft(adapt(target.config, run.draft, target.mask_token_id))
    draft.reset(run.seed)  # its time does not depend on what it has learnt
    draft = draft.to(target.device, target.dtype).eval()
    prompts = [target.chat([{"role": "user", "content": question}]) for question in QUESTIONS]

    forwards = Forwards((target, "forward"), (draft, "propose"), (draft, "extend"), (Head, "greedy"))
    ours, theirs, alone, drafted, other, outside = [], [], [], [], 0, 0.0
    for repeat in range(REPEATS + 1):  # the first one warms up
        for index, prompt in enumerate(prompts):
            def timed_generate() -> tuple[list[int], float]:
                began = time.perf_counter()
                text = generate(target, prompt, TOKENS)
                return text, time.perf_counter() - began

            if (repeat + index) % 2:
                trace, (text, seconds) = decode_target(target, [prompt], TOKENS)[0], timed_generate()
            else:
                (text, seconds), trace = timed_generate(), decode_target(target, [prompt], TOKENS)[0]
            with forwards:
                (speculative,) = decode_speculative(target, draft, [prompt], TOKENS)
            if repeat:
                ours.append((trace.prefill_seconds + trace.seconds) / len(trace.tokens))
                theirs.append(seconds / len(text))
                alone.append(trace)
                drafted.append(speculative)
                outside += speculative.prefill_seconds + speculative.seconds - forwards.seconds
                other += trace.tokens != text

    ratio = median(ours) / median(theirs)
    print(f"{target.name}, {run.target.dtype}, {target.device}, {len(ours)} texts of up to {TOKENS} tokens")
    print(f"milliseconds a token: decode_target {1e3 * median(ours):.2f}, generate {1e3 * median(theirs):.2f}")
    print(f"ratio of medians {ratio:.3f}")
    times = call_times(alone, drafted)
    whole = times["draft_ms"] + times["verify_ms"] + times["commit_ms"]
    print(f"block size {draft.spec.block_size}, {draft.spec.num_hidden_layers} draft layers, mean milliseconds:",
          ", ".join(f"{name} {value:.2f}" for name, value in times.items()))  # fmt: skip
    for name in ("draft", "verify", "commit"):
        values = [getattr(r, f"{name}_seconds") * 1e3 for trace in drafted for r in trace.rounds]
        print(f"  {name}: median {median(values):.2f} ms, {times[name + '_ms'] / whole:.1%} of a round")
    share = outside / sum(trace.seconds for trace in drafted)  # the prefill's bookkeeping too: an upper bound
    print(f"  in no forward: {share:.1%} of the rounds")
    if other:
        print(f"{other} of {len(ours)} texts differ from generate's")
    return int(ratio > ALLOWED or other > 0 or share > ALLOWED - 1)


class Forwards:
    """While it is open, these methods' seconds are added up, the device's work included."""

    def __init__(self, *methods: tuple[object, str]) -> None:
        self.methods = methods

    def timed(self, method: Callable) -> Callable:
        def run(*args):
            began = self.now()
            result = method(*args)
            self.seconds += self.now() - began
            return result

        return run

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def __enter__(self) -> None:
        self.seconds, self.patches = 0.0, ExitStack()
        for owner, name in self.methods:
            method = getattr(owner, name)
            self.patches.enter_context(patch.object(owner, name, self.timed(method)))

    def __exit__(self, *_: object) -> None:
        self.patches.close()


if __name__ == "__main__":
    sys.exit(main())
