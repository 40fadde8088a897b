"""How fast does a target write a corpus, against transformers' `generate` with the same prompts?

Both answer the same held-out prompts greedily, in float32, and must write the same tokens. `generate` gets all prompts
as one batch; draftlab cuts them into batches of `corpus.write_batch`, as it does for a corpus. They take turns.

Run:    python tests/benchmarks/bench_corpus.py
        python tests/benchmarks/bench_corpus.py --prompts 128 --tokens 160
        python tests/benchmarks/bench_corpus.py --device cuda
Cost:   about three minutes on two idle CPU cores.
Exit:   1 when an answer differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from measuring import alternate, now, parser, start

from draftlab import cli, corpus
from draftlab.target import Target, load_target

SHAPE = ["target.dtype=float32", "corpus.conversations=null", "corpus.write_batch=32"]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--tokens", type=int, default=64, help="most new tokens of an answer")
    options.add_argument("--rounds", type=int, default=2, help="times that both write all answers")
    args = options.parse_args(argv)
    run = start(args, SHAPE)
    if run is None:
        return 0
    quiet = lambda *_, **__: None  # noqa: E731
    target = load_target(run.target)
    prompts = corpus.load_corpus(run.corpus, target, quiet).prompts(args.prompts)
    contexts = [target.chat(prompt) for prompt in prompts]

    def ours() -> tuple[list[list[int]], float]:
        began = now()
        found = corpus.generate(
            target, contexts, args.tokens, temperature=0, batch=run.corpus.write_batch, seed=(run.seed,), say=quiet,
            what="",
        )
        answers = dict(found)
        return [answers[i] for i in range(len(contexts))], now() - began

    def theirs() -> tuple[list[list[int]], float]:
        began = now()
        return transformers_generate(target, contexts, args.tokens), now() - began

    found = alternate({"draftlab": ours, "generate": theirs}, args.rounds)
    (answers, _), (expected, _) = found["draftlab"][0], found["generate"][0]
    other = sum(ours != theirs for ours, theirs in zip(answers, expected, strict=True))
    tokens = sum(map(len, answers))
    print(f"{len(contexts)} prompts of {min(map(len, contexts))} to {max(map(len, contexts))} tokens, {tokens} new "
          f"tokens, greedy; medians of {args.rounds} rounds")  # fmt: skip
    rates = {name: sum(map(len, rounds[0][0])) / median(spent for _, spent in rounds) for name, rounds in found.items()}
    for name, rate in rates.items():
        print(f"{name:10} {rate:8.1f} tokens/s {rate / rates['generate']:7.2f}x of generate")
    print(f"answers that differ: {other} of {len(contexts)}")
    return int(other > 0)


@torch.inference_mode()
def transformers_generate(target: Target, contexts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """The new tokens of each context by transformers' own greedy decoding, all contexts as one batch."""
    width, eos = max(map(len, contexts)), sorted(target.eos_token_ids)
    ids, mask = (torch.zeros(len(contexts), width, dtype=torch.long) for _ in range(2))
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :] = torch.tensor(context)
        mask[row, width - len(context) :] = 1
    out = target.model.generate(
        ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=limit,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=eos,
        pad_token_id=eos[0],
    )
    rows = out[:, width:].tolist()
    ends = [next((i for i, token in enumerate(row, 1) if token in target.eos_token_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends)]


if __name__ == "__main__":
    cli.main(main)
