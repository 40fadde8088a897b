"""Have the target write a training corpus.

Question: what would the target answer? A draft learns to guess exactly that (arXiv:2602.06036 regenerates responses).
Varies:   the prompts: a JSONL file, a Hugging Face dataset, or `self`: the target continues an empty user turn.
Run:      python experiments/build_corpus.py --out outputs/corpus.jsonl.gz corpus.write_conversations=500
Writes:   the corpus, a JSON row a conversation, and beside it the recipe (.yaml): command, seed, target, counts.
Cost:     the packaged corpus, 2,000 conversations: 20 to 30 minutes on 2 idle cores.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from draftlab import cli, config, corpus, target


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.add_argument("--prompts", default="self", help="`self`, a .jsonl file, or a Hugging Face dataset id")
    parser.add_argument("--out", type=Path, required=True, help="the corpus: a .jsonl or .jsonl.gz file")
    args = parser.parse_args(argv)
    run = config.load(args.config, args.overrides)
    corpus.check_out(args.out)

    with cli.Progress("loading the target") as say:
        writer = target.load_target(run.target)
        prompts = None
        if args.prompts != "self":
            prompts = corpus.read_prompts(args.prompts, run.corpus.write_conversations)
        say(f"{writer.name} writes {run.corpus.write_conversations if prompts is None else len(prompts)} conversations")
        recipe = {
            "command": shlex.join(["python", "experiments/build_corpus.py", *(sys.argv[1:] if argv is None else argv)]),
            "prompts": args.prompts,
            **corpus.recipe(writer, run.corpus, run.seed),
            "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
            "threads": torch.get_num_threads(),
        }
        rows = corpus.write_corpus(writer, prompts, run.corpus, run.seed, say)
        count = corpus.write_file(args.out, rows, recipe)
        say(f"wrote {count} conversations to {args.out}")
    return 0


if __name__ == "__main__":
    cli.main(main)
