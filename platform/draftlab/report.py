"""Tables and figures: data in, files out.

A number that there is none of is an empty cell and a gap in the figure, never a zero.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
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
    "trial", "block_size", "gamma",
    "acceptance_length", "acceptance_length_low", "acceptance_length_high", "acceptance_length_macro",
    "speedup", "speedup_low", "speedup_high",
    "draft_ms", "verify_ms", "target_ms",
    "train_seconds", "supervised_tokens", "heldout_acceptance_length",
    "checkpoint", "mlflow_run_id", "status", "reason",
)  # fmt: skip
"""Columns of results.csv, in this order; others follow."""

TEXT = ("trial", "checkpoint", "mlflow_run_id", "status", "reason")
WHOLE = ("block_size", "supervised_tokens")

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
    varied: str = "draft.block_size",
) -> pd.DataFrame:
    """Write a sweep's results.csv, acceptance.png, survival.png and training.png.

    Args:
        rows: one a trial, failed ones too; keys are COLUMNS, and what is missing stays empty.
        curves: trial -> reports by `step`: `loss`, and `heldout_acceptance_length` where it was measured.
        survivals: trial -> P(the first k drafted tokens are all accepted), k = 1..B-1.
        out: folder, made if it is missing.
        varied: what the trials differ in: a dotted key, whose last part (or whole) is a column.

    Returns:
        The table, a row a trial, in the order given.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    frame = _frame(rows)
    frame.to_csv(out / "results.csv", index=False)
    column = varied if varied in frame else varied.rpartition(".")[2]
    colors = _colors(list(frame["trial"]))
    with matplotlib.rc_context(STYLE):
        _acceptance_figure(frame, column).savefig(out / "acceptance.png")
        _survival_figure(survivals, colors).savefig(out / "survival.png")
        _training_figure(curves, colors).savefig(out / "training.png")
    return frame


def check_folder(folder: Path) -> None:
    """Refuse, before any work, a results folder that is in use or can't be made.

    Raises:
        UserError: it is a file, it has something in it, or the place is not writable.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--out {folder}: is there already; name another folder (a sweep goes on by --resume)")
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"--out {folder}: expected a folder that can be made, but {place} is no writable folder")


def write_evaluation(evaluations: Mapping[str, Evaluation], out: Path) -> None:
    """Write an evaluation's results.json, traces.jsonl (a line a prompt), survival.png and first_failure.png.

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
    colors = _colors(list(evaluations))
    with matplotlib.rc_context(STYLE):
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


def table(frame: pd.DataFrame) -> str:
    """The results for a terminal: intervals in brackets, dashes for what there is none of, failures' reasons below."""
    number = {"block_size": "{:g}", "gamma": "{:g}", "train_seconds": "{:.0f}", "supervised_tokens": "{:,.0f}"}
    shown = pd.DataFrame({"trial": frame["trial"]})
    for column, title in {
        "block_size": "block", "gamma": "gamma", "acceptance_length": "acceptance length",
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
    figure = Figure(figsize=(5.6, 3.6))
    axis = figure.subplots()
    for name, survival in survivals.items():
        slots = np.arange(1, len(survival) + 1)
        on_top = 2 + 1 / max(1, len(slots))  # the short ones
        axis.plot(
            slots, np.asarray(survival, float),
            marker="o", markersize=3.5, color=colors.get(name), label=_label(name), zorder=on_top,
        )  # fmt: skip
    axis.set_xlabel("drafted tokens k")
    axis.set_ylabel("P(the first k are all accepted)")
    axis.set_title("Survival along the block")
    axis.set_ylim(0, 1)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axis)
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


def _training_figure(curves: Mapping[str, Sequence[Mapping[str, float]]], colors: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(8.4, 3.4))
    for axis, measure, title, marker in zip(
        figure.subplots(1, 2, sharex=True),
        ("loss", "heldout_acceptance_length"),
        ("Training loss", "Held-out acceptance length (offline)"),
        (None, "o"),
    ):
        for name, curve in curves.items():
            points = [(report["step"], report[measure]) for report in curve if report.get(measure) is not None]
            if points:
                steps, values = np.array(sorted(points), float).T
                axis.plot(steps, values, color=colors.get(name), marker=marker, markersize=3.5, label=_label(name))
        axis.set_xlabel("step")
        axis.set_title(title)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _legend(axis)
    return figure


def _legend(axis: Axes) -> None:
    if axis.lines:
        axis.legend(fontsize=9)
    else:
        _say_nothing(axis)


def _say_nothing(axis: Axes) -> None:
    axis.text(0.5, 0.5, "nothing was measured", transform=axis.transAxes, ha="center", va="center", color=FADED)
    axis.set_yticks([])


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
