"""Offline acceptance: on the target's own greedy text the serving walk is what decoding does, round by round."""

import math

import pytest
import torch

from draftlab import metrics, offline
from draftlab.config import DraftConfig, TargetConfig
from draftlab.decode import decode_speculative, decode_target
from draftlab.draft import Draft, adapt
from draftlab.init import initialise
from draftlab.target import load_target


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))


KINDS = {
    "dflash": {}, "dflare": {"variant": "dflare"}, "dspark": {"variant": "dspark"},
    **{kind: {"variant": "dspark", "markov_head": kind, "markov_rank": 8} for kind in ("vanilla", "gated", "rnn")},
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def draft(target, request):
    """A draft that is right now and then: it begins as the target's last layers.

    A Markov head has much to say, so that its guesses hang on the token before.
    """
    config = DraftConfig(block_size=4, num_hidden_layers=1, target_layer_ids=[0, 2], **request.param)
    made = Draft(adapt(target.config, config, target.mask_token_id))
    sample = torch.tensor([target.chat([{"role": "user", "content": "What is there to see in a town by the sea?"}])])
    initialise(made, target, "target_layers", 0, sample)
    if made.spec.markov_head:
        torch.manual_seed(0)
        torch.nn.init.normal_(made.markov_head.markov_w1.weight)
        torch.nn.init.normal_(made.markov_head.markov_w2.weight, std=0.5)
    return made.eval()


@pytest.mark.parametrize("block_size", [2, 4, 7])
@pytest.mark.parametrize("limit", [1, 2, 37, 100])
def test_the_serving_walk_over_greedy_text_is_the_decoded_rounds(target, draft, block_size, limit):
    texts = []
    for question in ("How many?", "Why is that so, and since when?", "a"):
        prompt = target.chat([{"role": "user", "content": question}])
        answer = decode_target(target, [prompt], limit)[0].tokens
        trace = decode_speculative(target, draft, [prompt], limit, block_size)[0]
        committed = offline.committed_everywhere(target, draft, prompt, answer, block_size)
        place = 0
        for each in trace.rounds:
            assert committed[place] == each.committed
            place += each.committed
        assert place == len(answer) - 1 and committed[-1] == 0
        assert metrics.serving_walk(committed) == (len(answer) - 1, len(trace.rounds))
        texts.append((prompt, answer, trace))
    found = offline.agreement(target, draft, texts, block_size)
    assert found["walk_agreement"] == 1
    walked = metrics.acceptance_length([trace for *_, trace in texts])
    assert found["walk_acceptance_length"] == pytest.approx(walked, nan_ok=True)


@pytest.mark.parametrize("block_size", [2, 4, 7])
def test_no_round_commits_more_than_the_text_has_left(target, draft, block_size, monkeypatch):
    def all_right(hidden, part, *_):
        return torch.ones(part.labels[..., part.first :].shape, dtype=torch.bool).numpy()

    monkeypatch.setattr(offline, "leading_correct", all_right)
    committed = offline.committed_everywhere(target, draft, [75, 3], list(range(5, 17)), block_size)
    most = block_size + 1 - draft.spec.first_slot
    assert committed.tolist() == [min(most, left) for left in range(11, -1, -1)]


def test_another_text_than_the_decoded_one_does_not_agree(target, draft):
    prompt = target.chat([{"role": "user", "content": "How many?"}])
    answer = decode_target(target, [prompt], 20)[0].tokens
    shorter = decode_speculative(target, draft, [prompt], 10)[0]
    assert offline.agreement(target, draft, [(prompt, answer, shorter)], 4)["walk_agreement"] == 0
    assert math.isnan(offline.agreement(target, draft, [], 4)["walk_agreement"])
