"""Speculative decoding against the target alone, against transformers' `generate`, and against an independent oracle
that keeps no cache and recomputes everything in every round, written from the definition of a round."""

import copy
import dataclasses
import random
import time
from itertools import zip_longest

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftlab import decode, metrics, schedule
from draftlab.cache import KVCache
from draftlab.config import DraftConfig, TargetConfig
from draftlab.decode import Sampling, decode_speculative, decode_target, generate
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.init import initialise
from draftlab.schedule import Schedule, reach
from draftlab.target import Ends, Head, layer_output_index, load_target

LAYERS = (0, 2)
LIMIT = 32


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def endless():
    """The tiny target without an EOS that it could ever write, so that tests choose where texts end."""
    made = load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))
    made.eos_token_ids = frozenset({made.vocab_size})
    return made


@pytest.fixture(scope="module")
def packaged():
    return load_target(TargetConfig(model="smollm2", dtype="float32", device="cpu"))


def prompts(target, count):
    words = ["What", "is", "a", "llama", "?", "Name", "three", "rivers", "and", "why"]
    rng = random.Random(0)
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(count)]
    return [target.chat([{"role": "user", "content": text}]) for text in texts]


def spec(target, block_size):
    config = DraftConfig(block_size=block_size, num_hidden_layers=2, target_layer_ids=list(LAYERS))
    return adapt(target.config, config, target.mask_token_id)


def random_draft(target, block_size, seed=0):
    draft = Draft(spec(target, block_size))
    draft.reset(seed)
    return draft.to(target.dtype).eval()


@pytest.fixture(scope="module")
def learnt_draft(endless):
    """A real draft, overfitted on the target's texts for two of the prompts, so that it accepts long runs."""
    texts = [torch.tensor(p + generate(endless, p, LIMIT)) for p in prompts(endless, 2)]
    draft, size = random_draft(endless, 8), 8
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    mask = torch.tensor(endless.mask_token_id)
    for step in range(80):
        loss = 0.0
        for ids in texts:
            torch.manual_seed(step)
            anchors = 4 + torch.randperm(len(ids) - size - 4)[:16]
            inputs = torch.cat([ids[anchors, None], mask.expand(len(anchors), size - 1)], dim=1)
            features, _ = endless.tapped(ids[None], torch.tensor([len(ids)]), LAYERS)
            hidden = draft(features.clone(), endless.ends.embedding(inputs[None]), anchors[None])[0, :, 1:]
            logits = endless.ends.head.logits(hidden.reshape(-1, hidden.shape[-1]))
            labels = ids[anchors[:, None] + torch.arange(1, size)]
            loss = loss + F.cross_entropy(logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()


class Scripted:
    """A draft that knows the target's future and errs with some probability, each slot by itself.

    It stands in for `Draft` in decoding, and checks what it is handed: a block of the anchor and masks at the right
    place, and exactly the committed tokens' features.
    """

    def __init__(self, target, text, block_size, error, seed=0):
        self.target, self.text, self.error = target, text, error
        self.spec = spec(target, block_size)
        self.rng = random.Random(seed)
        self.features = recomputed(target, text)[1]

    def head(self, head):
        return head

    class Context:
        length = 0

        def rewind(self, lengths):
            (self.length,) = lengths or [0]

        def keep_rows(self, index):
            """There is one row."""

    def start(self, max_length, batch=1):
        return self.Context()

    def extend(self, cache, features):
        end = cache.length + features.shape[1]
        torch.testing.assert_close(features[0], self.features[cache.length : end], atol=1e-4, rtol=1e-4)
        cache.length = end

    def propose(self, cache, embeds):
        size, anchor = embeds.shape[1], cache.length
        block = torch.tensor([self.text[anchor]] + [self.spec.mask_token_id] * (size - 1))
        assert torch.equal(embeds, self.target.ends.embedding(block)[None])
        return self.target.ends.head.weight[self.guesses(anchor, size)][None]

    def guesses(self, anchor, size):
        """Slot 0 is noise that nobody may read; then the future, with errors; noise past the text's end."""
        noise = [self.rng.randrange(256) for _ in range(size)]
        future = self.text[anchor + 1 : anchor + size]
        right = [token if self.rng.random() >= self.error else (token + 1) % 256 for token in future]
        return noise[:1] + right + noise[1 + len(right) :]


def recomputed(target, ids):
    """(argmax after each token, features of each token), from transformers' model without any cache or hook."""
    with torch.no_grad():
        out = target.model(torch.tensor([ids], device=target.device), output_hidden_states=True, use_cache=False)
    taps = torch.cat([out.hidden_states[layer_output_index(i)][0] for i in LAYERS], dim=-1)
    return out.logits[0].argmax(-1).tolist(), taps


def oracle(target, propose, prompt, limit, block_size, eos):
    """Speculative decoding from its definition: no cache, everything recomputed.

    propose(text, features of all tokens before the last) -> B - 1 drafted tokens.
    Returns (new tokens, [(accepted, committed) of each round]).
    """
    text = list(prompt)
    text.append(recomputed(target, text)[0][-1])
    rounds = []
    while text[-1] not in eos and len(text) - len(prompt) < limit:
        left = limit - (len(text) - len(prompt))
        block = propose(text, recomputed(target, text)[1][:-1])
        assert len(block) == block_size - 1
        choices = recomputed(target, text + block)[0][len(text) - 1 :]
        accepted = 0
        while accepted < min(len(block), left - 1) and block[accepted] == choices[accepted]:
            accepted += 1
            if block[accepted - 1] in eos:
                break
        committed = block[:accepted]
        if not (committed and committed[-1] in eos):
            committed = committed + [choices[accepted]]
        text += committed
        rounds.append((accepted, len(committed)))
    return text[len(prompt) :], rounds


def training_forward(target, draft, block_size):
    """The oracle's propose: the draft's training forward over the whole text, one anchor, no cache."""

    def propose(text, features):
        block = torch.tensor([text[-1]] + [draft.spec.mask_token_id] * (block_size - 1))
        # One zero row stands for the anchor, whose features don't exist yet.
        padded = torch.cat([features, torch.zeros_like(features[:1])])[None]
        with torch.no_grad():
            hidden = draft(padded, target.ends.embedding(block)[None, None], torch.tensor([[len(text) - 1]]))
        return draft.head(target.ends.head).greedy(hidden[0, 0, 1:]).tolist()

    return propose


def speculate(target, draft, prompt, limit, block_size=None):
    """One prompt's trace."""
    return decode_speculative(target, draft, [prompt], limit, block_size)[0]


def rounds_of(trace):
    return [(r.accepted, r.committed) for r in trace.rounds]


# ---- the target alone


def test_the_targets_own_decoding_equals_generate(target):
    for prompt in prompts(target, 8):
        (trace,) = decode_target(target, [prompt], LIMIT)
        assert trace.tokens == generate(target, prompt, LIMIT)
        assert trace.rounds == [] and trace.prompt_tokens == len(prompt)
        assert trace.seconds > 0 and trace.prefill_seconds > 0


def test_the_targets_own_decoding_stops_at_any_eos_exactly_where_generate_does(endless, monkeypatch):
    prompt = prompts(endless, 1)[0]
    text = generate(endless, prompt, 12)
    for last in range(12):
        eos = frozenset({text[last], endless.vocab_size})
        monkeypatch.setattr(endless, "eos_token_ids", eos)
        assert decode_target(endless, [prompt], 12)[0].tokens == generate(endless, prompt, 12)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_limit_counts_the_prefills_token(endless, limit):
    prompt = prompts(endless, 1)[0]
    assert len(decode_target(endless, [prompt], limit)[0].tokens) == limit
    trace = speculate(endless, random_draft(endless, 4), prompt, limit)
    assert trace.tokens == generate(endless, prompt, limit)
    assert sum(r.committed for r in trace.rounds) == limit - 1


# ---- speculative decoding against the oracle


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_a_random_draft_gives_the_oracles_rounds_and_the_targets_text(target, block_size):
    draft = random_draft(target, block_size)
    for prompt in prompts(target, 2):
        trace = speculate(target, draft, prompt, 20)
        propose = training_forward(target, draft, block_size)
        tokens, rounds = oracle(target, propose, prompt, 20, block_size, target.eos_token_ids)
        assert trace.tokens == tokens == generate(target, prompt, 20)
        assert rounds_of(trace) == rounds


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_a_learnt_draft_gives_the_oracles_rounds_and_the_targets_text(endless, learnt_draft, block_size):
    # Trained at 8, decoded at 2 to 16. One prompt it has seen, one it has not.
    seen, unseen = prompts(endless, 3)[0], prompts(endless, 3)[2]
    for prompt in (seen, unseen):
        trace = speculate(endless, learnt_draft, prompt, LIMIT, block_size)
        propose = training_forward(endless, learnt_draft, block_size)
        tokens, rounds = oracle(endless, propose, prompt, LIMIT, block_size, endless.eos_token_ids)
        assert trace.tokens == tokens == generate(endless, prompt, LIMIT)
        assert rounds_of(trace) == rounds
        if prompt == seen:
            assert max(r.accepted for r in trace.rounds) >= min(block_size - 1, 4), "the draft has not learnt its text"


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
@pytest.mark.parametrize("error", [0.0, 0.15, 0.5, 1.0])
def test_a_draft_that_knows_the_future_gives_the_oracles_rounds(endless, block_size, error):
    for seed, prompt in enumerate(prompts(endless, 2)):
        text = prompt + generate(endless, prompt, LIMIT)
        trace = speculate(endless, Scripted(endless, text, block_size, error, seed), prompt, LIMIT)
        again = Scripted(endless, text, block_size, error, seed)
        tokens, rounds = oracle(
            endless, lambda now, _: again.guesses(len(now) - 1, block_size)[1:], prompt, LIMIT, block_size,
            endless.eos_token_ids,
        )
        assert trace.tokens == tokens == text[len(prompt) :]
        assert rounds_of(trace) == rounds
        if error == 0.0:
            assert all(r.committed == block_size for r in trace.rounds[:-1])
        if error == 1.0:
            assert all(r.committed == 1 for r in trace.rounds)


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
@pytest.mark.parametrize("error", [0.0, 0.3])
def test_eos_anywhere_in_a_block_ends_the_text_where_the_target_alone_would(endless, monkeypatch, block_size, error):
    prompt = prompts(endless, 1)[0]
    text = generate(endless, prompt, 13)
    kinds = set()
    for last in range(13):
        eos = frozenset({text[last], endless.vocab_size})
        monkeypatch.setattr(endless, "eos_token_ids", eos)
        expected = generate(endless, prompt, 13)
        draft = Scripted(endless, prompt + text, block_size, error, seed=last)
        trace = speculate(endless, draft, prompt, 13)
        again = Scripted(endless, prompt + text, block_size, error, seed=last)
        tokens, rounds = oracle(
            endless, lambda now, _: again.guesses(len(now) - 1, block_size)[1:], prompt, 13, block_size, eos
        )
        assert trace.tokens == tokens == expected
        assert rounds_of(trace) == rounds
        assert 1 + sum(r.committed for r in trace.rounds) == len(expected)
        if trace.rounds and trace.tokens[-1] in eos:
            end = trace.rounds[-1]
            kinds.add("accepted" if end.committed == end.accepted else "bonus")
            asked = min(block_size - 1, 13 - sum(r.committed for r in trace.rounds[:-1]) - 2)
            assert end.drafted == min(asked, end.committed)  # what stands behind the EOS was never at stake
    assert kinds == {"accepted", "bonus"}, "both ways to meet EOS must have been tried"


@pytest.mark.parametrize("limit", range(1, 20))
def test_the_limit_anywhere_in_a_block_ends_the_text_there(endless, limit):
    prompt = prompts(endless, 2)[1]
    text = prompt + generate(endless, prompt, 24)
    trace = speculate(endless, Scripted(endless, text, 8, 0.0), prompt, limit)
    assert trace.tokens == text[len(prompt) :][:limit]
    whole, rest = divmod(limit - 1, 8)
    assert [r.committed for r in trace.rounds] == [8] * whole + [rest] * (rest > 0)
    assert [r.drafted for r in trace.rounds] == [7] * whole + [rest - 1] * (rest > 0)


def test_the_last_position_of_the_target_can_be_written_and_none_behind_it(endless, monkeypatch):
    prompt = prompts(endless, 1)[0]
    monkeypatch.setattr(endless, "max_positions", len(prompt) + 10)
    text = prompt + generate(endless, prompt, 10)
    lengths = []
    forward = endless.forward
    monkeypatch.setattr(endless, "forward", lambda *a, **k: (forward(*a, **k), lengths.append(a[1].length))[0])
    trace = speculate(endless, Scripted(endless, text, 8, 0.2), prompt, 10)
    assert trace.tokens == text[len(prompt) :]
    assert max(lengths) < len(prompt) + 10
    words = f"prompt of {len(prompt)} tokens .* 11: the target has {len(prompt) + 10} positions"
    with pytest.raises(UserError, match=words):
        decode_target(endless, [prompt], 11)


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_twenty_prompts_give_the_oracles_rounds_at_every_block_size(endless, learnt_draft, block_size):
    accepted = 0
    for prompt in prompts(endless, 20):
        trace = speculate(endless, learnt_draft, prompt, 12, block_size)
        propose = training_forward(endless, learnt_draft, block_size)
        tokens, rounds = oracle(endless, propose, prompt, 12, block_size, endless.eos_token_ids)
        assert trace.tokens == tokens
        assert rounds_of(trace) == rounds
        accepted += sum(kept for kept, _ in rounds)
    assert accepted > 5, "a draft that is never accepted tests little"


# ---- batches


LENGTHS = (1, 500, 2, 40, 7, 133, 499, 20)


def prompts_of_all_lengths(target):
    rng = random.Random(1)
    return [rng.choices(range(33, 127), k=length) for length in LENGTHS[:-1]] + [prompts(target, 1)[0][: LENGTHS[-1]]]


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_a_batch_writes_what_each_prompt_alone_writes_in_the_same_rounds(endless, learnt_draft, monkeypatch, batch):
    asked = prompts_of_all_lengths(endless)
    # Every second text has its end somewhere in it, so that rows leave at different times.
    texts = [generate(endless, prompt, 24) for prompt in asked]
    monkeypatch.setattr(endless, "eos_token_ids", frozenset({texts[1][9], texts[3][14], endless.vocab_size}))
    expected = [generate(endless, prompt, 24) for prompt in asked]
    assert len({len(text) for text in expected}) > 2 and max(map(len, expected)) == 24
    knowing = KnowsAll(endless, [prompt + text for prompt, text in zip(asked, texts)])
    for draft in (learnt_draft, knowing):
        alone = [speculate(endless, draft, prompt, 24) for prompt in asked]
        drafted, target_alone = [], []
        for start in range(0, len(asked), batch):
            drafted += decode_speculative(endless, draft, asked[start : start + batch], 24)
            target_alone += decode_target(endless, asked[start : start + batch], 24)
        assert [t.tokens for t in drafted] == [t.tokens for t in target_alone] == expected
        assert [rounds_of(t) for t in drafted] == [rounds_of(t) for t in alone]
        assert [t.prompt_tokens for t in drafted] == list(LENGTHS)
    assert {r.committed for t in drafted for r in t.rounds} == set(range(1, 9)), "acceptance was ragged"


class KnowsAll(Draft):
    """A draft that looks up which of several texts a row is, and proposes its future up to a place that varies."""

    def __init__(self, target, texts):
        super().__init__(spec(target, 8))
        self.reset(0)
        self.target, self.texts = target, texts
        self.eval()

    def propose(self, cache, embeds):
        hidden = super().propose(cache, embeds)
        anchors = cache.positions(1)[:, 0].expand(len(embeds)).tolist()
        for row, at in enumerate(anchors):
            anchor = torch.cdist(embeds[row, :1], self.target.ends.embedding.weight).argmin().item()
            futures = [text[at + 1 : at + 8] for text in self.texts if len(text) > at and text[at] == anchor]
            if len(futures) == 1:
                wrong = at % 8
                future = [(t + 1) % 256 if slot == wrong else t for slot, t in enumerate(futures[0])]
                hidden[row, 1 : 1 + len(future)] = self.target.ends.head.weight[future]
        return hidden


def test_rows_that_leave_change_nothing_for_those_that_stay(endless, learnt_draft, monkeypatch):
    asked = prompts(endless, 5)
    texts = [generate(endless, prompt, 16) for prompt in asked]
    for leaver in range(5):
        monkeypatch.setattr(endless, "eos_token_ids", frozenset({texts[leaver][4]}))
        expected = [generate(endless, prompt, 16) for prompt in asked]
        assert [t.tokens for t in decode_target(endless, asked, 16)] == expected
        assert [t.tokens for t in decode_speculative(endless, learnt_draft, asked, 16)] == expected


def test_the_rows_of_a_batch_share_its_time(endless, learnt_draft):
    began = time.perf_counter()
    traces = decode_speculative(endless, learnt_draft, prompts(endless, 3), 16)
    spent = time.perf_counter() - began
    assert traces[0].prefill_seconds == traces[1].prefill_seconds == traces[2].prefill_seconds > 0
    assert sum(t.seconds + t.prefill_seconds for t in traces) <= spent
    assert traces[0].rounds[0].rows == 3
    for trace in traces:
        parts = sum(r.draft_seconds + r.verify_seconds + r.commit_seconds for r in trace.rounds)
        assert parts == pytest.approx(trace.seconds)
    calls = max(len(t.rounds) for t in traces)
    assert sum(1 / r.rows for t in traces for r in t.rounds) == pytest.approx(calls)


# ---- sampling


FLAT = Sampling(temperature=1.0)
BENT = Sampling(temperature=0.7, top_k=5, top_p=0.9)


def logits_of(rows, size=40, seed=0):
    return 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 7, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
def test_logits_are_bent_as_transformers_bends_them(temperature, top_k, top_p):
    logits = logits_of(50)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    expected = expected if top_k is None else TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected).softmax(-1)
    found = decode.warp(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(found, expected)
    assert decode.warp(logits.bfloat16(), Sampling(temperature, top_k, top_p)).dtype == torch.float32


def test_a_draw_is_the_inverse_of_the_running_sum_and_never_impossible():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for uniform, token in ((0.0, 1), (0.24999, 1), (0.25, 3), (0.9, 3), (1 - 2**-53, 3)):
        assert decode.draw(p, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_accepted_guesses_are_counted_up_to_the_first_that_is_not_and_to_what_is_at_stake():
    rng = random.Random(0)
    for n in range(6):
        kept = [[rng.random() < 0.7 for _ in range(n)] for _ in range(50)]
        stake = [rng.randint(0, n) for _ in kept]
        expected = [next((i for i, good in enumerate(row[:s]) if not good), s) for row, s in zip(kept, stake)]
        found = decode.leading(torch.tensor(kept, dtype=torch.bool).view(50, n), torch.tensor(stake))
        assert found.tolist() == expected


def test_what_is_committed_ends_with_the_first_eos():
    assert decode.committed(2, [5, 6, 7, 8], frozenset({9})) == [5, 6, 7]
    assert decode.committed(3, [5, 6, 7, 8], frozenset({6, 8})) == [5, 6]
    assert decode.committed(0, [5, 6, 7, 8], frozenset({6})) == [5]
    assert decode.committed(1, [5, 6], frozenset({6})) == [5, 6]


def drafted_blocks(draws, size=6, n=2):
    """Random p and q, the same for every row; guesses drawn from p; the draws that `reject` wants."""
    p = decode.warp(logits_of(n, size, seed=1), FLAT).expand(draws, -1, -1)
    q = decode.warp(logits_of(n + 1, size, seed=2), FLAT).expand(draws, -1, -1)
    random = torch.Generator().manual_seed(3)
    guesses = torch.multinomial(p[0], draws, replacement=True, generator=random).T
    keep = torch.rand(draws, n, generator=random, dtype=torch.float64)
    return guesses, p, q, torch.full((draws,), n), keep, torch.rand(draws, generator=random, dtype=torch.float64)


def p_values(rule, draws=200_000):
    """Of each of the block's tokens, among the rows that come that far, against the target's distribution."""
    blocks = drafted_blocks(draws)
    (accepted, answers), q = rule(*blocks), blocks[2][0]
    found = []
    for slot in range(answers.shape[1]):
        tokens = answers[accepted >= slot, slot]
        counts = torch.bincount(tokens, minlength=q.shape[1]).double().numpy()
        found.append(metrics.chi_square(counts, q[slot].double().numpy() * len(tokens)))
    return found


def test_rejection_sampling_gives_the_targets_distribution_at_every_slot():
    assert min(p_values(decode.reject)) > 0.001


def accept_always(guesses, p, q, stake, keep, replace):
    return decode.reject(guesses, p, q, stake, torch.zeros_like(keep), replace)


def without_residual(guesses, p, q, stake, keep, replace):
    accepted, answers = decode.reject(guesses, p, q, stake, keep, replace)
    fresh = decode.draw(q[torch.arange(len(q)), accepted], replace)
    return accepted, answers.scatter(1, accepted[:, None], fresh[:, None])


def guesses_at_random(guesses, p, q, stake, keep, replace):
    return decode.reject(guesses, p.flip(-1), q, stake, keep, replace)  # not the p that they were drawn from


@pytest.mark.parametrize("broken", [accept_always, without_residual, guesses_at_random])
def test_a_broken_rule_does_not(broken):
    assert min(p_values(broken)) < 1e-9


def test_each_slot_is_accepted_as_often_as_the_distributions_overlap():
    blocks = drafted_blocks(200_000)
    accepted, _ = decode.reject(*blocks)
    overlap = torch.minimum(blocks[1][0], blocks[2][0, :-1]).sum(-1)  # 1 - TV
    for slot, expected in enumerate(overlap.tolist()):
        reached = (accepted >= slot).sum().item()
        rate, spread = (accepted > slot).sum().item() / reached, (expected * (1 - expected) / reached) ** 0.5
        assert abs(rate - expected) < 3.3 * spread


def test_only_guesses_at_stake_are_kept_and_the_next_token_is_the_targets_own():
    guesses, p, q, _, keep, replace = drafted_blocks(50_000)
    accepted, answers = decode.reject(guesses, p, q, torch.zeros(50_000), keep, replace)
    assert not accepted.any()
    counts = torch.bincount(answers[:, 0], minlength=6).double().numpy()
    assert metrics.chi_square(counts, q[0, 0].double().numpy() * 50_000) > 0.001


def test_a_draft_that_equals_the_target_is_never_rejected():
    guesses, _, q, stake, keep, replace = drafted_blocks(10_000)
    accepted, answers = decode.reject(guesses, q[:, :2], q, stake, keep, replace)
    assert (accepted == 2).all() and torch.equal(answers[:, :2], guesses)


@pytest.mark.parametrize("mode", ["rejection", "greedy_draft"])
@pytest.mark.parametrize("sampling", [FLAT, BENT], ids=["flat", "bent"])
def test_sampled_texts_are_distributed_as_the_targets(endless, learnt_draft, mode, sampling):
    prompt, draws = prompts(endless, 1)[0], 3000
    traces = decode_speculative(
        endless, learnt_draft, [prompt] * draws, 5, 4, dataclasses.replace(sampling, mode=mode, seed=1)
    )
    weights, texts = torch.ones(1), torch.tensor([prompt])
    for place in range(2):  # the exact distribution of the first tokens, over all texts before them
        logits = endless.model(texts).logits[:, -1]
        q = weights[:, None] * decode.warp(logits, sampling)
        counts = np.bincount([t.tokens[place] for t in traces], minlength=endless.vocab_size)
        assert metrics.chi_square(counts, q.sum(0).double().numpy() * draws) > 0.001
        before, token = (q > 1e-7).nonzero().T
        weights, texts = q[before, token], torch.cat([texts[before], token[:, None]], dim=1)
    alone = decode_target(endless, [prompt] * draws, 5, dataclasses.replace(sampling, seed=2))
    for place in range(1, 5):
        ours, theirs = (np.bincount([t.tokens[place] for t in some], minlength=300) for some in (traces, alone))
        assert metrics.two_samples(ours, theirs) > 0.001
    assert metrics.acceptance_length(traces) > 1.1, "a draft that is never accepted tests little"


def test_in_decoding_each_slot_is_accepted_as_often_as_the_distributions_overlap(endless, learnt_draft, monkeypatch):
    slots, reject = [[], [], []], decode.reject

    def watched(guesses, p, q, stake, keep, replace):
        accepted, answers = reject(guesses, p, q, stake, keep, replace)
        overlap = torch.minimum(p, q[:, :-1]).sum(-1)
        for slot in range(guesses.shape[1]):
            reached = (accepted >= slot) & (stake > slot)
            slots[slot] += zip(overlap[reached, slot].tolist(), (accepted[reached] > slot).tolist())
        return accepted, answers

    monkeypatch.setattr(decode, "reject", watched)
    traces = decode_speculative(endless, learnt_draft, prompts(endless, 2) * 800, 8, 4, FLAT)
    for slot, rate in zip(slots, metrics.conditional_acceptance(traces, 4)):
        overlap, kept = np.array(slot).T
        assert rate == pytest.approx(kept.mean())
        spread = (overlap * (1 - overlap)).sum() ** 0.5 / len(slot)
        assert abs(rate - overlap.mean()) < 3.3 * spread and len(slot) > 300


@pytest.mark.parametrize("mode", ["rejection", "greedy_draft"])
def test_a_seed_repeats_a_text_whatever_its_company_is(endless, learnt_draft, mode):
    asked, sampling = prompts_of_all_lengths(endless), Sampling(1.0, mode=mode, seed=7)
    together = decode_speculative(endless, learnt_draft, asked, 16, 8, sampling)
    again = decode_speculative(endless, learnt_draft, asked, 16, 8, sampling)
    alone = [
        decode_speculative(endless, learnt_draft, [prompt], 16, 8, sampling, streams=[row])[0]
        for row, prompt in enumerate(asked)
    ]
    assert [t.tokens for t in together] == [t.tokens for t in again] == [t.tokens for t in alone]
    assert [rounds_of(t) for t in together] == [rounds_of(t) for t in alone]
    targets = decode_target(endless, asked, 16, sampling)
    assert [t.tokens for t in targets[2:4]] == [
        t.tokens for t in decode_target(endless, asked[2:4], 16, sampling, streams=[2, 3])
    ]
    other = decode_speculative(endless, learnt_draft, asked, 16, 8, dataclasses.replace(sampling, seed=8))
    assert [t.tokens for t in together] != [t.tokens for t in other]
    twins = decode_speculative(endless, learnt_draft, asked[:1] * 2, 16, 8, sampling)
    assert twins[0].tokens != twins[1].tokens


@pytest.mark.parametrize("mode", ["rejection", "greedy_draft"])
def test_the_best_token_alone_is_greedy_decoding(endless, learnt_draft, mode):
    for prompt in prompts(endless, 3):
        (trace,) = decode_speculative(endless, learnt_draft, [prompt], 16, 8, Sampling(1.0, top_k=1, mode=mode))
        greedy = speculate(endless, learnt_draft, prompt, 16, 8)
        assert trace.tokens == greedy.tokens == generate(endless, prompt, 16)
        assert rounds_of(trace) == rounds_of(greedy)


def test_a_sampling_has_a_name_and_refuses_what_it_cannot_be():
    assert Sampling().protocol == "greedy"
    assert BENT.protocol == "rejection, temperature 0.7, top-k 5, top-p 0.9"
    assert Sampling(1.0, mode="greedy_draft").protocol == "greedy_draft, temperature 1"
    with pytest.raises(UserError, match="rejection or greedy_draft, got typical"):
        Sampling(mode="typical")
    cold = [{"temperature": value} for value in (-1.0, float("nan"), 1e-39)]
    for bad in (*cold, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(UserError, match="expected temperature 0 or >= 1e-06"):
            Sampling(**bad)


# ---- what a round may cost


def test_a_round_runs_each_model_once_and_no_buffer_ever_moves(endless, monkeypatch):
    prompt = prompts(endless, 1)[0]
    text = prompt + generate(endless, prompt, 24)
    forwards, buffers, rows = [], set(), []
    forward, products = endless.forward, type(endless.ends.head).products

    def watched(ids, cache, layer_ids=()):
        forwards.append(ids.shape[1])
        result = forward(ids, cache, layer_ids)
        buffers.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
        return result

    def counted(head, hidden):
        assert hidden.ndim == 2 and hidden.is_contiguous()
        rows.append(len(hidden))
        return products(head, hidden)

    monkeypatch.setattr(endless, "forward", watched)
    monkeypatch.setattr(type(endless.ends.head), "products", counted)
    trace = speculate(endless, Scripted(endless, text, 8, 0.3), prompt, 24)
    rounds = trace.rounds
    assert len(buffers) == 1
    assert len(forwards) == 1 + len(rounds) and forwards[0] == len(prompt) and set(forwards[1:-1]) == {8}
    # The head: one row for the prompt; then the drafted slots and the block's positions of each round.
    assert rows[0] == 1 and rows[1:-2] == [7, 8] * (len(rounds) - 1)


def test_rounds_account_for_the_decoding_time(endless):
    prompt = prompts(endless, 1)[0]
    trace = speculate(endless, random_draft(endless, 4), prompt, 16)
    parts = sum(r.draft_seconds + r.verify_seconds + r.commit_seconds for r in trace.rounds)
    assert parts == pytest.approx(trace.seconds)
    assert all(min(r.draft_seconds, r.verify_seconds, r.commit_seconds) > 0 for r in trace.rounds)


# ---- refusals and divergences


@pytest.mark.parametrize("prompt, words", [([], "at least one token"), ([5, 300], r"ids below 300, got 5..300")])
def test_prompts_that_cannot_be_decoded_are_refused(target, prompt, words):
    with pytest.raises(UserError, match=words):
        decode_target(target, [prompt], 4)
    with pytest.raises(UserError, match=words):
        speculate(target, random_draft(target, 4), prompt, 4)


def test_a_prompt_longer_than_the_drafts_positions_is_refused(target):
    draft = Draft(dataclasses.replace(spec(target, 4), max_position_embeddings=10)).eval()
    assert len(speculate(target, draft, [65] * 6, 4).tokens) <= 4
    with pytest.raises(UserError, match="prompt of 7 tokens .* 4: the draft has 10 positions"):
        speculate(target, draft, [65] * 7, 4)


def test_a_block_without_a_drafted_token_is_refused(target):
    with pytest.raises(UserError, match="at least 2 .* got 1"):
        speculate(target, random_draft(target, 4), [1, 2], 4, block_size=1)


def test_a_divergence_says_where_and_how_sure_the_target_was(endless):
    prompt = prompts(endless, 1)[0]
    text = generate(endless, prompt, 12)
    assert decode.divergence(endless, prompt, text, list(text)) is None
    other = text[:7] + [(text[7] + 1) % 256] + text[8:]
    found = decode.divergence(endless, prompt, other, text)
    with torch.no_grad():
        best = endless.model(torch.tensor([prompt + text[:7]])).logits[0, -1].topk(2).values
    assert (found.position, found.ours, found.theirs) == (7, other[7], text[7])
    assert found.gap == pytest.approx(float(best[0] - best[1]), abs=1e-3)


def test_an_output_that_ended_early_diverges_where_it_ended(endless):
    prompt = prompts(endless, 1)[0]
    text = generate(endless, prompt, 6)
    found = decode.divergence(endless, prompt, text[:4], text)
    assert (found.position, found.ours, found.theirs) == (4, None, text[4])


# ---- the packaged target; all prompts and texts: evals/losslessness.py


def test_the_packaged_target_decodes_as_generate_does_with_and_without_a_draft(packaged):
    for prompt in prompts(packaged, 1):
        expected = generate(packaged, prompt, 20)
        assert decode_target(packaged, [prompt], 20)[0].tokens == expected
        scripted = Scripted(packaged, prompt + expected, 8, 0.2)
        assert speculate(packaged, scripted, prompt, 20).tokens == expected
        assert speculate(packaged, random_draft(packaged, 8), prompt, 20).tokens == expected


# ---- a draft of the layout next, with a head that drafts token by token


def dspark_draft(target, kind):
    """Overfitted like `learnt_draft`: slot k learns the token at a+k+1 and is told the one at a+k."""
    size = 7
    config = DraftConfig(
        block_size=size, num_hidden_layers=2, target_layer_ids=list(LAYERS), variant="dspark", markov_head=kind,
        markov_rank=16, confidence=True,
    )
    draft = Draft(adapt(target.config, config, target.mask_token_id))
    draft.reset(0)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    mask, head = torch.tensor(target.mask_token_id), target.ends.head
    texts = [torch.tensor(p + generate(target, p, LIMIT)) for p in prompts(target, 2)]
    for step in range(60):
        loss = 0.0
        for ids in texts:
            torch.manual_seed(step)
            anchors = 4 + torch.randperm(len(ids) - size - 4)[:16]
            inputs = torch.cat([ids[anchors, None], mask.expand(len(anchors), size - 1)], dim=1)
            features, _ = target.tapped(ids[None], torch.tensor([len(ids)]), LAYERS)
            hidden = draft(features.clone(), target.ends.embedding(inputs[None]), anchors[None])[0]
            places = anchors[:, None] + torch.arange(size)
            latents = draft.markov_head(hidden, ids[places])
            logits = draft.logits(head, hidden.flatten(0, 1), latents.flatten(0, 1))
            loss = loss + F.cross_entropy(logits, ids[places + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    opinionated(draft)
    return draft.eval()


def opinionated(draft):
    """Give a confidence head, which learns nothing here, opinions that vary with the state and the token before."""
    with torch.no_grad():
        weight = torch.randn(draft.confidence_head.proj.weight.shape, generator=torch.Generator().manual_seed(3))
        vector = draft.markov_head.markov_w1.weight.std() if draft.spec.markov_head else 1.0
        weight[:, : draft.spec.hidden_size] *= 0.15
        weight[:, draft.spec.hidden_size :] *= 0.5 / vector
        draft.confidence_head.proj.weight.copy_(weight)
        draft.confidence_head.proj.bias.fill_(1.0)


def token_by_token(target, draft, size):
    """The oracle's propose: the training forward over the whole text, then the Markov head on its own tokens."""

    def propose(text, features):
        block = torch.tensor([text[-1]] + [draft.spec.mask_token_id] * (size - 1))
        padded = torch.cat([features, torch.zeros_like(features[:1])])[None]
        tokens = [text[-1]]
        with torch.no_grad():
            hidden = draft(padded, target.ends.embedding(block)[None, None], torch.tensor([[len(text) - 1]]))[0, 0]
            for k in range(size):
                latents = draft.markov_head(hidden[: k + 1], torch.tensor(tokens))
                logits = hidden[k] @ target.ends.head.weight.T + draft.markov_head.markov_w2(latents[k])
                tokens.append(int(logits.argmax()))
        return tokens[1:]

    return propose


@pytest.fixture(scope="module", params=["vanilla", "gated", "rnn"])
def dspark(request, endless):
    return dspark_draft(endless, request.param)


@pytest.mark.parametrize("size", [2, 7, 9])
def test_a_dspark_draft_gives_the_oracles_rounds_and_the_targets_text(endless, dspark, size):
    """A block of B tokens drafts B, so that a round commits up to B + 1."""
    longest = 0
    for prompt in (prompts(endless, 3)[0], prompts(endless, 3)[2]):
        trace = speculate(endless, dspark, prompt, LIMIT, size)
        propose = token_by_token(endless, dspark, size)
        tokens, rounds = oracle(endless, propose, prompt, LIMIT, size + 1, endless.eos_token_ids)
        assert trace.tokens == tokens == generate(endless, prompt, LIMIT)
        assert rounds_of(trace) == rounds
        longest = max(longest, *(r.accepted for r in trace.rounds))
    assert longest >= min(size, 4), "the draft has not learnt its text"


def test_the_heads_weights_are_read_once_for_all_of_a_blocks_slots(endless, dspark, monkeypatch):
    head, rows = type(endless.ends.head), []
    products = head.products
    monkeypatch.setattr(head, "products", lambda self, hidden: rows.append(len(hidden)) or products(self, hidden))
    trace = speculate(endless, dspark, prompts(endless, 1)[0], 24)
    size = dspark.spec.block_size
    assert len(trace.rounds) > 8 and rows[:17] == [1] + [size, size + 1] * 8


def test_a_dspark_batch_writes_what_each_prompt_alone_writes(endless, dspark):
    asked = prompts_of_all_lengths(endless)
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        together = decode_speculative(endless, dspark, asked, 16, None, sampling)
        for row, prompt in enumerate(asked):
            (alone,) = decode_speculative(endless, dspark, [prompt], 16, None, sampling, streams=[row])
            assert alone.tokens == together[row].tokens and rounds_of(alone) == rounds_of(together[row])


@pytest.mark.parametrize("draws, batch", [(3000, 3000), (1000, 20)], ids=["whole blocks", "by schedule"])
def test_texts_sampled_with_a_dspark_draft_are_distributed_as_the_targets(endless, dspark, draws, batch):
    """All at once, or in batches that are small enough for a schedule to choose."""
    prompt, ours = prompts(endless, 1)[0], []
    plan = None if batch == draws else PLAN
    for start in range(0, draws, batch):
        streams = range(start, start + batch)
        ours += decode_speculative(endless, dspark, [prompt] * batch, 5, 3, FLAT, streams, plan)
    theirs = decode_target(endless, [prompt] * draws, 5, Sampling(1.0, seed=1))
    for place in range(1, 5):
        counts = (np.bincount([t.tokens[place] for t in some], minlength=300) for some in (ours, theirs))
        assert metrics.two_samples(*counts) > 0.001
    assert metrics.acceptance_length(ours) > 1.02, "a draft that is never accepted tests little"


# ---- the confidence head and its schedule


PLAN = Schedule({1: [1.0, 1.4, 1.7, 2.0, 2.3, 2.6, 2.9, 3.2, 3.5, 3.8]})
"""Rounds in which a drafted token has to be likely to be worth its verification, whatever the number of rows."""


def test_rounds_keep_the_confidence_in_what_was_drafted(endless, dspark):
    """Recomputed without a cache: the head at each slot's state and the draft's own token before it."""
    prompt = prompts(endless, 3)[2]
    trace = speculate(endless, dspark, prompt, LIMIT)
    text, size = prompt + trace.tokens[:1], dspark.spec.block_size
    propose = token_by_token(endless, dspark, size)
    for each in trace.rounds:
        features = recomputed(endless, text)[1][:-1]
        tokens = [text[-1], *propose(text, features)]
        block = torch.tensor([text[-1]] + [dspark.spec.mask_token_id] * (size - 1))
        padded = torch.cat([features, torch.zeros_like(features[:1])])[None]
        with torch.no_grad():
            hidden = dspark(padded, endless.ends.embedding(block)[None, None], torch.tensor([[len(text) - 1]]))[0, 0]
            expected = dspark.confidence(hidden, torch.tensor(tokens[:-1]))
        assert len(each.confidence) == each.drafted
        np.testing.assert_allclose(each.confidence, expected[: each.drafted], atol=1e-3, rtol=1e-3)
        text += trace.tokens[len(text) - len(prompt) :][: each.committed]
    assert np.std([logit for r in trace.rounds for logit in r.confidence]) > 0.5, "a head without opinions tests little"


def test_without_a_confidence_head_there_is_no_confidence_and_no_schedule(endless, learnt_draft):
    prompt = prompts(endless, 1)[0]
    assert {r.confidence for r in speculate(endless, learnt_draft, prompt, 12).rounds} == {()}
    with pytest.raises(UserError, match="eval.schedule=confidence: needs draft.confidence=true"):
        decode_speculative(endless, learnt_draft, [prompt], 12, schedule=PLAN)


def test_a_schedule_verifies_what_its_rule_says_and_no_more(endless, dspark, monkeypatch):
    """Calibrated, in a batch: as many positions as the rule admits for all rows together go through the target."""
    dspark = copy.copy(dspark)
    dspark.spec = dataclasses.replace(dspark.spec, confidence_temperatures=(2.0, 0.5))
    forward, length, verified, chosen = endless.forward, Schedule.length, [], []

    def watched(ids, *rest):
        verified.append(ids.shape[1])
        return forward(ids, *rest)

    def asked(plan, reached, stake):
        chosen.append((reached, list(stake), length(plan, reached, stake)))
        return chosen[-1][2]

    monkeypatch.setattr(endless, "forward", watched)
    monkeypatch.setattr(Schedule, "length", asked)
    traces = decode_speculative(endless, dspark, prompts_of_all_lengths(endless), LIMIT, schedule=PLAN)
    assert verified[1:] == [1 + length for *_, length in chosen]
    calls = [list(filter(None, some)) for some in zip_longest(*(trace.rounds for trace in traces))]
    assert len(calls) == len(chosen)
    for rounds, (reached, stake, length) in zip(calls, chosen):
        assert len(reached) == len(rounds) == rounds[0].rows
        assert sorted(min(own, length) for own in stake) == sorted(r.drafted for r in rounds)
        by_confidence = [reach(np.array(r.confidence), (2.0, 0.5)).tolist() for r in rounds]
        assert sorted(by_confidence) == sorted(row[: min(own, length)].tolist() for row, own in zip(reached, stake))
    assert len({length for *_, length in chosen}) > 2, "a schedule that always says the same tests little"


def test_a_schedule_saves_verification_and_keeps_the_text(endless, dspark):
    asked = prompts(endless, 4)
    whole, planned = ([decode_speculative(endless, dspark, [p], LIMIT, schedule=s)[0] for p in asked]
                      for s in (None, PLAN))  # fmt: skip
    assert [t.tokens for t in planned] == [t.tokens for t in whole] == [generate(endless, p, LIMIT) for p in asked]
    assert 0 < metrics.verified_tokens(planned) < metrics.verified_tokens(whole)


VARIANTS = {
    "dflash": {}, "dflare": {"variant": "dflare"}, "gated": {"variant": "gated"}, "a reduced vocabulary": {"vocab": 90},
    "dspark without a Markov head": {"variant": "dspark", "confidence": True},
    **{f"dspark, {kind}": {"variant": "dspark", "markov_head": kind, "markov_rank": 16, "confidence": True}
       for kind in ("vanilla", "gated", "rnn")},
    "dspark with a reduced vocabulary":
        {"variant": "dspark", "markov_head": "vanilla", "markov_rank": 16, "confidence": True, "vocab": 90},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_fifty_prompts_are_lossless_with_every_variant_whole_or_by_schedule(target, name):
    chosen = DraftConfig(block_size=5, num_hidden_layers=2, target_layer_ids=list(LAYERS), **VARIANTS[name])
    draft, asked = Draft(adapt(target.config, chosen, target.mask_token_id)), prompts(target, 50)
    initialise(draft, target, "target_layers", 0, torch.tensor([asked[0]]))
    if chosen.vocab is not None:
        draft.set_vocabulary(torch.arange(40, 40 + chosen.vocab))
    if chosen.confidence:
        opinionated(draft)
    expected = [t.tokens for t in decode_target(target, asked, 20)]
    assert expected[:5] == [generate(target, prompt, 20) for prompt in asked[:5]]
    for plan in (None, PLAN)[: 1 + chosen.confidence]:
        traces = [
            trace for at in range(0, 50, 10)
            for trace in decode_speculative(target, draft.eval(), asked[at : at + 10], 20, schedule=plan)
        ]  # fmt: skip
        assert [t.tokens for t in traces] == expected
        drafted = {r.drafted for t in traces for r in t.rounds[:-6]}
        assert plan is None or len(drafted) > 2
    assert metrics.acceptance_length(traces) > 1, "a draft that is never accepted tests little"


class Chain:
    """A target of four tokens whose next token hangs on the last one alone: its texts have known probabilities."""

    device, dtype, vocab_size, max_positions, eos_token_ids = torch.device("cpu"), torch.float32, 4, 99, frozenset()
    config = LlamaConfig(hidden_size=4, num_attention_heads=1, num_hidden_layers=1)
    table = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.2, 0.2, 0.3, 0.3], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.4, 0.1]])
    ends = Ends(torch.nn.Embedding.from_pretrained(torch.eye(4)), Head(table.log().T.contiguous()))

    def forward(self, ids, cache, layer_ids=()):
        cache.layers[0].length += ids.shape[1]
        return self.ends.embedding(ids), self.ends.embedding(ids)


class ChainDraft:
    """Drafts with the chain's own probabilities, but for a share of errors. After tokens 0 and 1 it is sure."""

    spec = dataclasses.replace(
        adapt(LlamaConfig(vocab_size=4, hidden_size=4, num_attention_heads=1, num_hidden_layers=4,
                          rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
              DraftConfig(block_size=3, num_hidden_layers=1, target_layer_ids=[0]), 3),
        label_layout="next", variant="dspark", markov_head="vanilla", markov_rank=4, confidence=True,
    )  # fmt: skip

    def __init__(self):
        self.markov_head = self

    def head(self, head):
        self.lent = head
        return head

    def start(self, max_length, batch=1):
        return KVCache(self.spec, batch, max_length, dtype=torch.float32, device="cpu")

    def extend(self, cache, features):
        cache.layers[0].length += features.shape[1]

    def propose(self, cache, embeds):
        return torch.zeros_like(embeds)

    def step(self, hidden, previous, state):
        return F.one_hot(previous, 4).float(), None

    def correction(self, latent, dtype):
        return (0.8 * self.lent.logits(latent).softmax(-1) + 0.05).log()

    def confidence(self, hidden, previous):
        return torch.where(previous < 2, 3.0, -3.0)


def peeking(reached, stake, seconds):
    """The rule without its early stop."""
    tokens = [len(reached) + reached[:, :length].sum() for length in range(reached.shape[1] + 1)]
    return int(np.argmax(np.array(tokens) / seconds[: len(tokens)]))


def texts_of_the_chain(rule, monkeypatch, seconds, draws=700):
    """The p-value of the texts' next three tokens after a prompt, under a rule of the verified length."""
    monkeypatch.setattr(schedule, "verified_length", rule)
    counts, q = np.zeros((4, 4, 4)), Chain.table.double().numpy()
    for stream in range(draws):
        plan = Schedule({1: seconds})
        (trace,) = decode_speculative(Chain(), ChainDraft(), [[0]], 5, None, FLAT, [stream], plan)
        counts[tuple(trace.tokens[:3])] += 1
    expected = draws * q[0][:, None, None] * q[:, :, None] * q[None]
    return metrics.chi_square(counts.ravel(), expected.ravel())


@pytest.mark.parametrize("seconds", [[1.0, 1.6, 2.0, 2.4], [1.0, 2.05, 2.2, 2.3]])
def test_texts_under_a_schedule_that_stops_early_are_distributed_as_the_targets(monkeypatch, seconds):
    assert texts_of_the_chain(schedule.verified_length, monkeypatch, seconds) > 0.001


def test_texts_under_one_that_looks_at_later_tokens_are_not(monkeypatch):
    assert texts_of_the_chain(peeking, monkeypatch, [1.0, 2.05, 2.2, 2.3]) < 1e-6


# ---- a reduced draft vocabulary


@pytest.mark.parametrize("size", [2, 40, 300])
def test_a_draft_with_a_reduced_vocabulary_changes_no_token_and_guesses_among_its_own(endless, learnt_draft, size):
    draft = Draft(dataclasses.replace(learnt_draft.spec, draft_vocab_size=size))
    draft.load_state_dict(learnt_draft.state_dict(), strict=False)
    often = torch.bincount(torch.tensor(generate(endless, prompts(endless, 1)[0], LIMIT)), minlength=endless.vocab_size)
    draft.set_vocabulary(often.argsort(descending=True, stable=True)[:size])
    head, rows = draft.head(endless.ends.head), torch.randn(20, endless.hidden_size)
    assert set(head.greedy(rows).tolist()) <= set(draft.token_ids.tolist())
    for prompt in prompts(endless, 4):
        trace = speculate(endless, draft.eval(), prompt, LIMIT)
        assert trace.tokens == generate(endless, prompt, LIMIT)
        expected = oracle(endless, training_forward(endless, draft, 8), prompt, LIMIT, 8, endless.eos_token_ids)
        assert rounds_of(trace) == expected[1]


def test_a_sampled_draft_with_a_reduced_vocabulary_gives_the_targets_distribution(endless, learnt_draft):
    draft = Draft(dataclasses.replace(learnt_draft.spec, draft_vocab_size=40))
    draft.load_state_dict(learnt_draft.state_dict(), strict=False)
    draft.set_vocabulary(torch.arange(60, 100))
    prompt, draws = prompts(endless, 1)[0], 2000
    ours = decode_speculative(endless, draft.eval(), [prompt] * draws, 4, 3, FLAT)
    theirs = decode_target(endless, [prompt] * draws, 4, Sampling(1.0, seed=1))
    for place in range(1, 4):
        counts = (np.bincount([t.tokens[place] for t in some], minlength=300) for some in (ours, theirs))
        assert metrics.two_samples(*counts) > 0.001
