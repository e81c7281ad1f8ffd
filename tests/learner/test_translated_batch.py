"""Policy and teacher have different tokenizers: each span is whole tokens of both, and some tokens are in no span."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from podrl.algorithms.distill import Distillation
from podrl.algorithms.spans import common_spans, over_spans
from podrl.data import problems
from podrl.data.tokenizer import Tokenizer
from podrl.job.config import TINY
from podrl.learner.translated_batch import aligned
from podrl.storage.hub import EMBEDDED

TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="0123456789 .+=<>answer/\n\té日🙂", max_size=40),
    st.integers(0, 500).map(lambda i: problems.GENERATOR.problem("train", i).reasoning),
)


def bytes_tokenizer(folder):
    """Writes a tokenizer whose tokens are sequences of bytes, as in GPT-2."""
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    texts = [problems.GENERATOR.problem("train", i).question for i in range(200)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=level.alphabet(), special_tokens=["<end>", "<turn>"], show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Returns the shipped tokenizers and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("bytes")
    bytes_tokenizer(folder)
    found = {name: Tokenizer(path) for name, path in EMBEDDED.items()} | {"bytes": Tokenizer(folder)}
    assert all(tokenizer.splits_text for tokenizer in found.values())
    return found


def test_spans_by_hand():
    """The tokens of one tokenizer end at bytes 2, 5, 6, 9, of the other at 1, 5, 8: only 5 is an end in both."""
    span_X, span_Y = common_spans(np.array([2, 5, 6, 9]), np.array([1, 5, 8]))
    assert span_X.tolist() == [0, 0, -1, -1] and span_Y.tolist() == [0, 0, -1]
    value_BT = np.array([[1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    span_BT = np.array([[-1, 0, 0, 1, -1], [0, 1, 2, 3, 4]])
    assert over_spans(value_BT, span_BT).tolist() == [[0, 6, 6, 8, 0], [1, 1, 1, 1, 1]]


@given(st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)))
def test_spans_are_the_finest_that_both_cover(ends, others):
    end_X, end_Y = np.array(sorted(ends), int), np.array(sorted(others), int)
    span_X, span_Y = common_spans(end_X, end_Y)
    shared = sorted(ends & others)
    for end, span in ((end_X, span_X), (end_Y, span_Y)):
        begin = np.concatenate([[0], end[:-1]]) if len(end) else end
        for number in range(len(shared)):
            own = np.flatnonzero(span == number)
            low = shared[number - 1] if number else 0
            assert (begin[own[0]], end[own[-1]]) == (low, shared[number]) and np.array_equal(
                own, np.arange(own[0], own[-1] + 1)
            )
        assert (span[end > (shared[-1] if shared else 0)] == -1).all()


def test_the_advantage_of_a_span_has_the_gradient_of_the_spans_divergence():
    """Sums over all texts of two policy tokens; each text is one token of the teacher. torch computes in float64."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    logits = [torch.tensor(rng.normal(size=shape), requires_grad=True) for shape in ((3,), (3, 3))]
    teacher_X = torch.log_softmax(torch.tensor(rng.normal(size=9)), -1)
    first_X, second_X = np.repeat(np.arange(3), 3), np.tile(np.arange(3), 3)

    def logprobs():
        own = torch.log_softmax(logits[0], -1)[first_X], torch.log_softmax(logits[1], -1)[first_X, second_X]
        return torch.stack(own, dim=1)

    kl = torch.sum(torch.exp(logprobs().sum(1)) * (logprobs().sum(1) - teacher_X))
    wanted = torch.autograd.grad(kl, logits)
    logprob_X2 = logprobs().detach().numpy()
    theirs_X2 = np.stack([teacher_X.numpy(), np.zeros(9)], axis=1)  # a span's sum is at its first token
    ones_X2, span_X2 = np.ones((9, 2)), np.zeros((9, 2), int)
    advantage_X2, metrics = Distillation(1.0, 0.0).advantages(logprob_X2, theirs_X2, ones_X2, span_X2)
    weight_X2 = torch.tensor(advantage_X2) * torch.exp(logprobs().detach().sum(1, keepdim=True))
    found = torch.autograd.grad(-(weight_X2 * logprobs()).sum(), logits)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-12)
    gap_X = logprob_X2.sum(1) - teacher_X.numpy()
    assert metrics == {"opd/reverse_kl": pytest.approx(gap_X.sum() / 18), "opd/compared": 1.0}
    alone_X2, _ = Distillation(1.0, 0.0).advantages(logprob_X2, theirs_X2, ones_X2, np.tile([0, 1], (9, 1)))
    plain_X2, _ = Distillation(1.0, 0.0).advantages(logprob_X2, theirs_X2, ones_X2)
    np.testing.assert_array_equal(alone_X2, plain_X2)  # equal to the bit if every token is a span


@settings(deadline=None, max_examples=60)
@given(text=TEXTS, data=st.data())
def test_spans_of_tokenizers_say_the_same_text(known, text, data):
    names = sorted(known)
    own, theirs = (known[data.draw(st.sampled_from(names))] for _ in range(2))
    said = own.encode_plain(text)
    if said and data.draw(st.booleans()):
        said = said[: data.draw(st.integers(1, len(said)))]  # cut off by a limit, perhaps within a character
    ended = data.draw(st.booleans())
    said += [own.turn_end_id] * ended
    most = data.draw(st.sampled_from([1000, 1000, 5, 0]))
    ids, span_X, span_Y = aligned(said, [True] * len(said), own, theirs, behind=theirs.eos_ids[0], most=most)
    assert len(ids) == len(span_Y) <= max(most, 0) and len(span_X) <= len(said)
    numbers = [n for n in dict.fromkeys(span_X.tolist()) if n >= 0]
    assert numbers == [n for n in dict.fromkeys(span_Y.tolist()) if n >= 0] == list(range(len(numbers)))
    for n in numbers:
        mine = b"".join(own.token_bytes(said[i]) for i in np.flatnonzero(span_X == n))
        assert mine == b"".join(theirs.token_bytes(ids[i]) for i in np.flatnonzero(span_Y == n))
    if numbers and not b"".join(own.token_bytes(said[i]) for i in np.flatnonzero(span_X == numbers[-1])):
        assert ended and said[len(span_X) - 1] == own.turn_end_id and ids[-1] == theirs.turn_end_id
    known_text = b"".join(map(theirs.token_bytes, theirs.encode_plain(text))) == text.encode()
    if (
        most == 1000
        and ended
        and own is theirs
        and known_text
        and b"".join(map(own.token_bytes, said)) == text.encode()
    ):
        assert len(span_X) == len(said) and (span_X >= 0).all()


def test_a_token_that_is_no_text_ends_what_is_compared(known):
    own, theirs = known["tiny"], known["bytes"]
    said = own.encode_plain("1+1=2.")
    compare = lambda ids, drawn=None: aligned(ids, drawn or [True] * len(ids), own, theirs, behind=0, most=99)  # noqa: E731
    ids, span_X, span_Y = compare([*said, own.turn_end_id])
    assert ids[-1] == theirs.turn_end_id and len(span_X) == len(said) + 1 and span_X[-1] == span_Y[-1]
    ids, span_X, _ = compare([*said, own.bos_id, *said, own.turn_end_id])
    assert len(span_X) == len(said) and theirs.turn_end_id not in ids
    ids, span_X, _ = compare([*said, *said], [True] * len(said) + [False] * len(said))
    assert len(span_X) == len(said) and (span_X >= 0).all()
    assert [len(x) for x in compare([own.turn_end_id])] == [1, 1, 1]


def test_bytes_of_a_character_that_was_cut_have_no_span(known):
    own, theirs = known["bytes"], known["bytes"]
    said = own.encode_plain("ab🙂")[:-1]
    ids, span_X, _ = aligned(said, [True] * len(said), own, theirs, behind=0, most=99)
    cut = len(own.encode_plain("ab"))
    assert own.decode(ids) == "ab" and (span_X[:cut] >= 0).all() and (span_X[cut:] == -1).all() and len(said) > cut


def test_a_tokenizer_whose_tokens_do_not_say_their_text_is_known_for_it(tmp_path):
    shutil.copytree(TINY, tmp_path / "tiny")
    path = tmp_path / "tiny" / "tokenizer.json"
    values = json.loads(path.read_text())
    values["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Lowercase"}, *([values["normalizer"]] if values.get("normalizer") else [])],
    }
    path.write_text(json.dumps(values))
    assert not Tokenizer(tmp_path / "tiny").splits_text
