"""Tables and figures: data in, files out.

A number that there is none of is an empty cell and a gap in the figure, never a zero.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftlab.errors import UserError

if TYPE_CHECKING:
    from draftlab.evaluation import Evaluation

COLUMNS = (
    "trial", "block_size", "drafted_tokens", "gamma",
    "acceptance_length", "acceptance_length_low", "acceptance_length_high", "acceptance_length_macro",
    "speedup", "speedup_low", "speedup_high",
    "draft_ms", "verify_ms", "target_ms",
    "train_seconds", "supervised_tokens", "heldout_acceptance_length", "heldout_vocab_coverage",
    "checkpoint", "mlflow_run_id", "status", "reason",
)  # fmt: skip
"""Columns of results.csv, in this order; others follow."""

TEXT = ("trial", "checkpoint", "mlflow_run_id", "status", "reason")
WHOLE = ("block_size", "drafted_tokens", "supervised_tokens")

STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
}

INK, FADED, BAD = "#1f4e79", "#8a8a8a", "#b03a2e"


def write_sweep(
    rows: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    survivals: Mapping[str, Sequence[float]],
    out: Path,
    varied: Sequence[str] = (),
) -> pd.DataFrame:
    """Write a sweep's results.csv and its figures: acceptance, survival, training, latency; a heat map if two vary.

    Args:
        rows: one a trial, failed ones too; keys are COLUMNS, and what is missing stays empty.
        curves: trial -> reports by `step`: `loss`, `train_seconds`, `supervised_tokens`, and
            `heldout_acceptance_length` where it was measured.
        survivals: trial -> P(the first k drafted tokens are all accepted), k = 1..B-1.
        out: folder, made if it is missing.
        varied: the columns in which the trials differ.

    Returns:
        The table, a row a trial, in the order given.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    frame = _frame(rows)
    frame.to_csv(out / "results.csv", index=False)
    colors = _colors(list(frame["trial"]))
    with matplotlib.rc_context(STYLE):
        _acceptance_figure(frame, next(iter(varied), "block_size")).savefig(out / "acceptance.png")
        _survival_figure(survivals, colors).savefig(out / "survival.png")
        _training_figure(curves, colors).savefig(out / "training.png")
        _latency_figure(frame, colors).savefig(out / "latency.png")
        if len(varied) > 1:
            _heat_map(frame, *varied[:2]).savefig(out / "heat_map.png")
    return frame


def write_verdicts(frame: pd.DataFrame, out: Path) -> None:
    """Write verdicts.csv and verdicts.png.

    Args:
        frame: a row a measure and arm, as `findings.frame` gives it.
        out: folder, made if it is missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(out / "verdicts.csv", index=False)
    with matplotlib.rc_context(STYLE):
        _verdict_figure(frame).savefig(out / "verdicts.png")


def check_folder(folder: Path) -> None:
    """Refuse, before any work, a results folder that is in use or can't be made.

    Raises:
        UserError: it is a file, it has something in it, or the place is not writable.
    """
    try:
        used = folder.is_dir() and any(folder.iterdir())
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    except OSError as error:  # a name too long, or a folder that can't be looked into
        raise UserError(f"--out {folder}: expected a folder that can be made ({error.strerror})") from error
    if used:
        raise UserError(f"--out {folder}: is there already; name another folder (a sweep goes on by --resume)")
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"--out {folder}: expected a folder that can be made, but {place} is no writable folder")


def write_evaluation(evaluations: Mapping[str, Evaluation], out: Path) -> None:
    """Write what decoding said: results.json, traces.jsonl (a line an answer), breakdown.csv, breakdown.png,
    survival.png and first_failure.png; for several block sizes block_sizes.csv and block_sizes.png too.

    Args:
        evaluations: draft -> its evaluation.
        out: folder, made if it is missing.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    results = {name: dataclasses.asdict(evaluation) for name, evaluation in evaluations.items()}
    traces = [{"draft": name, "traces": pair} for name, result in results.items() for pair in result.pop("traces")]
    (out / "results.json").write_text(_json(results, indent=1) + "\n", encoding="utf-8")
    (out / "traces.jsonl").write_text("".join(_json(pair) + "\n" for pair in traces), encoding="utf-8")
    breakdowns = [{"draft": name, **row} for name, found in evaluations.items() for row in found.breakdown]
    pd.DataFrame(breakdowns).to_csv(out / "breakdown.csv", index=False)
    colors = _colors(list(evaluations))
    with matplotlib.rc_context(STYLE):
        _breakdown_figure(evaluations, colors).savefig(out / "breakdown.png")
        if (frame := by_block_size(evaluations))["block_size"].nunique() > 1:
            frame.to_csv(out / "block_sizes.csv", index=False)
            _block_size_figure(frame).savefig(out / "block_sizes.png")
        survivals = {name: evaluation.survival for name, evaluation in evaluations.items()}
        _survival_figure(survivals, colors).savefig(out / "survival.png")
        failures = {name: evaluation.first_failure for name, evaluation in evaluations.items()}
        _first_failure_figure(failures, colors).savefig(out / "first_failure.png")


def write_layer_mix(mix: np.ndarray, layer_ids: Sequence[int], path: Path) -> None:
    """A picture of which draft layer listens to which target layer.

    Args:
        mix: (L, T) shares, each row adding up to 1; (1, T) of a gate.
        layer_ids: the T tapped layers.
        path: the PNG to write.
    """
    rows, taps = mix.shape
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(2.2 + 0.55 * taps, 1.6 + 0.4 * rows))
        axis = figure.subplots()
        image = axis.imshow(mix, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for (row, tap), share in np.ndenumerate(mix):
            color = "white" if share < 0.6 else "black"
            axis.text(tap, row, f"{share:.2f}", ha="center", va="center", fontsize=8, color=color)
        axis.set_xticks(range(taps), [str(layer) for layer in layer_ids])
        axis.set_yticks(range(rows), [str(row) for row in range(rows)] if rows > 1 else ["all"])
        axis.set_xlabel("target layer")
        axis.set_ylabel("draft layer")
        axis.set_title("Share of each tapped layer in what a draft layer reads")
        figure.colorbar(image)
        figure.savefig(path)


def write_gate(
    shares: Sequence[float], layer_ids: Sequence[int], taken: Collection[int], verdicts: Sequence[str], out: Path
) -> None:
    """Write gate.csv and gate.png: the share that a gate gives each candidate layer, and what became of it.

    Args:
        shares: of the layers, adding up to 1.
        layer_ids: the candidates.
        taken: those of them that were proposed.
        verdicts: of the drafts that were trained with them, as sentences.
        out: folder.
    """
    frame = pd.DataFrame({"layer": layer_ids, "share": shares, "proposed": [layer in taken for layer in layer_ids]})
    frame.sort_values("share", ascending=False).to_csv(out / "gate.csv", index=False)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 1.6 + 0.26 * len(frame)), 3.6))
        axis = figure.subplots()
        axis.bar(range(len(frame)), frame["share"], color=[INK if one else FADED for one in frame["proposed"]])
        axis.axhline(1 / len(frame), color=BAD, linewidth=1.2, linestyle="--", label="where the gate began")
        axis.set_xticks(range(len(frame)), [str(layer) for layer in layer_ids], fontsize=8)
        axis.set_xlabel("target layer (dark: proposed)")
        axis.set_ylabel("share in what the draft reads")
        axis.set_title("\n".join(textwrap.fill(text, 90) for text in verdicts), fontsize=9)
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.2)
        axis.legend(fontsize=9, loc="upper right")
        figure.savefig(out / "gate.png")


def write_surface(rows: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write a speed surface's surface.csv, prediction.csv and surface.png.

    Args:
        rows: of `surface.predict`, with their `domain`.
        compared: of `surface.against_measurement`, for all domains together.
        out: folder, made if it is missing.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(out / "surface.csv", index=False)
    pd.DataFrame(compared).to_csv(out / "prediction.csv", index=False)
    with matplotlib.rc_context(STYLE):
        _surface_figure(pd.DataFrame(rows), compared).savefig(out / "surface.png")


def surface_table(best: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]) -> str:
    """The best block size by domain and batch, and the prediction beside the measurement, for a terminal."""
    columns = {
        "domain": "domain", "batch_size": "batch", "block_size": "best b", "acceptance_length": "tokens per round",
        "break_even": "break-even", "speedup": "speedup", "tokens_per_second": "tokens/s",
    }  # fmt: skip
    shown = pd.DataFrame(best)[list(columns)].rename(columns=columns)
    beside = pd.DataFrame(compared).rename(columns=lambda name: name.replace("acceptance_length", "tokens"))
    if len(beside):
        beside["error"] = beside["error"].map("{:+.1%}".format)
    precise = {"index": False, "float_format": "{:.2f}".format}
    return f"{shown.to_string(**precise)}\n\nprediction and measurement\n{beside.to_string(**precise)}"


def verdict_table(frame: pd.DataFrame) -> str:
    """The verdicts for a terminal, as `findings.frame` gives them."""
    ends = zip(frame["difference_low"], frame["difference_high"])
    return pd.DataFrame({
        "arm": frame["arm"].map(_label),
        "measure": frame["measure"],
        "value": frame["value"].map("{:.3f}".format),
        "difference": frame["difference"].map("{:+.3f}".format),
        "95% interval": [f"[{low:+.3f}, {high:+.3f}]" for low, high in ends],
        "verdict": frame["verdict"],
    }).to_string(index=False)  # fmt: skip


def by_block_size(evaluations: Mapping[str, Evaluation]) -> pd.DataFrame:
    """A row a draft and block size: what it was trained with, what it was decoded with, acceptance and speedup.

    Where there are several schedules, each is a draft of its own.
    """
    several = len({found.provenance.get("schedule") for found in evaluations.values()}) > 1
    names = [f"{name}{end}" for name in ("acceptance_length", "speedup") for end in ("", "_low", "_high")]
    rows = [
        {key: found.provenance[key] for key in ("draft", "trained_block_size", "block_size")}
        | ({"draft": f"{found.provenance['draft']} {found.provenance['schedule']}"} if several else {})
        | {name: found.metrics[name] for name in ("drafted_tokens", *names)}
        for found in evaluations.values()
    ]
    return pd.DataFrame(rows).astype(dict.fromkeys(names, float))  # a JSON's null is NaN


def write_block_sizes(frame: pd.DataFrame, out: Path) -> None:
    """Write a sweep's block_sizes.csv and block_sizes.png: trained by decoded block size, means over an arm's seeds.

    Args:
        frame: of `by_block_size`, with the `arm` of each draft.
    """
    frame.to_csv(out / "block_sizes.csv", index=False)
    with matplotlib.rc_context(STYLE):
        decoded = frame.rename(columns={"block_size": "decoded_block_size"})
        _heat_map(decoded, "decoded_block_size", "arm").savefig(out / "block_sizes.png")


def block_size_table(frame: pd.DataFrame) -> str:
    """Trained by decoded block size, for a terminal; a cell holds tokens per round and, after the x, the speedup."""
    shown = frame.assign(cell=[f"{row.acceptance_length:.2f} x{row.speedup:.2f}" for row in frame.itertuples()])
    cells = shown.pivot(index="draft", columns="block_size", values="cell").reindex(_kinds(shown["draft"]))
    trained = dict(zip(frame["draft"], frame["trained_block_size"]))
    cells.index = [f"{_label(name)} (trained B={trained[name]})" for name in cells.index]
    return cells.rename_axis(index=None, columns="decoded b =").to_string(na_rep="-")


def table(frame: pd.DataFrame) -> str:
    """The results for a terminal: intervals in brackets, dashes for what there is none of, failures' reasons below."""
    number = {"block_size": "{:g}", "drafted_tokens": "{:g}", "gamma": "{:g}", "train_seconds": "{:.0f}"}
    shown = pd.DataFrame({"trial": frame["trial"]})
    for column, title in {
        "block_size": "block", "drafted_tokens": "drafted", "gamma": "gamma", "acceptance_length": "acceptance length",
        "acceptance_length_macro": "macro", "speedup": "speedup", "draft_ms": "draft ms", "verify_ms": "verify ms",
        "target_ms": "target ms", "heldout_acceptance_length": "offline", "train_seconds": "train s",
    }.items():  # fmt: skip
        texts = [_text(value, number.get(column, "{:.2f}")) for value in frame[column]]
        if f"{column}_low" in frame:
            ends = zip(frame[f"{column}_low"], frame[f"{column}_high"])
            spans = ["" if pd.isna(low) or pd.isna(high) else f" [{low:.2f}, {high:.2f}]" for low, high in ends]
            texts = [text + span for text, span in zip(texts, spans)]
        shown[title] = texts
    shown["status"] = [_text(value, "{}") for value in frame["status"]]
    lines = shown.to_string(index=False).splitlines()
    for trial, reason in zip(frame["trial"], frame["reason"]):
        if pd.notna(reason) and reason:
            lines.append(textwrap.shorten(f"{trial}: {reason}", 200, placeholder=" ..."))
    return "\n".join(lines)


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame([dict(row) for row in rows])
    for column in COLUMNS:
        if column not in frame:
            frame[column] = None if column in TEXT else math.nan
        if column not in TEXT:
            frame[column] = pd.to_numeric(frame[column]).astype("Int64" if column in WHOLE else float)
    return frame[[*COLUMNS, *(column for column in frame if column not in COLUMNS)]]


def _acceptance_figure(frame: pd.DataFrame, column: str) -> Figure:
    figure, legend = Figure(figsize=(8.4, 3.7)), {}
    x, ticks, labels = _positions(frame[column])
    for axis, measure, title in zip(
        figure.subplots(1, 2),
        ("acceptance_length", "speedup"),
        ("Acceptance length (tokens per round)", "Decoding speedup over the target"),
    ):
        value, low, high = (frame[measure + end].to_numpy(float) for end in ("", "_low", "_high"))
        known = np.flatnonzero(np.isfinite(value))
        known = known[np.argsort(x[known], kind="stable")]
        bars = np.nan_to_num(np.stack([value - low, high - value]).clip(min=0))  # no interval: the point alone
        if len(known):
            axis.errorbar(
                x[known], value[known], bars[:, known],
                color=INK, marker="o", markersize=5, capsize=4, elinewidth=1.2,
                linestyle="-" if len(set(x[known])) == len(known) else "",  # several seeds: the points alone
                label="measured, 95% interval over prompts",
            )  # fmt: skip
            axis.axhline(1, color=FADED, linewidth=1.2, linestyle="--", label="the target alone")
            for index in known:
                top = (x[index], value[index] + bars[1, index])
                axis.annotate(f"{value[index]:.2f}", top, (0, 5), textcoords="offset points", ha="center", fontsize=9)
        else:
            _say_nothing(axis)
        lost = np.setdiff1d(np.arange(len(frame)), known)
        if len(lost):
            axis.plot(
                x[lost], np.full(len(lost), 0.04), transform=axis.get_xaxis_transform(),
                linestyle="", marker="x", color=BAD, label="no result",
            )  # fmt: skip
        axis.set_xticks(ticks, labels)
        axis.set_xlabel(column.replace("_", " "))
        axis.set_title(title)
        axis.margins(x=0.12, y=0.15)
        legend.update({handle.get_label(): handle for handle in axis.get_legend_handles_labels()[0]})
    figure.legend(handles=list(legend.values()), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _survival_figure(survivals: Mapping[str, Sequence[float]], colors: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(9.6, 3.6))
    survived, conditional = figure.subplots(1, 2)
    for name, survival in survivals.items():
        slots, survival = np.arange(1, len(survival) + 1), np.asarray(survival, float)
        before = np.concatenate([[1.0], survival[:-1]])
        style = {
            "marker": "o", "markersize": 3.5, "color": colors.get(name), "label": _label(name),
            "zorder": 2 + 1 / max(1, len(slots)),  # the short ones on top
        }  # fmt: skip
        survived.plot(slots, survival, **style)
        conditional.plot(slots, np.divide(survival, before, np.full(len(slots), np.nan), where=before > 0), **style)
    survived.set_ylabel("P(the first k are all accepted)")
    survived.set_title("Survival along the block")
    conditional.set_ylabel("P(k-th accepted | all before it)")
    conditional.set_title("Acceptance by slot")
    for axis in (survived, conditional):
        axis.set_xlabel("drafted tokens k")
        axis.set_ylim(0, 1)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(survived)
    return figure


def _first_failure_figure(failures: Mapping[str, Sequence[int]], colors: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(5.6, 1.2 + 1.8 * len(failures)))
    axes = figure.subplots(len(failures), squeeze=False, sharex=True, sharey=True)[:, 0]
    for axis, (name, counts) in zip(axes, failures.items()):
        share = np.asarray(counts, float) / max(1, sum(counts))
        slots, color = np.arange(1, len(counts) + 1), colors.get(name)
        axis.bar(slots[:-1], share[:-1], color=color)
        axis.bar(slots[-1:], share[-1:], color=color, hatch="///", edgecolor="white", label="whole block accepted")
        axis.set_title(_label(name), loc="left")
        axis.set_ylabel("share of rounds")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(axis="x", visible=False)
        axis.legend(fontsize=9)
    axes[-1].set_xlabel("slot of the first rejected token")
    return figure


def _breakdown_figure(evaluations: Mapping[str, Evaluation], colors: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(9.6, 6.4))
    for axis, (by, title) in zip(
        figure.subplots(2, 2).flat,
        {"domain": "By domain", "turn": "By turn", "context": "By context length", "position": "By position"}.items(),
    ):
        rows = {name: [row for row in found.breakdown if row["by"] == by] for name, found in evaluations.items()}
        groups = list(dict.fromkeys(row["group"] for some in rows.values() for row in some))
        for number, (name, some) in enumerate(rows.items()):
            x = np.array([groups.index(row["group"]) for row in some]) + 0.1 * (number - (len(rows) - 1) / 2)
            values, bars = _with_interval(some, "acceptance_length")
            axis.errorbar(
                x, values, bars,
                linestyle="", marker="o", markersize=4, capsize=3, color=colors.get(name), label=_label(name),
            )  # fmt: skip
        axis.set_xticks(range(len(groups)), groups, rotation=20 if len(groups) > 3 else 0)
        axis.set_title(title)
        axis.set_ylabel("tokens per round")
        axis.margins(x=0.15)
    handles = axis.get_legend_handles_labels()[0]
    if len(handles) > 1:
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _block_size_figure(frame: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(8.4, 3.6))
    colors = _colors(list(frame["draft"].unique()))
    for axis, measure, title in zip(
        figure.subplots(1, 2), ("acceptance_length", "speedup"), ("Tokens per round", "Decoding speedup")
    ):
        for name, some in frame.sort_values("block_size").groupby("draft", sort=False):
            values, bars = _with_interval(some.to_dict("records"), measure)
            axis.errorbar(
                some["block_size"], values, bars,
                marker="o", markersize=4, capsize=3, color=colors[name],
                label=f"{_label(name)}, trained B={some['trained_block_size'].iloc[0]}",
            )  # fmt: skip
        axis.axhline(1, color=FADED, linewidth=1.2, linestyle="--")
        axis.set_xticks(sorted(frame["block_size"].unique()))
        axis.set_xlabel("block size decoded with")
        axis.set_title(title)
    axis.legend(fontsize=8)
    return figure


def _surface_figure(frame: pd.DataFrame, compared: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(9.6, 3.8))
    speed, gain = figure.subplots(1, 2)
    lines = [
        (f"{domain}, batch {batch}", some.sort_values("block_size"))
        for (domain, batch), some in frame.groupby(["domain", "batch_size"], sort=False)
    ]
    colors = _colors([name for name, _ in lines])
    for name, some in lines:
        speed.plot(some["block_size"], some["speedup"], color=colors[name], label=name)
        gain.plot(some["drafted_tokens"], some["slot_gain"], color=colors[name], marker="o", markersize=3)
    values, bars = _with_interval(compared, "measured_speedup")
    sizes = [row["block_size"] for row in compared]
    speed.errorbar(
        sizes, values, bars, linestyle="", marker="s", markersize=4, capsize=4, color=BAD, label="measured, all domains"
    )
    speed.axhline(1, color=FADED, linewidth=1.2, linestyle="--")
    gain.axhline(0, color=FADED, linewidth=1.2, linestyle="--")
    for axis, title, label in (
        (speed, "Speedup, predicted", "block size"),
        (gain, "What the last slot adds", "drafted tokens"),
    ):
        axis.set_title(title)
        axis.set_xlabel(label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _with_interval(rows: Sequence[Mapping[str, Any]], measure: str) -> tuple[np.ndarray, np.ndarray]:
    """(n,) values, and (2, n) how far their intervals reach; 0 where there is none."""
    value, low, high = (np.array([row[measure + end] for row in rows], float) for end in ("", "_low", "_high"))
    return value, np.nan_to_num(np.stack([value - low, high - value]).clip(min=0))


def _training_figure(curves: Mapping[str, Sequence[Mapping[str, float]]], colors: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(8.4, 6.4))
    loss, heldout = "loss", "heldout_acceptance_length"
    for axis, (along, measure, label) in zip(
        figure.subplots(2, 2).flat,
        (
            ("step", loss, "step"),
            ("step", heldout, "step"),
            ("train_seconds", heldout, "training time (s)"),
            ("supervised_tokens", heldout, "supervised tokens"),
        ),
    ):
        for name, curve in curves.items():
            points = [(report[along], report[measure]) for report in curve if measure in report and along in report]
            if points:
                x, y = np.array(sorted(points), float).T
                marker = None if measure == loss else "o"
                axis.plot(x, y, color=colors.get(name), marker=marker, markersize=3.5, label=_label(name))
        axis.set_xlabel(label)
        axis.set_title("Training loss" if measure == loss else "Held-out acceptance length (offline)")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _legend(axis)
    return figure


def _latency_figure(frame: pd.DataFrame, colors: Mapping[str, Any]) -> Figure:
    """Acceptance against the draft's time; the front are the drafts that no other is both faster and better than."""
    figure = Figure(figsize=(5.6, 3.8))
    axis = figure.subplots()
    known = frame[frame["draft_ms"].notna() & frame["acceptance_length"].notna()].sort_values("draft_ms")
    best = known["acceptance_length"].cummax()
    front = known[known["acceptance_length"].eq(best) & ~best.duplicated()]
    axis.plot(front["draft_ms"], front["acceptance_length"], color=FADED, linestyle="--", drawstyle="steps-post")
    for row in known.itertuples():
        axis.plot(row.draft_ms, row.acceptance_length, marker="o", color=colors[row.trial])
        axis.annotate(_label(row.trial), (row.draft_ms, row.acceptance_length), (5, 4), textcoords="offset points",
                      fontsize=8)  # fmt: skip
    if known.empty:
        _say_nothing(axis)
    axis.set_xlabel("drafting a block (ms)")
    axis.set_ylabel("acceptance length (tokens per round)")
    axis.set_title("Acceptance against draft latency; dashed: the Pareto front")
    axis.margins(x=0.2, y=0.2)
    return figure


def _heat_map(frame: pd.DataFrame, across: str, down: str) -> Figure:
    """Acceptance length and speedup over two varied columns, means over whatever else varies."""
    figure = Figure(figsize=(8.4, 3.7))
    for axis, measure in zip(figure.subplots(1, 2), ("acceptance_length", "speedup")):
        cells = frame.pivot_table(index=down, columns=across, values=measure, aggfunc="mean", dropna=False)
        cells = cells.reindex(index=_kinds(frame[down]), columns=_kinds(frame[across]))
        axis.imshow(cells.to_numpy(float), cmap="viridis", aspect="auto")
        axis.grid(visible=False)
        axis.set_xticks(range(cells.shape[1]), [value if isinstance(value, str) else f"{value:g}" for value in cells])
        axis.set_yticks(
            range(cells.shape[0]), [value if isinstance(value, str) else f"{value:g}" for value in cells.index]
        )
        for (y, x), value in np.ndenumerate(cells.to_numpy(float)):
            axis.text(x, y, _text(value, "{:.2f}"), ha="center", va="center",
                      bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1})  # fmt: skip
        axis.set_xlabel(across.replace("_", " "))
        axis.set_ylabel(down.replace("_", " "))
        axis.set_title(measure.replace("_", " "))
    return figure


def _verdict_figure(frame: pd.DataFrame) -> Figure:
    """Differences from the baseline, a panel a measure; the arms of all panels stand as the first ranks them."""
    measures, arms = frame["measure"].unique(), list(frame["arm"].unique())
    columns = 2 if len(measures) > 1 else 1
    lines = max(1, math.ceil(len(measures) / columns))
    figure = Figure(figsize=(2.4 + 4.8 * columns, 0.4 + (1 + 0.36 * len(arms)) * lines))
    inks = {"better": INK, "worse": BAD}
    for axis, measure in zip(figure.subplots(lines, columns, squeeze=False, sharey=True).flat, measures):
        for row in frame[frame["measure"] == measure].itertuples():
            y, ink = arms.index(row.arm), inks.get(row.verdict, FADED)
            axis.plot([row.difference_low, row.difference_high], [y, y], color=ink)
            axis.plot(row.difference, y, marker="o", color=ink)
            place = {"xy": (1.01, y), "xycoords": ("axes fraction", "data"), "va": "center"}
            axis.annotate(row.verdict, **place, fontsize=9, color=ink)
        axis.axvline(0, color=FADED, linewidth=1, linestyle="--")
        axis.set_title(measure.replace("_", " "))
        axis.set_yticks(range(len(arms)), [_label(arm) for arm in arms])
        axis.set_ylim(len(arms) - 0.5, -0.5)
    figure.supxlabel("difference from the baseline, 95% interval", fontsize=10)
    return figure


def _legend(axis: Axes) -> None:
    if axis.lines:
        axis.legend(fontsize=9)
    else:
        _say_nothing(axis)


def _say_nothing(axis: Axes) -> None:
    axis.text(0.5, 0.5, "nothing was measured", transform=axis.transAxes, ha="center", va="center", color=FADED)
    axis.set_yticks([])


def _kinds(column: pd.Series) -> list[Any]:
    """The values of a column: numbers ascending, words as they come."""
    kinds = list(dict.fromkeys(column.dropna()))
    return kinds if any(isinstance(kind, str) for kind in kinds) else sorted(kinds)


def _positions(column: pd.Series) -> tuple[np.ndarray, list[float], list[str]]:
    """Where each value stands on the x axis, and the ticks: numbers as they are, anything else evenly."""
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(float, na_value=math.nan)
    if np.isfinite(numbers).all():
        ticks = sorted(set(numbers.tolist()))
        return numbers, ticks, [f"{tick:g}" for tick in ticks]
    names = [str(value) for value in column]
    kinds = list(dict.fromkeys(names))
    return np.array([kinds.index(name) for name in names], float), list(range(len(kinds))), kinds


def _colors(names: Sequence[str]) -> dict[str, Any]:
    """One colour a trial, the same in every figure, dark to light in the order given."""
    return dict(zip(names, matplotlib.colormaps["viridis"](np.linspace(0, 0.85, max(2, len(names))))))


def _text(value: Any, form: str) -> str:
    return "-" if value is None or pd.isna(value) else form.format(value)


def _label(name: str) -> str:
    """A draft's name for a figure; of a long path its end."""
    return name if len(name) <= 48 else f"...{name[-45:]}"


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_jsonable(value), indent=indent, allow_nan=False)


def _jsonable(value: Any) -> Any:
    """Plain JSON: arrays as lists, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
