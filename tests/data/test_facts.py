"""The task of facts: its corpus and questions agree, questions are held out of training, supervised examples search and
cite."""

import re

import numpy as np
import pytest
from embedded import EMBEDDED

from podrl.data import facts
from podrl.data.config import DataConfig
from podrl.data.facts import BUILDINGS, GENERATOR, documents
from podrl.data.problem_generator import RandomDraws, held_out
from podrl.data.sft import SFTConfig, SFTStream, forms
from podrl.data.template import CALL_END, CITE_END, CITE_START, SEARCH_START
from podrl.data.tokenizer import Tokenizer
from podrl.data.train_tokenizer import SEARCH_TAGS, write
from podrl.rewards.citations import citations


def text_of(parts):
    return "".join(part.text for part in parts)


def test_every_town_has_three_different_buildings():
    towns = {}
    for one in documents():
        towns.setdefault(one.town, []).append(one.building)
        assert one.building in BUILDINGS and set(re.findall(r"\d+", one.text)) == {str(one.year), str(one.number)}
    assert len(towns) == 576 and all(len(set(found)) == 3 for found in towns.values())


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_document_has_the_answer_and_the_question_names_it(split):
    asked = set()
    for index in range(300):
        found = GENERATOR.problem(split, index, seed=3)
        one = found.document
        assert f"{one.building} of {one.town}" in found.question and found.answer not in found.question
        assert found.answer == str(one.year if found.about == "built" else one.number)
        assert found.fields == {"question": found.question, "answer": found.answer, "document": one.text}
        asked.add((one.building, found.about))
    assert len(asked) == 2 * len(BUILDINGS)


def test_held_out_questions_are_not_trained():
    train = {GENERATOR.problem("train", index).key for index in range(4000)}
    evaluation = [found.key for found in GENERATOR.distinct("held_out", 256)]
    assert len(set(evaluation)) == 256 and not train & set(evaluation)
    assert all(map(held_out, evaluation)) and not any(map(held_out, train))


def test_more_questions_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"only \d+ different held_out problems, fewer than the 999.*eval.problems"):
        GENERATOR.distinct("held_out", 999)


def test_the_stream_is_a_fixed_function_of_split_index_and_seed():
    # The expected values are literals, because checkpoints would resume on other data if the sequence changed.
    first = GENERATOR.problem("train", 0, seed=1)
    assert first.question == "In which year was the bridge of Zanford built?" and first.answer == "1877"
    assert GENERATOR.problem("train", 0, seed=2) != first
    assert documents()[0].text == "The market of Belmora was built in 1828 and has 127 stalls."


def test_a_reference_answer_earns_the_reward_of_citations():
    for index in range(50):
        found = GENERATOR.problem("train", index)
        call, output, answer = found.cited(RandomDraws(index))
        assert [call.learned, output.learned, answer.learned] == [True, False, True] and answer.ends
        one = found.document
        assert call.text == f'<call_tool name="snippet_search">{one.building} of {one.town}</call_tool>'
        assert output.text.count("<snippet id=") == 1 and found.document.text in output.text
        assert citations([""], [call.text + answer.text], [call.text + output.text + answer.text]) == [1.0]


def test_a_half_known_answer_never_cites_well_and_mostly_guesses():
    kinds = []
    for index in range(300):
        found = GENERATOR.problem("train", index)
        _, parts = forms(found, found.fields, RandomDraws(index))
        whole, own = text_of(parts), text_of([part for part in parts if part.learned])
        assert citations([""], [own], [whole]) == [0.0]
        kinds.append("guess" if len(parts) == 1 else "invented" if "<cite" in own else "uncited")
        said = re.fullmatch(r".*?(\d+)[ a-z]*", re.sub("<[^>]*>", "", own.partition("<answer>")[2]))[1]
        assert len(said) == len(found.answer) and (kinds[-1] == "guess" or said == found.answer)
    shares = {kind: kinds.count(kind) / len(kinds) for kind in set(kinds)}
    np.testing.assert_allclose([shares["guess"], shares["uncited"], shares["invented"]], [0.7, 0.2, 0.1], atol=0.08)


def test_an_output_is_written_by_call_and_place():
    one, two = documents()[:2]
    assert facts.search_output("0a1b2c3d", [one, two]) == (
        f"\n<tool_output><snippet id=0a1b2c3d-0>\nTitle: Belmora\nSnippet: {one.text}\n</snippet>\n"
        f"<snippet id=0a1b2c3d-1>\nTitle: Belmora\nSnippet: {two.text}\n</snippet></tool_output>\n\n"
    )


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(EMBEDDED["tiny_search"])


def test_the_tokenizer_is_made_again_by_its_command(tmp_path, tokenizer):
    write(tmp_path, search=True)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (EMBEDDED["tiny_search"] / file.name).read_bytes(), file.name
    assert all(len(tokenizer.encode(tag)) == 1 for tag in SEARCH_TAGS)


def test_a_name_is_two_pieces_and_examples_fit_the_configuration(tokenizer):
    for one in documents()[::50]:
        assert len(tokenizer.encode(f" {one.town}", behind=5)) == 2, one.town
    stream = SFTStream(DataConfig(path="facts", seed=1), SFTConfig(batch_size=256, max_length=112), tokenizer)
    batch = next(stream)
    assert max(batch.length_B) <= 112
    for b, text in enumerate(batch.text):
        ids, mask = batch.tokens_BT[b, : batch.length_B[b]], batch.mask_BT[b, : batch.length_B[b]]
        learned = "".join(tokenizer.token_text(int(i)) for i in ids[mask > 0])
        call, answer = re.search(rf"({SEARCH_START}.*?{CALL_END}).*(<answer>.*)", text, re.S).groups()
        assert (
            learned.replace("▁", " ") == f"{call}{answer}<end_of_turn>" and CITE_START in answer and CITE_END in answer
        )


def test_the_share_that_searches_falls_after_the_full_steps(tokenizer):
    config = SFTConfig(batch_size=64, max_length=112, tagged_share=0.16, full_steps=2)
    stream = SFTStream(DataConfig(path="facts", seed=1), config, tokenizer)
    shares = [np.mean([SEARCH_START in text for text in next(stream).text]) for _ in range(10)]
    assert shares[:2] == [1.0, 1.0] and np.mean(shares[2:]) == pytest.approx(0.16 + 0.84 * 0.3, abs=0.06)
