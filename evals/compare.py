"""Question: is this draft better than that one, or does it only look so? Or this schedule of the verified length?

Varies: the draft, the schedule; all decode the same prompts in one process, by turns.
Run:    python evals/compare.py --ckpt REFERENCE --ckpt OTHER [--ckpt ...] --prompts heldout:40,humaneval:40
        python evals/compare.py --ckpt CKPT --schedules fixed,confidence eval.batch_size=8
    CKPT as in evals/acceptance.py; the first is what the others are compared with.
Writes: verdicts.csv, verdicts.png and what evals/acceptance.py writes, under --out (default
    outputs/compare/<UTC time>), and an MLflow run with the same.
Cost:   a decoding of each prompt by the target, and one for each draft and schedule.
Source: 95% percentile bootstrap over prompts, paired; an interval that holds 0 is no difference.
Exit:   0; 1 if a prompt failed, or in float32 an output was not the target's own; 2 for what the user can mend.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from draftlab import cli, config
from draftlab.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.eval_parser(__doc__)
    parser.add_argument("--schedules", type=cli.several, help="decode with each of these: fixed,confidence")
    args = parser.parse_args(argv)
    cli.check_taken(args.overrides, {"eval.schedule": "--schedules"} if args.schedules else {})
    cli.check_own_sizes(args.overrides)
    if len(set(args.schedules or ())) < len(args.schedules or ()):
        raise UserError(f"--schedules: expected each once, got {','.join(map(str, args.schedules))}")
    if len(args.ckpt) * len(args.schedules or [None]) < 2:
        raise UserError("expected at least two --ckpt to compare, or one with --schedules fixed,confidence")
    out = cli.out_folder("compare", args)
    base = config.load(args.config or config.DEFAULT_CONFIG, args.overrides)
    for schedule in args.schedules or ():
        base.replace({"eval.schedule": schedule})  # refuses what is none

    with cli.Progress("loading the drafts and their target") as say, tempfile.TemporaryDirectory() as fetched:
        say(f"comparing {', '.join(args.ckpt)}")
        from draftlab import drafts, evaluation, findings, report  # slow: after the first line is out
        from draftlab.tracking import Store

        report.check_folder(out)
        store = Store(base.tracking, Path("outputs"))
        field = drafts.load_field(args.ckpt, args.config, args.overrides, lambda: store, Path(fetched), say)
        run, target = field.run, field.target
        prompts = field.prompts(args.prompts, say)
        params = run.flat() | {"ckpt": ", ".join(args.ckpt), "prompts": args.prompts}
        what = f"{len(args.ckpt)} drafts" if len(args.ckpt) > 1 else "schedules"
        with store.run(f"compare {what}", params) as run_id:
            found = evaluation.evaluate(
                target, field.drafts, prompts, run.eval, say, run.seed, field.hashes, schedules=args.schedules
            )
            arms = {name: {run.seed: result.traces} for name, result in found.items()}
            verdicts = findings.frame([
                verdict
                for measure in evaluation.MEASURES
                for verdict in findings.verdicts(arms, measure, next(iter(arms)), run.eval.bootstrap, run.seed)
            ])  # fmt: skip
            report.write_evaluation(found, out)
            report.write_verdicts(verdicts, out)
            store.log_evaluations(run_id, found, args.prompts, field.folders, out)
        for name, result in found.items():
            say(f"{name}\n{evaluation.describe(result)}")
        say(f"against {next(iter(found))}\n{report.verdict_table(verdicts)}")
        say(f"results: {out}\nMLflow run {run_id}: {store.ui_command}")
    return evaluation.exit_code(found.values())


if __name__ == "__main__":
    cli.main(main)
