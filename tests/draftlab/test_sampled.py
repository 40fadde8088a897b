"""The distribution tests of sampled decoding; evals/losslessness.py runs them, see also test_evaluation.py."""

import numpy as np
import pytest
import torch

from draftlab import decode, sampled
from draftlab.config import DraftConfig, TargetConfig
from draftlab.decode import Sampling
from draftlab.draft import Draft, adapt
from draftlab.schedule import Schedule
from draftlab.target import load_target


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))


def quiet(*_, **__):
    pass


def test_exact_probabilities_sum_over_all_texts_before_a_place(target, monkeypatch):
    monkeypatch.setattr(sampled, "PLACES", 2)
    found = sampled.probabilities(target, [75])
    np.testing.assert_allclose(found.sum(1), 1)
    with torch.no_grad():
        first = target.model(torch.tensor([[75]])).logits[0, -1].double().softmax(-1)
        second, ended = torch.zeros(target.vocab_size), 0.0
        for token, share in enumerate(first):
            if token in target.eos_token_ids:
                ended += share
            else:
                second += share * target.model(torch.tensor([[75, token]])).logits[0, -1].softmax(-1)
    np.testing.assert_allclose(found[0, :-1], first, atol=1e-7)
    np.testing.assert_allclose(found[1], [*second, ended], atol=1e-6)


def test_texts_that_ended_are_counted_as_such(target, monkeypatch):
    (text,) = decode.decode_target(target, [[75]], 3)
    monkeypatch.setattr(target, "eos_token_ids", frozenset({text.tokens[1]}))
    counts = sampled.counts(target, None, [75], 5, 2, Sampling())
    assert counts[0, text.tokens[0]] == counts[1, text.tokens[1]] == counts[2, -1] == 5 and counts.sum() == 15


def test_a_rule_that_keeps_every_guess_does_not_pass(monkeypatch):
    reject = decode.reject
    monkeypatch.setattr(decode, "reject", lambda g, p, q, s, keep, r: reject(g, p, q, s, torch.zeros_like(keep), r))
    assert not sampled.check_exactly(3000, quiet)


def test_a_target_that_is_sure_of_its_first_token_is_no_difference():
    assert sampled._same(print, "one outcome on both sides", [float("nan"), 0.5, 0.3])
    assert not sampled._same(print, "another at one place", [float("nan"), 0.5, 1e-12])


def test_samples_by_schedule_pass_too(target):
    chosen = DraftConfig(block_size=3, num_hidden_layers=1, target_layer_ids=[0, 2], variant="dspark", confidence=True)
    draft = Draft(adapt(target.config, chosen, target.mask_token_id)).eval()
    draft.reset(0)
    said = []
    plan = Schedule({1: [1.0, 1.2, 1.5, 1.9]})
    assert sampled.check_samples(target, draft, [75], 200, lambda text, **_: said.append(text), plan)
    assert len(said) == 3
