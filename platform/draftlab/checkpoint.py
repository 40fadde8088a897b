"""A draft on disk: config.json and model.safetensors as SGLang, vLLM and the authors' code load them.

Others' forms (see `formats`) are read as well, and can be written.

Beside them stand run.yaml (the resolved run) and provenance.json (target, versions, git state, command).
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from draftlab import config as configs
from draftlab import formats
from draftlab.config import Run
from draftlab.draft import Draft, DraftSpec, rope_of
from draftlab.errors import UserError, first_line
from draftlab.target import Head, Target, check_layer_ids

WEIGHTS, CONFIG, RUN, PROVENANCE = "model.safetensors", "config.json", "run.yaml", "provenance.json"
INDEX = "model.safetensors.index.json"
"""Names the files of weights that are cut into several."""
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
LABEL_LAYOUTS = ("same", "next")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
ARCHITECTURES = {
    formats.AUTHORS: "dflash",
    "QwenDFlareDraftModel": "dflare",
    "DFlashGatedDraftModel": "gated",
    formats.DEEPSPEC: "dspark",
}
"""Published class name -> variant; a gate is a probe that no server loads."""
OPTIONS = {
    "block_size": "draft.block_size=B",
    "mask_token_id": "draft.mask_token_id=ID",
    "target_layer_ids": "draft.target_layer_ids=[ID,...]",
    "num_target_layers": "target.model=NAME",
}
"""What may be missing in a config.json, and how a user says it instead."""
ABSENT = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "is_causal": (False,),
    "causal": (False,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "projector_type": ("dflash",),
    "input_embedding_scale": (1, 1.0),
}
"""The only values of these keys that this draft has; others would otherwise be dropped without a word."""


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
    heads = {}
    if spec.variant == "dspark":  # its authors' form has all of it at the top
        heads = {
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
            "markov_rank": spec.markov_rank,
            "markov_head_type": spec.markov_head or "vanilla",
            "enable_confidence_head": spec.confidence,
            "confidence_head_with_markov": spec.markov_head is not None,
        }
    if spec.confidence_temperatures is not None:
        heads["confidence_temperatures"] = list(spec.confidence_temperatures)
    reduced = {} if spec.draft_vocab_size is None else {"draft_vocab_size": spec.draft_vocab_size}
    return {
        "architectures": [name for name, variant in ARCHITECTURES.items() if variant == spec.variant],
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
        **heads,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "use_cache": True,
        "dtype": dtype,
    }


def spec_from_json(
    data: dict[str, Any], where: str = "config.json", known: Mapping[str, Any] | None = None
) -> DraftSpec:
    """Read a draft's config in the authors' form, or with the seed's flat keys.

    `num_target_layers` is the target's depth in the authors' form and the count of tapped layers in the flat one;
    the presence of `target_num_hidden_layers` tells them apart.

    Args:
        where: how errors name it.
        known: values, by their key in the authors' form, for what the config doesn't say.

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
    told = {key: value for key, value in {**data, **nested}.items() if value is not None}
    merged = {**(known or {}), **told}

    def need(key: str) -> Any:
        if key not in merged:
            option = f"give it by {OPTIONS[key]}" if key in OPTIONS else f"known keys here: {', '.join(sorted(told))}"
            raise UserError(f"{where}: {key!r} is missing; {option}")
        return merged[key]

    def whole(key: str, default: int | None = None, least: int = 1) -> int:
        value = need(key) if default is None else merged.get(key, default)
        if type(value) is not int or value < least:
            raise UserError(f"{where}: {key} must be a whole number of at least {least}, got {value!r}")
        return value

    names = told.get("architectures", [formats.AUTHORS])
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UserError(f"{where}: architectures must be one of {', '.join(ARCHITECTURES)}, got {names}")
    for key, values in ABSENT.items():
        if key in told and told[key] not in values:
            raise UserError(f"{where}: {key} must be {values[0]}, got {told[key]!r}")
    kinds = told.get("layer_types", ["sliding_attention"] if told.get("use_sliding_window") else [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f"{where}: layer_types must be full_attention in every layer, got {kinds!r}")
    variant = ARCHITECTURES[names[0]]
    own = "next" if variant == "dspark" else "same"
    layout = {**data, **nested}.get("label_layout", own)
    if layout not in LABEL_LAYOUTS:
        raise UserError(f"{where}: label_layout must be one of {', '.join(LABEL_LAYOUTS)}, got {layout!r}")
    if layout != own:
        raise UserError(f"{where}: label_layout of a {names[0]} must be {own}, got {layout}")
    rank = whole("markov_rank", 0, least=0) if variant == "dspark" else 0
    head, confidence = told.get("markov_head_type", "vanilla") if rank else None, False
    if head not in (None, *MARKOV_HEADS):
        raise UserError(f"{where}: markov_head_type must be one of {', '.join(MARKOV_HEADS)}, got {head!r}")
    if variant == "dspark" and (confidence := bool(told.get("enable_confidence_head"))):
        if bool(told.get("confidence_head_with_markov")) != bool(rank):
            raise UserError(f"{where}: confidence_head_with_markov must be {bool(rank)} for markov_rank {rank}")
    if (temperatures := told.get("confidence_temperatures")) is not None:
        if not confidence or not isinstance(temperatures, list) or not temperatures:
            raise UserError(
                f"{where}: confidence_temperatures must be a list, and belong to an enable_confidence_head, "
                f"got {temperatures!r} and {confidence}"
            )
        temperatures = tuple(_positive(value, f"{where}: confidence_temperatures") for value in temperatures)
    layer_ids = need("target_layer_ids")
    if not isinstance(layer_ids, list) or any(type(i) is not int for i in layer_ids):
        raise UserError(f"{where}: target_layer_ids must be a list of layers, got {layer_ids!r}")
    if "target_num_hidden_layers" in told:
        depth, count = whole("target_num_hidden_layers"), told.get("num_target_layers", len(layer_ids))
        if count != len(layer_ids):
            raise UserError(f"{where}: num_target_layers is {count}, but target_layer_ids has {len(layer_ids)} layers")
        assumed = configs.DraftConfig().block_size  # the flat form has no key for it
    else:
        depth, assumed = whole("num_target_layers"), None
    width, heads, vocabulary = whole("hidden_size"), whole("num_attention_heads"), whole("vocab_size")
    if (target_width := whole("target_hidden_size", width)) != width:
        raise UserError(
            f"{where}: hidden_size is {width}, but target_hidden_size {target_width}; "
            "a draft has its target's width, since it borrows the embedding and the head"
        )
    if (mask := whole("mask_token_id", least=0)) >= vocabulary:
        raise UserError(f"{where}: mask_token_id must be below vocab_size {vocabulary}, got {mask}")
    reduced = whole("draft_vocab_size") if "draft_vocab_size" in told else None
    if reduced is not None and reduced > vocabulary:
        raise UserError(f"{where}: draft_vocab_size must be at most vocab_size {vocabulary}, got {reduced}")
    try:
        layers = check_layer_ids(layer_ids, depth)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    spec = DraftSpec(
        block_size=whole("block_size", assumed, least=2),
        mask_token_id=mask,
        target_layer_ids=layers,
        target_num_hidden_layers=depth,
        target_hidden_size=target_width,
        num_hidden_layers=whole("num_hidden_layers"),
        hidden_size=width,
        intermediate_size=whole("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", width // heads),
        hidden_act=told.get("hidden_act", "silu"),
        rms_norm_eps=_positive(need("rms_norm_eps"), f"{where}: rms_norm_eps"),
        rope_parameters=_rope(told, where),
        max_position_embeddings=whole("max_position_embeddings"),
        vocab_size=vocabulary,
        tie_word_embeddings=bool(told.get("tie_word_embeddings", False)),
        label_layout=layout,
        variant=variant,
        markov_head=head,
        markov_rank=rank,
        confidence=confidence,
        confidence_temperatures=temperatures,
        draft_vocab_size=reduced,
    )
    try:
        rope_of(spec)
    except Exception as error:  # each kind of rope has its own parameters, and its own way to miss them
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{where}: rope_parameters can't be used ({reason})") from error
    return spec


def _positive(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"{what} must be a positive number, got {value!r}")
    return value


def _rope(told: dict[str, Any], where: str) -> dict[str, Any]:
    """The rope that a config describes, be it by `rope_parameters` or by the older keys around `rope_theta`."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(told.get(key, {}), dict):
            raise UserError(f"{where}: {key} must be an object, got {told[key]!r}")
    rope = told.get("rope_parameters")
    if rope is None:
        scaling = dict(told.get("rope_scaling", {}))
        rope = {"rope_type": scaling.pop("type", "default"), **scaling}
        if (share := told.get("partial_rotary_factor")) is not None:
            rope.setdefault("partial_rotary_factor", share)
    thetas = [value for value in (told.get("rope_theta"), rope.get("rope_theta")) if value is not None]
    if not thetas or thetas.count(thetas[0]) != len(thetas):
        raise UserError(f"{where}: expected one rope_theta, got {thetas or 'none'}")
    return {**rope, "rope_theta": _positive(thetas[0], f"{where}: rope_theta")}


def save(
    folder: Path, draft: Draft, run: Run, target: dict[str, Any], origin: dict[str, Any] | None = None
) -> None:
    """Write a draft: float32 master weights, its config, the resolved run and where it came from.

    Args:
        folder: made if needed.
        target: {"name", "revision", "fingerprint"} of the frozen target.
        origin: `provenance()` of the process that the user started; None is this one.
    """
    _write_draft(folder, draft.state_dict(), spec_to_json(draft.spec, "float32"))
    (folder / RUN).write_text(run.to_yaml(), encoding="utf-8")
    _write_json(folder / PROVENANCE, {"target": target, **(origin or provenance())})


def save_calibrated(folder: Path, source: Path, temperatures: Sequence[float], by: dict[str, Any]) -> None:
    """Copy a DSpark draft as it stands, with the temperatures of its confidence head in its config.

    Args:
        folder: made if needed.
        source: the draft's checkpoint folder.
        by: how it was calibrated, for the `calibration` of its provenance.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*_weight_files(source), source / INDEX, source / RUN):
        if path.is_file():
            shutil.copy2(path, folder)
    trained = _read_json(source / PROVENANCE) if (source / PROVENANCE).is_file() else {}
    _write_json(folder / PROVENANCE, {**trained, "calibration": by})
    _write_json(folder / CONFIG, {**_read_json(source / CONFIG), "confidence_temperatures": list(temperatures)})


def export(
    folder: Path, draft: Draft, form: str, target: str, architectures: Sequence[str], head: Head | None = None
) -> None:
    """Write a draft for others: its tensors in float32, and its config in their form.

    Args:
        folder: made if needed.
        form: `zlab` (the authors') or `speculators`.
        target, architectures: as in `formats.to_speculators`.
        head: the target's; needed for a reduced vocabulary, whose rows of it speculators' form carries. The authors'
            form has none: there the draft guesses through the whole head.

    Raises:
        UserError: a form that lacks what the draft has.
    """
    tensors, spec = draft.state_dict(), draft.spec
    if form == "zlab" and spec.markov_head and spec.draft_vocab_size is not None:
        raise UserError(f"form {form}: has no reduced vocabulary for a Markov head, got {spec.draft_vocab_size} tokens")
    if form == "zlab":
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        data = spec_to_json(replace(spec, draft_vocab_size=None), "float32")
    elif spec.variant != "dflash":
        raise UserError(f"form {form}: expected a draft of variant dflash, got {spec.variant}")
    else:
        data = formats.to_speculators(spec_to_json(spec, "float32"), target, architectures)
        if spec.draft_vocab_size is not None:
            tensors["lm_head.weight"] = draft.head(head).weight
    _write_draft(folder, tensors, data)


def _write_draft(folder: Path, tensors: Mapping[str, torch.Tensor], data: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.detach().float() if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / CONFIG, data)


def load(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    known: Mapping[str, Any] | None = None,
) -> tuple[Draft, CheckpointInfo]:
    """Read a draft in any of the forms of `formats`. Nothing in the folder is executed.

    Args:
        known: as in `spec_from_json`.

    Raises:
        UserError: a file is missing, damaged, or holds other tensors than its config describes.
    """
    folder = Path(folder)
    where = f"checkpoint {folder}: {CONFIG}"
    files = [folder / CONFIG, *_weight_files(folder)]
    for path in files:
        if not path.is_file():
            raise UserError(f"checkpoint {folder}: expected {CONFIG} and {WEIGHTS}, found no {path.name}")
    data = _read_json(folder / CONFIG)
    data, lent = formats.to_authors(data, where) if isinstance(data, dict) else (data, ())
    spec = spec_from_json(data, where, known)
    with torch.device("meta"):  # no memory and no first weights for what the file brings
        draft = Draft(spec)
    tensors: dict[str, torch.Tensor] = {}
    for path in files[1:]:
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys() if name not in lent}
        except (SafetensorError, OSError) as error:
            raise UserError(f"checkpoint {folder}: {path.name} is damaged ({error})") from error
    _check_tensors(folder, draft, tensors)
    draft.load_state_dict(tensors, assign=True)
    if spec.draft_vocab_size is not None:
        _check_vocabulary(folder, draft)
    info = CheckpointInfo(
        folder=folder,
        hash=_hash_files(*files),
        run=configs.load(folder / RUN) if (folder / RUN).is_file() else None,
        provenance=_read_json(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else {},
    )
    return draft.to(device, dtype).eval().requires_grad_(False), info


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files beside it that an index names."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    index = _read_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or any(Path(str(name)).name != name for name in names.values()):
        raise UserError(f"checkpoint {folder}: {INDEX} should map tensors to files beside it")
    return [folder / name for name in sorted(set(names.values()))]


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
        if name not in ("d2t", "t2d") and tensors[name].dtype not in PRECISIONS:
            raise UserError(f"checkpoint {folder}: {name} is quantized ({tensors[name].dtype}), expected 16 or 32 bits")
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
    _check_shape(spec, target.name, target.vocab_size, target.hidden_size, target.num_layers)


def check_target_config(spec: DraftSpec, config: PreTrainedConfig, name: str) -> None:
    """`check_target` by the target's (text) configuration alone, before its weights are read."""
    _check_shape(spec, name, config.vocab_size, config.hidden_size, config.num_hidden_layers)


def _check_shape(spec: DraftSpec, name: str, vocabulary: int, width: int, depth: int) -> None:
    for what, ours, theirs in (
        ("vocabulary", spec.vocab_size, vocabulary),
        ("hidden size", spec.target_hidden_size, width),
        ("number of layers", spec.target_num_hidden_layers, depth),
    ):
        if ours != theirs:
            raise UserError(f"the draft was made for a target with {what} {ours}, but {name} has {theirs}")


def check_lent(info: CheckpointInfo, draft: Draft, target: Target) -> None:
    """Refuse a draft whose copies of the target's embedding or head, where it has any, are not this target's.

    Raises:
        UserError: it was made for another target, or with an embedding or a head of its own.
    """
    ours = {"embed_tokens.weight": target.ends.embedding.weight, "lm_head.weight": draft.head(target.ends.head).weight}
    for path in _weight_files(info.folder):
        with safe_open(path, "pt") as file:
            for name in ours.keys() & set(file.keys()):
                # In the coarsest precision that either of them may have been kept in.
                pair = [weight.to("cpu", torch.bfloat16) for weight in (file.get_tensor(name), ours[name])]
                if not torch.equal(*pair):
                    raise UserError(f"the draft's {name} is not the one of {target.name}; a draft borrows its target's")


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
