"""The benchmarks run, on the tiny target. What they measure means something only on an idle machine."""

import re
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import torch

from draftlab import config
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.target import load_target

FOLDER = Path(__file__).parent / "benchmarks"
TINY = ["--config", str(config.CONFIGS / "tiny.yaml")]


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch):
    """A script's folder comes first on sys.path when it runs."""
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture(scope="module")
def tiny():
    run = config.load(config.CONFIGS / "tiny.yaml")
    return load_target(run.target), run


def test_a_training_step_stands_beside_the_plain_script_and_its_products(capsys):
    bench = import_module("bench_train")
    assert bench.main([*TINY, "--block-sizes", "4", "--rounds", "1", "--vocab", "64"]) == 0
    said = capsys.readouterr().out
    names = ("plain", "plain, target in the loop", "draftlab", "draftlab, vocab 64", "products alone")
    assert all(re.search(rf"^{name} +\d+", said, re.MULTILINE) for name in names)


def test_the_plain_script_has_draftlabs_gradients_from_the_same_weights(tiny):
    """The same slots, labels and weights: what differs between the two is how they are computed."""
    bench, train = import_module("bench_train"), import_module("draftlab.train")
    target, run = tiny
    run = run.replace({"draft.init": "random"})
    prepared = train.prepare({"one": run}, lambda *_, **__: None)
    ours = import_module("measuring").Steps(run, prepared, target)
    plain, looped = (bench.Plain(run, prepared, target, in_the_loop=looped) for looped in (False, True))
    assert plain()[0] == ours()[0] == looped()[0] > 0
    for own, theirs in zip(ours.loop.draft.parameters(), plain.draft.parameters(), strict=True):
        assert own.grad.any()
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-3, atol=1e-6)
    slots = [ours()[0] for _ in range(3)]
    assert [plain()[0] for _ in range(3)] == [looped()[0] for _ in range(3)] == slots


@pytest.mark.parametrize("setting", ["draft.vocab=64", "train.compile=true", "loss.gamma=2", "draft.block_size=8"])
def test_a_setting_that_one_side_alone_would_obey_is_refused(setting):
    with pytest.raises(UserError, match=f"override '{setting}': "):
        import_module("bench_train").main([*TINY, setting])


def test_recorded_products_are_all_that_there_are():
    bench = import_module("bench_train")
    x = torch.randn(6, 4, requires_grad=True)
    with bench.Products() as products:
        (torch.nn.functional.linear(x, torch.randn(5, 4)) ** 2).sum().backward()
    assert [[tuple(shape) for shape, *_ in pair] for pair in products.seen] == [[(6, 4), (4, 5)], [(6, 5), (5, 4)]]
    tokens, seconds = products.again()
    assert tokens == 0 and seconds > 0


def test_the_corpus_writer_writes_what_generate_writes(capsys):
    bench = import_module("bench_corpus")
    shape = ["--prompts", "6", "--tokens", "12", "--rounds", "1", "corpus.write_batch=4"]
    assert bench.main([*TINY, *shape]) == 0
    said = capsys.readouterr().out
    assert "answers that differ: 0 of 6" in said and re.search(r"^draftlab +[\d.]+ tokens/s", said, re.MULTILINE)


def test_decoding_and_the_plain_loop_write_the_same_in_the_same_rounds(swept, capsys):
    bench, draft = import_module("bench_decode"), swept.folder / "trials" / "block_size_4" / "draft"
    shape = ["--ckpt", str(draft), "--batches", "1,3", "--tokens", "48", "--rounds", "1"]
    bench.main([*TINY, *shape])  # the exit code depends on the clock
    said = capsys.readouterr().out
    assert "same text: True" in said and said.count("texts that differ: 0") == 2
    counts = re.findall(r"(\d+) tokens in (\d+) rounds", said)
    assert len(counts) == 4 and len(set(counts)) == 1
    tokens, rounds = map(int, counts[0])
    assert tokens - len(bench.QUESTIONS) - rounds > 2, "a draft that is never accepted tests little"
    with pytest.raises(UserError, match="--ckpt has its own"):
        bench.main([*TINY, *shape, "draft.num_hidden_layers=2"])


def test_the_plain_draft_drafts_as_ours_does(tiny):
    """Two rows of unlike length, two rounds: the second reads features of its own."""
    bench, (target, run) = import_module("bench_decode"), tiny
    draft = Draft(adapt(target.config, run.draft, target.mask_token_id)).eval()
    draft.reset(1)
    plain, torch_random = bench.PlainDraft(draft, target.ends.head), torch.Generator().manual_seed(0)
    features = torch.randn(1, 9, target.hidden_size, generator=torch_random)
    embeds = torch.randn(1, 4, target.hidden_size, generator=torch_random)
    cache, theirs = draft.start(9), bench.DynamicCache()
    with torch.inference_mode():
        for start, end in ((0, 6), (6, 9)):
            draft.extend(cache, features[:, start:end])
            positions = torch.arange(start, end + 4)[None]
            found = plain(features[:, start:end], embeds, positions, None, theirs)
            theirs.crop(-4)
            assert torch.allclose(found, draft.propose(cache, embeds), atol=1e-5)


def test_the_profile_names_every_part(tmp_path, capsys):
    bench = import_module("profile_step")
    assert bench.main([*TINY, "--quick", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "profile.png").stat().st_size > 10_000
    for name in ("backward", "optimizer", "head, loss and its gradient", "draft's cache", "chunked MB"):
        assert name in said


def test_a_part_does_not_count_what_is_inside_it(monkeypatch):
    measuring, clock = import_module("measuring"), iter(range(100))
    monkeypatch.setattr(measuring, "now", lambda: next(clock))

    class Work:
        def inner(self):
            next(clock)

        def outer(self):
            self.inner()

    with measuring.Parts(("in", Work, "inner"), ("out", Work, "outer")) as parts:
        Work().outer()
    assert parts.seconds == {"in": 2, "out": 2} and parts.total == 6 and parts.rest == 2
    assert Work.inner.__name__ == "inner"  # as before


def test_ways_take_turns_and_the_first_round_does_not_count():
    measuring, order = import_module("measuring"), []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert measuring.alternate(ways, 2) == {"a": [4, 5], "b": [3, 6]}
    assert order == list("abbaab")


def test_a_sweep_and_separate_runs_are_asked_for_as_the_scripts_understand(monkeypatch, capsys):
    bench = import_module("bench_sweep")

    def dry(script, *arguments):
        import_module(f"experiments.{Path(script).stem}").main([*arguments, "--dry-run"])
        return 1.0

    monkeypatch.setattr(bench, "seconds", dry)
    assert bench.main([*TINY, "--trials", "2", "--separate", "1"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"\b2 trials, 1 at once", said) and re.search(r"\b1 trials, 1 at once", said)
    assert "2 separate runs: 2 s (by their mean)\nthe sweep takes 50.0% of them" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["bench_train", "bench_corpus", "bench_decode", "bench_quality", "profile_step"])
def test_without_a_gpu_cuda_is_skipped_visibly(name, capsys):
    assert import_module(name).main([*TINY, "--device", "cuda"]) == 0
    assert "skipped: --device cuda" in capsys.readouterr().out


def test_the_default_recipe_and_the_published_one_are_scored_alike(tmp_path, capsys, monkeypatch):
    bench, scored = import_module("bench_quality"), []
    curve = bench.curve

    def watched(step, score, *rest):
        drafted = step.draft if isinstance(step, bench.Plain) else step.loop.draft
        scored.append(score.__self__.draft is drafted)
        return curve(step, score, *rest)

    monkeypatch.setattr(bench, "curve", watched)
    bench.main([*TINY, "--seconds", "1", "--seeds", "0", "--points", "2", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert scored == [True, True]
    assert "seed 0: the published recipe gets to 1." in said and (tmp_path / "curves.png").stat().st_size > 10_000
    frame = pd.read_csv(tmp_path / "curves.csv")
    assert list(frame["recipe"]) == ["published"] * 3 + ["draftlab"] * 3
    assert frame["acceptance_length"].between(1, 8).all()
    ends = frame.groupby("recipe")["seconds"].max()
    assert ends["published"] >= 1 and 1 / 3 <= ends["draftlab"] < ends["published"]


def test_the_moment_at_which_a_curve_gets_there():
    bench = import_module("bench_quality")
    curve = [(0.0, 1.0), (10.0, 1.2), (20.0, 1.1), (30.0, 1.3)]
    assert [bench.first(curve, aim) for aim in (1.0, 1.15, 1.2, 1.25, 1.4)] == [0, 10, 10, 30, None]
    assert bench.told_of(10.0, 100.0, 5.0) == "is there after 10 s, 10% of 100; with the features 15 s, 15%"
