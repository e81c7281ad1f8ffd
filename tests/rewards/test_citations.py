"""Rewards of citations: supported statements, the documents that support them, and forgeries that earn nothing."""

import pytest

from podrl.rewards.citations import citation_format, citations
from podrl.rewards.compose import RewardConfig, Rewards

READ = (
    "<tool_output><snippet id=5f1c09ab-0>\nTitle: Belmora\nSnippet: The bridge of Belmora was built in 1473 and is "
    "1,312 feet long.\n</snippet>\n<snippet id=5f1c09ab-1>\nTitle: Belmora\nSnippet: The inn of Belmora has 28 rooms, "
    "and 2 < 3.\n</snippet></tool_output>"
)


def share(answer, read=READ, own=""):
    said = f"{own}<answer>{answer}</answer>"
    return citations([""], [said], sample_text=[own + read + said[len(own) :]])[0]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ('<cite id="5f1c09ab-0">The bridge was built in 1473.</cite>', 1.0),
        ("It was <cite id='5f1c09ab-0'>1473</cite>.", 1.0),
        ("<cite id=5f1c09ab-0>1312 feet</cite>", 1.0),
        ("<cite id=5f1c09ab-1>28 rooms</cite>", 1.0),
        ("<cite id=5f1c09ab-0>28 rooms</cite>", 0.0),
        ("<cite id=5f1c09ab-0>built in 1474</cite>", 0.0),
        ("<cite id=5f1c09ab-0>ancient stones crumble in 1473</cite>", 0.0),
        ("<cite id=5f1c09ab-0,5f1c09ab-1>built in 1473, with 28 rooms</cite>", 1.0),
        ("<cite id=5f1c09ab-0,5f1c09ab-2>built in 1473</cite>", 0.0),
        ("<cite id=5f1c09ab-2>built in 1473</cite>", 0.0),
        ("<cite id=5f1c09ab-0>1473</cite> and <cite id=5f1c09ab-1>29</cite>", 0.5),
        ("<cite id=5f1c09ab-0> </cite>", 0.0),
        ("<cite id=5f1c09ab-0>...</cite>", 0.0),
        ("<cite id=5f1c09ab-0>1473", 0.0),
        ("1473", 0.0),
    ],
)
def test_a_statement_needs_the_numbers_and_half_of_the_words_of_its_documents(answer, wanted):
    assert share(answer) == wanted


def test_only_the_answer_cites():
    said = "<cite id=5f1c09ab-0>1473</cite><answer>1473</answer>"
    assert citations([""], [said], sample_text=[READ + said]) == [0.0]


def test_a_document_that_the_model_wrote_is_not_cited():
    answer = "<cite id=x>1999</cite>"
    assert share(answer, "<tool_output><snippet id=x>1999</snippet></tool_output>") == 1.0
    for own in ("<snippet id=x>1999</snippet>", "<snippet id='x'>1999", '<webpage  id="x">1999</webpage>'):
        assert share(answer, own=own) == 0.0
    assert share("<cite id=5f1c09ab-0>1999</cite>", own="<snippet id=5f1c09ab-0>1999</snippet>") == 0.0


@pytest.mark.parametrize("piece", ["<cite id=a>", "<cite id=a>x", "<snippet id=a>", "<cite ", "<cite id='"])
def test_the_time_is_linear_in_the_text(piece):
    assert share(piece * 20_000, read=READ + piece * 20_000) == 0.0


def test_the_format_has_three_parts():
    called, failed = ({"by": "snippet_search", "failed": why} for why in ("", "deadline"))
    said = {"by": "model"}
    completions = ["<answer><cite id=a>1</cite></answer>"] * 2 + ["<answer>1</answer>", "<cite id=a>1</cite>", ""]
    turns = [[said, called, said], [said, failed, said], [said], [said, called], []]
    assert citation_format([""] * 5, completions, turns) == [1.0, 0.8, 0.5, 0.2, 0.0]


def test_they_are_built_in():
    with Rewards(RewardConfig(fns=("citations", "citation_format"), weights=(0.2, 0.2), workers=1)) as rewards:
        text = READ + "<answer><cite id=5f1c09ab-0>1473</cite></answer>"
        scored = rewards.score(["q"], [text], {"turns": [[{"by": "snippet_search", "failed": ""}]]})
        assert scored.tolist() == [[1.0], [1.0]]
    for name, field in (("citations", "sample_text"), ("citation_format", "turns")):
        refused = pytest.raises(ValueError, match=f"has no field '{field}'")
        with Rewards(RewardConfig(fns=(name,), workers=1)) as rewards, refused:
            rewards.check_fields([("record 1", {"answer": "1"})], (), ())
