import csv
import json
import math

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from draftlab import report
from draftlab.decode import Round, Trace
from draftlab.errors import UserError
from draftlab.evaluation import Case, Evaluation, Pair


def row(block_size, length, speedup, **more):
    result = {
        "trial": f"block_size={block_size}", "block_size": block_size, "drafted_tokens": block_size - 1,
        "gamma": block_size / 2,
        "acceptance_length": length, "acceptance_length_low": length - 0.1, "acceptance_length_high": length + 0.2,
        "acceptance_length_macro": length + 0.05,
        "speedup": speedup, "speedup_low": speedup - 0.05, "speedup_high": speedup + 0.1,
        "draft_ms": 12.34, "verify_ms": 48.2, "target_ms": 33.1, "train_seconds": 213.4, "supervised_tokens": 1234567,
        "heldout_acceptance_length": length - 0.1, "checkpoint": "/x", "mlflow_run_id": "0" * 32,
        "status": "FINISHED", "reason": None,
    }  # fmt: skip
    return result | more


REASON = "RuntimeError: no memory"
FAILED = {"trial": "block_size=32", "block_size": 32, "gamma": 16.0, "status": "FAILED", "reason": REASON}
ROWS = [row(4, 1.9, 1.2), row(8, 2.3, 1.4), row(16, 2.5, 0.9), FAILED]
CURVES = {
    f"block_size={size}": [
        {"step": step, "loss": 3 + math.exp(-step / 80), **({} if step % 100 else {"heldout_acceptance_length": 1.5})}
        for step in range(10, 401, 10)
    ]
    for size in (4, 8, 16)
} | {"block_size=32": []}
SURVIVALS = {f"block_size={size}": [0.6**k for k in range(1, size)] for size in (4, 8, 16)}


def written(out):
    with (out / "results.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def lines_of(figure):
    """label -> (x, y) of every line of a figure's axes."""
    return [{line.get_label(): line.get_xydata().T.tolist() for line in axis.lines} for axis in figure.axes]


def test_results_have_a_row_a_trial_and_the_columns_in_order(tmp_path):
    frame = report.write_sweep(ROWS, CURVES, SURVIVALS, tmp_path)
    rows = written(tmp_path)
    assert tuple(rows[0]) == report.COLUMNS == tuple(frame.columns)
    assert [one["trial"] for one in rows] == [one["trial"] for one in ROWS]
    assert (rows[0]["block_size"], rows[0]["supervised_tokens"], rows[0]["reason"]) == ("4", "1234567", "")
    assert float(rows[1]["speedup_high"]) == 1.5


def test_a_failed_trial_has_empty_cells_its_status_and_its_reason(tmp_path):
    report.write_sweep(ROWS, CURVES, SURVIVALS, tmp_path)
    filled = {name: value for name, value in written(tmp_path)[-1].items() if value}
    assert filled == {name: str(value) for name, value in FAILED.items()}


def test_other_columns_follow_the_known_ones(tmp_path):
    frame = report.write_sweep([row(4, 2.0, 1.1, lr=1e-3)], {}, {}, tmp_path, varied=["lr"])
    assert list(frame)[-1] == "lr"


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[3:], [FAILED | {"block_size": None}]])
def test_figures_are_written_whatever_failed(rows, tmp_path):
    out, names = tmp_path / "new" / "folder", [one["trial"] for one in rows if one["status"] == "FINISHED"]
    report.write_sweep(rows, {name: CURVES[name] for name in names}, {name: SURVIVALS[name] for name in names}, out)
    for name in ("acceptance", "survival", "training"):
        picture = imread(out / f"{name}.png")
        assert picture.shape[1] > 500 and picture.std() > 0.01  # not blank


def test_the_figure_shows_every_point_with_its_interval_at_its_real_block_size():
    frame = report._frame(ROWS[::-1])
    figure = report._acceptance_figure(frame, "block_size")
    for axis, measure in zip(figure.axes, ("acceptance_length", "speedup")):
        (bars,) = axis.containers
        assert bars.lines[0].get_xydata().tolist() == [[one["block_size"], one[measure]] for one in ROWS[:3]]
        ends = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
        assert ends == pytest.approx(np.array([[one[f"{measure}_low"], one[f"{measure}_high"]] for one in ROWS[:3]]))
        assert [text.get_text() for text in axis.get_xticklabels()] == ["4", "8", "16", "32"]
        assert axis.get_xticks().tolist() == [4, 8, 16, 32]
        lines = {line.get_label(): line for line in axis.lines}
        assert set(lines["the target alone"].get_ydata()) == {1}
        assert lines["no result"].get_xdata().tolist() == [32]


def test_a_point_without_an_interval_is_still_a_point():
    nan = float("nan")
    frame = report._frame([row(8, 2.3, 1.4) | {"speedup_low": nan, "speedup_high": None}])
    (bars,) = report._acceptance_figure(frame, "block_size").axes[1].containers
    assert bars.lines[0].get_xydata().tolist() == [[8, 1.4]]
    assert bars.lines[2][0].get_segments()[0][:, 1].tolist() == [1.4, 1.4]


def test_values_that_are_no_numbers_stand_side_by_side():
    frame = report._frame([row(8, 2.0, 1.1, init="random"), row(8, 2.5, 1.3, init="target_layers")])
    axis = report._acceptance_figure(frame, "init").axes[0]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["random", "target_layers"]


def test_survival_starts_at_the_first_drafted_token_and_keeps_gaps():
    survivals = {"a": [0.5, None, 0.25], "b": [], "c": [0.8, 0.4, 0.0, 0.0]}
    survived, conditional = lines_of(report._survival_figure(survivals, report._colors(list("abc"))))
    (x, y) = survived["a"]
    assert x == [1, 2, 3] and y[0] == 0.5 and math.isnan(y[1]) and y[2] == 0.25
    assert conditional["c"][1][:3] == [0.8, 0.5, 0.0] and math.isnan(conditional["c"][1][3]), "never reached"
    assert conditional["a"][1][0] == 0.5 and all(math.isnan(share) for share in conditional["a"][1][1:])


def test_training_curves_show_what_was_measured_in_the_order_of_steps():
    curve = [{"step": 20, "loss": 2.0}, {"step": 10, "loss": 3.0, "train_seconds": 7.5,
             "supervised_tokens": 4000, "heldout_acceptance_length": 1.5}]  # fmt: skip
    figure = report._training_figure({"a": curve, "failed": []}, report._colors(["a", "failed"]))
    loss, heldout, by_time, by_tokens = lines_of(figure)
    assert loss == {"a": [[10, 20], [3.0, 2.0]]}
    assert heldout == {"a": [[10], [1.5]]}
    assert by_time == {"a": [[7.5], [1.5]]} and by_tokens == {"a": [[4000], [1.5]]}


def test_the_front_holds_what_no_other_draft_beats_in_both_time_and_acceptance():
    times = {4: 10.0, 8: 12.0, 16: 11.0}
    rows = [one | {"draft_ms": times[one["block_size"]]} for one in ROWS[:3]] + [FAILED]
    frame = report._frame(rows)  # 16 is faster and better than 8
    axis = report._latency_figure(frame, report._colors(list(frame["trial"]))).axes[0]
    assert axis.lines[0].get_xydata().tolist() == [[10.0, 1.9], [11.0, 2.5]]
    assert len(axis.lines) == 1 + 3


def test_the_heat_map_has_a_cell_for_every_pair_and_means_over_the_rest():
    rows = [row(size, size / 4, 1.0, seed=seed) | {"gamma": gamma, "acceptance_length": size + seed}
            for size in (4, 8) for gamma in (1.0, math.inf) for seed in (0, 1)]  # fmt: skip
    rows[-1] |= {"acceptance_length": None}
    axis = report._heat_map(report._frame(rows), "block_size", "gamma").axes[0]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["4", "8"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["1", "inf"]
    assert axis.images[0].get_array().tolist() == [[4.5, 8.5], [4.5, 8.0]]


def test_a_heat_map_leaves_words_in_the_order_of_the_trials():
    rows = [row(size, size + place, 1.0, decay=decay)
            for place, decay in enumerate(("gamma_2", "gamma_15", "dpace")) for size in (8, 4)]  # fmt: skip
    axis = report._heat_map(report._frame(rows), "block_size", "decay").axes[0]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["4", "8"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["gamma_2", "gamma_15", "dpace"]
    assert axis.images[0].get_array().tolist() == [[4, 8], [5, 9], [6, 10]]


def test_the_table_of_decoded_block_sizes_keeps_the_order_of_the_drafts_and_averages_over_seeds(tmp_path):
    frame = pd.DataFrame([
        {"draft": f"{trained}-seed_{seed}", "trained_block_size": trained, "block_size": size, "arm": f"{trained}",
         "acceptance_length": trained + size / 100 + seed, "speedup": 1.0}
        for trained in (8, 16) for seed in (0, 1) for size in (16, 8)
    ])  # fmt: skip
    report.write_block_sizes(frame, tmp_path)
    assert imread(tmp_path / "block_sizes.png").std() > 0.01
    assert len((tmp_path / "block_sizes.csv").read_text().splitlines()) == 1 + 8
    lines = report.block_size_table(frame).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["8-seed_0", "8-seed_1", "16-seed_0", "16-seed_1"]
    assert lines[1].split()[-4:] == ["8.08", "x1.00", "8.16", "x1.00"]
    cells = report._heat_map(frame.rename(columns={"block_size": "decoded"}), "decoded", "arm").axes[0].images[0]
    assert np.allclose(cells.get_array(), [[8.58, 8.66], [16.58, 16.66]])
    frame["draft"] = [f"{start}/a/rather/long/folder/of/outputs/with/trials/block_size_8" for start in "aabbccdd"]
    assert len(report.block_size_table(frame).splitlines()) == 1 + 4, "names that end alike stay apart"


def test_the_table_of_decoded_block_sizes_bears_long_names_that_end_alike():
    names = [f"block_size_8-gamma_{gamma}-num_target_layers_5-num_hidden_layers_3-seed_0" for gamma in (2, 4)]
    frame = pd.DataFrame([
        {"draft": name, "trained_block_size": 8, "block_size": size, "acceptance_length": place + size / 10,
         "speedup": 1.0}
        for place, name in enumerate(names) for size in (4, 8)
    ])  # fmt: skip
    lines = report.block_size_table(frame).splitlines()
    assert [line.split()[-4::2] for line in lines[1:]] == [["0.40", "0.80"], ["1.40", "1.80"]]


def test_a_trial_has_one_colour_in_every_figure():
    colors = report._colors([one["trial"] for one in ROWS])
    survival = report._survival_figure(SURVIVALS, colors).axes[0]
    training = report._training_figure(CURVES, colors).axes[1]
    for name in SURVIVALS:
        (one,), (other,) = ([line for line in axis.lines if line.get_label() == name] for axis in (survival, training))
        assert np.allclose(one.get_color(), other.get_color())
    assert len({tuple(color) for color in colors.values()}) == 4


def test_figures_leave_matplotlibs_settings_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    report.write_sweep(ROWS, CURVES, SURVIVALS, tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_the_table_shows_intervals_dashes_and_reasons(tmp_path):
    text = report.table(report.write_sweep(ROWS, CURVES, SURVIVALS, tmp_path)).splitlines()
    assert len(text) == 1 + 4 + 1
    assert text[1].split() == (
        "block_size=4 4 3 2 1.90 [1.80, 2.10] 1.95 1.20 [1.15, 1.30] 12.34 48.20 33.10 1.80 213 FINISHED".split()
    )
    assert text[4].split() == "block_size=32 32 - 16 - - - - - - - - FAILED".split()
    assert text[5] == "block_size=32: RuntimeError: no memory"
    assert max(len(line) for line in text) < 160


ENDS = ("acceptance_length_low", "acceptance_length_high", "speedup_low", "speedup_high")
EVALUATION = Evaluation(
    metrics={"drafted_tokens": 3, "acceptance_length": 2.5, "speedup": 1.5, **dict.fromkeys(ENDS, float("nan"))},
    survival=[0.75, 0.5, float("nan")],
    conditional_acceptance=[0.75, 2 / 3, float("nan")],
    first_failure=[1, 1, 0, 2],
    breakdown=[{"by": "domain", "group": "chat", "acceptance_length": 2.5, **dict.fromkeys(ENDS, float("nan"))}],
    prompts=[{"prompt": 0, "status": "ok", "acceptance_length": np.float64(2.5)}],
    provenance={"protocol": "greedy", "draft": "a", "block_size": 4, "trained_block_size": 4},
    traces=[Pair(
        Case(0, 1, "chat", "here", [5]),
        Trace(3, [5, 6, 7], 0.1, 0.2),
        Trace(3, [5, 6, 7], 0.1, 0.03, [Round(3, 1, 2, 0.01, 0.01, 0.01)]),
    )],
)


def test_an_evaluation_is_written_as_strict_json_with_its_traces_beside_it(tmp_path):
    name = "outputs/sweep_block_size/20260101T000000Z/trials/block_size=4/draft"
    report.write_evaluation({name: EVALUATION}, tmp_path / "new")

    def refuse(constant):
        raise ValueError(constant)

    results = json.loads((tmp_path / "new" / "results.json").read_text(), parse_constant=refuse)
    nothing = dict.fromkeys(ENDS)
    assert results[name]["metrics"] == {"drafted_tokens": 3, "acceptance_length": 2.5, "speedup": 1.5, **nothing}
    assert results[name]["survival"] == [0.75, 0.5, None]
    assert results[name]["prompts"][0]["acceptance_length"] == 2.5
    assert "traces" not in results[name]
    (trace,) = map(json.loads, (tmp_path / "new" / "traces.jsonl").read_text().splitlines())
    assert trace["draft"] == name
    assert trace["traces"]["draft"]["rounds"][0]["accepted"] == 1
    assert (tmp_path / "new" / "breakdown.csv").read_text().splitlines()[1].startswith(f"{name},domain,chat,2.5,")
    for figure in ("survival.png", "first_failure.png", "breakdown.png"):
        assert imread(tmp_path / "new" / figure).std() > 0.01


def test_first_failures_are_shares_of_all_rounds():
    figure = report._first_failure_figure({"a": [1, 1, 0, 2], "b": [0, 0]}, report._colors(["a", "b"]))
    heights = [[bar.get_height() for bar in axis.patches] for axis in figure.axes]
    assert heights == [[0.25, 0.25, 0, 0.5], [0, 0]]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_mix_is_a_picture(tmp_path, rows):
    mix = np.random.default_rng(0).dirichlet(np.ones(5), rows)
    report.write_layer_mix(mix, [1, 8, 14, 20, 27], tmp_path / "layer_mix.png")
    assert imread(tmp_path / "layer_mix.png").std() > 0.01


def test_a_gates_shares_are_a_picture_and_a_table_the_largest_first(tmp_path):
    report.write_gate([0.2, 0.5, 0.3], [1, 8, 14], {8, 14}, ["better " * 30, "worse"], tmp_path)
    assert imread(tmp_path / "gate.png").std() > 0.01
    assert (tmp_path / "gate.csv").read_text().split() == [
        "layer,share,proposed", "8,0.5,True", "14,0.3,True", "1,0.2,False",
    ]  # fmt: skip


def test_a_results_folder_that_is_in_use_or_cannot_be_made_is_refused(tmp_path):
    report.check_folder(tmp_path / "new" / "deeper")
    report.check_folder(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is there already"):
        report.check_folder(tmp_path)
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="no writable folder"):
            report.check_folder(place)
    with pytest.raises(UserError, match="expected a folder that can be made"):
        report.check_folder(tmp_path / ("long" * 100))
