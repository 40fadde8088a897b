"""Speculative decoding against the target alone, against transformers' `generate`, and against an independent oracle
that keeps no cache and recomputes everything in every round, written from the definition of a round."""

import random

import pytest
import torch
import torch.nn.functional as F

from draftlab import decode
from draftlab.config import DraftConfig, TargetConfig
from draftlab.decode import decode_speculative, decode_target, generate
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.target import layer_output_index, load_target

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
        return target.ends.head.logits(hidden[0, 0, 1:]).argmax(-1).tolist()

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
            assert end.drafted == (end.accepted if end.committed == end.accepted else end.drafted)
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


# ---- what a round may cost


def test_a_round_runs_each_model_once_and_no_buffer_ever_moves(endless, monkeypatch):
    prompt = prompts(endless, 1)[0]
    text = prompt + generate(endless, prompt, 24)
    forwards, buffers, rows = [], set(), []
    forward, logits = endless.forward, type(endless.ends.head).logits

    def watched(ids, cache, layer_ids=()):
        forwards.append(ids.shape[1])
        result = forward(ids, cache, layer_ids)
        buffers.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
        return result

    def counted(head, hidden):
        assert hidden.ndim == 2 and hidden.is_contiguous()
        rows.append(len(hidden))
        return logits(head, hidden)

    monkeypatch.setattr(endless, "forward", watched)
    monkeypatch.setattr(type(endless.ends.head), "logits", counted)
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
