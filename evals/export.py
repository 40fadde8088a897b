"""Question: how do other projects' tools get this draft?

Varies: nothing; one draft, written in another project's form. Its weights keep their values, as float32.
Run:    python evals/export.py --ckpt CKPT --to zlab --out DIR
        python evals/export.py --ckpt CKPT --to speculators --out DIR target.model=Qwen/Qwen3-8B
    CKPT as in evals/acceptance.py, published drafts included: from one form to the other. `zlab` is the form of the
    DFlash authors, which SGLang and vLLM load; `speculators` is that of vllm-project/speculators. The latter names the
    target, by target.model. What a published config.json lacks is given by draft.mask_token_id=ID,
    draft.target_layer_ids=[ID,...] or target.model=NAME (the number of its layers). The authors' form has no reduced
    vocabulary (draft.vocab): there the draft guesses through the target's whole head, and one with a Markov head can't.
    speculators knows the variant dflash alone; a reduced vocabulary takes the head's rows along.
Writes: config.json and model.safetensors under --out, a new or empty folder.
Cost:   seconds.
Source: platform/draftlab/formats.py names the code that reads each form.
Exit:   0; 2 for what the user can mend.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from draftlab import cli, config


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.set_defaults(config=None)
    parser.add_argument("--ckpt", required=True, help="folder, MLflow run id, models:/ URI, or hub id")
    parser.add_argument("--to", required=True, choices=["zlab", "speculators"], help="the form to write")
    parser.add_argument("--out", required=True, type=Path, help="the new checkpoint's folder")
    args = parser.parse_args(argv)
    base = config.load(args.config or config.DEFAULT_CONFIG, args.overrides)

    with cli.Progress("loading the draft") as say, tempfile.TemporaryDirectory() as fetched:
        say(f"export of {args.ckpt} to {args.to}")
        from draftlab import checkpoint, drafts, report  # slow: after the first line is out
        from draftlab.target import load_target, load_target_config
        from draftlab.tracking import Store

        report.check_folder(args.out)
        opened = functools.partial(Store, base.tracking, Path("outputs"))
        draft, info, run = drafts.load_draft(args.ckpt, args.config, args.overrides, opened, Path(fetched))
        target = load_target_config(run.target)
        lends = args.to == "speculators" and draft.spec.draft_vocab_size is not None
        head = load_target(run.target).ends.head if lends else None
        if args.to == "zlab" and draft.spec.draft_vocab_size is not None:
            say("zlab has no reduced vocabulary: the draft written there guesses through the target's whole head")
        checkpoint.export(args.out, draft, args.to, run.target.model, target.architectures or [], head)
        say(f"draft {info.hash} written to {args.out}")
    return 0


if __name__ == "__main__":
    cli.main(main)
