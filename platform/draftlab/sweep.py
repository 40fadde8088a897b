"""A sweep from the varied values to the table: the driver, which owns every record on disk and in MLflow."""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from draftlab import checkpoint, cluster, corpus, evaluation, findings, report, search, train
from draftlab.config import Run
from draftlab.corpus import Corpus
from draftlab.errors import UserError
from draftlab.prompts import heldout, load_prompts
from draftlab.records import (
    FAILED,
    FINISHED,
    KILLED,
    RUNNING,
    STOPPED,
    TRAINED,
    Plan,
    Record,
    alone,
    load_plan,
    save_plan,
)
from draftlab.search import Trial, Vary
from draftlab.target import Target, expand, load_target, load_target_config
from draftlab.tracking import Store

OUTPUTS = Path("outputs")

ENDED = (TRAINED, FINISHED, STOPPED)
"""Needs no training any more."""

Say = Callable[..., None]


@dataclass(frozen=True)
class Question:
    """What a script asks."""

    experiment: str
    """Its name; of the runs and of the default folder, too."""
    text: str
    """The question itself."""
    vary: Vary
    """What is varied; empty is a single trial."""
    baseline: str | None = None
    """The arm that the others are compared with, unless search.baseline names another."""
    probe: Mapping[str, Any] | None = None
    """Settings of a trial that comes first and proposes layers to those that have draft.layer_choice=gate; its
    candidates are features.layers, or all that can be tapped."""


def start(question: Question, base: Run, out: Path | None, say: Say) -> int:
    """Train and evaluate a draft for every trial.

    Args:
        base: what the trials share.
        out: the sweep's folder; None is `outputs/<experiment>/<UTC time>`.
        say: shows a line.

    Returns:
        0, or 1 if a trial failed.

    Raises:
        UserError: before any long work, and before the folder exists.
        KeyboardInterrupt: when everything has been put away.
    """
    base = _anchor(base)
    probe = _probe(question, base)
    trials = _trials(base, question.vary, probe)
    name = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
    folder = expand(str(out or OUTPUTS / question.experiment / name)).resolve()
    report.check_folder(folder)
    store = _store(base, None, say)
    prepared = _prepare(base, trials, say)
    _make(folder)
    with alone(folder):
        key = uuid.uuid4().hex[:12]
        flats = [trial.run.flat() for trial in trials.values()]
        shared = {name: value for name, value in flats[0].items() if all(flat[name] == value for flat in flats)}
        varied = {f"sweep.{name}": list(values) for name, values in question.vary.items()}
        tags = {"draftlab.experiment": question.experiment, "draftlab.folder": str(folder)}
        parent = store.start_run(f"{question.experiment} {folder.name}", key=key, params=shared | varied, tags=tags)
        plan = Plan(
            experiment=question.experiment,
            question=question.text,
            key=key,
            vary=dict(question.vary),
            baseline=base.search.baseline or question.baseline,
            base=base,
            probe=probe,
            tracking_uri=store.uri,
            mlflow_run_id=parent,
            prepared=_fingerprints(prepared),
        )
        return _Sweep(plan, trials, folder, store, say).run(prepared)


def resume(folder: Path, say: Say) -> int:
    """Go on with an interrupted sweep: what has ended is kept, what failed is tried again.

    Args:
        folder: as `start` made it.
        say: shows a line.

    Returns, raises: as `start`.
    """
    folder = expand(str(folder)).resolve()
    plan = load_plan(folder)
    trials = _trials(plan.base, plan.vary, plan.probe, plan.proposed)
    with alone(folder):
        store = _store(plan.base, plan.tracking_uri, say)
        prepared = _prepare(plan.base, trials, say)
        if _fingerprints(prepared) != plan.prepared:
            raise UserError(f"--resume {folder}: target or corpus have changed since; start a new sweep")
        if (found := store.start_run(f"{plan.experiment} {folder.name}", key=plan.key)) != plan.mlflow_run_id:
            store.end_run(found, FAILED, "made by a resumed sweep whose runs are not here")
            raise UserError(f"--resume {folder}: its MLflow run {plan.mlflow_run_id} is not in {store.uri}")
        return _Sweep(plan, trials, folder, store, say).run(prepared)


def dry_run(question: Question, base: Run, say: Say) -> int:
    """Show the trials and about what they take, and do nothing.

    Raises:
        UserError: as `start`, for what can be known without loading the target.
    """
    base = _anchor(base)
    trials = _trials(base, question.vary, _probe(question, base))
    target = load_target_config(base.target)
    say("measuring the machine", doing="measuring the machine")
    shares = cluster.find_shares([trial.run for trial in trials.values()])
    device = torch.device("cuda" if shares.gpus else "cpu")
    here = device if torch.cuda.is_available() else torch.device("cpu")  # a cluster's GPUs are not to be measured
    flops = search.matrix_speed(base, here, base.train.threads or shares.cpus)
    costs = {}
    for name, trial in trials.items():
        try:
            train.check(trial.run, target)
            costs[name] = search.cost(trial.run, target, device)
        except UserError as error:
            raise UserError(f"trial {name}: {error}") from error
    rows = [
        {
            "trial": name,
            "steps": "-" if trials[name].run.train.seconds else trials[name].run.train.steps,
            "anchors": trials[name].run.train.anchors,
            "minutes": f"{cost.seconds(flops) / 60:.1f}",
            "GB memory": f"{cost.memory * trials[name].run.train.workers / 1e9:.1f}",
            "GB disk": f"{cost.disk / 1e9:.2f}",
        }
        for name, cost in costs.items()
    ]
    count = search.count(base, trials)
    times = [cost.seconds(flops) for cost in costs.values()]
    seconds = max(*times, sum(times) / len(times) * count / shares.concurrent)
    seconds = min(seconds, base.search.time_budget or float("inf"))
    conversations = base.corpus.conversations or corpus.count_rows(base.corpus)
    stored = search.feature_bytes(trials, target, conversations)
    say(f"{len(trials)} combinations\n{pd.DataFrame(rows).to_string(index=False)}")
    memory = max(cost.memory for cost in costs.values()) * base.train.workers * shares.concurrent
    disk = sum(cost.disk for cost in costs.values()) / len(costs) * count
    say(
        f"{count} trials, {shares.concurrent} at once: about {seconds / 60:.0f} minutes of training, "
        f"{memory / 1e9:.1f} GB of memory, {disk / 1e9:.2f} GB of disk and at most {stored / 1e9:.2f} GB of features"
    )
    if base.cluster.address == "local":
        _tell_memory(costs.values(), base, shares, say)
    say("estimates, without ASHA, features and decoding; nothing was started")
    return 0


class _Sweep:
    """The driver's side of a sweep that goes on; hears what the cluster tells (cluster.Watch)."""

    def __init__(self, plan: Plan, trials: dict[str, Trial], folder: Path, store: Store, say: Say) -> None:
        self.plan, self.trials, self.folder, self.store, self.say = plan, trials, folder, store, say
        self.search = plan.base.search
        self.until = time.monotonic() + (self.search.time_budget or math.inf)

    def run(self, prepared: train.Prepared) -> int:
        """Train what isn't trained, evaluate what isn't evaluated, report."""
        self.prepared = prepared
        self.records: dict[str, Record] = {}
        try:
            self.records = {name: Record(self.folder / "trials" / name) for name in self.trials}
            save_plan(self.folder, self.plan)
            for name, record in self.records.items():
                if record.status == TRAINED:  # in an earlier process
                    self._start_run(name)
            self._train(self._propose())
            self._evaluate()
            return self._report()
        except (KeyboardInterrupt, SystemExit):
            self.say(f"stopped; go on with --resume {self.folder}", doing="stopping")
            self._close(KILLED, "stopped by a signal")
            raise
        except BaseException as error:
            self.say(f"failed; go on with --resume {self.folder}", doing="stopping")
            self._close(FAILED, f"{type(error).__name__}: {error}")
            raise

    def _propose(self) -> list[str]:
        """Train the probe, where there is one, and let those that ask have the layers that it proposes.

        Returns:
            The trials that can be trained now.
        """
        if search.PROBE not in self.trials:
            return list(self.trials)
        self._train([search.PROBE])
        probe = self.records[search.PROBE]
        if self.plan.proposed is None and probe.status in ENDED:
            order = checkpoint.load(probe.draft)[0].layer_order()
            self.plan = self.plan.model_copy(update={"proposed": order})
            save_plan(self.folder, self.plan)
            self.trials = _trials(self.plan.base, self.plan.vary, self.plan.probe, order)
            self.say(f"{search.PROBE}: puts the target's layers in the order {', '.join(map(str, order))}")
        lost = [] if self.plan.proposed else self._asking()
        for name in lost:
            self.records[name].change(status=FAILED, reason=f"{search.PROBE} proposed no layers")
        return [name for name in self.trials if name not in (search.PROBE, *lost)]

    def _asking(self) -> list[str]:
        """The trials whose layers the probe proposes."""
        return [name for name, trial in self.trials.items() if trial.run.draft.layer_choice == "gate"]

    def _train(self, names: Sequence[str]) -> None:
        done = {name: self.records[name].reports() for name in names if self.records[name].status in ENDED}
        todo = {name: self.trials[name].run for name in names if name not in done}
        chosen = self.search.method == "optuna" and search.PROBE not in names
        count = (self.search.samples if chosen else len(names)) - len(done)
        if count < 1:
            return
        self.say(f"{count} of {self._count()} trials to train; starting Ray", doing="starting Ray")
        points = {name: self.trials[name].point for name in names} if chosen else None
        begun = [name for name in todo if self.records[name].status]
        left = max(1.0, self.until - time.monotonic()) if self.search.time_budget else None
        cluster.run_trials(todo, self.prepared, self.folder, self, points, done, begun, left)
        for name in begun:
            if self.records[name].status == RUNNING:  # in an earlier process, and not since
                self.records[name].change(status=KILLED, reason="the time budget was used up before it went on")

    def _count(self) -> int:
        return search.count(self.plan.base, self.trials)

    # What the cluster tells

    def started(self, name: str) -> None:
        run_id = self._start_run(name)
        data = self.prepared.corpus
        self.store.log_dataset(run_id, "corpus", data["fingerprint"], data["source"], "training")
        self.records[name].change(status=RUNNING, run_id=run_id, reason=None)
        number = sum(record.status is not None for record in self.records.values())  # in another order than given
        self.say(f"{name}: trial {number} of {self._count()} starts", doing=f"starting the workers of {name}")

    def _start_run(self, name: str) -> str:
        trial = self.trials[name]
        return self.store.start_run(
            name,
            key=f"{self.plan.key}/{name}",
            parent=self.plan.mlflow_run_id,
            params=trial.run.flat(),
            tags={
                "draftlab.experiment": self.plan.experiment,
                "draftlab.sweep": self.folder.name,
                "draftlab.trial": name,
                "draftlab.arm": trial.arm,
                "draftlab.seed": trial.run.seed,
                "draftlab.status": RUNNING,
            },
        )

    def reported(self, name: str, step: int, metrics: dict[str, float]) -> None:
        record = self.records[name]
        record.add_report(step, metrics)
        self.store.log_metrics(record.run_id, metrics, step)
        config = self.trials[name].run.train
        score = metrics.get(cluster.SCORE)
        left = round(metrics["train_seconds"] * (1 / metrics["progress"] - 1))
        self.say(
            f"{name}: step {step}{'' if config.seconds else f'/{config.steps}'}  loss {metrics['loss']:.3f}"
            f"{'' if score is None else f'  held-out acceptance {score:.2f}'}"
            f"  {metrics['tokens_per_second']:,.0f} tokens/s  {left // 60}:{left % 60:02d} left",
            doing=f"training {name}",
        )

    def restarted(self, name: str, reason: str) -> None:
        self.say(f"{name}: {reason}; going on from its last checkpoint", doing=f"restarting the workers of {name}")

    def ended(self, name: str, failure: str | None, stopped: str | None) -> None:
        record, best = self.records[name], cluster.best_checkpoint(self.folder, name)
        if failure or best is None:
            status = KILLED if stopped else FAILED
            reason = failure or f"{stopped or 'it ended'} without a checkpoint"
            record.change(status=status, reason=reason)
            self.store.end_run(record.run_id, status, reason)
            self.say(f"{name}: {status}, {reason} (see {record.folder})")
            return
        source, step, metrics = best
        last = (record.reports() or [metrics])[-1]
        given_up = stopped == cluster.BEHIND  # what only the time cut off is decoded
        if stopped:
            stopped = f"stopped at {last['progress']:.0%}: {stopped}"
        shutil.rmtree(record.draft, ignore_errors=True)
        shutil.copytree(source / "draft", record.draft)
        model_id = None
        if self.plan.base.tracking.log_checkpoints:
            model_id = self.store.log_checkpoint(
                record.run_id, record.draft, name=name, step=step, params=self.trials[name].run.flat(), metrics=metrics
            )
        record.change(
            status=STOPPED if given_up else TRAINED,
            reason=stopped,
            model_id=model_id,
            best_step=step,
            heldout_acceptance_length=metrics.get(cluster.SCORE),
            heldout_vocab_coverage=metrics.get("heldout_vocab_coverage"),
            train_seconds=last["train_seconds"],
            supervised_tokens=last["supervised_tokens"],
        )
        if given_up:
            self.store.end_run(record.run_id, FINISHED, stopped, STOPPED)
        self.say(f"{name}: {stopped or 'trained'}; best at step {step}")

    # After the training

    def _evaluate(self) -> None:
        """Decode held-out prompts with every trained draft, in this process: Ray is down and the machine idle."""
        records = {name: record for name, record in self.records.items() if record.status == TRAINED}
        if not records:
            return
        base = self.plan.base
        self.say(f"decoding held-out prompts with {len(records)} drafts", doing="loading the target")
        target = load_target(base.target)
        prompts = load_prompts("heldout", base, target, self.say)
        loaded = {
            name: checkpoint.load(record.draft, dtype=target.dtype, device=target.device)
            for name, record in records.items()
        }
        drafts = {name: draft for name, (draft, _) in loaded.items()}
        hashes = {name: info.hash for name, (_, info) in loaded.items()}
        sizes = base.eval.block_sizes and sorted({*base.eval.block_sizes, *self._block_sizes()})
        results = evaluation.evaluate(target, drafts, prompts, base.eval, self.say, base.seed, hashes, sizes)
        for name, draft in drafts.items():
            record, out = records[name], records[name].folder / "evaluation"
            others = {one.provenance["block_size"]: one for one in results.values() if one.provenance["draft"] == name}
            result = others.pop(draft.spec.block_size)
            report.write_evaluation({name: result} | {f"{name} b={size}": one for size, one in others.items()}, out)
            if (mix := draft.layer_mix()) is not None:
                report.write_layer_mix(mix.cpu().numpy(), draft.spec.target_layer_ids, out / "layer_mix.png")
            data = ("prompts", result.provenance["prompts_hash"])
            self.store.log_dataset(record.run_id, *data, base.corpus.source, "evaluation")
            values = result.metrics | {
                f"b{size}/{key}": one.metrics[key] for size, one in others.items() for key in evaluation.MEASURES
            }
            state = record.state
            self.store.log_metrics(record.run_id, values, state["best_step"], model_id=state["model_id"], dataset=data)
            self.store.log_artifacts(record.run_id, out, "evaluation")
            self.store.log_table(record.run_id, result.prompts, "evaluation/prompts.csv")
            record.change(status=FINISHED)
            self.store.end_run(record.run_id, FINISHED, record.state["reason"])

    def _block_sizes(self) -> set[int]:
        """That the sweep's drafts are trained with."""
        return {trial.run.draft.block_size for trial in self.trials.values()}

    def _report(self) -> int:
        known = [name for name, record in self.records.items() if self.search.method != "optuna" or record.status]
        survivals = {name: found.survival for name in known if (found := self.records[name].results())}
        curves = {name: self.records[name].reports() for name in known}
        varied = [key.rpartition(".")[2] for key, values in self.plan.vary.items() if len(values) > 1]
        found = self._verdicts()
        said = [findings.answer(found, self.search.rank_by), *self._caveats(known), *self._proposals(found)]
        sentence = " ".join(said)
        frame = report.write_sweep([self._row(name) for name in known], curves, survivals, self.folder, varied)
        if found:
            report.write_verdicts(findings.frame(found), self.folder)
        table = "\n\n".join([report.table(frame), *self._by_block_size()])
        title = f"{self.plan.experiment} {self.folder.name}"
        figures = sorted(path.name for path in self.folder.glob("*.png"))
        page = findings.page(title, self.plan.question, sentence, found, table, figures)
        (self.folder / "report.md").write_text(page, encoding="utf-8")
        parent = self.plan.mlflow_run_id
        for path in (*sorted(self.folder.glob("*.csv")), *sorted(self.folder.glob("*.png")), self.folder / "report.md",
                     self.folder / "sweep.yaml"):  # fmt: skip
            self.store.log_artifacts(parent, path)
        failed = [name for name in known if self.records[name].status == FAILED]
        done = sum(self.records[name].status in ENDED for name in known)
        self.say(f"{done} of {len(known)} trials done\n{table}")
        for one in found:
            self._tell(one)
        self.say(sentence)
        self._log_best(frame)
        lost = sum(found.metrics["failed"] for name in known if (found := self.records[name].results()))
        if lost:
            self.say(f"{lost:.0f} answers failed and are in no number (prompts.csv of each trial)")
        self.say(f"results: {self.folder / 'report.md'}")
        self.say(f"compare: {self.store.ui_command}")
        if failed:
            self.store.end_run(parent, FAILED, f"{len(failed)} of {len(known)} trials failed: {', '.join(failed)}")
        else:
            self.store.end_run(parent, FINISHED)
        return 1 if failed or lost else 0

    def _verdicts(self) -> list[findings.Verdict]:
        """Of the arms that were decoded, by the measure that the sweep ranks by."""
        arms: dict[str, dict[int, list[evaluation.Pair]]] = {}
        for name, record in self.records.items():
            if record.status == FINISHED and name != search.PROBE:
                trial = self.trials[name]
                arms.setdefault(trial.arm, {})[trial.run.seed] = record.pairs()
        base = self.plan.base
        found = findings.verdicts(arms, self.search.rank_by, self.plan.baseline, base.eval.bootstrap, base.seed)
        by_arm = {one.arm: one for one in found}
        for name, record in self.records.items():
            if record.status == FINISHED and (one := by_arm.get(self.trials[name].arm)):
                ends = {"difference": one.difference, "difference_low": one.difference_low}
                self.store.log_metrics(record.run_id, ends | {"difference_high": one.difference_high})
        return found

    def _by_block_size(self) -> list[str]:
        """The table of trained by decoded block size, where there is one; and its picture."""
        finished = [name for name, record in self.records.items() if record.status == FINISHED]
        if not (self.plan.base.eval.block_sizes and finished):
            return []
        frame = pd.concat(
            report.by_block_size(self.records[name].by_block_size()).assign(arm=self.trials[name].arm)
            for name in finished
        )
        report.write_block_sizes(frame, self.folder)
        return [report.block_size_table(frame)]

    def _caveats(self, known: Sequence[str]) -> list[str]:
        """Which arms the answer knows nothing of, and which it knows too early."""
        arms = {self.trials[name].arm: [] for name in known if name != search.PROBE}
        cut = []
        for name in known:
            if self.records[name].status == FINISHED and name != search.PROBE:
                arms[self.trials[name].arm].append(name)
                if reason := self.records[name].state.get("reason"):
                    cut.append(f"{name} {reason}")
        missing = [arm for arm, measured in arms.items() if not measured]
        return [
            *([f"Not measured: {', '.join(missing)}."] if missing else []),
            *([f"Not trained to the end: {'; '.join(cut)}."] if cut else []),
        ]

    def _proposals(self, found: Sequence[findings.Verdict]) -> list[str]:
        """What became of the probe's proposal, by arm; and its picture."""
        if self.plan.proposed is None or self.records[search.PROBE].status not in ENDED:
            return []
        layers = {self.trials[name].arm: self.trials[name].run.draft.target_layer_ids for name in self._asking()}
        texts = [findings.proposal(arm, ids, found) for arm, ids in layers.items()]
        if not self.records[search.PROBE].draft.is_dir():  # deleted after the sweep had ended
            return texts
        gate, _ = checkpoint.load(self.records[search.PROBE].draft)
        shares, taken = gate.layer_mix()[0].tolist(), {layer for ids in layers.values() for layer in ids}
        report.write_gate(shares, gate.spec.target_layer_ids, taken, texts, self.folder)
        return texts

    def _tell(self, one: findings.Verdict) -> None:
        against = f"{one.verdict}, {findings.change(one)} against the baseline"
        beside = "the baseline" if one.verdict == "baseline" else against
        measure = self.search.rank_by.replace("_", " ")
        self.say(f"{one.arm}: {measure} {one.value:.2f} [{one.low:.2f}, {one.high:.2f}], {beside}")

    def _log_best(self, frame: pd.DataFrame) -> None:
        if self.search.rank_by not in frame:
            return
        measured = frame[frame[self.search.rank_by].notna() & frame["trial"].ne(search.PROBE)]
        if measured.empty:
            return
        best = measured.loc[measured[self.search.rank_by].idxmax()]
        numbers = ("acceptance_length", "speedup", cluster.SCORE)
        metrics = {f"best.{number}": float(best[number]) for number in numbers if pd.notna(best[number])}
        self.store.log_metrics(self.plan.mlflow_run_id, metrics)
        self.say(f"best by {self.search.rank_by.replace('_', ' ')}: {best['trial']}, {best['checkpoint']}")

    def _row(self, name: str) -> dict[str, Any]:
        trial, record = self.trials[name], self.records[name]
        row = trial.values | {"trial": name, "arm": trial.arm, "seed": trial.run.seed}
        gamma = math.nan if trial.run.loss.positions == "dpace" else trial.run.gamma
        row |= {"block_size": trial.run.draft.block_size, "gamma": gamma}
        if found := record.results():
            kept = (*report.COLUMNS, *evaluation.MEASURES, "divergences")
            row |= {key: value for key, value in found.metrics.items() if key in kept}
        if record.status in ENDED:
            row["checkpoint"] = str(record.draft)
        for key in (
            "train_seconds", "supervised_tokens", "heldout_acceptance_length", "heldout_vocab_coverage",
            "status", "reason",
        ):  # fmt: skip
            row[key] = record.state.get(key)
        return row | {"mlflow_run_id": record.state.get("run_id")}

    def _close(self, status: str, reason: str) -> None:
        """End every MLflow run of this sweep that is still running."""
        for record in self.records.values():
            if record.status in (RUNNING, TRAINED):
                with contextlib.suppress(Exception):  # say a full disk; the others must be ended all the same
                    self.store.end_run(record.run_id, status, reason)
                    if record.status == RUNNING:
                        record.change(status=status, reason=reason)
        with contextlib.suppress(Exception):
            self.store.end_run(self.plan.mlflow_run_id, status, reason)


def _probe(question: Question, base: Run) -> dict[str, Any] | None:
    """The settings of the question's probe, with its candidates."""
    if question.probe is None:
        return None
    candidates = base.features.layers or list(range(load_target_config(base.target).num_hidden_layers - 1))
    return {**question.probe, "draft.target_layer_ids": candidates}


def _trials(
    base: Run, vary: Vary, probe: Mapping[str, Any] | None, proposed: Sequence[int] | None = None
) -> dict[str, Trial]:
    """The trials, and what can be refused of them before any work."""
    if base.search.rank_by not in evaluation.MEASURES:
        known = ", ".join(evaluation.MEASURES)
        raise UserError(f"search.rank_by: expected one of {known}; got {base.search.rank_by!r}")
    trials = search.trials(base, vary, probe, proposed)
    arms = list(dict.fromkeys(trial.arm for name, trial in trials.items() if name != search.PROBE))
    if base.search.baseline not in (None, *arms):
        raise UserError(f"search.baseline: expected one of {', '.join(arms)}; got {base.search.baseline!r}")
    return trials


def _prepare(base: Run, trials: Mapping[str, Trial], say: Say) -> train.Prepared:
    """What the trials share; refuses, before the features are built, what their cluster or decoding would refuse."""
    shares = cluster.find_shares([trial.run for trial in trials.values()])

    def ready(target: Target, data: Corpus) -> None:
        evaluation.check(target, heldout(data, base.eval.prompts), base.eval)
        if base.cluster.address == "local":
            costs = [search.cost(trial.run, target.config, target.device) for trial in trials.values()]
            _tell_memory(costs, base, shares, say)

    prepared = train.prepare({name: trial.run for name, trial in trials.items()}, say, ready)
    if torch.cuda.is_available():  # the target's place on a GPU is the workers' from here on
        gc.collect()
        torch.cuda.empty_cache()
    return prepared


def _tell_memory(costs: Collection[search.Cost], base: Run, shares: cluster.Shares, say: Say) -> None:
    """Say so where the largest trials are not expected to fit into this machine's memory."""
    worker = max(cost.memory for cost in costs)
    if shares.gpus:
        needed, there = worker / min(1.0, shares.gpus), torch.cuda.get_device_properties(0).total_memory
    else:
        needed, there = worker * base.train.workers * shares.concurrent, cluster.memory()
    if needed > there:
        say(
            f"MEMORY: the largest trials are expected to need {needed / 1e9:.1f} GB and there are {there / 1e9:.1f}; "
            "less is needed by fewer anchors, smaller batches or more train.accumulation, shorter texts "
            "(corpus.max_length) or fewer trials at once"
        )


def _store(base: Run, uri: str | None, say: Say) -> Store:
    say("opening the tracking store", doing="opening the tracking store")
    store = Store(base.tracking if uri is None else base.tracking.model_copy(update={"uri": uri}), OUTPUTS)
    if ended := store.reconcile():
        say(f"{ended} MLflow runs of processes that are gone: now KILLED")
    return store


def _anchor(run: Run) -> Run:
    """The run with absolute paths: workers and later resumes have other working directories."""
    changes = {}
    for key, value, names in (
        ("target.model", run.target.model, ("smollm2", "tiny")),
        ("corpus.source", run.corpus.source, ("packaged", "self")),
    ):
        if value not in names and (path := expand(value)).exists():
            changes[key] = str(path.resolve())
    return run.replace(changes)


def _fingerprints(prepared: train.Prepared) -> dict[str, Any]:
    return {"target": prepared.target["fingerprint"], "corpus": prepared.corpus["fingerprint"]}


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be made ({error.strerror})") from error
