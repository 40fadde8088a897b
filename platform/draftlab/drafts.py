"""From a reference on the command line to a draft, its config and its hash.

A reference is a folder, an MLflow run id or models:/ URI, or the hub id of a published draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download

from draftlab import checkpoint
from draftlab import config as configs
from draftlab.config import Run
from draftlab.draft import Draft
from draftlab.errors import UserError, first_line

if TYPE_CHECKING:
    from draftlab.tracking import Store


def find_checkpoint(ref: str, store: Store, into: Path) -> Path:
    """The folder of the draft that a reference names.

    Args:
        ref: a folder, an MLflow run id or models:/ URI, or the hub id of a published draft.
        store: where MLflow references are looked up.
        into: folder for what has to be fetched.

    Raises:
        UserError: there is no such thing.
    """
    folder: Path | None = Path(ref).expanduser()
    if not folder.is_dir():
        folder = store.resolve_checkpoint(ref, into)
    if folder is None:
        folder = _from_hub(ref, into)
    return folder / "draft" if (folder / "draft").is_dir() else folder


def load_draft(
    ref: str, config_file: Path | None, overrides: list[str], store: Store, into: Path
) -> tuple[Draft, checkpoint.CheckpointInfo, Run]:
    """A draft in float32 on the CPU, what its checkpoint says, and the run that it is to be evaluated by.

    Args:
        ref, store, into: as in find_checkpoint.
        config_file: the run's configuration; None is the checkpoint's own, or the default where it has none.
        overrides: of that configuration.

    Raises:
        UserError: see find_checkpoint, checkpoint.load and config.load.
    """
    folder = find_checkpoint(ref, store, into)
    own = folder / checkpoint.RUN
    for override in overrides:
        if override.startswith(("draft.", "loss.", "train.")):
            raise UserError(f"override {override!r}: the draft is trained already, expected target, corpus or eval")
    run = configs.load(config_file or (own if own.is_file() else configs.DEFAULT_CONFIG), overrides)
    draft, info = checkpoint.load(folder)
    return draft, info, run


def _from_hub(ref: str, into: Path) -> Path:
    """Fetch a published draft's two files; nothing of it is ever run."""
    if ref.count("/") != 1 or ref.startswith((".", "/", "~")):
        raise UserError(f"checkpoint {ref}: no such folder, MLflow run, models:/ URI or hub id")
    try:
        return Path(snapshot_download(ref, allow_patterns=["config.json", "model.safetensors"], local_dir=into / ref))
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"checkpoint {ref}: no such folder, and not fetched from the hub ({reason})") from error
