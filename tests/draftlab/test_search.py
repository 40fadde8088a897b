"""Which trials a sweep has, what is equal for them, and what they cost."""

import math

import pytest
import torch

from draftlab import checkpoint, search, train
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.target import load_target, load_target_config

CPU = torch.device("cpu")
GRID = {"draft.block_size": [2, 8], "train.lr": [1e-3, 0.5]}


def test_a_grid_is_all_combinations_with_names_fit_for_folders(tiny_run):
    trials = search.trials(tiny_run, GRID)
    assert list(trials) == [
        "block_size_2-lr_0_001", "block_size_2-lr_0_5", "block_size_8-lr_0_001", "block_size_8-lr_0_5",
    ]  # fmt: skip
    last = trials["block_size_8-lr_0_5"]
    assert (last.run.draft.block_size, last.run.train.lr) == (8, 0.5)
    assert (last.point, last.values) == ((1, 1), {"block_size": 8, "lr": 0.5})
    assert list(search.trials(tiny_run, {"draft.block_size": [8], "train.lr": [1e-3, 0.5]})) == ["lr_0_001", "lr_0_5"]


def test_a_sweep_over_nothing_is_one_trial(tiny_run):
    (trial,) = search.trials(tiny_run, {}).values()
    assert (trial.name, trial.run) == ("draft", tiny_run)


def test_settings_that_change_together_go_by_the_name_of_their_variation(tiny_run):
    losses = {"l1": {"loss.ce": 0.0, "loss.l1": 1.0}, "tv": {"loss.ce": 0.0, "loss.tv": 1.0}}  # the same values
    run = tiny_run.replace({"features.last_hidden": True})
    trials = search.trials(run, {"loss": losses, "draft.block_size": [2, 8]})
    assert {name: trial.values for name, trial in trials.items()} == {
        f"{loss}-block_size_{size}": {"loss": loss, "block_size": size} for loss in losses for size in (2, 8)
    }
    assert trials["tv-block_size_8"].point == (1, 1)
    assert trials["tv-block_size_8"].run == run.replace({"loss.ce": 0.0, "loss.tv": 1.0, "draft.block_size": 8})
    assert list(search.trials(run, {"loss": {"ce + l1": {"loss.l1": 0.9}, "ce": {}}})) == ["ce___l1", "ce"]


def test_several_seeds_are_several_trials_of_an_arm(tiny_run):
    trials = search.trials(tiny_run.replace({"search.seeds": [3, 5]}), {"draft.block_size": [2, 8]})
    assert list(trials) == ["block_size_2-seed_3", "block_size_2-seed_5", "block_size_8-seed_3", "block_size_8-seed_5"]
    assert [trial.run.seed for trial in trials.values()] == [3, 5, 3, 5]
    assert {trial.arm for trial in trials.values()} == {"block_size_2", "block_size_8"}


GATE = {"draft.variant": "gated", "draft.target_layer_ids": [0, 1, 2]}
LAYERS = {
    f"{choice}_{count}": {"draft.layer_choice": choice, "draft.num_target_layers": count}
    for choice, count in (("gate", 2), ("gate", 1), ("late", 2))
}


def test_a_probe_comes_first_and_its_proposal_is_what_the_others_tap(tiny_run):
    before = search.trials(tiny_run, {"layers": LAYERS}, GATE)
    after = search.trials(tiny_run, {"layers": LAYERS}, GATE, [2, 0, 1])
    assert list(before) == list(after) == ["gate", "gate_2", "gate_1", "late_2"]
    assert before["gate"] == after["gate"] and before["late_2"] == after["late_2"]
    probe = after["gate"]
    assert probe.run == tiny_run.replace(GATE) and probe.values == {"layers": "gate"}
    taps = [{name: trial.run.draft.target_layer_ids for name, trial in trials.items()} for trials in (before, after)]
    assert taps[0] == {"gate": [0, 1, 2], "gate_2": [0, 1], "gate_1": [0], "late_2": None}
    assert taps[1] == {"gate": [0, 1, 2], "gate_2": [0, 2], "gate_1": [2], "late_2": None}
    assert after["gate_2"].run.draft.variant == "dflash"


def test_one_probe_serves_all_seeds_and_none_comes_unasked(tiny_run):
    seeds = tiny_run.replace({"search.seeds": [3, 5]})
    assert list(search.trials(seeds, {"layers": {"gate_1": LAYERS["gate_1"]}}, GATE)) == [
        "gate", "draft-seed_3", "draft-seed_5",
    ]  # fmt: skip
    assert list(search.trials(tiny_run, {"layers": {"a": {}, "late_2": LAYERS["late_2"]}}, GATE)) == ["a", "late_2"]


def test_optuna_runs_the_probe_beside_its_samples(tiny_run):
    run = tiny_run.replace({"search.method": "optuna", "search.samples": 2})
    assert search.count(run, search.trials(run, {"layers": LAYERS}, GATE)) == 3
    assert search.count(run, search.trials(run, {"layers": LAYERS, "draft.block_size": [2, 4]})) == 2
    assert search.count(tiny_run, search.trials(tiny_run, {"layers": LAYERS}, GATE)) == 4


@pytest.mark.parametrize(
    "changes, probe, complaint",
    [
        ({}, GATE | {"draft.target_layer_ids": [1]}, "trial gate_2: .* the gate has 1 layers to choose from, got 2"),
        ({"draft.conditioning": "none"}, GATE, "trial gate: .*draft.conditioning=none"),
    ],
)
def test_a_probe_that_cannot_be_or_has_too_little_to_propose_is_refused(tiny_run, changes, probe, complaint):
    with pytest.raises(UserError, match=complaint):
        search.trials(tiny_run.replace(changes), {"layers": LAYERS}, probe)


def test_a_gates_layers_are_unknown_where_there_is_no_gate(tiny_run):
    with pytest.raises(UserError, match="draft.layer_choice=gate: only experiments/sweep_target_layers.py"):
        adapt(load_target_config(tiny_run.target), tiny_run.replace({"draft.layer_choice": "gate"}).draft, 0)


def test_random_draws_some_of_the_grid_and_the_same_again(tiny_run):
    some = tiny_run.replace({"search.method": "random", "search.samples": 3})
    drawn = search.trials(some, GRID)
    assert len(drawn) == 3 and set(drawn) < set(search.trials(tiny_run, GRID))
    assert list(search.trials(some, GRID)) == list(drawn)
    draws = {tuple(search.trials(some.replace({"seed": seed}), GRID)) for seed in range(8)}
    assert len(draws) > 1


def test_equal_tokens_are_brought_about_by_the_anchors(tiny_run):
    run = tiny_run.replace({"search.budget": "tokens", "train.anchors": 8})
    trials = search.trials(run, {"draft.block_size": [4, 8, 16]})
    anchors = {trial.run.draft.block_size: trial.run.train.anchors for trial in trials.values()}
    assert anchors == {4: 40, 8: 17, 16: 8}
    assert all(count * (size - 1) == pytest.approx(120, rel=0.01) for size, count in anchors.items())


@pytest.mark.parametrize(
    "changes, vary, complaint",
    [
        ({}, {"draft.blocksize": [2]}, "trial blocksize_2|trial draft: override 'draft.blocksize': unknown key"),
        ({}, {"train.batch_size": [4, 5], "train.workers": [2]}, "trial batch_size_5: .* multiple"),
        ({}, {"loss": {"ce": {}, "l1": {"loss.l2": 1.0}}}, "trial l1: override 'loss.l2': unknown key 'l2'"),
        ({}, {"loss": {"a b": {}, "a_b": {}}}, "trial a_b would be tried twice"),
        ({}, {"draft.block_size": [2, 2]}, "trial block_size_2 would be tried twice"),
        ({"search.samples": 2}, GRID, "a grid has all combinations"),
        ({"search.method": "random"}, GRID, "expected search.samples of 1 to 4.* got None"),
        ({"search.method": "optuna", "search.samples": 5}, GRID, "expected search.samples of 1 to 4"),
        ({"search.method": "optuna", "search.samples": 2, "search.seeds": [0, 1]}, GRID, "one seed"),
        ({"search.method": "optuna", "search.samples": 1}, {}, "expected several values to choose from, got one"),
        ({"search.scheduler": "asha", "search.seeds": [0, 1]}, GRID, "search.seeds: asha takes one seed"),
        ({"search.scheduler": "asha", "train.eval_every": 40, "train.steps": 40}, GRID, "an evaluation after"),
        ({"search.scheduler": "asha", "train.eval_every": 30, "search.grace": 0.8, "train.steps": 60}, GRID, "e=0.8"),
        (
            {"draft.target_layer_ids": [0, 1]}, {"draft.num_target_layers": [1, 2]},
            r"trial num_target_layers_1: draft.target_layer_ids=\[0, 1\] is set, beside which draft.num_target_layers",
        ),
        ({"search.budget": "time"}, GRID, "search.budget=time and train.seconds go together"),
        ({"train.seconds": 3.0}, GRID, "search.budget=time and train.seconds go together"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny_run, changes, vary, complaint):
    with pytest.raises(UserError, match=complaint):
        search.trials(tiny_run.replace(changes), vary)


def test_a_value_that_one_trial_alone_cannot_have_is_refused_with_the_trial_named(tiny_run):
    trials = search.trials(tiny_run, {"draft.num_target_layers": [1, 40]})
    runs = {name: trial.run for name, trial in trials.items()}
    with pytest.raises(UserError, match="trial num_target_layers_40: draft.num_target_layers: a target of 4"):
        train.prepare(runs, lambda *_, **__: None)


def test_the_cost_grows_with_what_is_trained(tiny_run):
    shape = load_target_config(tiny_run.target)
    base = search.cost(tiny_run, shape, CPU)
    steps = search.cost(tiny_run.replace({"train.steps": tiny_run.train.steps * 10}), shape, CPU)
    assert steps.seconds(1e9) - search.START_SECONDS == pytest.approx(10 * (base.seconds(1e9) - search.START_SECONDS))
    assert base.seconds(1e9) - search.START_SECONDS == pytest.approx(2 * (base.seconds(2e9) - search.START_SECONDS))
    assert (steps.memory, steps.disk) == (base.memory, base.disk)
    deeper = search.cost(tiny_run.replace({"draft.num_hidden_layers": 3}), shape, CPU)
    assert deeper.operations > base.operations and deeper.memory > base.memory and deeper.disk > base.disk
    timed = search.cost(tiny_run.replace({"train.seconds": 90.0}), shape, CPU)
    assert timed.seconds(1e9) == 90 + search.START_SECONDS


def test_flex_attention_keeps_no_scores_in_memory(tiny_run):
    shape, long = load_target_config(tiny_run.target), tiny_run.replace({"corpus.max_length": 1024})
    split, flex = (
        search.cost(long.replace({"draft.attention": name}), shape, CPU).memory for name in ("split", "flex")
    )
    slots = long.train.batch_size * long.train.anchors * long.draft.block_size
    scores = 4 * shape.num_attention_heads * 1024 * long.draft.num_hidden_layers * slots
    assert split - flex == scores
    auto = search.cost(long, shape, torch.device("cuda")).memory
    assert (auto, search.cost(long, shape, CPU).memory) == (flex, split)


def test_the_cost_of_disk_covers_the_checkpoints_weights(tiny_run):
    target = load_target(tiny_run.target)
    draft = Draft(adapt(target.config, tiny_run.draft, target.mask_token_id))
    weights = sum(parameter.numel() for parameter in draft.parameters())
    assert search.cost(tiny_run, target.config, CPU).disk == 32 * weights


def test_the_cost_of_disk_is_what_a_trials_checkpoints_take(swept):
    """At most: the last checkpoint may be the best one, too; and MLflow's copy isn't counted here."""
    run = checkpoint.load(swept.folder / "trials" / "block_size_4" / "draft")[1].run
    files = [*swept.folder.glob("ray/block_size_4/**/*"), *swept.folder.glob("trials/block_size_4/draft/*")]
    weights = [path.stat().st_size for path in files if path.suffix in (".safetensors", ".pt")]
    expected = search.cost(run, load_target_config(run.target), CPU).disk
    assert len(weights) >= 3 and 0.4 < sum(weights) / expected < 1.05


def test_features_are_counted_once_for_all_trials(tiny_run):
    shape = load_target_config(tiny_run.target)
    trials = search.trials(tiny_run, {"draft.target_layer_ids": [[0], [0, 2]]})
    size = search.feature_bytes(trials, shape, conversations=10)
    assert size == 10 * tiny_run.corpus.max_length * (2 * 2 * shape.hidden_size + 5)
    online = search.trials(tiny_run.replace({"features.mode": "online"}), {})
    assert search.feature_bytes(online, shape, 10) == 0


def test_the_speed_of_a_machine_is_measured_and_its_threads_are_left_alone(tiny_run):
    before = torch.get_num_threads()
    speed = search.matrix_speed(tiny_run, torch.device("cpu"), 1)
    assert math.isfinite(speed) and speed > 1e8
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("variant", ["dflash", "dflare", "gated", "dspark"])
def test_every_variant_has_a_cost(tiny_run, variant):
    run = tiny_run.replace({"draft.variant": variant})
    assert search.cost(run, load_target_config(run.target), CPU).seconds(1e9) > search.START_SECONDS
