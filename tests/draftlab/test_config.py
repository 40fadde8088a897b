"""The typed run: what is accepted, what is refused and how, and that nothing is lost on the way through YAML."""

import ast
import inspect
import math

import pytest

from draftlab import config
from draftlab.config import DraftConfig, Run, Section
from draftlab.errors import UserError

SECTIONS = [kind for kind in vars(config).values() if inspect.isclass(kind) and issubclass(kind, Section)]


def written(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(overrides=(), path=config.DEFAULT_CONFIG):
    with pytest.raises(UserError) as caught:
        config.load(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert config.load(written(tmp_path, "# nothing\n")) == Run()


def test_a_file_holds_only_differences(tmp_path):
    run = config.load(written(tmp_path, "draft: {block_size: 8}\ntrain: {steps: 7}\n"))
    assert (run.draft.block_size, run.train.steps) == (8, 7)
    assert run.replace({"draft.block_size": DraftConfig().block_size, "train.steps": Run().train.steps}) == Run()


def test_a_file_may_extend_another(tmp_path):
    written(tmp_path, "seed: 3\ntrain: {steps: 9, lr: 0.5}\n", "base.yaml")
    run = config.load(written(tmp_path, "extends: base.yaml\ntrain: {lr: 0.25}\n"))
    assert (run.seed, run.train.steps, run.train.lr) == (3, 9, 0.25)


@pytest.mark.parametrize("link", ["run.yaml", "./run.yaml", "../{}/run.yaml"])
def test_a_file_that_extends_itself_is_refused(tmp_path, link):
    path = written(tmp_path, f"extends: {link.format(tmp_path.name)}\n")
    assert "circle" in refusal(path=path)


@pytest.mark.parametrize("text", ["extends: 3", "extends: [a.yaml]", "extends: nowhere.yaml"])
def test_extending_anything_but_a_file_beside_it_is_refused(tmp_path, text):
    refusal(path=written(tmp_path, text))


BROKEN = ["a: [1", "- just\n- a list", "word", "false", "\x00", "seed: 0b_", "seed: !!bool x", "[" * 9999]


@pytest.mark.parametrize("text", [*BROKEN, "!!python/object/apply:os.getcwd []"])
def test_broken_yaml_is_refused_and_never_executed(tmp_path, text):
    path = written(tmp_path, text)
    assert str(path) in refusal(path=path)


def test_a_missing_file_is_refused(tmp_path):
    assert "none.yaml" in refusal(path=tmp_path / "none.yaml")


def test_an_override_beats_the_file(tmp_path):
    path = written(tmp_path, "train: {lr: 0.5, steps: 3}\n")
    run = config.load(path, ["train.lr=3e-4", "draft.block_size=8", "draft.target_layer_ids=[1, 2]"])
    assert (run.train.lr, run.train.steps, run.draft.block_size, run.draft.target_layer_ids) == (3e-4, 3, 8, [1, 2])


def test_the_last_of_two_overrides_counts():
    assert config.load(overrides=["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("text, value", [("3e-4", 3e-4), ("1E3", 1e3), (".5e+1", 5.0), ("-0.0", 0.0), ("2", 2.0)])
def test_floats_may_be_written_in_every_usual_way(tmp_path, text, value):
    assert config.load(overrides=[f"train.weight_decay={text}"]).train.weight_decay == value
    assert config.load(written(tmp_path, f"train:\n  weight_decay: {text}\n")).train.weight_decay == value


@pytest.mark.parametrize("text", ["2026-01-01", "2026-13-45", "2026-01-01 10:00:00"])
def test_a_date_is_text(tmp_path, text):
    assert config.load(overrides=[f"tracking.experiment={text}"]).tracking.experiment == text
    assert config.load(written(tmp_path, f"tracking: {{experiment: '{text}'}}\n")).tracking.experiment == text
    run = config.load(written(tmp_path, f"tracking:\n  experiment: {text}\n"))
    assert config.load(written(tmp_path, run.to_yaml())) == run and run.tracking.experiment == text


@pytest.mark.parametrize(
    "yaml_text, override, place, known",
    [
        ("draft: {blocksize: 8}", "draft.blocksize=8", "blocksize", "block_size"),
        ("trian: {steps: 1}", "trian.steps=1", "trian", "train"),
        ("train: {lr: {peak: 1}}", "train.lr.peak=1", "lr", ""),
    ],
)
def test_an_unknown_key_is_refused_with_its_place_and_the_known_ones(tmp_path, yaml_text, override, place, known):
    path = written(tmp_path, yaml_text)
    for message in (refusal(path=path), refusal([override])):
        assert place in message
        assert known in message
    assert str(path) in refusal(path=path)


WRONG = [
    "draft.block_size=1",
    "draft.block_size=0",
    "draft.block_size=eight",
    "draft.block_size=8.5",
    "draft.block_size=true",
    "draft.block_size='8'",
    "draft.block_size=",
    "draft.target_layer_ids=3",
    "draft.target_layer_ids=[1, x]",
    "draft.target_layer_ids=[true]",
    "draft.init=warm",
    "draft.mask_token_id=[mask]",
    "train.steps=0",
    "train.lr=0",
    "train.lr=.inf",
    "train.lr=.nan",
    "train.lr=true",
    "train.clip=-1",
    "train.warmup=1",
    "train.dtype=float16",
    "loss.gamma=0",
    "loss.gamma=-.inf",
    "loss.gamma=.nan",
    "loss.gamma=fast",
    "loss.gamma=true",
    "loss.ce=-1",
    "loss.l1=some",
    "loss.top_k=0",
    "loss.positions=late",
    "eval.schedule=true",
    "corpus.heldout=0",
    "corpus.heldout=1",
    "target.model=8",
    "tracking.log_checkpoints=1",
    "cluster.gpus_per_worker=some",
    "seed=-1",
    "seed=9223372036854775808",
    "corpus.conversations=1",
    "seed=null",
]


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_type_or_value_is_refused_with_its_place_and_what_came(override):
    message = refusal([override])
    assert override.partition("=")[0] in message
    assert "got" in message


def test_a_section_that_is_no_section_is_refused(tmp_path):
    assert "train" in refusal(path=written(tmp_path, "train: fast\n"))


def test_a_whole_section_is_no_override_since_it_would_reset_its_other_keys():
    assert "train.key=value" in refusal(["train={steps: 3}"])


@pytest.mark.parametrize("override", ["train.steps", "=3", "train.steps=[1", "train.steps=0b_", ""])
def test_an_override_that_is_no_assignment_is_refused(override):
    refusal([override])


def test_a_batch_that_cannot_be_shared_evenly_is_refused():
    good = ["train.batch_size=12", "train.workers=2", "train.accumulation=3"]
    assert config.load(overrides=good).train.batch_size == 12
    message = refusal(["train.batch_size=8", "train.workers=2", "train.accumulation=3"])
    assert "train.batch_size" in message and "6" in message and "8" in message


@pytest.mark.parametrize("block_size, gamma", [(16, 7.0), (10, 5.0), (8, 4.0), (7, 4.0), (4, 2.0), (2, 1.0)])
def test_gamma_tied_to_the_block_size_is_as_published(block_size, gamma):
    assert config.load(overrides=[f"draft.block_size={block_size}", "loss.gamma=tied"]).gamma == gamma


def test_a_given_gamma_stands_whatever_the_block_size():
    assert config.load(overrides=["loss.gamma=3", "draft.block_size=16"]).gamma == 3.0
    assert config.load(overrides=["loss.gamma=.inf"]).gamma == math.inf


CONTRADICTIONS = {
    ("loss.l1=0.9",): ("loss.l1", "features.last_hidden"),
    ("loss.kl=1", "features.mode=online"): ("loss.kl", "features.last_hidden"),
    ("loss.ce=0",): ("loss", "topk_kl"),
    ("loss.positions=dpace", "loss.gamma=4"): ("loss.positions", "loss.gamma"),
    ("loss.positions=dpace", "loss.gamma_step=1"): ("loss.positions", "gamma_step"),
    ("loss.gate_entropy=0.1", "draft.variant=dflare"): ("loss.gate_entropy", "draft.variant"),
    ("draft.markov_head=vanilla",): ("draft.markov_head", "draft.variant", "label layout same"),
    ("draft.confidence=true", "draft.variant=dflare"): ("draft.confidence", "draft.variant"),
    ("draft.confidence=true", "draft.variant=dspark"): ("draft.confidence", "loss.confidence"),
    ("loss.confidence=1", "features.last_hidden=true"): ("draft.confidence", "loss.confidence"),
    ("loss.confidence=1", "draft.confidence=true", "draft.variant=dspark"): ("loss.confidence", "features.last_hidden"),
    ("loss.positions=dpace", "draft.markov_head=rnn", "draft.variant=dspark"): ("loss.positions", "draft.markov_head"),
    ("draft.conditioning=none", "draft.variant=gated"): ("draft.conditioning", "draft.variant"),
    ("loss.gamma=5", "loss.gamma_cap=4"): ("loss.gamma", "loss.gamma_cap"),
}


@pytest.mark.parametrize("overrides", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused_by_name(overrides):
    message = refusal(list(overrides))
    assert all(name in message for name in CONTRADICTIONS[overrides])


def test_a_loss_is_any_mix_of_terms(tmp_path):
    path = written(tmp_path, "features: {last_hidden: true}\nloss: {ce: 0.1, l1: 0.9}\n")
    loss = config.load(path).loss
    assert (loss.ce, loss.distilled) == (0.1, {"l1": 0.9})
    assert (Run().loss.ce, Run().loss.distilled) == (1.0, {})


def test_replace_makes_a_new_validated_run():
    run = Run()
    other = run.replace({"draft.block_size": 4, "loss.gamma": 2.5})
    assert (other.draft.block_size, other.gamma, run) == (4, 2.5, Run())
    with pytest.raises(UserError, match="draft.block_size"):
        run.replace({"draft.block_size": 1})
    with pytest.raises(UserError, match="blocks"):
        run.replace({"draft.blocks": 1})


def test_a_run_cannot_be_changed_in_place():
    with pytest.raises(ValueError):
        Run().train.steps = 3


def test_flat_names_every_setting_and_the_gamma_in_force():
    run = config.load(overrides=["draft.block_size=8"])
    flat = run.flat()
    expected = {
        f"{name}.{key}"
        for name, section in Run.model_fields.items()
        if name != "seed"
        for key in section.annotation.model_fields
    }
    assert set(flat) == expected | {"seed"}
    assert flat["draft.block_size"] == 8
    assert flat["loss.gamma"] == 4.0


@pytest.mark.parametrize("overrides", [[], ["loss.gamma=.inf", "train.lr=1e-5", "corpus.heldout=1e-7"], ["seed=9"]])
def test_a_run_survives_its_own_yaml(tmp_path, overrides):
    run = config.load(overrides=overrides)
    assert config.load(written(tmp_path, run.to_yaml())) == run


def test_the_fingerprint_tells_runs_apart_and_nothing_else():
    runs = [Run(), Run().replace({"seed": 1}), Run().replace({"train.lr": 1e-3})]
    assert len({run.fingerprint() for run in runs}) == 3
    assert Run().fingerprint() == Run.model_validate(Run().model_dump()).fingerprint()
    assert config.digest({"a": 1, "b": [2]}) == config.digest({"b": [2], "a": 1})
    assert len(config.digest(None)) == 12 and int(config.digest(None), 16) >= 0


def test_every_field_says_what_it_is():
    for node in ast.parse(inspect.getsource(config)).body:
        if not isinstance(node, ast.ClassDef) or node.name not in {kind.__name__ for kind in SECTIONS} - {"Run"}:
            continue
        for field, after in zip(node.body, [*node.body[1:], None]):
            if isinstance(field, ast.AnnAssign):
                said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
                assert isinstance(said, str), f"{node.name}.{field.target.id} has no docstring"


def test_every_section_is_frozen_and_refuses_unknown_keys():
    assert len(SECTIONS) >= 10
    for section in SECTIONS:
        assert section.model_config["frozen"] and section.model_config["extra"] == "forbid"


def test_a_key_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("train: {steps: 3}\nseed: 1\ntrain: {lr: 1}\n")
    with pytest.raises(UserError, match="'train' stands there twice"):
        config.load(path)
