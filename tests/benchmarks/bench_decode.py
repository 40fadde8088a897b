"""Is the target's own decoding, which speedups are measured against, as fast as transformers' `generate`?

And where does a speculative round spend its time? Everything alternates in one process, prompt by prompt.

Run:    python tests/benchmarks/bench_decode.py
        python tests/benchmarks/bench_decode.py target.dtype=float32 draft.block_size=16
Cost:   about a minute on two idle CPU cores.
Exit:   1 when decoding by itself takes over 5 % longer than `generate` (ratio of medians), or writes another text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median

from draftlab import cli, config
from draftlab.decode import decode_speculative, decode_target, generate
from draftlab.draft import Draft, adapt
from draftlab.metrics import call_times
from draftlab.target import load_target

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

    ours, theirs, alone, drafted, other = [], [], [], [], 0
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
            speculative = decode_speculative(target, draft, [prompt], TOKENS)[0]
            if repeat:
                ours.append((trace.prefill_seconds + trace.seconds) / len(trace.tokens))
                theirs.append(seconds / len(text))
                alone.append(trace)
                drafted.append(speculative)
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
    if other:
        print(f"{other} of {len(ours)} texts differ from generate's")
    return int(ratio > ALLOWED or other > 0)


if __name__ == "__main__":
    sys.exit(main())
