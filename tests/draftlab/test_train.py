"""The training loop on the tiny target: one step against an oracle and a golden number, then every way of running it.

Random choices hang on (seed, epoch, row) alone, so splits, workers and a resumed run must give the same curve.
"""

import dataclasses
import functools
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from draftlab import blocks, checkpoint, config, features, train
from draftlab.config import TargetConfig, TrainConfig
from draftlab.corpus import load_corpus
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.init import initialise
from draftlab.target import load_target

RUN = config.load(config.CONFIGS / "tiny.yaml").replace({
    "draft.num_hidden_layers": 2, "draft.target_layer_ids": [0, 2], "train.steps": 6, "train.eval_every": 6,
})

WORKER = """
import os, pickle, shutil, signal, sys
from pathlib import Path
import torch
from torch import distributed
from draftlab import train

folder = Path(sys.argv[1])
rank, world_size, dies_at, threads = map(int, sys.argv[2:])
torch.set_num_threads(threads)
run, prepared = pickle.loads((folder / "job").read_bytes())
if world_size > 1:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
train.REPORT_SECONDS = -1.0
reports = []

def report(now):
    reports.append((now.step, now.metrics, now.checkpoint is not None))
    (folder / f"reports_{rank}").write_bytes(pickle.dumps(reports))
    if now.checkpoint:
        shutil.copytree(now.checkpoint, folder / f"kept_{now.step}")
    if now.step == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)

train.train(run, prepared, rank=rank, world_size=world_size, report=report, workdir=folder / f"work_{rank}")
if world_size > 1:
    distributed.destroy_process_group()
"""


def quiet(*_, **__):
    """A `say` that says nothing."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own, and a report at every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(train, "REPORT_SECONDS", -1.0)
        yield


@pytest.fixture(scope="module")
def target(cache):
    return load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def prepared(cache):
    return train.prepare({"base": RUN}, quiet)


@pytest.fixture(scope="module")
def corpus(target):
    return load_corpus(RUN.corpus, target, quiet)


@dataclasses.dataclass
class Done:
    """What a training run told, and the checkpoint folders it wrote."""

    steps: list
    metrics: list
    checkpoints: dict

    def curve(self, key="loss"):
        return [metrics[key] for metrics in self.metrics]

    def weights(self, step):
        return checkpoint.load(self.checkpoints[step] / "draft")[0].state_dict()

    def trainer(self, step):
        return torch.load(self.checkpoints[step] / "trainer.pt", weights_only=True)


def trained(run, prepared, workdir, resume=None):
    done = Done([], [], {})

    def report(now):
        done.steps.append(now.step)
        done.metrics.append(now.metrics)
        if now.checkpoint:
            done.checkpoints[now.step] = now.checkpoint

    train.train(run, prepared, rank=0, world_size=1, report=report, workdir=workdir, resume=resume)
    return done


@pytest.fixture(scope="module")
def base(prepared, tmp_path_factory):
    return trained(RUN, prepared, tmp_path_factory.mktemp("base"))


def assert_same_curve(ours, theirs):
    assert ours.steps == theirs.steps
    for key in ("loss", "grad_norm"):
        assert ours.curve(key) == pytest.approx(theirs.curve(key), rel=1e-5, abs=1e-5)
    for key in ("lr", "supervised_tokens", "valid_slots", "coverage"):
        assert ours.curve(key) == pytest.approx(theirs.curve(key), rel=1e-12)


# ---- what is prepared


def test_what_is_prepared_names_the_target_the_split_and_the_store(prepared, target, corpus):
    assert prepared.target == {
        "name": "tiny", "revision": target.revision, "fingerprint": target.fingerprint,
        "mask_token_id": target.mask_token_id,
    }
    assert prepared.train_rows == tuple(corpus.train) and sorted(prepared.heldout_rows) == corpus.heldout
    asked = [corpus.prompts(1)[0][0]["content"]]  # the prompts that are decoded come last where checkpoints are chosen
    assert [corpus.rows[i].messages[0]["content"] for i in prepared.heldout_rows[-1:]] == asked
    assert not set(prepared.train_rows) & set(prepared.heldout_rows)
    assert prepared.corpus["fingerprint"] == corpus.fingerprint
    assert prepared.corpus["supervised_tokens"] == sum(corpus.rows[i].supervised.sum() for i in corpus.train)
    store = features.open_store(prepared.store, (0, 2))
    ids = torch.tensor(corpus.rows[3].ids, dtype=torch.int64)[None]
    expected, _ = target.tapped(ids, torch.tensor([ids.shape[1]]), (0, 2))
    torch.testing.assert_close(store.batch([3]).features, expected.bfloat16(), rtol=0.01, atol=0.01)


def test_what_is_prepared_holds_the_layers_of_every_trial():
    runs = {f"layer {i}": RUN.replace({"draft.target_layer_ids": [i]}) for i in (1, 2)}
    store = train.prepare(runs, quiet).store
    assert features.open_store(store, (1, 2)).layer_ids == (1, 2)


def test_what_is_prepared_can_travel(prepared):
    assert pickle.loads(pickle.dumps(prepared)) == prepared
    json.dumps(dataclasses.asdict(prepared))


def test_a_corpus_without_an_anchor_is_refused(tmp_path):
    path = tmp_path / "corpus.jsonl"
    texts = [("a", [[0, 1]]), ("b", [[0, 1]]), ("c", [[0, 1]])]
    with path.open("w") as file:
        for text, spans in texts:
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
            ids = [ord(text) - ord("!")] * 9
            file.write(json.dumps({"messages": messages, "ids": ids, "supervised": spans, "finished": False}) + "\n")
    with pytest.raises(UserError, match="supervised token after its first"):
        train.prepare({"run": RUN.replace({"corpus.source": str(path)})}, quiet)


def test_flex_attention_is_not_trained_on_a_cpu(prepared, tmp_path):
    run = RUN.replace({"target.device": "cpu"})
    flex = run.replace({"draft.attention": "flex"})
    with pytest.raises(UserError, match="trial bad: draft.attention=flex"):
        train.prepare({"good": run, "bad": flex}, quiet)
    with pytest.raises(UserError, match="^draft.attention=flex"):
        trained(flex, prepared, tmp_path)


def test_compiling_needs_a_compiler(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    complaint = "train.compile=true: needs a C\\+\\+ compiler, and there is no no-such-compiler"
    with pytest.raises(UserError, match=complaint):
        trained(RUN.replace({"train.compile": True}), prepared, tmp_path)


@pytest.mark.parametrize(
    "override, said",
    [
        ({"draft.target_layer_ids": [0, 4]}, "got 4"),
        ({"draft.target_layer_ids": [1, 1]}, "more than once"),
        ({"draft.target_layer_ids": [3]}, "last layer"),
        ({"draft.mask_token_id": 300}, "mask_token_id"),
        ({"draft.num_hidden_layers": 5}, "5 draft layers"),
        ({"draft.block_size": 65}, "draft.block_size: expected at most corpus.max_length=64, got 65"),
        ({"draft.target_layer_ids": None, "draft.num_target_layers": 40}, "a target of 4 layers has 1 to spread over"),
        ({"corpus.max_length": 32}, "same for all trials"),
        ({"target.dtype": "bfloat16"}, "same for all trials"),
    ],
)
def test_a_bad_trial_is_named_before_the_target_is_loaded(monkeypatch, override, said):
    monkeypatch.setattr(train, "load_target", lambda *_: pytest.fail("long work began"))
    with pytest.raises(UserError, match="trial bad") as caught:
        train.prepare({"good": RUN, "bad": RUN.replace(override)}, quiet)
    assert said in str(caught.value)


@pytest.mark.parametrize("layers, said", [([], "at least one"), ([1, 1], "distinct"), ([0, 3], "the last"), ([9], "9")])
def test_layers_that_can_not_be_stored_are_refused_before_the_target_is_loaded(monkeypatch, layers, said):
    monkeypatch.setattr(train, "load_target", lambda *_: pytest.fail("long work began"))
    with pytest.raises(UserError, match=f"features.layers: .*{said}"):
        train.prepare({"run": RUN.replace({"features.layers": layers})}, quiet)


# ---- schedule and data order


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_the_learning_rate_rises_and_then_takes_the_schedules_shape(schedule):
    steps, lr = 100, 0.5
    setting = TrainConfig(steps=steps, lr=lr, schedule=schedule, warmup=0.1, decay=0.3)
    rates = [train.learning_rate(step, setting) for step in range(steps)]
    assert rates[:10] == pytest.approx([lr * (i + 1) / 10 for i in range(10)])
    for step in range(10, steps):
        if schedule == "cosine":
            expected = lr * (1 + math.cos(math.pi * (step - 10) / 90)) / 2
        elif schedule == "wsd":
            expected = lr if step <= 70 else lr * (steps - step) / 30
        else:
            expected = lr
        assert rates[step] == pytest.approx(expected)
    assert min(rates) > 0 and max(rates) == lr


def test_between_two_steps_the_learning_rate_is_never_above_its_peak():
    """Where time counts, a step is a fraction."""
    setting = TrainConfig(steps=30, lr=0.5, warmup=0.1)
    assert max(train.learning_rate(step, setting) for step in np.linspace(0, 5, 501)) == 0.5


def test_a_single_step_has_the_full_learning_rate():
    for schedule in ("cosine", "wsd", "constant"):
        assert train.learning_rate(0, TrainConfig(steps=1, lr=0.5, schedule=schedule)) == 0.5


@pytest.mark.parametrize("count, batch_size", [(12, 4), (10, 4), (3, 8)])
def test_every_epoch_visits_every_row_once_in_a_fresh_order(count, batch_size):
    rows = tuple(range(100, 100 + count))
    steps = 40
    pairs = [pair for step in range(steps) for pair in train.rows_of_step(step, batch_size, rows, seed=3)]
    assert len(pairs) == steps * batch_size
    assert [epoch for epoch, _ in pairs] == [i // count for i in range(len(pairs))]
    epochs = [tuple(row for epoch, row in pairs if epoch == e) for e in range(len(pairs) // count)]
    assert all(sorted(epoch) == list(rows) for epoch in epochs)
    assert len(set(epochs)) > 1
    assert pairs[:batch_size] == train.rows_of_step(0, batch_size, rows, seed=3)


def test_the_order_depends_on_the_seed_alone():
    rows = tuple(range(50))
    orders = [train.rows_of_step(0, 50, rows, seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


# ---- one step


def slots_of_step(run, prepared, corpus, target, step):
    """(row of the corpus, anchor, slot) of everything that counts; and how many labels there are in the batch."""
    slots, available = [], 0
    for epoch, row in train.rows_of_step(step, run.train.batch_size, prepared.train_rows, run.seed):
        supervised = corpus.rows[row].supervised
        candidates = torch.zeros(1, len(supervised), dtype=torch.bool)
        candidates[0, :-1] = torch.tensor(supervised[1:])
        anchors, valid = blocks.sample_anchors(candidates, run.train.anchors, [(run.seed, epoch, row)])
        for a in anchors[valid].tolist():
            for k in range(1, run.draft.block_size):
                if a + k < len(supervised) and supervised[a + k]:
                    slots.append((row, a, k))
        available += int(supervised.sum())
    return slots, available


def loss_of_slots(draft, target, corpus, slots, gamma, vocabulary=None):
    """Decayed cross-entropy in float64, one block at a time and with all logits (of the draft's vocabulary)."""
    size, mask = draft.spec.block_size, draft.spec.mask_token_id
    numerator = denominator = 0.0
    for row, a in sorted({(row, a) for row, a, _ in slots}):
        ids = torch.tensor(corpus.rows[row].ids, dtype=torch.int64)
        tapped, _ = target.tapped(ids[None], torch.tensor([len(ids)]), draft.spec.target_layer_ids)
        tapped = tapped.bfloat16().float()  # as it is stored
        tokens = torch.tensor([int(ids[a])] + [mask] * (size - 1))
        hidden = draft(tapped, target.ends.embedding(tokens)[None, None], torch.tensor([[a]]))[0, 0]
        logits = hidden.double() @ target.ends.head.weight.double().T
        if vocabulary is not None:
            logits = torch.full_like(logits, -torch.inf).index_copy(1, vocabulary, logits[:, vocabulary])
        likelihood = logits.log_softmax(-1)
        for k in (k for r, b, k in slots if (r, b) == (row, a)):
            weight = math.exp(-(k - 1) / gamma)
            numerator = numerator - weight * likelihood[k, ids[a + k]]
            denominator += weight
    return numerator / denominator


def test_one_step_equals_the_oracle(prepared, corpus, target, tmp_path):
    """Loss, gradient norm, clipped gradient, coverage and count of the first step."""
    run = RUN.replace({"draft.init": "random", "train.steps": 1, "train.clip": 0.5, "loss.gamma": 1.7})
    done = trained(run, prepared, tmp_path)
    draft = Draft(adapt(target.config, run.draft, target.mask_token_id))
    draft.reset(run.seed)
    slots, available = slots_of_step(run, prepared, corpus, target, 0)
    loss = loss_of_slots(draft, target, corpus, slots, gamma=1.7)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), 0.5).item()
    (metrics,) = done.metrics
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 0.5
    assert metrics["supervised_tokens"] == metrics["valid_slots"] == len(slots)
    assert metrics["coverage"] == pytest.approx(len({(row, a + k) for row, a, k in slots}) / available)
    state = done.trainer(1)["optimizer"]["state"]
    for i, parameter in enumerate(draft.parameters()):
        gradient = state[i]["exp_avg"] / (1 - run.train.beta1)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


def test_the_vocabulary_is_the_answers_most_frequent_tokens_and_then_the_lowest_ids(prepared, corpus, target):
    counts = Counter(int(t) for i in corpus.train for t in corpus.rows[i].ids[corpus.rows[i].supervised])
    ids = train.frequent_tokens(corpus, 200, target.vocab_size)
    assert ids == tuple(sorted(range(target.vocab_size), key=lambda token: (-counts[token], token))[:200])
    assert len(counts) < 200 and prepared.vocabulary == ()


def test_a_label_outside_the_drafts_vocabulary_teaches_nothing(corpus, target, tmp_path):
    """The step's loss is that of the reduced head, in float64."""
    run = RUN.replace({"draft.init": "random", "train.steps": 1, "draft.vocab": 6})
    prepared = train.prepare({"reduced": run}, quiet)
    done = trained(run, prepared, tmp_path)
    ids = torch.tensor(sorted(prepared.vocabulary))
    slots, _ = slots_of_step(run, prepared, corpus, target, 0)
    inside = [(row, a, k) for row, a, k in slots if int(corpus.rows[row].ids[a + k]) in set(ids.tolist())]
    assert 0 < len(inside) < len(slots)
    draft = Draft(adapt(target.config, run.draft, target.mask_token_id))
    draft.reset(run.seed)
    loss = loss_of_slots(draft, target, corpus, inside, gamma=run.gamma, vocabulary=ids)
    (metrics,) = done.metrics
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5) and metrics["valid_slots"] == len(inside)


GOLDEN = {"loss": 8.304227, "grad_norm": 22.18184}
GOLDEN_WEIGHTS = -7.3199
"""Written down from a run of the code that passed the oracle above; another number means another training."""


def checksum(weights):
    """One number that every weight moves."""
    flat = torch.cat([weights[name].double().flatten() for name in sorted(weights)])
    return (flat * torch.arange(len(flat)).cos()).sum().item()


def golden_corpus(path, target):
    """Conversations that no generator and no template has a say in."""
    with path.open("w") as file:
        for i in range(6):
            question, answer = f"what is {i} + {i * i}?", f"it is {i + i * i}, {'and so on, ' * i}of course."
            ids = target.tokenizer.encode(question) + target.tokenizer.encode(answer)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            spans = [[len(question), len(ids)]]
            file.write(json.dumps({"messages": messages, "ids": ids, "supervised": spans, "finished": False}) + "\n")
    return str(path)


def test_one_step_is_golden(target, tmp_path):
    run = RUN.replace({"corpus.source": golden_corpus(tmp_path / "golden.jsonl", target), "train.steps": 1})
    done = trained(run, train.prepare({"golden": run}, quiet), tmp_path)
    found = {"loss": done.metrics[0]["loss"], "grad_norm": done.metrics[0]["grad_norm"]}
    assert found == pytest.approx(GOLDEN, rel=1e-4)
    assert checksum(done.weights(1)) == pytest.approx(GOLDEN_WEIGHTS, abs=0.01)  # the step moved it by -0.29


# ---- other losses

DISTILLED = {"features.last_hidden": True, "loss.ce": 0.1, "loss.l1": 0.9, "loss.kl": 0.3}


def test_one_distilled_step_equals_the_oracle(corpus, target, tmp_path):
    """The target's distribution for the label at t is read at t - 1; every term is told by itself, and by slot."""
    changes = {"draft.init": "random", "train.steps": 1, "train.clip": 0.5, "loss.gamma": 1.7, "loss.log_slots": True}
    run = RUN.replace(DISTILLED | changes)
    prepared = train.prepare({"distilled": run}, quiet)
    (metrics,) = trained(run, prepared, tmp_path).metrics
    draft = Draft(adapt(target.config, run.draft, target.mask_token_id))
    draft.reset(run.seed)
    slots, _ = slots_of_step(run, prepared, corpus, target, 0)
    sums = {name: [[0.0, 0.0] for _ in range(run.draft.block_size)] for name in ("ce", "l1", "kl")}
    head = target.ends.head.weight.double()
    for row, a, k in slots:
        ids = torch.tensor(corpus.rows[row].ids, dtype=torch.int64)
        tapped, last = target.tapped(ids[None], torch.tensor([len(ids)]), draft.spec.target_layer_ids, True)
        tokens = torch.tensor([int(ids[a])] + [draft.spec.mask_token_id] * (draft.spec.block_size - 1))
        embeds = target.ends.embedding(tokens)[None, None]
        hidden = draft(tapped.bfloat16().float(), embeds, torch.tensor([[a]]))[0, 0, k]
        log_p = (hidden.double() @ head.T).log_softmax(-1)
        log_q = (last[0, a + k - 1].bfloat16().double() @ head.T).log_softmax(-1)
        found = {
            "ce": -log_p[ids[a + k]],
            "l1": (log_p.exp() - log_q.exp()).abs().sum(),
            "kl": (log_q.exp() * (log_q - log_p)).sum(),
        }
        for name, value in found.items():
            weight = math.exp(-(k - 1) / 1.7)
            sums[name][k][0] += weight * value.item()
            sums[name][k][1] += weight
    loss = 0.0
    for name, by_slot in sums.items():
        total = sum(n for n, _ in by_slot) / sum(d for _, d in by_slot)
        assert metrics[f"loss_{name}"] == pytest.approx(total, rel=1e-5)
        loss += {"ce": 0.1, "l1": 0.9, "kl": 0.3}[name] * total
        assert f"loss_{name}_slot_0" not in metrics
        for k, (n, d) in enumerate(by_slot[1:], 1):
            assert metrics[f"loss_{name}_slot_{k}"] == pytest.approx(n / d, rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)


def test_cross_entropy_alone_is_told_once(base):
    assert not any(key.startswith("loss_") for key in base.metrics[-1])


@pytest.mark.parametrize("vocab", [None, 6])
def test_dpace_weighs_by_the_drafts_own_chances_and_divides_by_the_anchors(prepared, corpus, target, tmp_path, vocab):
    """A token outside the draft's vocabulary has no chance: what stands behind it is reached by the floor alone."""
    run = RUN.replace({"draft.init": "random", "train.steps": 1, "loss.positions": "dpace", "draft.vocab": vocab})
    known = list(range(target.vocab_size)) if vocab is None else sorted(train.frequent_tokens(corpus, vocab, 300))
    prepared = dataclasses.replace(prepared, vocabulary=() if vocab is None else tuple(known))
    (metrics,) = trained(run, prepared, tmp_path).metrics
    draft = Draft(adapt(target.config, run.draft, target.mask_token_id))
    draft.reset(run.seed)
    slots, _ = slots_of_step(run, prepared, corpus, target, 0)
    size, total, anchors = draft.spec.block_size, 0.0, {(row, a) for row, a, _ in slots}
    for row, a in anchors:
        ids = torch.tensor(corpus.rows[row].ids, dtype=torch.int64)
        tapped, _ = target.tapped(ids[None], torch.tensor([len(ids)]), draft.spec.target_layer_ids)
        tokens = torch.tensor([int(ids[a])] + [draft.spec.mask_token_id] * (size - 1))
        hidden = draft(tapped.bfloat16().float(), target.ends.embedding(tokens)[None, None], torch.tensor([[a]]))[0, 0]
        log_p = (hidden.double() @ target.ends.head.weight[known].double().T).log_softmax(-1)
        there = [k for k in range(1, size) if (row, a, k) in slots]
        guessable = [k for k in there if int(ids[a + k]) in known]
        found = {k: log_p[k, known.index(int(ids[a + k]))].item() if k in guessable else -math.inf for k in there}
        for k in guessable:
            reached = [math.prod((1 + math.exp(found[i])) / 2 for i in there if i <= m) for m in there if m >= k]
            total -= sum(reached) * found[k]
    assert metrics["loss"] == pytest.approx(total / len(anchors), rel=1e-5)


def test_gamma_may_grow_with_the_epochs(prepared, tmp_path):
    """The first epoch is that of a fixed gamma; each row has the gamma of its own epoch."""
    growing = RUN.replace({"loss.gamma": 1.0, "loss.gamma_step": 2.0, "loss.gamma_cap": 4.0, "train.batch_size": 8})
    assert [growing.gamma_at(epoch) for epoch in range(4)] == [1.0, 3.0, 4.0, 4.0]
    prepared = dataclasses.replace(prepared, train_rows=prepared.train_rows[:12])  # epoch 1 begins inside step 2
    loop = train._Loop(growing, prepared, 0, 1, None, tmp_path)
    for step, epochs in ((0, [0] * 8), (1, [0] * 4 + [1] * 4), (2, [1] * 8)):
        loop.step = step
        (part,) = loop._micro_batches()
        for weights, epoch in zip(part.weights, epochs):
            expected = blocks.position_weights(4, growing.gamma_at(epoch)).expand_as(weights)
            assert weights[weights > 0].equal(expected[weights > 0])


@pytest.mark.parametrize("changes", [DISTILLED, {"loss.positions": "dpace"}])
def test_accumulation_gives_the_same_curve_with_every_loss(tmp_path, changes):
    run = RUN.replace(changes)
    prepared = train.prepare({"loss": run}, quiet)
    whole = trained(run, prepared, tmp_path / "whole")
    assert_same_curve(trained(run.replace({"train.accumulation": 4}), prepared, tmp_path / "split"), whole)


def test_online_features_distil_too(tmp_path):
    runs = [RUN.replace({**DISTILLED, "features.mode": mode}) for mode in ("stored", "online")]
    curves = [trained(run, train.prepare({"run": run}, quiet), tmp_path / run.features.mode).curve() for run in runs]
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


def test_a_trial_whose_top_k_exceeds_the_vocabulary_is_named(monkeypatch):
    monkeypatch.setattr(train, "load_target", lambda *_: pytest.fail("long work began"))
    run = RUN.replace({"features.last_hidden": True})
    with pytest.raises(UserError, match="trial bad: loss.top_k"):
        train.prepare({"good": run, "bad": run.replace({"loss.topk_kl": 1.0, "loss.top_k": 1000})}, quiet)


def test_a_schedule_that_the_draft_could_not_follow_is_refused_before_it_is_trained(monkeypatch):
    monkeypatch.setattr(train, "load_target", lambda *_: pytest.fail("long work began"))
    with pytest.raises(UserError, match="trial bad: eval.schedule=confidence: needs draft.confidence=true, got false"):
        train.prepare({"bad": RUN.replace({"eval.schedule": "confidence"})}, quiet)


# ---- variants


@pytest.mark.parametrize("variant", ["dflare", "gated"])
@pytest.mark.parametrize("init", ["target_layers", "random"])
def test_every_variant_learns(prepared, tmp_path, variant, init):
    changes = {"draft.variant": variant, "draft.init": init, "train.steps": 30, "train.eval_every": 30}
    done = trained(RUN.replace({**changes, "train.lr": 0.01}), prepared, tmp_path)
    curve = done.curve()
    assert sum(curve[-5:]) < 0.8 * sum(curve[:5])
    draft, _ = checkpoint.load(done.checkpoints[30] / "draft")
    assert draft.spec.variant == variant
    assert done.metrics[-1]["mix_entropy"] == pytest.approx(draft.mix_entropy().item())


DSPARK = {
    "draft.variant": "dspark", "draft.markov_rank": 8, "draft.confidence": True, "features.last_hidden": True,
    "loss.ce": 0.1, "loss.l1": 0.9, "loss.confidence": 1.0,
}


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_one_dspark_step_equals_the_oracle(corpus, target, tmp_path, kind):
    """Slot k predicts the token at a+k+1 and knows the one at a+k; the confidence learns 1 - L1/2."""
    run = RUN.replace({**DSPARK, "draft.markov_head": kind, "draft.init": "random", "train.steps": 1})
    (metrics,) = trained(run, train.prepare({"dspark": run}, quiet), tmp_path).metrics
    draft = Draft(adapt(target.config, run.draft, target.mask_token_id))
    draft.reset(run.seed)
    size, head = draft.spec.block_size, target.ends.head.weight.double()
    total, weights = dict.fromkeys(("ce", "l1", "confidence"), 0.0), 0.0
    prepared = train.prepare({"dspark": run}, quiet)
    for epoch, row in train.rows_of_step(0, run.train.batch_size, prepared.train_rows, run.seed):
        ids, supervised = torch.tensor(corpus.rows[row].ids, dtype=torch.int64), corpus.rows[row].supervised
        candidates = torch.zeros(1, len(ids), dtype=torch.bool)
        candidates[0, :-1] = torch.tensor(supervised[1:])
        anchors, valid = blocks.sample_anchors(candidates, run.train.anchors, [(run.seed, epoch, row)])
        tapped, last = target.tapped(ids[None], torch.tensor([len(ids)]), draft.spec.target_layer_ids, True)
        for a in anchors[valid].tolist():
            tokens = torch.tensor([int(ids[a])] + [draft.spec.mask_token_id] * (size - 1))
            embeds = target.ends.embedding(tokens)[None, None]
            hidden = draft(tapped.bfloat16().float(), embeds, torch.tensor([[a]]))[0, 0]
            state = None
            for k in range(size):
                if a + k + 1 >= len(ids):
                    break
                latent, state = draft.markov_head.step(hidden[k], ids[a + k], state)
                if not supervised[a + k + 1]:
                    continue
                logits = hidden[k].double() @ head.T + draft.markov_head.markov_w2(latent).double()
                log_p = logits.log_softmax(-1)
                q = (last[0, a + k].bfloat16().double() @ head.T).softmax(-1)
                l1 = (log_p.exp() - q).abs().sum().item()
                score = draft.confidence(hidden[k], ids[a + k]).double().sigmoid().item()
                weight = math.exp(-k / run.gamma)
                weights += weight
                total["ce"] -= weight * log_p[ids[a + k + 1]].item()
                total["l1"] += weight * l1
                total["confidence"] -= weight * ((1 - l1 / 2) * math.log(score) + l1 / 2 * math.log(1 - score))
    for name, value in total.items():
        assert metrics[f"loss_{name}"] == pytest.approx(value / weights, rel=1e-4)
    loss = 0.1 * total["ce"] + 0.9 * total["l1"] + total["confidence"]
    assert metrics["loss"] == pytest.approx(loss / weights, rel=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_heldout_runs_follow_the_drafts_own_tokens(corpus, target, kind):
    """Against drafting token by token: a Markov head that is told the data's tokens is right oftener, but not first."""
    run = RUN.replace({**DSPARK, "draft.markov_head": kind})
    draft, head = Draft(adapt(target.config, run.draft, target.mask_token_id)).eval(), target.ends.head
    spec, size = draft.spec, draft.spec.block_size
    initialise(draft, target, "target_layers", 0, torch.tensor(corpus.rows[0].ids[:8])[None].long())
    torch.manual_seed(0)
    torch.nn.init.normal_(draft.markov_head.markov_w1.weight)
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight, std=0.3)
    data = features.OnlineFeatures(target, corpus, spec.target_layer_ids, False)
    batch = data.batch(corpus.heldout)
    anchors, valid = blocks.spread_anchors(blocks.anchor_candidates(batch.supervised, batch.lengths), 24)
    part = train.make_blocks(batch, anchors, valid, spec, torch.ones(size))
    with torch.no_grad():
        hidden = draft(batch.features.float(), target.ends.embedding(part.tokens), anchors)
        latents = draft.markov_head(hidden, part.previous)
        found = train.leading_correct(hidden, part, draft, head, 5, latents)
        expected, told = np.zeros(found.shape, bool), np.zeros(found.shape, bool)
        for row, anchor in (part.weights[..., 0] > 0).nonzero().tolist():
            token, state, alive = part.tokens[row, anchor, 0], None, True
            for k in range(size):
                if not part.weights[row, anchor, k]:
                    break
                here, label = hidden[row, anchor, k], part.labels[row, anchor, k]
                latent, state = draft.markov_head.step(here, token, state)
                token = head.best(draft.logits(head, here[None], latent[None]))[0]
                expected[row, anchor, k] = alive = alive and bool(token == label)
                best = head.best(draft.logits(head, here[None], latents[row, anchor, k][None]))[0]
                told[row, anchor, k] = best == label
    assert (found == expected).all() and expected.any()
    assert told.sum() > expected.sum(), "the two paths have to differ for this to test anything"


@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
def test_a_dspark_draft_learns(tmp_path, kind):
    changes = {"draft.markov_head": kind, "train.steps": 30, "train.eval_every": 30, "train.lr": 0.01}
    run = RUN.replace({**DSPARK, **changes, "train.dtype": "bfloat16"})
    done = trained(run, train.prepare({"dspark": run}, quiet), tmp_path)
    assert sum(done.curve("loss_ce")[-5:]) < 0.8 * sum(done.curve("loss_ce")[:5])
    draft, _ = checkpoint.load(done.checkpoints[30] / "draft")
    assert draft.spec.markov_head == kind and 1 <= done.metrics[-1]["heldout_acceptance_length"] <= 5


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_entropy_penalty_has_the_gate_choose(prepared, tmp_path, accumulation):
    entropies = []
    for penalty in (0.0, 10.0):
        changes = {"draft.variant": "gated", "loss.gate_entropy": penalty, "train.accumulation": accumulation}
        run = RUN.replace({**changes, "train.steps": 30, "train.eval_every": 30, "train.lr": 0.1})
        entropies.append(trained(run, prepared, tmp_path / str(penalty)).curve("mix_entropy"))
    free, pressed = entropies
    assert free[0] < math.log(2) and pressed[-1] < 0.25 < free[-1]


# ---- the whole loop


def test_reports_are_steps_in_order_with_a_checkpoint_at_evaluations_and_at_the_end(prepared, tmp_path):
    done = trained(RUN.replace({"train.steps": 5, "train.eval_every": 2}), prepared, tmp_path)
    assert done.steps == [1, 2, 3, 4, 5]
    assert list(done.checkpoints) == [2, 4, 5]
    for step, metrics in zip(done.steps, done.metrics):
        assert ("heldout_acceptance_length" in metrics) == (step in done.checkpoints)
        assert {"loss", "lr", "grad_norm", "coverage", "supervised_tokens", "tokens_per_second"} <= metrics.keys()
        assert all(math.isfinite(value) for value in metrics.values())
    for key in ("supervised_tokens", "train_seconds"):
        assert done.curve(key) == sorted(set(done.curve(key))) and done.curve(key)[0] > 0
    assert not any(metrics["empty_steps"] for metrics in done.metrics)


def test_a_loop_reports_now_and_then_and_not_at_every_step(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "REPORT_SECONDS", 3600.0)
    done = trained(RUN.replace({"train.steps": 5, "train.eval_every": 3}), prepared, tmp_path)
    assert done.steps == [3, 5]


def test_a_checkpoint_is_a_draft_with_its_run_and_everything_to_go_on(base, prepared):
    folder = base.checkpoints[6]
    assert {path.name for path in folder.iterdir()} == {"draft", "trainer.pt"}
    draft, info = checkpoint.load(folder / "draft")
    assert info.run == RUN
    assert info.provenance["target"]["fingerprint"] == prepared.target["fingerprint"]
    assert info.provenance["command"] == prepared.provenance["command"] == sys.argv  # the driver's
    state = base.trainer(6)
    assert state["step"] == 6
    assert {tuple(s) for s in map(sorted, state["optimizer"]["state"].values())} == {("exp_avg", "exp_avg_sq", "step")}
    assert all(s["exp_avg"].dtype == torch.float32 for s in state["optimizer"]["state"].values())
    assert len(state["optimizer"]["state"]) == len(list(draft.parameters()))


@pytest.mark.parametrize("init", ["random", "target_layers"])
def test_a_draft_learns(prepared, tmp_path, init):
    run = RUN.replace({"draft.init": init, "train.steps": 30, "train.eval_every": 30, "train.lr": 0.01})
    curve = trained(run, prepared, tmp_path).curve()
    assert sum(curve[-5:]) < 0.8 * sum(curve[:5])


def test_a_run_repeats_bit_for_bit_and_its_seed_matters(base, prepared, tmp_path):
    again = trained(RUN, prepared, tmp_path / "again")
    assert again.curve() == base.curve()
    ours, theirs = again.weights(6), base.weights(6)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    other = trained(RUN.replace({"seed": 1}), prepared, tmp_path / "other")
    assert other.curve() != base.curve()


@pytest.mark.parametrize("vocab", [None, 60])
def test_heldout_acceptance_equals_a_loop_over_anchors(prepared, corpus, target, tmp_path, vocab):
    """On a draft that knows something: its held-out rows are those that it learns by heart.

    A token outside its vocabulary can't be guessed, and counts as missed.
    """
    run = RUN.replace({"train.steps": 80, "train.eval_every": 80, "train.lr": 0.01, "train.anchors": 16})
    run = run.replace({"draft.vocab": vocab})
    rows, known = prepared.train_rows[:8], train.frequent_tokens(corpus, vocab or 0, target.vocab_size)
    prepared = dataclasses.replace(prepared, train_rows=rows, heldout_rows=rows, vocabulary=known)
    done = trained(run, prepared, tmp_path)
    draft, _ = checkpoint.load(done.checkpoints[80] / "draft")
    size, mask = draft.spec.block_size, draft.spec.mask_token_id
    committed, survived, reached = [], [0] * (size - 1), [0] * (size - 1)
    for row in prepared.heldout_rows[: RUN.eval.offline_conversations]:
        ids, supervised = torch.tensor(corpus.rows[row].ids, dtype=torch.int64), corpus.rows[row].supervised
        tapped, _ = target.tapped(ids[None], torch.tensor([len(ids)]), draft.spec.target_layer_ids)
        candidates = torch.zeros(1, len(ids), dtype=torch.bool)
        candidates[0, :-1] = torch.tensor(supervised[1:])
        anchors, valid = blocks.spread_anchors(candidates, RUN.eval.offline_anchors)
        for a in anchors[valid].tolist():
            cache = draft.start(len(ids))
            draft.extend(cache, tapped[:, :a].bfloat16().float())
            tokens = torch.tensor([[int(ids[a])] + [mask] * (size - 1)])
            hidden = draft.propose(cache, target.ends.embedding(tokens))[0]
            guesses = draft.head(target.ends.head).greedy(hidden).tolist()
            run = 0
            while run + 1 < size and a + run + 1 < len(ids) and supervised[a + run + 1]:
                reached[run] += 1
                if guesses[run + 1] != ids[a + run + 1]:
                    break
                survived[run] += 1
                run += 1
            follows = a + run + 1 < len(ids) and supervised[a + run + 1]
            committed.append(run + follows)  # the bonus token, unless the text ended with the run
    metrics = done.metrics[-1]
    assert 1.5 < metrics["heldout_acceptance_length"] < size
    assert metrics["heldout_acceptance_length"] == pytest.approx(sum(committed) / len(committed))
    survival = [metrics[f"heldout_survival_{k}"] for k in range(1, size)]
    conditional = [through / tried for through, tried in zip(survived, reached)]
    assert survival == pytest.approx([math.prod(conditional[:k]) for k in range(1, size)])
    answers = [token for i in rows for token in corpus.rows[i].ids[corpus.rows[i].supervised].tolist()]
    covered = sum(vocab is None or token in known for token in answers) / len(answers)
    assert metrics["heldout_vocab_coverage"] == pytest.approx(covered) and (covered == 1) == (vocab is None)


def test_bfloat16_compute_keeps_float32_masters(base, prepared, tmp_path):
    done = trained(RUN.replace({"train.dtype": "bfloat16"}), prepared, tmp_path)
    assert done.curve() == pytest.approx(base.curve(), rel=0.05)
    assert done.curve() != base.curve()
    weight = done.weights(6)["norm.weight"]
    assert weight.dtype == torch.float32 and not weight.equal(weight.bfloat16().float())


def test_features_computed_online_give_the_same_curve(base, prepared, tmp_path):
    run = RUN.replace({"features.mode": "online"})
    online = train.prepare({"online": run}, quiet)
    assert online.store is None and online.train_rows == prepared.train_rows
    assert trained(run, online, tmp_path).curve() == pytest.approx(base.curve(), rel=1e-3)


def test_a_worker_with_another_corpus_than_the_driver_stops(prepared, tmp_path):
    run = RUN.replace({"features.mode": "online"})
    other = dataclasses.replace(prepared, store=None, corpus={**prepared.corpus, "fingerprint": "0" * 12})
    with pytest.raises(UserError, match="corpus"):
        trained(run, other, tmp_path)


def test_a_loss_that_is_no_longer_finite_ends_the_run(prepared, tmp_path):
    with pytest.raises(FloatingPointError, match="step 2"):
        trained(RUN.replace({"train.lr": 1e30, "train.schedule": "constant"}), prepared, tmp_path)


def test_a_batch_without_a_valid_slot_contributes_nothing_and_is_counted(target, tmp_path):
    path = golden_corpus(tmp_path / "corpus.jsonl", target)
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}], "finished": False}
    ids = target.tokenizer.encode("a, which no token before it predicts")
    with open(path, "a") as file:
        file.write(json.dumps({**row, "ids": ids, "supervised": [[0, 1]]}) + "\n")
    changes = {"train.batch_size": 1, "train.weight_decay": 0.1, "train.steps": 3, "train.eval_every": 3}
    run = RUN.replace({"corpus.source": path, **changes})
    prepared = train.prepare({"empty": run}, quiet)
    corpus = load_corpus(run.corpus, target, quiet)
    (empty,) = [i for i, row in enumerate(corpus.rows) if row.supervised.sum() == 1]
    done = trained(run, dataclasses.replace(prepared, train_rows=(empty,)), tmp_path)
    assert done.curve() == [0.0] * 3 and done.curve("grad_norm") == [0.0] * 3
    assert done.curve("empty_steps") == [1, 2, 3] and done.curve("supervised_tokens") == [0] * 3
    first = Draft(adapt(target.config, run.draft, target.mask_token_id))
    initialise(first, target, run.draft.init, run.seed, torch.tensor(corpus.rows[empty].ids)[None])
    last = done.weights(3)
    assert all(weight.equal(last[name]) for name, weight in first.state_dict().items())


# ---- splits, workers, resumption


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_gives_the_same_curve(base, prepared, tmp_path, accumulation):
    assert_same_curve(trained(RUN.replace({"train.accumulation": accumulation}), prepared, tmp_path), base)


@pytest.mark.skipif(not train.has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("variant", ["dflash", "dflare", "dspark"])
def test_a_compiled_draft_gives_the_same_curve(prepared, tmp_path, monkeypatch, variant):
    """As torch traces and differentiates it; bench_train.py has it compile in earnest, which takes a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    run = RUN.replace({"draft.variant": variant})
    plain, compiled = (
        trained(run.replace({"train.compile": each}), prepared, tmp_path / str(each)) for each in (False, True)
    )
    assert_same_curve(compiled, plain)
    assert compiled.weights(RUN.train.steps).keys() == plain.weights(RUN.train.steps).keys()


def start(folder, run, prepared, rank=0, world_size=1, dies_at=0):
    folder.mkdir(exist_ok=True)
    (folder / "job").write_bytes(pickle.dumps((run, prepared)))
    numbers = map(str, (rank, world_size, dies_at, torch.get_num_threads()))
    return subprocess.Popen([sys.executable, "-c", WORKER, str(folder), *numbers], stderr=subprocess.PIPE, text=True)


def wait(*workers, code):
    """Wait for workers to end with this code; none outlives a failure."""
    try:
        for worker in workers:
            _, said = worker.communicate(timeout=600)
            assert worker.returncode == code, said
    finally:
        for worker in workers:
            worker.kill()


def test_two_workers_give_the_same_curve(base, prepared, tmp_path):
    run = RUN.replace({"train.workers": 2, "train.accumulation": 2})
    wait(*(start(tmp_path, run, prepared, rank, world_size=2) for rank in range(2)), code=0)
    reports = [pickle.loads((tmp_path / f"reports_{rank}").read_bytes()) for rank in range(2)]
    for rank, mine in enumerate(reports):
        done = Done([step for step, _, _ in mine], [metrics for _, metrics, _ in mine], {})
        assert_same_curve(done, base)
        for key, value in base.metrics[-1].items():
            if key.startswith("heldout_"):
                assert done.metrics[-1][key] == pytest.approx(value)
        assert [kept for _, _, kept in mine] == [rank == 0 and step == 6 for step in done.steps]
    ours, _ = checkpoint.load(tmp_path / "kept_6" / "draft")
    for name, weight in base.weights(6).items():
        torch.testing.assert_close(ours.state_dict()[name], weight, rtol=1e-3, atol=1e-4)


def test_a_killed_run_that_goes_on_ends_with_the_same_bits(prepared, tmp_path):
    """Killed at step 5, with its last checkpoint at 3; on the way to 6."""
    run = RUN.replace({"train.eval_every": 3, "train.weight_decay": 0.1})
    worker = start(tmp_path / "killed", run, prepared, dies_at=5)
    whole = trained(run, prepared, tmp_path / "whole")
    wait(worker, code=-signal.SIGKILL)
    kept = tmp_path / "killed" / "kept_3"
    assert kept.is_dir() and not (tmp_path / "killed" / "kept_6").exists()
    resumed = trained(run, prepared, tmp_path / "resumed", resume=kept)
    assert resumed.steps == [4, 5, 6]
    before, after = whole.weights(6), resumed.weights(6)
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    for i, state in whole.trainer(6)["optimizer"]["state"].items():
        for key, value in state.items():
            assert value.equal(resumed.trainer(6)["optimizer"]["state"][i][key])
    for ours, theirs in zip(resumed.metrics, whole.metrics[3:], strict=True):
        timed = {key: ours[key] for key in ("train_seconds", "tokens_per_second")}
        assert ours == theirs | timed
    assert resumed.curve("train_seconds")[0] > torch.load(kept / "trainer.pt", weights_only=True)["seconds"] > 0


def test_a_finished_run_that_is_resumed_has_nothing_left_to_do(base, prepared, tmp_path):
    assert trained(RUN, prepared, tmp_path, resume=base.checkpoints[6]).steps == []


def test_a_run_resumes_only_as_itself(base, prepared, tmp_path):
    folder = base.checkpoints[6]
    with pytest.raises(UserError, match="another configuration"):
        trained(RUN.replace({"train.lr": 0.1}), prepared, tmp_path, resume=folder)
    other = dataclasses.replace(prepared, corpus={**prepared.corpus, "fingerprint": "0" * 12})
    with pytest.raises(UserError, match="another target or corpus"):
        trained(RUN, other, tmp_path, resume=folder)
    other = dataclasses.replace(prepared, target={**prepared.target, "fingerprint": "0" * 12})
    with pytest.raises(UserError, match="another target or corpus"):
        trained(RUN, other, tmp_path, resume=folder)


def test_a_damaged_checkpoint_is_not_resumed_from(base, prepared, tmp_path):
    for name in ("draft/model.safetensors", "trainer.pt"):
        broken = tmp_path / name.replace("/", "_")
        shutil.copytree(base.checkpoints[6], broken)
        os.truncate(broken / name, (broken / name).stat().st_size // 2)
        with pytest.raises(UserError, match=name.partition("/")[2] or name):
            trained(RUN, prepared, tmp_path / "work", resume=broken)


# ---- ablations and budgets


def test_a_draft_without_conditioning_never_hears_of_the_target(prepared, target, tmp_path):
    done = trained(RUN.replace({"draft.conditioning": "none"}), prepared, tmp_path)
    draft, _ = checkpoint.load(done.checkpoints[6] / "draft")
    assert not draft.fc.weight.any() and done.curve()[-1] < done.curve()[0]
    anchors, embeds = torch.tensor([[5]]), target.ends.embedding(torch.tensor([[[3, 0, 0, 0]]]))
    width = len(draft.spec.target_layer_ids) * draft.spec.target_hidden_size
    one, other = (draft(torch.randn(1, 8, width), embeds, anchors) for _ in range(2))
    torch.testing.assert_close(one, other)


def test_a_smaller_training_set_is_part_of_a_larger_one(prepared, tmp_path):
    small, large = (train.training_rows(prepared.train_rows, count) for count in (3, 7))
    assert len(small) == 3 and set(small) < set(large) < set(prepared.train_rows)
    assert train.training_rows(prepared.train_rows, None) == prepared.train_rows
    done = trained(RUN.replace({"train.conversations": 1}), prepared, tmp_path)
    assert done.curve("supervised_tokens")[-1] > 0 and done.curve() != trained(RUN, prepared, tmp_path).curve()


def test_more_conversations_than_there_are_is_refused_with_the_trial_named():
    with pytest.raises(UserError, match="trial b: train.conversations: expected at most the 35 .* got 999"):
        train.prepare({"a": RUN, "b": RUN.replace({"train.conversations": 999})}, quiet)


def test_fixed_blocks_are_other_anchors(base, prepared, tmp_path):
    fixed = trained(RUN.replace({"train.anchor_choice": "blocks"}), prepared, tmp_path)
    assert fixed.curve() != base.curve()


def test_a_budget_of_time_ends_the_training_whatever_the_steps_and_the_rate_follows_it(prepared, tmp_path):
    run = RUN.replace({"train.seconds": 0.5, "train.steps": 1000, "train.warmup": 0.0, "train.eval_every": 1000})
    done = trained(run, prepared, tmp_path)
    seconds, progress, rates = (done.curve(key) for key in ("train_seconds", "progress", "lr"))
    assert seconds[-1] >= 0.5 > seconds[-2]
    assert progress == pytest.approx([min(1, now / 0.5) for now in seconds]) and progress[-1] == 1
    assert rates == pytest.approx(
        [train.learning_rate(before * 1000, run.train) for before in (0, *progress[:-1])]
    )
    assert list(done.checkpoints) == [done.steps[-1]]
