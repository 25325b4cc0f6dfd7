"""The whole evaluation with a model that knows the answers, one that knows nothing, and the real (untrained) one."""

import json
import math
import re
from dataclasses import replace

import miniatures as mini
import numpy as np
import pytest
import torch
from commands import evaluate_corpus, refusal
from drawn_shards import write_shard
from embedding import as_embedder, changed, similarity_scores
from tiny_tars import plain
from torch import nn

from prolip.corpora.emoji import uncertainty
from prolip.corpora.emoji.evaluate import evaluate_corpus as evaluated
from prolip.corpora.emoji.evaluate import gallery, recall_by_trace
from prolip.corpora.emoji.result import CorpusResult, calibration_lines, format_corpus, load
from prolip.evaluation.metrics.calibration import LOG_ODDS, reliability
from prolip.evaluation.metrics.selective import auroc, by_decile
from prolip.gaussian import Gaussian
from prolip.scores import TrueMatchScore
from prolip.uncertainty.doubt import Doubt, Evidence

GROUPS = {"nature": ("mammal", "bird"), "food": ("fruit",)}


def records(count=12):
    subgroups = [(group, subgroup) for group, members in GROUPS.items() for subgroup in members]
    for i in range(count):
        group, subgroup = subgroups[i % len(subgroups)]
        yield {"hexcode": str(i), "name": f"n{i}", "keywords": [f"k{i % 5}"], "subgroup": subgroup, "group": group}


def tokenize(texts):
    return torch.tensor([[ord(c) for c in text.ljust(20, "\0")] for text in texts])


class Knowing(nn.Module):
    """Embeds a drawing as its concept and a text as the mean of the concepts it is true of; general texts are wider."""

    def __init__(self, corpus):
        super().__init__()
        self.table = corpus.caption_table()
        self.concepts = len(corpus.concepts)

    def encode_image(self, x):
        concept = x[:, 0, 0, 0].long()
        mean = nn.functional.one_hot(concept, self.concepts).float()
        return Gaussian(mean, torch.full_like(mean, -8.0))

    def encode_text(self, ids):
        texts = ["".join(map(chr, row)).rstrip("\0") for row in ids.tolist()]
        rows = []
        for text in texts:
            known = next((i for i, t in enumerate(self.table.texts) if text.endswith(t) and t), None)
            rows.append(self.table.text_relation[known] if known is not None else np.ones(self.concepts))
        relation = torch.tensor(np.array(rows)).float()
        log_var = (relation.sum(1, keepdim=True).log() - 7).expand(-1, self.concepts)
        return Gaussian(nn.functional.normalize(relation, dim=-1), log_var)


@pytest.fixture
def shards(tmp_path):
    every = list(records())
    form = {"size": 32, "colour": lambda record: (int(record["hexcode"]), 0, 0)}  # its number is the red value
    test, names = tmp_path / "test.tar", tmp_path / "names.tar"
    return write_shard(test, "t", every[:9], **form), write_shard(names, "n", every, **form)


@pytest.fixture
def full(shards):
    return gallery([shards[0]], names=[shards[1]])


@pytest.fixture
def known(full):
    return evaluated(as_embedder(Knowing(full), tokenize, plain), full)


def test_a_model_that_knows_everything_scores_one_everywhere(known):
    m = known.metrics
    perfect = ("names/i2t/R@1", "names/t2i/R@1", "captions/i2t/mAP@R", "captions/t2i/mAP@R", "captions/t2i/R-Precision")
    assert {m[key] for key in perfect} == {1.0}
    assert m["names/i2t/R@10"] == m["names/t2i/R@5"] == 1 and "names/rsum" not in m
    assert not {"names/t2i/R@10", "names/t2i/chance_R@10"} & m.keys()  # among nine drawings
    table = format_corpus(known)
    assert re.search(r"names -> image +100.00 +100.00 +- ", table) and table.count("fewer candidates than k") == 1
    assert m["names/t2i/queries"] == 9 and m["names/t2i/queries_without_match"] == 3
    assert m["zero_shot/subgroup/top1"] == m["zero_shot/group_members/top1"] == 1.0
    assert m["zero_shot/subgroup/classes"] == 3
    assert m["prompts/i2t/R@1"] == m["prompts/a photo of a {}/i2t/R@1"] == 1.0
    assert m["names/i2t/chance_R@1"] == pytest.approx(1 / 12) and m["names/t2i/chance_R@5"] == pytest.approx(5 / 9)
    assert m["spearman/trace_true_matches"] == pytest.approx(1) and m["inclusion/name_in_group"] == 1.0
    assert m["trace/group"] > m["trace/subgroup"] > m["trace/keyword"] > m["trace/name"] > m["trace/image"]


def test_a_model_that_knows_nothing_is_at_chance(full):
    model = Knowing(full)
    model.encode_image = lambda x: Gaussian(torch.ones(len(x), 12) / 12**0.5, torch.zeros(len(x), 12))
    m = evaluated(as_embedder(model, tokenize, plain), full).metrics
    assert m["names/i2t/R@1"] == pytest.approx(1 / 9)  # all images give one order: one of nine is right
    assert math.isnan(m["recall_by_trace/names_i2t/spearman_deciles"])


def scattered(known, similarity):
    """The same corpus with random Gaussians: everything differs from everything."""
    g = torch.Generator().manual_seed(0)

    def random(like):
        mean, log_var = (torch.randn(like.mean.shape, generator=g) for _ in range(2))
        return Gaussian(nn.functional.normalize(mean, dim=-1), log_var)

    image, text = random(known.image), random(known.text)
    info = {"similarity": similarity}
    return CorpusResult(known.corpus, image, text, known.token_lengths, {}, info)


def test_deciles_of_keywords_are_of_their_average_precision(known):
    found = scattered(known, "csd")
    rows, ranking = found.table.text[found.table.rows("keyword")], found.rankings["captions"][1]
    assert not torch.equal(ranking.ap_at_r[rows], ranking.r_precision[rows])
    deciles = recall_by_trace(found)["keywords_t2i"]
    want = by_decile(found.text.trace[rows].numpy(), ranking.ap_at_r[rows].numpy())
    np.testing.assert_array_equal(deciles.value, want.value)


def test_one_concept_is_refused_and_one_drawing_among_names_is_not(full):
    """NumPy took the first place of a single query for a number."""
    knowing = as_embedder(Knowing(full), tokenize, plain)
    with pytest.raises(ValueError, match="'n2' is the only concept"):
        evaluated(knowing, full.select("name=n2"))
    one = replace(full, drawings=full.drawings[:1])
    found = evaluated(knowing, one)
    assert found.metrics["names/i2t/R@1"] == 1 and found.metrics["names/t2i/queries"] == 1
    assert found.metrics["refusal/names_t2i/image/aurc"] == 0
    found.add_intervals(20)
    two = evaluated(knowing, full.select("name=n2|n5"))
    assert two.metrics["names/t2i/R@1"] == 1 and two.metrics["names/t2i/queries"] == 2


def test_match_probabilities_of_both_galleries_are_checked(known):
    assert not uncertainty.calibration(scattered(known, "csd"))  # no scale, no probability
    found = scattered(known, "csd")
    found.info["score"] = {"name": "csd", "scale": 6.0, "bias": -4.0}
    got = uncertainty.calibration(found)
    scores = 1 / (1 + torch.exp(4 - 6 * similarity_scores(found.image, found.text, "csd")))
    true = torch.from_numpy(found.text_relation).T
    every = reliability(scores.flatten(), true.flatten(), LOG_ODDS).metrics("calibration/captions/match")
    assert {key: got[key] for key in every} == pytest.approx(every, rel=1e-4)
    first = reliability(scores.amax(0), true.gather(0, scores.argmax(0, keepdim=True))[0])
    assert got["calibration/captions/match_t2i/ece"] == pytest.approx(first.ece, rel=1e-4)
    assert got["calibration/names/match/base_rate"] == pytest.approx(1 / 12)
    found.metrics |= got
    line = next(line for line in calibration_lines(found.metrics) if line.startswith("names"))
    assert f"{got['calibration/names/match/probability_over_base_rate']:.4f}" in line


class Reader:
    """A reader whose numbers follow from means and traces in a line each."""

    def evidence(self, mean):
        return Evidence(mean.argmax(1).float(), 9 - mean.argmax(1).float())

    def ambiguity(self, mean):
        return mean.argmax(1).float() % 3

    def shares(self, trace, mean):
        share = (mean > 0).float().mean(1)
        return torch.where(trace > trace.median(), 1.2, 0.5) * share, 2 * share


@pytest.fixture
def doubting(full):
    """The result of a model that doubts the drawings: the more the higher their number."""
    doubt = Doubt((0.0, 0.5, -0.1), (-1.0, 0.5, -0.1, -0.05), (0.0, 0.0), (9.0, 9.0))
    score = TrueMatchScore(0.4, 0.5, images=50, texts=9, scale=5.0, bias=-3.0, doubt=doubt)
    score.reader = Reader()
    embedder = changed(as_embedder(Knowing(full), tokenize, plain), score=score)
    return evaluated(embedder, full)


def test_doubt_enters_the_probabilities_and_those_without_stand_beside(doubting):
    m, number = doubting.metrics, torch.arange(9.0)
    d = 1 / (1 + torch.exp(1 - 0.5 * (1 + number).log() + 0.1 * (9 - number) + 0.05 * 5))  # nearest: 5 on average
    torch.testing.assert_close(doubting.doubt, d)
    scores = doubting.score.pairwise(doubting.image, doubting.text)
    own, true = torch.sigmoid(5 * scores - 3), torch.from_numpy(doubting.text_relation).T
    share = ((doubting.text.trace / 0.5).exp() / 50).clamp(max=1)
    hedged = (1 - d)[:, None] * own + d[:, None] * share
    best = scores.argmax(1, keepdim=True)
    for place, p in (("calibration", hedged), ("undoubted", own)):
        every = reliability(p.flatten(), true.flatten(), LOG_ODDS).metrics(f"{place}/captions/match")
        assert {key: m[key] for key in every} == pytest.approx(every, rel=1e-4)
        first = reliability(p.gather(1, best)[:, 0], true.gather(1, best)[:, 0])
        assert m[f"{place}/captions/match_i2t/ece"] == pytest.approx(first.ece, rel=1e-4)
    names = doubting.text.mean[doubting.name_texts]
    answer = (2 / 0.5 * doubting.image.mean @ names.T).softmax(1).amax(1)  # all are right
    assert m["undoubted/names_i2t/answer/ece"] == pytest.approx(1 - answer.mean().item(), rel=1e-4)
    given = (1 - d) * answer + d / 12
    assert m["refusal/names_i2t/answer/ece"] == pytest.approx(1 - given.mean().item(), rel=1e-4)
    table = format_corpus(doubting)
    assert re.search(f"right, ECE +{m['refusal/names_i2t/answer/ece']:.4f}, unadjusted", table)
    assert re.search(rf"names, unadjusted +{m['undoubted/names/match/ece']:.4f}", table)


def test_ambiguity_is_held_against_neighbours_of_other_subgroups(doubting):
    m = doubting.metrics  # cosines of other drawings are all 0: the nearest of all is the first, mammal, or the second
    wrong, nats = np.array([1, 1, 1, 0, 1, 1, 0, 1, 1]), np.arange(9) % 3  # subgroups go round, too
    assert m["ambiguity/auroc"] == pytest.approx(auroc(nats, wrong))
    assert m["ambiguity/neighbour_auroc"] == m["ambiguity/trace_auroc"] == 0.5
    doubting.add_intervals(20)
    low, high = doubting.info["intervals"]["ambiguity/auroc"]
    assert low <= m["ambiguity/auroc"] <= high
    doubting.read["ambiguity"][2] = np.nan  # unknown
    assert not uncertainty.ambiguity(doubting)


def test_true_shares_are_looked_for_inside_the_intervals(doubting):
    share, low, high = doubting.text_relation.mean(1), doubting.read["share_low"], doubting.read["share_high"]
    inside = [a <= x <= b for a, x, b in zip(low, share, high) if x > 0]
    assert 0 < np.mean(inside) < 1 and doubting.metrics["matches/inside_interval"] == pytest.approx(np.mean(inside))
    names = [low[i] <= share[i] <= high[i] for i in doubting.name_texts if share[i] > 0]
    assert doubting.metrics["matches/inside_interval/name"] == pytest.approx(np.mean(names))
    assert "matches/inside_interval/group" in format_corpus(doubting)


def test_what_the_model_read_is_saved_and_an_old_result_shows_what_it_showed(doubting, known, tmp_path):
    back = load(doubting.save(tmp_path / "eval"))
    assert back.read.keys() == {"evidence", "ambiguity", "share_low", "share_high"}
    assert all(np.array_equal(x, doubting.read[name]) for name, x in back.read.items())
    assert torch.equal(back.doubt, doubting.doubt)
    old = load(known.save(tmp_path / "old"))
    assert old.read == {} and old.doubt is None
    assert not any(key.startswith(("undoubted/", "ambiguity/", "matches/inside")) for key in old.metrics)
    table = format_corpus(old)
    assert "unadjusted" not in table and "ambiguity" not in table and "inside" not in table


def test_a_concept_is_drawn_with_its_drawings_and_texts(known):
    assert all(set(s.clusters) == set(s.sizes) - {"concepts"} for s in known.statistics.values())
    names = known.statistics["names/t2i/R@1"].clusters["names"]
    images = known.statistics["names/i2t/R@1"].clusters["images"]
    assert names.size == images.size == 9 and names.name == images.name == "concepts"
    owners = [known.corpus.drawings[i].concept for i in np.unique(images.of, return_index=True)[1]]
    for text in np.flatnonzero(known.rankings["names"][1].answerable):
        assert owners[names.of[text]] == text  # a concept's row is that of its name
    captions = known.statistics["captions/t2i/R@1"].clusters["captions"]
    for text in np.flatnonzero(known.rankings["captions"][1].answerable):
        assert known.table.text_relation[text, owners[captions.of[text]]]


def test_differences_are_refused_between_other_texts(known):
    concepts = known.corpus.concepts
    other = replace(known.corpus, concepts=(replace(concepts[0], name="other"), *concepts[1:]))
    with pytest.raises(ValueError, match="of different texts"):
        known.add_intervals(10, replace(known, corpus=other))
    moved = tuple(replace(d, concept=(d.concept + 1) % 12) for d in known.corpus.drawings)
    with pytest.raises(ValueError, match="of different drawings"):
        known.add_intervals(10, replace(known, corpus=replace(known.corpus, drawings=moved)))


def test_the_gallery_follows_select_unless_all_names_are_asked_for(shards):
    test, names = shards
    narrow = gallery([test], "group=food", [names])
    assert [c.name for c in narrow.concepts] == ["n2", "n5", "n8", "n11"] and len(narrow.drawings) == 3
    wide = gallery([test], "group=food", [names], all_names=True)
    assert len(wide.concepts) == 12 and len(wide.drawings) == 3
    styled = gallery([test, names], "style=t", [names])
    assert len(styled.concepts) == 12 and len(styled.drawings) == 9


def test_results_survive_saving(known, tmp_path):
    known.metrics["undefined"] = float("nan")
    back = load(known.save(tmp_path / "eval"))
    assert math.isnan(back.metrics.pop("undefined"))
    known.metrics.pop("undefined")
    assert back.metrics == pytest.approx(known.metrics, nan_ok=True)
    assert back.corpus == known.corpus and back.info == known.info
    torch.testing.assert_close(back.image.mean, known.image.mean)
    torch.testing.assert_close(back.text.log_var, known.text.log_var)
    assert torch.equal(back.rankings["captions"][0].first, known.rankings["captions"][0].first)
    assert json.loads((tmp_path / "eval" / "metrics.json").read_text())["metrics"]["undefined"] is None
    (tmp_path / "eval" / "corpus.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no corpus.json .*prolip eval emoji .*--output"):
        load(tmp_path / "eval")


def test_the_command_evaluates_a_saved_model(shards, tmp_path, capsys):
    out = tmp_path / "eval"
    arguments = ["--model", mini.prolip_folder(tmp_path / "model"), "--data", str(shards[0]), "--names", str(shards[1])]
    got = evaluate_corpus([*arguments, "--similarity", "mean", "--output", str(out)])
    assert "image -> names" in capsys.readouterr().out
    assert 0 <= got.metrics["names/i2t/R@10"] <= 1 and got.image.mean.shape == (9, 32)
    saved = load(out)
    assert saved.info["model"].startswith("local-dir:") and saved.similarity == "mean"
    assert saved.metrics["names/i2t/R@1"] == got.metrics["names/i2t/R@1"]
    assert saved.info["scale"] == pytest.approx(10, rel=1e-5) and saved.info["bias"] == -10

    other = evaluate_corpus([*arguments, "--intervals", "60", "--against", str(out)])  # by the method's score, csd
    for key, (low, high) in other.info["intervals"].items():
        assert low <= other.metrics[key] <= high and not key.endswith("rsum")
    assert {"names/i2t/R@1", "captions/t2i/mAP@R", "zero_shot/subgroup/top1"} <= other.info["intervals"].keys()
    for key, (change, low, high) in other.info["difference"].items():
        assert change == pytest.approx(other.metrics[key] - saved.metrics[key], abs=1e-12) and low <= change <= high
    assert "difference to --against" in capsys.readouterr().out
    arguments += ["--intervals", "--against", str(out), "--select", "subgroup!=bird"]
    assert "of different drawings" in refusal(capsys, evaluate_corpus, *arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--data", "none.tar"], "no shard at none.tar"),
        (["--select", "group=foo"], "use one of food"),
        (["--similarity", "csd_similarty"], "did you mean csd_similarity"),
        (["--model", "local-dir:nowhere"], "nowhere does not exist"),
        (["--device", "warp"], "device 'warp' is unknown"),
        (["--output", "setup.py"], "setup.py is a file: give a folder"),
        (["--intervals", "1"], "--intervals 1: give 2 or more"),
        (["--against", "runs/other/eval"], "also give --intervals"),
        (["--intervals", "--against", "nowhere"], "no metrics.json in nowhere"),
    ],
)
def test_the_command_ends_in_one_line_on_what_the_user_can_mend(shards, capsys, change, message):
    words = ["--model", "ProLIP-ViT-test", "--data", shards[0], *change]
    (line,) = refusal(capsys, evaluate_corpus, *words).strip().splitlines()
    assert line.startswith("error: ") and message in line
