"""What a reference on the command line leads to: a draft, its config and its hash, or one clear line."""

import pytest

from draftlab import checkpoint, config, drafts
from draftlab.config import DraftConfig, TargetConfig
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.target import load_target


@pytest.fixture()
def saved(tmp_path):
    """A trainer's checkpoint folder, its draft inside."""
    target = load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))
    run = config.load(config.CONFIGS / "tiny.yaml", ["draft.target_layer_ids=[0,2]", "seed=5"])
    shape = DraftConfig(block_size=4, num_hidden_layers=1, target_layer_ids=[0, 2])
    draft = Draft(adapt(target.config, shape, target.mask_token_id))
    draft.reset(0)
    checkpoint.save(tmp_path / "step" / "draft", draft, run, {"name": "tiny", "revision": None, "fingerprint": "x"})
    return tmp_path / "step"


def test_a_checkpoint_folder_is_found_with_or_without_its_draft_folder(saved, store, tmp_path):
    for folder in (saved, saved / "draft"):
        _, info, run = drafts.load_draft(str(folder), None, ["eval.prompts=2"], store, tmp_path)
        assert info.folder == saved / "draft" and run.seed == 5 and run.eval.prompts == 2


def test_a_checkpoint_is_found_by_its_mlflow_run_and_model(saved, store, tmp_path):
    run_id = store.start_run("trial", key="trial")
    model = store.log_checkpoint(run_id, saved / "draft", name="draft", step=1, params={}, metrics={})
    _, expected, _ = drafts.load_draft(str(saved), None, [], store, tmp_path)
    for ref in (run_id, f"models:/{model}"):
        _, info, run = drafts.load_draft(ref, None, [], store, tmp_path / "fetched")
        assert info.hash == expected.hash and run.seed == 5


def test_a_published_draft_without_a_run_is_evaluated_by_the_given_configuration(saved, store, tmp_path, monkeypatch):
    asked = {}

    def hub(repo_id, *, allow_patterns, local_dir):
        asked.update(repo_id=repo_id, files=allow_patterns)
        for name in ("config.json", "model.safetensors"):
            local_dir.mkdir(parents=True, exist_ok=True)
            (local_dir / name).write_bytes((saved / "draft" / name).read_bytes())
        return str(local_dir)

    monkeypatch.setattr(drafts, "snapshot_download", hub)
    made, info, run = drafts.load_draft("someone/draft", None, ["target.model=tiny"], store, tmp_path)
    assert asked == {"repo_id": "someone/draft", "files": ["config.json", "model.safetensors"]}
    assert info.run is None and run.target.model == "tiny" and made.spec.block_size == 4


@pytest.mark.parametrize("ref", ["no/such/folder", "./nothing", "nothing"])
def test_a_reference_to_nothing_is_refused(store, tmp_path, ref):
    with pytest.raises(UserError, match=f"checkpoint {ref}: no such folder"):
        drafts.find_checkpoint(ref, store, tmp_path)


def test_a_hub_that_cannot_be_reached_is_one_line(store, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def offline(*_, **__):
        raise FileNotFoundError("Cannot find the files\nand more")

    monkeypatch.setattr(drafts, "snapshot_download", offline)
    words = r"someone/draft: no such folder, and not fetched from the hub \(Cannot find the files\)$"
    with pytest.raises(UserError, match=words):
        drafts.find_checkpoint("someone/draft", store, tmp_path)
