"""A model learns to search and to cite: it reads the server's documents, and its citations earn rewards."""

import json
import re

import pytest
from processes import comparable, run, samples

from podrl.environments.search_server import FACTS, Index, read
from podrl.rewards.citations import citations

pytestmark = [pytest.mark.e2e, pytest.mark.optimised]
FEW = (
    *("--config.trainer.max_steps=3", "--config.trainer.eval_every_n_steps=3", "--config.checkpoint.every=3"),
    *("--config.eval.problems=16", "--config.eval.samples=1", "--config.log.to=()"),
    *("--config.log.samples_every=1", "--config.log.samples=8"),
)
CALL = re.compile(
    r'<call_tool name="snippet_search">([^<]*)</call_tool>\n'
    r"<tool_output><snippet id=[0-9a-f]{8}-0>\nTitle: (\w+)\nSnippet: ([^<]*)\n</snippet></tool_output>\n\n"
)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    pytest.importorskip("mcp", reason="needs the extra [tools]")
    return run(tmp_path_factory.mktemp("search") / "run", base=("--config=grpo_search.py", *FEW))


@pytest.mark.nightly("podrl/environments", "podrl/rewards", "configs")
def test_searches_are_answered_from_the_corpus(done):
    index = Index(read(FACTS))
    answered = [found for sample in samples(done.workdir) for found in CALL.findall(sample["completion"])]
    assert len(answered) > 10
    for query, title, text in answered:
        assert [(one.title, one.text) for _, one in index.best(query, 1)] == [(title, text)]


@pytest.mark.nightly("podrl/environments", "podrl/rewards", "configs")
def test_the_starting_checkpoint_finds_every_reward_somewhere(done):
    steps = [record for record in comparable(done.workdir) if "actor/grad_norm" in record]
    assert len(steps) == 3 and all(0.1 < record["episode/calls"] < 0.9 for record in steps)
    for name in ("number", "citations", "citation_format"):
        assert any(record[f"reward/{name}"] > 0 for record in steps), name
    assert any(
        "citations" in name for record in comparable(done.workdir) for name in record if name.startswith("eval/")
    )


@pytest.mark.nightly("podrl/environments", "podrl/rewards", "configs")
def test_a_citation_is_scored_by_what_the_sample_read(done):
    trained = [sample for sample in samples(done.workdir) if "reward" in sample]
    assert len(trained) == 3 * 8  # one sample of each prompt
    for sample in trained:
        own = "".join(turn["text"] for turn in sample["turns"] if turn["by"] == "model")
        assert citations([""], [own], [sample["completion"]]) == [sample["citations"]], json.dumps(sample)


@pytest.mark.nightly("configs/sft_search.py", "podrl/learner/answers")
def test_the_checkpoint_is_trained_by_its_command(tmp_path):
    """Runs a few steps of the command: at first all targets are searches, then some are guesses. All steps would take
    minutes (see configs/sft_search.py)."""
    few = ("--config.trainer.max_steps=4", "--config.sft.full_steps=2", "--config.log.to=()")
    done = run(tmp_path / "run", base=("--config=sft_search.py", *few))
    losses = [record["sft/loss"] for record in done.records() if "actor/grad_norm" in record]
    assert len(losses) == 4 and losses[-1] < losses[0]
