"""The search server ranks by BM25, refuses bad files, and shows documents as the task 'facts' writes them."""

import json
import sys

import pytest
from test_played_episodes import call, play

from podrl.data import facts
from podrl.environments.calls import format_of
from podrl.environments.config import EnvironmentConfig, MCPServer
from podrl.environments.protocol import Turn
from podrl.environments.search_server import FACTS, Document, Index, read, searcher
from podrl.environments.workers import Episodes
from podrl.rewards.citations import citations
from podrl.workers.user_code import Limits


def test_scores_are_bm25s():
    index = Index([Document("", "red apple"), Document("", "green apple apple"), Document("", "blue sky")])
    # Three documents of 2, 3 and 2 words, 7/3 on average; 'apple' is in two: ln(1 + 1.5 / 2.5) = 0.470004.
    # A word that occurs once in 2 words: 2.2 / (1 + 1.2 (0.25 + 0.75 * 6 / 7)) = 1.062069. A word that occurs twice in
    # 3 words: 4.4 / (2 + 1.2 (0.25 + 0.75 * 9 / 7)) = 1.272727.
    (first, second) = index.best("Apple", 10)
    assert second == (pytest.approx(0.470004 * 1.062069, abs=1e-5), index.documents[0])
    assert first == (pytest.approx(0.470004 * 1.272727, abs=1e-5), index.documents[1])
    assert [one.text for _, one in index.best("apple sky", 1)] == ["blue sky"], (
        "'sky' is rarer than 'apple', so it counts more"
    )
    assert [one.text for _, one in index.best("apple apple red", 1)] == ["red apple"]
    assert index.best("pear", 10) == [] and index.best("", 10) == []


def test_a_title_is_found_and_equal_documents_keep_their_order():
    index = Index([Document("Ulm", "x"), Document("Ulm", "y"), Document("Bel", "x")])
    assert [one.text for _, one in index.best("ulm", 5)] == ["x", "y"]


def test_the_answer_is_semantic_scholars_and_limits_are_refused(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "A", "text": "red\u2028cat"}\n{"text": "red red"}\n')
    search = searcher(corpus)
    (found,) = json.loads(search("red", limit=1))["data"]
    assert found["paper"] == {"title": ""} and found["snippet"] == {"text": "red red"} and found["score"] > 0
    assert len(json.loads(search("red"))["data"]) == 2
    with pytest.raises(ValueError, match="limit=0, from 1 to 100"):
        search("red", limit=0)
    with pytest.raises(ValueError, match="1001 characters, at most 1000"):
        search("x" * 1001)


@pytest.mark.parametrize("line", ["{", "[]", '{"title": "A"}', '{"text": null}', '{"title": 1, "text": "red"}'])
def test_a_file_that_is_no_corpus_is_refused_by_its_line(tmp_path, line):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(f'{{"text": "red"}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2, is not a text for the corpus"):
        read(corpus)
    corpus.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read(corpus)


def test_the_embedded_corpus_is_that_of_the_task():
    assert [(one.title, one.text) for one in read(FACTS)] == [(one.town, one.text) for one in facts.documents()]


def test_a_query_for_the_building_finds_its_document_first():
    index = Index(read(FACTS))
    for place in range(0, len(facts.documents()), 7):
        one = facts.documents()[place]
        found = [document.text for _, document in index.best(f"{one.building} of {one.town}", 2)]
        assert found[0] == one.text and one.town in found[1]


def test_the_prompt_of_podrl_shows_the_formats_that_are_read():
    text = FACTS.with_name("search_prompt.txt").read_text().partition("\nExample\n")[2]
    said, closed, rest = text.partition("</call_tool>")
    (asked,) = format_of("call_tool", ["snippet_search"]).calls(said + closed, closed)
    assert (asked.name, asked.arguments, asked.problem) == ("snippet_search", {"": "bridge of Belmora"}, "")
    output, end, answer = rest.partition("</tool_output>\n\n")
    document = next(one for one in facts.documents() if (one.town, one.building) == ("Belmora", "bridge"))
    assert output + end == facts.search_output("5f1c09ab", [document])
    assert citations([""], [answer], [output + end + answer]) == [1.0]


def test_a_model_reads_what_the_first_examples_show():
    pytest.importorskip("mcp", reason="needs the extra [tools]")
    server = MCPServer(f"{sys.executable} -m podrl.environments.search_server")
    config = EnvironmentConfig(environment="tools", mcp=(server,), arguments={"snippet_search": {"limit": 2}})
    with Episodes(config, Limits(), journal=None) as episodes:
        one = facts.documents()[4]
        turns = [
            call("snippet_search", f"{one.building} of {one.town}"),
            call("snippet_search", "x" * 1001),
            Turn("end"),
        ]
        says, _ = play(episodes, turns)
    seen = says[1].observation
    key = seen.partition("<snippet id=")[2].partition("-")[0]
    second = next(other for other in facts.documents()[3:6] if other != one and other.shown in seen)
    assert seen == facts.search_output(key, [one, second])
    assert "ValueError: 1001 characters, at most 1000" in says[2].observation
