"""What a reference on the command line leads to: a draft, its config and its hash, or one clear line."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlab import checkpoint, config, drafts
from draftlab.config import DraftConfig, TargetConfig
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.target import load_target

ROOT = Path(__file__).resolve().parents[2]
TINY = ["target.model=tiny", "target.dtype=float32"]


def no_store():
    pytest.fail("a folder needs no MLflow store")


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))


@pytest.fixture()
def saved(target, tmp_path):
    """A trainer's checkpoint folder, its draft inside."""
    run = config.load(config.CONFIGS / "tiny.yaml", ["draft.target_layer_ids=[0,2]", "seed=5"])
    shape = DraftConfig(block_size=4, num_hidden_layers=1, target_layer_ids=[0, 2])
    draft = Draft(adapt(target.config, shape, target.mask_token_id))
    draft.reset(0)
    checkpoint.save(tmp_path / "step" / "draft", draft, run, {"name": "tiny", "revision": None, "fingerprint": "x"})
    return tmp_path / "step"


def test_a_checkpoint_folder_is_found_with_or_without_its_draft_folder(saved, tmp_path):
    for folder in (saved, saved / "draft"):
        _, info, run = drafts.load_draft(str(folder), None, ["eval.prompts=2"], no_store, tmp_path)
        assert info.folder == saved / "draft" and run.seed == 5 and run.eval.prompts == 2


def test_a_checkpoint_is_found_by_its_mlflow_run_and_model(saved, store, tmp_path):
    run_id = store.start_run("trial", key="trial")
    model = store.log_checkpoint(run_id, saved / "draft", name="draft", step=1, params={}, metrics={})
    _, expected, _ = drafts.load_draft(str(saved), None, [], lambda: store, tmp_path)
    for ref in (run_id, f"models:/{model}"):
        _, info, run = drafts.load_draft(ref, None, [], lambda: store, tmp_path / "fetched")
        assert info.hash == expected.hash and run.seed == 5


def test_held_out_prompts_were_held_out_from_every_draft(saved, target, tmp_path):
    run = config.load(config.CONFIGS / "tiny.yaml", ["draft.target_layer_ids=[0,2]", "corpus.heldout=0.1"])
    shape = DraftConfig(block_size=4, num_hidden_layers=1, target_layer_ids=[0, 2])
    draft = Draft(adapt(target.config, shape, target.mask_token_id))
    draft.reset(0)
    checkpoint.save(tmp_path / "less", draft, run, {"name": "tiny", "revision": None, "fingerprint": "x"})
    quiet, refs = lambda *_, **__: None, [str(saved), str(tmp_path / "less")]
    field = drafts.load_field(refs, None, [], no_store, tmp_path, quiet)
    with pytest.raises(UserError, match="prompts heldout: less was trained with corpus.heldout=0.1, .* at most 0.1"):
        field.prompts("heldout:2", quiet)
    asked = [  # by runs of the seeds 5 and 0: a corpus that the target writes is the same
        drafts.load_field(some, None, ["corpus.heldout=0.1"], no_store, tmp_path, quiet).prompts("heldout:2", quiet)
        for some in (refs, refs[::-1])
    ]
    assert asked[0] == asked[1] and len(asked[0]) == 2


def test_a_published_draft_without_a_run_is_evaluated_by_the_given_configuration(saved, store, tmp_path, monkeypatch):
    asked = {}

    def hub(repo_id, *, allow_patterns, local_dir):
        asked.update(repo_id=repo_id, files=allow_patterns)
        for name in ("config.json", "model.safetensors"):
            local_dir.mkdir(parents=True, exist_ok=True)
            (local_dir / name).write_bytes((saved / "draft" / name).read_bytes())
        return str(local_dir)

    monkeypatch.setattr(drafts, "snapshot_download", hub)
    made, info, run = drafts.load_draft("someone/draft", None, ["target.model=tiny"], lambda: store, tmp_path)
    assert asked == {"repo_id": "someone/draft", "files": drafts.FILES}
    assert info.run is None and run.target.model == "tiny" and made.spec.block_size == 4


@pytest.mark.parametrize("ref", ["no/such/folder", "./nothing", "nothing", "~nobody", "~nobody/draft"])
def test_a_reference_to_nothing_is_refused(store, tmp_path, ref):
    with pytest.raises(UserError, match=f"checkpoint {ref}: no such folder"):
        drafts.find_checkpoint(ref, lambda: store, tmp_path)


def test_a_hub_that_cannot_be_reached_is_one_line(store, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def offline(*_, **__):
        raise FileNotFoundError("Cannot find the files\nand more")

    monkeypatch.setattr(drafts, "snapshot_download", offline)
    words = r"someone/draft: no such folder, and not fetched from the hub \(Cannot find the files\)$"
    with pytest.raises(UserError, match=words):
        drafts.find_checkpoint("someone/draft", lambda: store, tmp_path)


def refusal(*args):
    with pytest.raises(UserError) as caught:
        drafts.load_draft(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what the training has settled


@pytest.mark.parametrize(
    "override, said",
    [
        ("draft.block_size=8", "draft.block_size=8: the draft is trained already with 4"),
        ("draft.mask_token_id=7", "draft.mask_token_id=7: the draft is trained already with"),
        ("loss.gamma=3.0", "loss.gamma=3.0: the draft is trained already with 2.0"),
        ("train.steps=13", "train.steps=13: the draft is trained already with 12"),
    ],
)
def test_a_setting_that_contradicts_the_training_is_refused_however_it_is_given(
    saved, tmp_path, override, said
):
    assert said in refusal(str(saved), None, [override], no_store, tmp_path)
    key, _, value = override.partition("=")
    section, _, name = key.partition(".")
    file = tmp_path / "run.yaml"
    file.write_text(f"target: {{model: tiny, dtype: float32}}\n{section}: {{{name}: {value}}}\n")
    assert said in refusal(str(saved), file, [], no_store, tmp_path)


def test_a_configuration_file_that_agrees_with_the_training_is_taken_and_the_rest_is_the_checkpoints(
    saved, tmp_path
):
    file = tmp_path / "run.yaml"
    file.write_text("target: {model: tiny, dtype: float32}\ndraft: {block_size: 4}\neval: {prompts: 3}\n")
    draft, info, run = drafts.load_draft(str(saved), file, ["draft.target_layer_ids=[0,2]"], no_store, tmp_path)
    assert run.eval.prompts == 3 and run.seed == 0, "of the file"
    assert run.draft.block_size == 4 and run.train == info.run.train and run.loss == info.run.loss
    assert run.draft.mask_token_id == draft.spec.mask_token_id


def publish(saved, folder, change, tensors=None):
    """The draft as somebody else would publish it: no run, no provenance."""
    folder.mkdir()
    data = json.loads((saved / "draft" / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))
    save_file({**load_file(saved / "draft" / "model.safetensors"), **(tensors or {})}, folder / "model.safetensors")
    return folder


def test_the_record_of_a_published_draft_tells_its_own_shape(saved, tmp_path):
    folder = publish(saved, tmp_path / "published", lambda data: None)
    draft, info, run = drafts.load_draft(str(folder), None, TINY, no_store, tmp_path)
    assert info.run is None and run.target.model == "tiny"
    assert run.draft.block_size == 4 and run.draft.num_hidden_layers == 1 and run.draft.target_layer_ids == [0, 2]
    assert "train.lr=0.1: the draft is trained already;" in refusal(
        str(folder), None, [*TINY, "train.lr=0.1"], no_store, tmp_path
    )


def test_a_config_that_the_draft_was_trained_by_is_taken(saved, tmp_path):
    own = saved / "draft" / "run.yaml"
    assert drafts.load_draft(str(saved), own, [], no_store, tmp_path)[2].draft.target_layer_ids == [0, 2]
    folder = publish(saved, tmp_path / "published", lambda data: None)
    file = tmp_path / "recipe.yaml"
    file.write_text("target: {model: tiny}\ndraft: {block_size: 4, init: random}\ntrain: {steps: 75000}\n")
    assert drafts.load_draft(str(folder), file, [], no_store, tmp_path)[2].target.model == "tiny"
    file.write_text("target: {model: tiny}\ndraft: {block_size: 8}\n")
    assert "draft.block_size=8: the draft is trained already with 4" in refusal(
        str(folder), file, [], no_store, tmp_path
    )


# ---- what a published config.json may lack


@pytest.mark.parametrize("key, value", [("block_size", 6), ("mask_token_id", 5), ("target_layer_ids", [0, 2])])
def test_what_a_published_config_lacks_is_named_with_the_option_that_supplies_it(saved, tmp_path, key, value):
    def lose(data):
        del data["dflash_config"][key]
        data.pop(key, None)

    folder = publish(saved, tmp_path / "published", lose)
    message = refusal(str(folder), None, TINY, no_store, tmp_path)
    assert f"'{key}' is missing; give it by draft.{key}=" in message
    draft, _, run = drafts.load_draft(str(folder), None, [*TINY, f"draft.{key}={value}"], no_store, tmp_path)
    assert run.draft.model_dump()[key] == value
    assert getattr(draft.spec, key) == (tuple(value) if isinstance(value, list) else value)


def test_the_depth_that_speculators_do_not_tell_is_the_targets(saved, target, tmp_path):
    draft, _ = checkpoint.load(saved / "draft")
    folder = tmp_path / "published"
    checkpoint.export(folder, draft, "speculators", "tiny", [])
    data = json.loads((folder / "config.json").read_text())
    del data["target_num_hidden_layers"], data["label_layout"]  # draftlab's own addition
    (folder / "config.json").write_text(json.dumps(data))
    again, _, _ = drafts.load_draft(str(folder), None, TINY, no_store, tmp_path)
    assert again.spec == draft.spec and again.spec.target_num_hidden_layers == target.num_layers
    with pytest.raises(UserError, match="'num_target_layers' is missing; give it by target.model="):
        checkpoint.load(folder)


# ---- another target


def test_a_draft_for_another_target_is_refused_before_the_targets_weights_are_read(saved, tmp_path):
    folder = publish(saved, tmp_path / "published", lambda data: data.update(vocab_size=4000))
    assert "vocabulary 4000, but tiny has 300" in refusal(str(folder), None, TINY, no_store, tmp_path)


def deepspec(saved, folder, **tensors):
    """In the form that may carry the target's embedding and head."""

    def change(data):
        data.update(architectures=["Qwen3DSparkModel"], markov_rank=0)
        del data["dflash_config"]["label_layout"]

    return publish(saved, folder, change, tensors)


def test_an_embedding_and_a_head_that_a_draft_carries_have_to_be_the_targets(saved, target, tmp_path):
    embedding, head = target.ends.embedding.weight, target.ends.head.weight
    own = {"embed_tokens.weight": embedding.clone(), "lm_head.weight": head.to(torch.bfloat16)}
    draft, info, _ = drafts.load_draft(str(deepspec(saved, tmp_path / "a", **own)), None, TINY, no_store, tmp_path)
    drafts.check_target(draft, info, target)
    trained = {**own, "lm_head.weight": head + 0.1}
    draft, info, _ = drafts.load_draft(str(deepspec(saved, tmp_path / "b", **trained)), None, TINY, no_store, tmp_path)
    with pytest.raises(UserError, match="the draft's lm_head.weight is not the one of tiny"):
        drafts.check_target(draft, info, target)


# ---- the script


def export(*argv):
    spec = importlib.util.spec_from_file_location("export", ROOT / "evals" / "export.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(list(map(str, argv)))


@pytest.mark.parametrize("form", ["zlab", "speculators"])
def test_a_draft_comes_back_from_either_form_bit_for_bit(saved, outputs, monkeypatch, tmp_path, form):
    monkeypatch.chdir(outputs.parent)
    assert export("--ckpt", saved, "--to", form, "--out", tmp_path / "theirs") == 0
    assert {path.name for path in (tmp_path / "theirs").iterdir()} == {"config.json", "model.safetensors"}
    assert export("--ckpt", tmp_path / "theirs", "--to", "zlab", "--out", tmp_path / "ours", *TINY) == 0
    (before, _), (after, info) = checkpoint.load(saved / "draft"), checkpoint.load(tmp_path / "ours")
    assert after.spec == before.spec and info.run is None
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == json.loads(
        (saved / "draft" / "config.json").read_text()
    )
    tensors = before.state_dict()
    assert after.state_dict().keys() == tensors.keys()
    assert all(tensors[name].equal(tensor) for name, tensor in after.state_dict().items())


def test_the_weights_of_both_forms_are_the_same_file(saved, outputs, monkeypatch, tmp_path):
    monkeypatch.chdir(outputs.parent)
    for form in ("zlab", "speculators"):
        export("--ckpt", saved, "--to", form, "--out", tmp_path / form)
    files = [(folder / "model.safetensors").read_bytes() for folder in (saved / "draft", tmp_path / "zlab")]
    assert (tmp_path / "speculators" / "model.safetensors").read_bytes() == files[0] == files[1]


def test_a_reduced_vocabulary_goes_to_speculators_with_its_rows_of_the_head(
    target, outputs, monkeypatch, tmp_path
):
    monkeypatch.chdir(outputs.parent)
    shape = DraftConfig(block_size=4, num_hidden_layers=1, target_layer_ids=[0, 2], vocab=40)
    draft = Draft(adapt(target.config, shape, target.mask_token_id))
    draft.reset(0)
    chosen = torch.arange(3, 283, 7)
    draft.set_vocabulary(chosen)
    run = config.load(config.CONFIGS / "tiny.yaml", ["draft.target_layer_ids=[0,2]", "draft.vocab=40"])
    checkpoint.save(tmp_path / "draft", draft, run, {"name": "tiny", "revision": None, "fingerprint": "x"})
    assert export("--ckpt", tmp_path / "draft", "--to", "speculators", "--out", tmp_path / "theirs") == 0
    written = load_file(tmp_path / "theirs" / "model.safetensors")
    assert written["lm_head.weight"].equal(target.ends.head.weight[chosen])
    assert written["d2t"].equal(chosen - torch.arange(40)) and written["t2d"].nonzero()[:, 0].equal(chosen)
    again, info, _ = drafts.load_draft(str(tmp_path / "theirs"), None, TINY, no_store, tmp_path)
    drafts.check_target(again, info, target)
    assert again.spec == draft.spec and again.token_ids.equal(chosen)
    # The authors' form knows no such thing: there the same weights guess through the whole head.
    assert export("--ckpt", tmp_path / "draft", "--to", "zlab", "--out", tmp_path / "zlab") == 0
    whole, _, _ = drafts.load_draft(str(tmp_path / "zlab"), None, TINY, no_store, tmp_path)
    assert whole.spec == dataclasses.replace(draft.spec, draft_vocab_size=None)
    assert all(tensor.equal(draft.state_dict()[name]) for name, tensor in whole.state_dict().items())
