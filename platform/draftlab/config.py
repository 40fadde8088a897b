"""The typed description of a run: defaults here, differences in YAML, dotted overrides on the command line.

Every default of a setting stands in this file; a script that starts from others says so in its docstring. Unknown
keys and wrong types are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftlab.errors import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEFAULT_CONFIG = CONFIGS / "smollm2.yaml"

PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0, 7: 4.0}
"""Loss decay by block size, as published (arXiv:2602.06036, training details; 7 as in DSpark's released code)."""

DISTILLED = ("l1", "tv", "kl", "reverse_kl", "topk_kl", "lk", "lk_hybrid")
"""Loss terms that compare the draft's distribution with the target's."""

Weight = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A part of the configuration; frozen, and strict about its keys and types (true is no number, "8" neither)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False)


class TargetConfig(Section):
    """The frozen model that is to be sped up."""

    model: str = "smollm2"
    """`smollm2` (the packaged SmolLM2-135M-Instruct), `tiny` (a little random model), a hub id or a folder."""
    revision: str | None = None
    """Hub revision; None is the default branch. Not used for folders and packaged targets."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights and compute of the target."""
    device: str = "auto"
    """`auto` is the GPU where there is one, else the CPU; or any torch device."""


class CorpusConfig(Section):
    """Conversations whose assistant turns were written by the target."""

    source: str = "packaged"
    """`packaged` (made by the packaged target), `self` (the target writes it now, once, into the cache), or a
    .jsonl / .jsonl.gz file written by experiments/build_corpus.py or holding {"messages": [...]} rows."""
    conversations: Annotated[int, Field(ge=2)] | None = None
    """Use this many conversations, chosen by hash, one of them to hold out at least; None is all."""
    max_length: Annotated[int, Field(ge=8)] = 256
    """Tokens kept of a conversation; the rest is cut off."""
    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of prompts, by hash, that no training step sees."""
    write_conversations: Annotated[int, Field(ge=1)] = 2000
    """Conversations to write when the target writes the corpus."""
    write_batch: Annotated[int, Field(ge=1)] = 64
    """Conversations written at once."""
    write_prompt_tokens: Annotated[int, Field(ge=1)] = 64
    """Longest self-written prompt, tokens."""
    write_response_tokens: Annotated[int, Field(ge=1)] = 160
    """Longest response, tokens; a response that reaches it is kept and marked unfinished."""
    write_prompt_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature of self-written prompts."""
    write_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of what is sampled in writing; not the run's, so that drafts of all seeds have one corpus."""
    write_temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of responses; 0 is greedy, which is what greedy serving asks of a draft."""


class FeaturesConfig(Section):
    """The target's tapped hidden states over the corpus."""

    mode: Literal["stored", "online"] = "stored"
    """`stored`: one target pass kept on disk, read by every trial. `online`: the target runs in every step."""
    layers: list[int] | None = None
    """Layers to store, a superset that several trials share; None is just the draft's own."""
    last_hidden: bool = False
    """Also keep the target's last hidden state (needed by distillation losses)."""
    batch_tokens: Annotated[int, Field(ge=1)] = 4096
    """Tokens of one target forward while building."""


class DraftConfig(Section):
    """The draft's own freedom; widths, heads and rope come from the target."""

    variant: Literal["dflash", "dflare", "gated", "dspark"] = "dflash"
    """`dflash`; `dflare` (each draft layer learns its own mix of the tapped layers, which it reads through projections
    of its own); `gated` (one learned mix for all draft layers, which tells which tapped layers matter); `dspark` (the
    label layout `next`: the anchor's slot drafts too, so B tokens are drafted)."""
    markov_head: Literal["vanilla", "gated", "rnn"] | None = None
    """dspark's correction of a slot's logits by the token before it; None has none."""
    markov_rank: Annotated[int, Field(ge=1)] = 256
    """Rank of that correction."""
    confidence: bool = False
    """dspark's head that says how likely each drafted token is to be accepted; trained by loss.confidence."""
    block_size: Annotated[int, Field(ge=2)] = 16
    """B: tokens in a block, the anchor included."""
    num_hidden_layers: Annotated[int, Field(ge=1)] = 3
    """L: draft layers."""
    num_target_layers: Annotated[int, Field(ge=1)] = 5
    """T: how many target layers are tapped when target_layer_ids is not given."""
    layer_choice: Annotated[str, Field(pattern=r"^(uniform|early|middle|late|random\d*|gate)$")] = "uniform"
    """Which T layers then: `uniform` is spread from the second to the third-to-last; early, middle, late, random and
    random1, random2, ..., further random draws, are controls; `gate` are those that the probe of a sweep proposes."""
    target_layer_ids: list[int] | None = None
    """Tapped layers, 0-based, read at each layer's output."""
    mask_token_id: int | None = None
    """MASK: an existing id that the tokenizer never produces; None chooses one."""
    intermediate_size: Annotated[int, Field(ge=1)] | None = None
    """Width of the draft's MLP; None is the target's."""
    vocab: Annotated[int, Field(ge=2)] | None = None
    """V': the draft guesses among that many tokens, the most frequent ones of the corpus' answers; None is all."""
    conditioning: Literal["target", "none"] = "target"
    """`none` is an ablation: the projection of the target's states is zero and stays so."""
    init: Literal["target_layers", "random"] = "target_layers"
    """Start from the target's own layers, or from small random weights."""
    attention: Literal["auto", "split", "flex", "dense"] = "auto"
    """Training attention: `split` (CPU), `flex` (FlexAttention, CUDA), `dense` (a full mask; the reference)."""


class LossConfig(Section):
    """A weighted mix of terms, each slot of a block with its position's weight.

    With draft.vocab both distributions are over the draft's tokens, and slots whose label is none of them count for
    nothing.
    """

    ce: Weight = 1.0
    """Cross-entropy against the corpus's tokens."""
    l1: Weight = 0.0
    """sum |q - p|, twice the total variation. This and the terms below compare the draft's distribution p with the
    target's q and need features.last_hidden."""
    tv: Weight = 0.0
    """Total variation: the share of drafted tokens that rejection sampling would reject."""
    kl: Weight = 0.0
    """KL(q || p)."""
    reverse_kl: Weight = 0.0
    """KL(p || q)."""
    topk_kl: Weight = 0.0
    """KL(q' || p), q' being q over its own top_k tokens."""
    lk: Weight = 0.0
    """-log sum min(p, q): of the acceptance, the logarithm."""
    lk_hybrid: Weight = 0.0
    """lambda KL + (1 - lambda) TV; lambda falls from 1 to exp(-3) as the acceptance rises from 0 to 1."""
    top_k: Annotated[int, Field(ge=1)] = 10
    """K of topk_kl."""
    positions: Literal["decay", "dpace"] = "decay"
    """Weights along the block: exponential `decay` by gamma, or D-PACE (arXiv:2605.18810): the tokens that decoding
    may be expected to accept from the slot on, as the draft stands now."""
    gamma: Annotated[float, Field(gt=0, allow_inf_nan=True)] | Literal["tied"] = "tied"
    """Decay length in tokens: the k-th drafted slot weighs exp(-(k-1)/gamma); .inf is no decay; `tied` follows
    block_size as published (16: 7, 10: 5, 8 and 7: 4), and block_size / 2 elsewhere."""
    gamma_step: Annotated[float, Field(ge=0)] = 0.0
    """Added to gamma at each epoch (DFlare: 1, from 4.5)."""
    gamma_cap: Annotated[float, Field(gt=0, allow_inf_nan=True)] = math.inf
    """Largest gamma that the steps lead to."""
    confidence: Weight = 0.0
    """Binary cross-entropy of the confidence head against the acceptance, 1 - TV; needs features.last_hidden. With
    draft.vocab it does not learn of the tokens that the draft can't guess, and is too sure until it is calibrated."""
    gate_entropy: Weight = 0.0
    """Weight of the entropy (nats) of the gated variant's mix: it has the gate choose among the tapped layers."""
    log_slots: bool = False
    """Also log every term slot by slot."""
    chunk_rows: Annotated[int, Field(ge=1)] = 256
    """Slots whose logits exist at once."""

    @property
    def distilled(self) -> dict[str, float]:
        """Weights of the terms against the target's distribution that are needed; the confidence needs tv."""
        weights = {name: getattr(self, name) for name in DISTILLED}
        return {name: weight for name, weight in weights.items() if weight or (name == "tv" and self.confidence)}

    @model_validator(mode="after")
    def _consistent(self) -> LossConfig:
        if not (self.ce or any(self.distilled.values())):
            raise ValueError(f"loss: expected a weight above 0 for one of ce, {', '.join(DISTILLED)}")
        if self.positions == "dpace" and (self.gamma, self.gamma_step, self.gamma_cap) != ("tied", 0, math.inf):
            raise ValueError("loss.positions=dpace: has no decay, but one of loss.gamma, gamma_step, gamma_cap is set")
        return self


class TrainConfig(Section):
    """One training run."""

    steps: Annotated[int, Field(ge=1)] = 400
    """Optimizer steps."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Training time instead of steps, evaluations not counted; the learning rate then follows the time."""
    conversations: Annotated[int, Field(ge=1)] | None = None
    """Train on this many of the corpus's conversations, chosen at random, more always holding fewer; None is all."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Sequences of one optimizer step, over all workers and accumulation splits."""
    accumulation: Annotated[int, Field(ge=1)] = 1
    """Splits of a worker's share of the batch, run one after another."""
    anchors: Annotated[int, Field(ge=1)] = 16
    """Anchors of one sequence in one step."""
    anchor_choice: Literal["random", "blocks"] = "random"
    """Drawn from all positions, or only from the first positions of a fixed cut into blocks (an ablation)."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Ray Train workers (data parallel)."""
    lr: Annotated[float, Field(gt=0)] = 6e-4
    """Peak learning rate (6e-4 in arXiv:2602.06036)."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to 0, or stable and then linear to 0 over the last `decay` of the steps."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.04
    """Share of the steps with a rising learning rate."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the steps with a falling one; wsd only."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's, on every weight alike."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient's mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's decay of the gradient's square."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute; master weights and optimizer state are float32 always."""
    compile: bool = False
    """torch.compile the draft: faster steps after a first one that takes a minute longer, so for trainings of an hour
    and more. Needs a C++ compiler."""
    eval_every: Annotated[int, Field(ge=1)] = 100
    """Steps between held-out evaluations, each with a checkpoint; the last step always has both."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of one worker; None shares the machine's cores among the workers that run at once."""


class EvalConfig(Section):
    """How a draft is scored."""

    offline_conversations: Annotated[int, Field(ge=1)] = 64
    """Held-out conversations scored without decoding during training."""
    offline_anchors: Annotated[int, Field(ge=1)] = 16
    """Deterministic anchors of each of them."""
    prompts: Annotated[int, Field(ge=1)] = 16
    """Prompts that are decoded for real: held-out ones after training; in evals/ of each set that names no number."""
    block_sizes: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] | None = None
    """A sweep decodes every draft with each of these, too, and with the block size of every other trial; None is each
    with its own alone. Trials are ranked and compared by their own."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """Token limit of a decoded text."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """Times each prompt is timed, alternating target and draft."""
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    """Resamples behind each 95% interval."""
    batch_size: Annotated[int, Field(ge=1)] = 1
    """Prompts decoded together."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy decoding: the most likely token."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Sample from the k most likely tokens; None is all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability."""
    mode: Literal["rejection", "greedy_draft"] = "rejection"
    """At temperature above 0: `rejection` samples the draft and keeps a token with probability min(1, q/p);
    `greedy_draft`, as in the published code, keeps the draft's best token where it equals a sample of the target."""
    schedule: Literal["fixed", "confidence"] = "fixed"
    """Drafted tokens that a round verifies: `fixed` is all; `confidence` as many as pay, by the draft's confidence head
    and by what rounds cost here, which is measured first."""
    thinking: bool | None = None
    """The chat template's `enable_thinking`; None leaves it to the template."""
    system: str | None = None
    """System prompt of prompts that have none of their own."""


class TrackingConfig(Section):
    """Where runs are recorded."""

    uri: str | None = None
    """MLflow tracking URI; None is $MLFLOW_TRACKING_URI, else a SQLite store in outputs/mlflow."""
    experiment: str = "draftlab"
    """MLflow experiment."""
    log_checkpoints: bool = True
    """Keep each trial's best draft as an MLflow logged model."""


class ClusterConfig(Section):
    """The machine, as Ray sees it."""

    address: str = "local"
    """`local` starts Ray on this machine; or the address of a running cluster."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """Cores given to Ray locally; None is all that this process may use."""
    gpus_per_worker: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """GPUs of one worker; `auto` is 1 where there are GPUs."""
    max_concurrent: Annotated[int, Field(ge=1)] = 1
    """Trials at once."""
    max_failures: Annotated[int, Field(ge=0)] = 1
    """Restarts of a trial whose worker died."""
    worker_memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Most memory of one worker; a trial that needs more fails alone. CPU only; None is no limit."""


class SearchConfig(Section):
    """How a sweep chooses among the combinations of its values, and what is equal for its trials."""

    method: Literal["grid", "random", "optuna"] = "grid"
    """`grid` is all combinations; `random` some; `optuna` some, chosen by the held-out acceptance of the others."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Combinations that random and optuna try."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Each combination is trained with each of these seeds; None is the run's own."""
    scheduler: Literal["none", "asha"] = "none"
    """`asha` stops a trial whose held-out acceptance falls behind the others' at the same share of their training."""
    grace: Annotated[float, Field(gt=0, le=0.9)] = 0.25
    """Share of its training after which asha first compares a trial."""
    reduction: Annotated[int, Field(ge=2)] = 2
    """Asha lets one of so many go on, and compares again when they have trained so many times as long."""
    time_budget: Annotated[float, Field(gt=0)] | None = None
    """Seconds for the training of all trials, from the start or the resume; those that run then are stopped."""
    budget: Literal["steps", "tokens", "time"] = "steps"
    """What is equal for all trials: their steps; those and (by their anchors) their supervised tokens, anchors x
    drafted tokens of a block; or the training time, train.seconds."""
    rank_by: str = "speedup"
    """The metric by which trials are ranked and compared: speedup, speedup_end_to_end, acceptance_length or
    acceptance_length_macro."""
    baseline: str | None = None
    """The arm (a trial's name without its seed) that the others are compared with; None is the script's own, or where
    there is no such arm the best."""


class Run(Section):
    """Everything that defines a run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Data order, anchors, initial weights."""
    target: TargetConfig = TargetConfig()
    corpus: CorpusConfig = CorpusConfig()
    features: FeaturesConfig = FeaturesConfig()
    draft: DraftConfig = DraftConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()
    search: SearchConfig = SearchConfig()

    @model_validator(mode="after")
    def _shares(self) -> Run:
        splits = self.train.workers * self.train.accumulation
        if self.train.batch_size % splits:
            raise ValueError(
                f"train.batch_size must be a multiple of train.workers x train.accumulation = {splits}, "
                f"got {self.train.batch_size}"
            )
        return self

    @model_validator(mode="after")
    def _loss(self) -> Run:
        if self.gamma > self.loss.gamma_cap:
            raise ValueError(f"loss.gamma is {self.gamma:g} at first, above loss.gamma_cap={self.loss.gamma_cap:g}")
        if self.loss.distilled and not self.features.last_hidden:
            terms = ", ".join(f"loss.{name}" for name in (*DISTILLED, "confidence") if getattr(self.loss, name))
            raise ValueError(f"{terms}: needs the target's last hidden state, but features.last_hidden is false")
        for name in ("markov_head", "confidence"):
            if getattr(self.draft, name) and self.draft.variant != "dspark":
                raise ValueError(
                    f"draft.{name}={getattr(self.draft, name)}: needs draft.variant=dspark (label layout next), got "
                    f"draft.variant={self.draft.variant} (label layout same)"
                )
        if self.draft.confidence != bool(self.loss.confidence):
            raise ValueError(
                f"draft.confidence={self.draft.confidence} and loss.confidence={self.loss.confidence:g}: "
                "a confidence head is trained by its loss, expected both or neither"
            )
        if self.draft.markov_head and self.loss.positions == "dpace":
            raise ValueError(f"loss.positions=dpace: has no draft.markov_head, got {self.draft.markov_head}")
        if self.draft.conditioning == "none" and self.draft.variant in ("dflare", "gated"):
            raise ValueError(f"draft.conditioning=none: draft.variant={self.draft.variant} has no projection to zero")
        if self.loss.gate_entropy and self.draft.variant != "gated":
            raise ValueError(f"loss.gate_entropy: needs draft.variant=gated, got draft.variant={self.draft.variant}")
        return self

    @property
    def gamma(self) -> float:
        """The loss decay in force, at first: as given, or tied to the block size; inf with D-PACE."""
        if self.loss.positions == "dpace":
            return math.inf
        if self.loss.gamma == "tied":
            return PUBLISHED_GAMMA.get(self.draft.block_size, self.draft.block_size / 2)
        return float(self.loss.gamma)

    def gamma_at(self, epoch: int) -> float:
        """The loss decay of an epoch, the first being 0."""
        return min(self.gamma + epoch * self.loss.gamma_step, self.loss.gamma_cap)

    def replace(self, overrides: dict[str, Any]) -> Run:
        """A new, validated run with dotted keys replaced, e.g. {"draft.block_size": 8}.

        Raises:
            UserError: an unknown key or a wrong value; the message names it.
        """
        data = self.model_dump()
        for key, value in overrides.items():
            _set(data, key, value)
        return _validate(data, "override")

    def flat(self) -> dict[str, Any]:
        """Dotted key -> value, as MLflow params; `loss.gamma` is the value in force."""
        flat: dict[str, Any] = {}

        def walk(prefix: str, node: Any) -> None:
            if isinstance(node, dict):
                for key, value in node.items():
                    walk(f"{prefix}{key}.", value)
            else:
                flat[prefix[:-1]] = node

        walk("", self.model_dump())
        flat["loss.gamma"] = self.gamma
        return flat

    def to_yaml(self) -> str:
        """The whole run, defaults included; `load` reads it back to an equal run."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)

    def fingerprint(self) -> str:
        """Short hash of the whole run."""
        return digest(self.model_dump())


def digest(value: Any) -> str:
    """12 hex digits of the SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def word(value: Any) -> str:
    """A setting's value as a word for a name."""
    return "_".join(map(word, value)) if isinstance(value, list) else str(value)


def load(
    path: str | Path = DEFAULT_CONFIG, overrides: list[str] | None = None, defaults: dict[str, Any] | None = None
) -> Run:
    """Read a YAML of differences and apply `section.key=value` overrides.

    Args:
        path: YAML file; `extends: other.yaml` (beside it) is read first.
        overrides: as given on a command line; values are parsed as YAML.
        defaults: section -> settings that hold where the YAML says nothing.

    Raises:
        UserError: no such file, broken YAML, unknown key, wrong type or value.
    """
    path = Path(path)
    run = _validate(_merge(defaults or {}, _read(path.resolve())), str(path))
    return run.replace(dict(_parse(item) for item in overrides or []))


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path in seen:
        raise UserError(f"{path}: `extends` runs in a circle")
    try:
        data = _from_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config {path}: not valid YAML ({' '.join(str(error).split())})") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise UserError(f"config {path}: expected a mapping of sections, got {type(data).__name__}")
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise UserError(f"config {path}: `extends` should name a file beside it, got {base!r}")
    return _merge(_read((path.parent / base).resolve(), (*seen, path)), data)


class _Loader(yaml.SafeLoader):
    """YAML as in version 1.2: 3e-4 is a number, although it has no point, and 2026-01-01 is text. A key stands once."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _from_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: data only
    except (ValueError, KeyError, AttributeError, RecursionError) as error:  # "0b_", "!!bool x", "[[[[..."
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _parse(item: str) -> tuple[str, Any]:
    key, sign, text = item.partition("=")
    if not sign or not key:
        raise UserError(f"override {item!r}: expected section.key=value")
    try:
        return key, _from_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"override {item!r}: the value is not valid YAML") from error


def _set(data: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    node, place = data, Run
    for name in (*sections, last):
        if not (isinstance(place, type) and issubclass(place, BaseModel)) or name not in place.model_fields:
            raise UserError(f"override {dotted!r}: unknown key {name!r}; known: {_known(place)}")
        place = place.model_fields[name].annotation
    if isinstance(place, type) and issubclass(place, BaseModel):
        raise UserError(f"override {dotted!r}: a section, expected {dotted}.key=value; known: {_known(place)}")
    for name in sections:
        node = node[name]
    node[last] = value


def _known(place: Any) -> str:
    if isinstance(place, type) and issubclass(place, BaseModel):
        return ", ".join(place.model_fields)
    return "none, it is a value and not a section"


def _validate(data: dict[str, Any], source: str) -> Run:
    try:
        return Run.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{source}: " + "; ".join(_explain(item) for item in error.errors())) from None


def _explain(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"] if not _is_union_tag(part)) or "run"
    if item["type"] == "extra_forbidden":
        section: Any = Run
        for part in item["loc"][:-1]:
            section = section.model_fields[part].annotation
        return f"{place}: unknown key; known: {_known(section)}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return f"{place}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def _is_union_tag(part: Any) -> bool:
    return isinstance(part, str) and (part in {"int", "float"} or "constrained" in part or "[" in part)


