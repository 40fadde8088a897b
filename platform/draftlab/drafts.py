"""From a reference on the command line to a draft, its config and its hash.

A reference is a folder, an MLflow run id or models:/ URI, or the hub id of a published draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download

from draftlab import checkpoint
from draftlab import config as configs
from draftlab.config import Run
from draftlab.draft import Draft, DraftSpec
from draftlab.errors import UserError, first_line
from draftlab.prompts import Prompt, load_prompts
from draftlab.target import Target, expand, load_target, load_target_config

if TYPE_CHECKING:
    from draftlab.tracking import Store


TRAINED = ("draft.", "loss.", "train.")
"""Sections of a run that a trained draft has settled."""
SUPPLIED = ("block_size", "mask_token_id", "target_layer_ids")
"""Keys of `draft` by which a user says what a published config.json may lack."""
FILES = ["config.json", "model*.safetensors", "model.safetensors.index.json"]


def find_checkpoint(ref: str, open_store: Callable[[], Store], into: Path) -> Path:
    """The folder of the draft that a reference names.

    Args:
        ref: a folder, an MLflow run id or models:/ URI, or the hub id of a published draft.
        open_store: opens the store where MLflow references are looked up; not called for a folder.
        into: folder for what has to be fetched.

    Raises:
        UserError: there is no such thing.
    """
    folder: Path | None = expand(ref)
    if not folder.is_dir():
        folder = open_store().resolve_checkpoint(ref, into)
    if folder is None:
        folder = _from_hub(ref, into)
    return folder / "draft" if (folder / "draft").is_dir() else folder


def load_draft(
    ref: str, config_file: Path | None, overrides: list[str], open_store: Callable[[], Store], into: Path
) -> tuple[Draft, checkpoint.CheckpointInfo, Run]:
    """A draft in float32 on the CPU, what its checkpoint says, and the run that it is to be evaluated by.

    Args:
        ref, open_store, into: as in find_checkpoint.
        config_file: the run's configuration; None is the checkpoint's own, or the default where it has none.
        overrides: of that configuration; of `draft`, what the checkpoint lacks.

    Returns:
        In the run, `draft`, `loss` and `train` are what the draft was trained with, as far as that is known.

    Raises:
        UserError: see find_checkpoint, checkpoint.load and config.load; a setting that contradicts the training; a
            draft for a target of another vocabulary, width or depth.
    """
    folder = find_checkpoint(ref, open_store, into)
    own = folder / checkpoint.RUN
    run = configs.load(config_file or (own if own.is_file() else configs.DEFAULT_CONFIG), overrides)
    said, default = run.flat(), Run().flat()
    asked = {override.partition("=")[0] for override in overrides}
    written = set() if config_file is None else {key for key in said if said[key] != default[key]}

    known = {key: said[f"draft.{key}"] for key in SUPPLIED if f"draft.{key}" in asked | written}
    target = load_target_config(run.target)
    draft, info = checkpoint.load(folder, known={"num_target_layers": target.num_hidden_layers, **known})
    trained = (info.run or Run()).replace(_shape(draft.spec))
    settled = trained.flat()
    if info.run is None:  # of a published draft's training nothing else is known that a file could contradict
        written &= _shape(draft.spec).keys()
    if said["draft.target_layer_ids"] is not None:
        written.discard("draft.num_target_layers")  # not in force
    for key in sorted(asked | written):
        if key.startswith(TRAINED) and said[key] != settled[key]:
            already = f"already with {settled[key]}" if info.run or key.startswith("draft.") else "already"
            rest = "expected settings of target, corpus or eval"
            raise UserError(f"{key}={said[key]}: the draft is trained {already}; {rest}")
    checkpoint.check_target_config(draft.spec, target, run.target.model)
    sections = {name: getattr(trained, name) for name in ("draft", "loss", "train")}
    return draft, info, run.model_copy(update=sections)


def check_target(draft: Draft, info: checkpoint.CheckpointInfo, target: Target) -> None:
    """Refuse a draft that was made for another target.

    Raises:
        UserError: another vocabulary, width or depth; or the checkpoint carries another embedding or head.
    """
    checkpoint.check_target(draft.spec, target)
    checkpoint.check_lent(info, draft, target)


@dataclass(frozen=True)
class Field:
    """Drafts of one target, ready to decode."""

    run: Run
    """What they are evaluated by: the first one's run, with the overrides."""
    target: Target
    drafts: dict[str, Draft]
    """Name -> draft, of the target's dtype and on its device."""
    infos: dict[str, checkpoint.CheckpointInfo]

    @property
    def hashes(self) -> dict[str, str]:
        """Name -> checkpoint hash."""
        return {ref: info.hash for ref, info in self.infos.items()}

    @property
    def folders(self) -> dict[str, Path]:
        """Name -> where the checkpoint's files stand."""
        return {ref: info.folder for ref, info in self.infos.items()}

    def prompts(self, spec: str, say: Callable[..., None]) -> list[Prompt]:
        """The prompts of an evaluation, as in prompts.load_prompts; held-out ones were held out from every draft.

        Raises:
            UserError: as there, or one of the drafts was trained with fewer held out.
        """
        found, corpus = load_prompts(spec, self.run, self.target, say), self.run.corpus
        if any(prompt.domain == "heldout" for prompt in found):
            trained = {name: info.run.corpus for name, info in self.infos.items() if info.run}
            for name, its in trained.items():
                if its.source == corpus.source and its.heldout < corpus.heldout:
                    raise UserError(
                        f"prompts heldout: {name} was trained with corpus.heldout={its.heldout:g}, so on some of those "
                        f"that corpus.heldout={corpus.heldout:g} holds out; expected at most {its.heldout:g}"
                    )
        return found


def load_field(
    refs: Sequence[str],
    config_file: Path | None,
    overrides: list[str],
    open_store: Callable[[], Store],
    into: Path,
    say: Callable[..., None],
) -> Field:
    """Several drafts, named as short as tells them apart, and the target of the first.

    Arguments as in `load_draft`.

    Raises:
        UserError: see load_draft and load_target; a draft for another target.
    """
    folders = [expand(ref) for ref in refs]
    short = [(folder.parent if folder.name == "draft" else folder).name if folder.is_dir() else ref
             for folder, ref in zip(folders, refs)]  # fmt: skip
    names = short if len(set(short)) == len(set(refs)) else refs
    names = [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]
    loaded = {name: load_draft(ref, config_file, overrides, open_store, into) for name, ref in zip(names, refs)}
    run = loaded[names[0]][2]
    target = load_target(run.target)
    for name, (draft, info, _) in loaded.items():
        check_target(draft, info, target)
        say(f"{name}: draft {info.hash} with blocks of {draft.spec.block_size}")
    say(f"target {target.name} in {run.target.dtype} on {target.device}")
    drafts = {name: draft.to(target.device, target.dtype) for name, (draft, _, _) in loaded.items()}
    return Field(run, target, drafts, {name: info for name, (_, info, _) in loaded.items()})


def _shape(spec: DraftSpec) -> dict[str, Any]:
    """The dotted keys of a run that say how this draft is made."""
    return {
        "draft.block_size": spec.block_size,
        "draft.num_hidden_layers": spec.num_hidden_layers,
        "draft.num_target_layers": len(spec.target_layer_ids),
        "draft.target_layer_ids": list(spec.target_layer_ids),
        "draft.mask_token_id": spec.mask_token_id,
        "draft.vocab": spec.draft_vocab_size,
    }


def _from_hub(ref: str, into: Path) -> Path:
    """Fetch a published draft's config and weights; nothing of it is ever run."""
    if ref.count("/") != 1 or ref.startswith((".", "/", "~")):
        raise UserError(f"checkpoint {ref}: no such folder, MLflow run, models:/ URI or hub id")
    try:
        return Path(snapshot_download(ref, allow_patterns=FILES, local_dir=into / ref))
    except Exception as error:  # its HTTP library, whose errors they are, changes with the hub client's version
        reason = first_line(error)
        raise UserError(f"checkpoint {ref}: no such folder, and not fetched from the hub ({reason})") from error
