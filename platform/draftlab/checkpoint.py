"""A draft on disk: config.json and model.safetensors as SGLang, vLLM and the authors' code load them.

Beside them stand run.yaml (the resolved run) and provenance.json (target, versions, git state, command).
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftlab import config as configs
from draftlab.config import Run
from draftlab.draft import Draft, DraftSpec
from draftlab.errors import UserError
from draftlab.target import Target, check_layer_ids

WEIGHTS, CONFIG, RUN, PROVENANCE = "model.safetensors", "config.json", "run.yaml", "provenance.json"
LABEL_LAYOUTS = ("same",)


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says besides its weights."""

    folder: Path
    hash: str
    """12 hex digits over config and weights."""
    run: Run | None
    """The run that trained it; None for a draft from elsewhere."""
    provenance: dict[str, Any]


def spec_to_json(spec: DraftSpec, dtype: str) -> dict[str, Any]:
    """config.json of a draft, in the published form."""
    rope = spec.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    reduced = {} if spec.draft_vocab_size is None else {"draft_vocab_size": spec.draft_vocab_size}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": {
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
            "label_layout": spec.label_layout,
        },
        "num_target_layers": spec.target_num_hidden_layers,
        "num_hidden_layers": spec.num_hidden_layers,
        "layer_types": ["full_attention"] * spec.num_hidden_layers,
        "hidden_size": spec.hidden_size,
        "target_hidden_size": spec.target_hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" and len(scaling) <= 1 else scaling,
        "rope_parameters": rope,
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_size,
        **reduced,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "use_cache": True,
        "dtype": dtype,
    }


def spec_from_json(data: dict[str, Any], where: str = "config.json") -> DraftSpec:
    """Read a draft's config: the published form, or the seed's flat keys.

    `num_target_layers` is the target's depth in the published form and the count of tapped layers in the flat one;
    the presence of `target_num_hidden_layers` tells them apart.

    Raises:
        UserError: a missing key, an impossible value, two values that contradict each other, an unknown label layout,
            or something that this draft doesn't have (sliding windows, another activation, another architecture).
    """
    nested = (data.get("dflash_config") or {}) if isinstance(data, dict) else None
    if not isinstance(nested, dict):
        raise UserError(f"{where}: expected an object, and an object as its dflash_config")
    # A key may stand at the top, inside dflash_config, or in both with the same value.
    for key in nested.keys() & data.keys():
        if nested[key] != data[key]:
            raise UserError(f"{where}: {key} is {data[key]} at the top and {nested[key]} in dflash_config")
    merged = {**data, **nested}

    def need(key: str) -> Any:
        if merged.get(key) is None:
            raise UserError(f"{where}: {key!r} is missing; known keys here: {', '.join(sorted(merged))}")
        return merged[key]

    def whole(key: str, default: int | None = None, least: int = 1) -> int:
        value = need(key) if default is None or merged.get(key) is not None else default
        if type(value) is not int or value < least:
            raise UserError(f"{where}: {key} must be a whole number of at least {least}, got {value!r}")
        return value

    # What this draft doesn't have would otherwise be dropped without a word.
    for key, value, known in (
        ("architectures", merged.get("architectures"), (None, ["DFlashDraftModel"])),
        ("hidden_act", merged.get("hidden_act"), (None, "silu")),
        ("layer_types", sorted(set(merged.get("layer_types") or ())), ([], ["full_attention"])),
    ):
        if value not in known:
            raise UserError(f"{where}: {key} must be {known[-1]}, got {value}")
    layout = merged.get("label_layout", "same")
    if layout not in LABEL_LAYOUTS:
        raise UserError(f"{where}: label_layout must be one of {', '.join(LABEL_LAYOUTS)}, got {layout!r}")
    layer_ids = need("target_layer_ids")
    if not isinstance(layer_ids, list) or any(type(i) is not int for i in layer_ids):
        raise UserError(f"{where}: target_layer_ids must be a list of layers, got {layer_ids!r}")
    if "target_num_hidden_layers" in merged:
        depth, count = whole("target_num_hidden_layers"), merged.get("num_target_layers", len(layer_ids))
        if count != len(layer_ids):
            raise UserError(f"{where}: num_target_layers is {count}, but target_layer_ids has {len(layer_ids)} layers")
    else:
        depth = whole("num_target_layers")
    width, heads, vocabulary = whole("hidden_size"), whole("num_attention_heads"), whole("vocab_size")
    if (target_width := whole("target_hidden_size", width)) != width:
        raise UserError(
            f"{where}: hidden_size is {width}, but target_hidden_size {target_width}; "
            "a draft has its target's width, since it borrows the embedding and the head"
        )
    if (mask := whole("mask_token_id", least=0)) >= vocabulary:
        raise UserError(f"{where}: mask_token_id must be below vocab_size {vocabulary}, got {mask}")
    reduced = None if merged.get("draft_vocab_size") is None else whole("draft_vocab_size")
    if reduced is not None and reduced > vocabulary:
        raise UserError(f"{where}: draft_vocab_size must be at most vocab_size {vocabulary}, got {reduced}")
    return DraftSpec(
        block_size=whole("block_size", configs.DraftConfig().block_size, least=2),
        mask_token_id=mask,
        target_layer_ids=check_layer_ids(layer_ids, depth),
        target_num_hidden_layers=depth,
        target_hidden_size=target_width,
        num_hidden_layers=whole("num_hidden_layers"),
        hidden_size=width,
        intermediate_size=whole("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", width // heads),
        hidden_act=merged.get("hidden_act") or "silu",
        rms_norm_eps=need("rms_norm_eps"),
        rope_parameters=_rope(merged, where),
        max_position_embeddings=whole("max_position_embeddings"),
        vocab_size=vocabulary,
        tie_word_embeddings=bool(merged.get("tie_word_embeddings", False)),
        label_layout=layout,
        draft_vocab_size=reduced,
    )


def _rope(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The rope that a config describes, be it by `rope_parameters` or by the older keys around `rope_theta`."""
    rope = data.get("rope_parameters")
    if rope is None:
        scaling = dict(data.get("rope_scaling") or {})
        rope = {"rope_type": scaling.pop("type", "default"), **scaling}
        if (share := data.get("partial_rotary_factor")) is not None:
            rope.setdefault("partial_rotary_factor", share)
    theta = {value for value in (data.get("rope_theta"), rope.get("rope_theta")) if value is not None}
    if len(theta) != 1:
        raise UserError(f"{where}: expected one rope_theta, got {sorted(theta) or 'none'}")
    return {**rope, "rope_theta": theta.pop()}


def save(
    folder: Path, draft: Draft, run: Run, target: dict[str, Any], origin: dict[str, Any] | None = None
) -> None:
    """Write a draft: float32 master weights, its config, the resolved run and where it came from.

    Args:
        folder: made if needed.
        target: {"name", "revision", "fingerprint"} of the frozen target.
        origin: `provenance()` of the process that the user started; None is this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.detach().float() if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in draft.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / CONFIG, spec_to_json(draft.spec, "float32"))
    (folder / RUN).write_text(run.to_yaml(), encoding="utf-8")
    _write_json(folder / PROVENANCE, {"target": target, **(origin or provenance())})


def load(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Draft, CheckpointInfo]:
    """Read a draft. Nothing in the folder is executed.

    Raises:
        UserError: a file is missing, damaged, or holds other tensors than its config describes.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"checkpoint {folder}: expected {CONFIG} and {WEIGHTS}, found no {name}")
    spec = spec_from_json(_read_json(folder / CONFIG), f"checkpoint {folder}: {CONFIG}")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UserError(f"checkpoint {folder}: {WEIGHTS} is damaged ({error})") from error
    with torch.device("meta"):  # no memory and no first weights for what the file brings
        draft = Draft(spec)
    _check_tensors(folder, draft, tensors)
    draft.load_state_dict(tensors, assign=True)
    if spec.draft_vocab_size is not None:
        _check_vocabulary(folder, draft)
    info = CheckpointInfo(
        folder=folder,
        hash=_hash_files(folder / CONFIG, folder / WEIGHTS),
        run=configs.load(folder / RUN) if (folder / RUN).is_file() else None,
        provenance=_read_json(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else {},
    )
    return draft.to(device, dtype).eval().requires_grad_(False), info


def _check_tensors(folder: Path, draft: Draft, tensors: dict[str, torch.Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if missing := sorted(expected.keys() - found.keys()):
        raise UserError(f"checkpoint {folder}: {WEIGHTS} lacks {', '.join(missing[:5])}")
    if extra := sorted(found.keys() - expected.keys()):
        raise UserError(f"checkpoint {folder}: {WEIGHTS} holds tensors that no draft has: {', '.join(extra[:5])}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(f"checkpoint {folder}: {name} should have shape {shape} by {CONFIG}, got {found[name]}")
        if not torch.isfinite(tensors[name]).all():
            raise UserError(f"checkpoint {folder}: {name} holds NaN or infinite weights")


def _check_vocabulary(folder: Path, draft: Draft) -> None:
    ids = draft.token_ids
    if not (ids.diff() > 0).all() or not torch.equal(draft.t2d.nonzero()[:, 0], ids):
        raise UserError(
            f"checkpoint {folder}: d2t and t2d must name the same {len(ids)} ascending token ids below {len(draft.t2d)}"
        )


def check_target(spec: DraftSpec, target: Target) -> None:
    """Refuse a draft that was made for another target.

    Raises:
        UserError: another vocabulary, width or depth.
    """
    for what, ours, theirs in (
        ("vocabulary", spec.vocab_size, target.vocab_size),
        ("hidden size", spec.target_hidden_size, target.hidden_size),
        ("number of layers", spec.target_num_hidden_layers, target.num_layers),
    ):
        if ours != theirs:
            raise UserError(f"the draft was made for a target with {what} {ours}, but {target.name} has {theirs}")


def provenance() -> dict[str, Any]:
    """Versions, command and git state, as kept beside every checkpoint and result."""
    return {
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("draftlab", "torch", "transformers", "ray", "mlflow")},
        "command": sys.argv,
        "git": git_state(),
    }


def git_state() -> dict[str, Any] | None:
    """Commit of the source tree and whether it has uncommitted changes; None outside a git checkout."""

    def git(*words: str) -> str:
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _hash_files(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"checkpoint {path.parent}: {path.name} is not valid JSON ({error})") from error


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
