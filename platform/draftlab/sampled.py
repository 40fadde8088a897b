"""Are sampled texts distributed as the target's? Tests of speculative decoding at temperature 1, in both modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from draftlab import decode, metrics
from draftlab.config import DraftConfig, TargetConfig
from draftlab.decode import MODES, Sampling, decode_speculative, decode_target
from draftlab.draft import Draft, adapt
from draftlab.schedule import Schedule
from draftlab.target import Target, load_target

Say = Callable[..., None]

PLACES = 3
"""Tokens of each text that are counted: the prefill's and two of the rounds'."""
LOWEST = 0.001
"""A p-value below it is a difference; where there is none it comes once in a thousand tests."""


def check_exactly(draws: int, say: Say) -> bool:
    """Do the tiny target's texts have its exact probabilities (chi-square), and does a broken rule show?

    Args:
        draws: texts in each mode.
        say: progress, and a line a test with the p-value of each place.
    """
    target = load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))
    chosen = DraftConfig(block_size=3, num_hidden_layers=2, target_layer_ids=[0, 2], vocab=None)
    draft, prompt = Draft(adapt(target.config, chosen, target.mask_token_id)).eval(), [75]
    draft.reset(5)  # after this prompt it agrees with the target comparatively often: 2 in 10 guesses are kept
    expected = draws * probabilities(target, prompt)

    def right(mode: str, what: str) -> bool:
        found = counts(target, draft, prompt, draws, 1000, Sampling(1.0, mode=mode))
        return _same(say, f"{what} against exact probabilities", map(metrics.chi_square, found, expected))

    say(f"{target.name}: {draws} texts each way", doing="sampling")
    lossless = all([right(mode, mode) for mode in MODES])
    with patch.object(decode, "reject", _without_residual(decode.reject)):
        return not right("rejection", "a rule without the residual") and lossless


def check_samples(
    target: Target, draft: Draft, prompt: Sequence[int], draws: int, say: Say, schedule: Schedule | None = None
) -> bool:
    """Does speculative decoding write what the target alone writes, as often (two-sample chi-square)?

    Args:
        draws: texts of the target alone, and of each mode.
        say: as in check_exactly.
        schedule: as in decode_speculative.
    """
    say(f"{target.name}: {draws} texts each way", doing="sampling")
    alone = counts(target, None, prompt, draws, 50, Sampling(1.0, seed=1))
    found = {mode: counts(target, draft, prompt, draws, 50, Sampling(1.0, mode=mode), schedule) for mode in MODES}
    return all(
        [_same(say, f"{mode} against the target alone", map(metrics.two_samples, found[mode], alone)) for mode in MODES]
    )


def counts(
    target: Target,
    draft: Draft | None,
    prompt: Sequence[int],
    draws: int,
    batch: int,
    sampling: Sampling,
    schedule: Schedule | None = None,
) -> np.ndarray:
    """(PLACES, V + 1) how often each token stood at each place; last, how often the text had ended before.

    Args:
        draft: None is the target alone.
        draws: texts, of which `batch` at a time are decoded.
    """
    result, limit = np.zeros((PLACES, target.vocab_size + 1), int), PLACES + 2
    for start in range(0, draws, batch):
        streams = range(start, min(start + batch, draws))
        prompts = [prompt] * len(streams)
        if draft is None:
            traces = decode_target(target, prompts, limit, sampling, streams)
        else:
            traces = decode_speculative(target, draft, prompts, limit, None, sampling, streams, schedule)
        for trace in traces:
            result[range(PLACES), (trace.tokens + [target.vocab_size] * PLACES)[:PLACES]] += 1
    return result


@torch.inference_mode()
def probabilities(target: Target, prompt: Sequence[int]) -> np.ndarray:
    """(PLACES, V + 1) the exact shares of what `counts` counts, summed over all texts before each place."""
    texts, weights, result = torch.tensor([prompt]), torch.ones(1, 1, dtype=torch.float64), []
    ends = torch.isin(torch.arange(target.vocab_size), torch.tensor(sorted(target.eos_token_ids)))
    for _ in range(PLACES):
        logits = torch.cat([target.model(part).logits[:, -1] for part in texts.split(3000)])
        q = weights * logits.double().softmax(-1)
        result.append(torch.cat([q.sum(0), 1 - q.sum()[None]]).clamp(min=0))
        before, tokens = (~ends).expand_as(q).nonzero().T
        texts, weights = torch.cat([texts[before], tokens[:, None]], dim=1), q[before, tokens][:, None]
    return torch.stack(result).numpy()


def _without_residual(reject: Callable) -> Callable:
    """The usual mistake: a rejected guess is replaced by a sample of q."""

    def broken(guesses: Tensor, p: Tensor, q: Tensor, stake: Tensor, keep: Tensor, replace: Tensor):
        accepted, answers = reject(guesses, p, q, stake, keep, replace)
        fresh = decode.draw(q.take_along_dim(accepted[:, None, None], 1)[:, 0], replace)
        return accepted, answers.scatter(1, accepted[:, None], fresh[:, None])

    return broken


def _same(say: Say, what: str, p_values: Iterable[float]) -> bool:
    p_values = list(p_values)
    same = not any(p < LOWEST for p in p_values)  # NaN: both sides always wrote the same
    say(f"{what}: {'no difference' if same else 'they differ'}, p {', '.join(f'{p:.2g}' for p in p_values)}")
    return same
