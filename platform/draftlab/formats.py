"""How others write a DFlash draft's config.json: translated to the authors' form, and back to speculators'; pure.

The authors' form, which SpecForge, SGLang and vLLM share, is the one that `checkpoint` reads and writes. Read as well:

- AngelSlim: the same under another class name (angelslim/compressor/speculative/train/models/draft/qwen_dflash.py).
- speculators: the layers' Qwen3 config apart, layer ids + 1, no depth of the target
  (vllm-project/speculators, src/speculators/models/dflash/config.py and core.py, convert/dflash/converter.py;
  vllm/transformers_utils/configs/speculators/algos.py reads it the same way).
- DeepSpec: its DFlash is a DSpark without the Markov and confidence heads, keys at the top, labels in layout `next`
  (deepseek-ai/DeepSpec, deepspec/modeling/dspark/qwen3/config.py and modeling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftlab.errors import UserError

AUTHORS, ANGELSLIM, DEEPSPEC = "DFlashDraftModel", "QwenDFlashDraftModel", "Qwen3DSparkModel"
"""The class that a config names in `architectures`."""

LENT = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Frozen copies of the target's tensors, which speculators' and DeepSpec's checkpoints may carry."""

SPECULATORS_OWN = """block_size mask_token_id draft_vocab_size target_hidden_size target_num_hidden_layers label_layout
projector_type layer_types use_sliding_window""".split()
"""What speculators' form says outside its transformer_layer_config; two of them are draftlab's own addition."""


def to_authors(data: dict[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A config in any of the forms: (the same in the authors' form, tensors that its weights may hold besides).

    Raises:
        UserError: a draft of another kind, or a DSpark with heads.
    """
    if "speculators_model_type" in data:
        return _from_speculators(data, where)
    architectures = data.get("architectures")
    if architectures == [ANGELSLIM]:
        return {**data, "architectures": [AUTHORS]}, ()
    if architectures == [DEEPSPEC]:
        for head in ("markov_rank", "enable_confidence_head"):
            if data.get(head):
                raise UserError(f"{where}: {head} must be 0 (a DFlash draft), got {data[head]}")
        return {"label_layout": "next", **data, "architectures": [AUTHORS]}, LENT
    return data, ()


def _from_speculators(data: dict[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    kind, layers = data["speculators_model_type"], data.get("transformer_layer_config")
    if kind != "dflash" or not isinstance(layers, dict):
        raise UserError(f"{where}: expected speculators_model_type dflash and a transformer_layer_config, got {kind!r}")
    told = {**layers, **{key: data[key] for key in SPECULATORS_OWN if data.get(key) is not None}}
    told["architectures"] = [AUTHORS]
    ids = data.get("aux_hidden_state_layer_ids")
    # The embedding is their 0; a value that is no list of numbers is left for the reader to refuse.
    whole = isinstance(ids, list) and all(type(i) is int for i in ids)
    told["target_layer_ids"] = [i - 1 for i in ids] if whole else ids
    if data.get("sample_from_anchor") or data.get("shift_label"):
        told["label_layout"] = "next"
    if told.get("draft_vocab_size") == told.get("vocab_size"):
        return {**told, "draft_vocab_size": None}, (*LENT, "d2t", "t2d")
    return told, LENT


def to_speculators(data: dict[str, Any], target: str, architectures: Sequence[str]) -> dict[str, Any]:
    """A config in speculators' form.

    Args:
        data: in the authors' form, as `checkpoint.spec_to_json` writes it.
        target: hub id or folder by which speculators and vLLM are to load the target.
        architectures: of the target's own config.json.
    """
    dflash = data["dflash_config"]
    apart = ("architectures", "block_size", "dflash_config", "num_target_layers", "target_hidden_size")
    layers = {key: value for key, value in data.items() if key not in (*apart, "draft_vocab_size")}
    return {
        "architectures": [AUTHORS],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": data["block_size"] - 1}],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": layers,
        "block_size": data["block_size"],
        "mask_token_id": dflash["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "draft_vocab_size": data.get("draft_vocab_size", data["vocab_size"]),
        "target_hidden_size": data["target_hidden_size"],
        "sample_from_anchor": False,
        "dtype": data["dtype"],
        # speculators keeps keys that it doesn't know; with these two the draft comes back whole.
        "target_num_hidden_layers": data["num_target_layers"],
        "label_layout": dflash["label_layout"],
    }
