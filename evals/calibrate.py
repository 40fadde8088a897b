"""Question: how far may a draft's confidence head be believed, and how much further after calibration?

Varies: one temperature a slot, fitted from the first slot to the last on the later half of each set's prompts; the
    earlier half, with which the held-out prompts of other scripts begin, tells the calibration error before and after.
Run:    python evals/calibrate.py --ckpt CKPT --out DIR
        python evals/calibrate.py --ckpt CKPT --out DIR --prompts heldout:108 eval.max_new_tokens=128 eval.batch_size=8
        python evals/acceptance.py --ckpt DIR eval.schedule=confidence
    CKPT as in evals/acceptance.py, a draft with a confidence head. A calibration holds for the way it was made: greedy,
    or at eval.temperature and in eval.mode.
Writes: under --out, a new or empty folder, the checkpoint with the temperatures in its config.json.
Cost:   two decodings of each prompt, whole blocks verified; 10 minutes for the default 100 prompts on two CPU cores.
Source: sequential temperature scaling of the DSpark paper.
Exit:   0; 1 if a prompt failed, or in float32 an output was not the target's own; 2 for what the user can mend.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from draftlab import cli, config
from draftlab.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.set_defaults(config=None)
    parser.add_argument("--ckpt", required=True, help="folder, MLflow run id, models:/ URI, or hub id")
    parser.add_argument("--prompts", default="heldout:100", help="as in evals/acceptance.py, by comma")
    parser.add_argument("--out", required=True, type=Path, help="the calibrated checkpoint's folder")
    args = parser.parse_args(argv)
    cli.check_own_sizes(args.overrides)
    base = config.load(args.config or config.DEFAULT_CONFIG, args.overrides)

    with cli.Progress("loading the draft and its target") as say, tempfile.TemporaryDirectory() as fetched:
        say(f"calibration of {args.ckpt}")
        from draftlab import checkpoint, drafts, evaluation, report  # slow: after the first line is out
        from draftlab.tracking import Store

        report.check_folder(args.out)
        store = Store(base.tracking, Path("outputs"))
        field = drafts.load_field([args.ckpt], args.config, args.overrides, lambda: store, Path(fetched), say)
        run, target = field.run, field.target
        ((name, draft),) = field.drafts.items()
        if not draft.spec.confidence:
            raise UserError(f"--ckpt {args.ckpt}: expected a draft with a confidence head (draft.confidence), got none")
        prompts = field.prompts(args.prompts, say)
        found = evaluation.evaluate(target, field.drafts, prompts, run.eval, say, run.seed, schedules=["fixed"])
        temperatures, scores = evaluation.calibrate(found[name])
        checkpoint.save_calibrated(args.out, field.folders[name], temperatures, found[name].provenance)
        for row in found[name].prompts:
            if row["status"] != "ok":
                say(f"{row['where']} failed: {row['reason']}")
        say("on the earlier half of the prompts, by slot, and last the mean")
        for title, values in {"temperature": temperatures, **scores}.items():
            say(f"{title:11} {' '.join(f'{value:6.3f}' for value in values)}")
        before, after = scores["raw_ece"][-1], scores["ece"][-1]
        better = "" if after < before else ": no better, so the draft is best left as it was"
        say(f"calibration error {before:.3f} before, {after:.3f} after{better}")
        say(f"calibrated draft written to {args.out}")
    return evaluation.exit_code(found.values())


if __name__ == "__main__":
    cli.main(main)
