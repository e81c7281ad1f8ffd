"""Trains SentencePiece models on the embedded word problems, with special pieces numbered as in Gemma."""

import io

import sentencepiece

from podrl.data import problems


def train(**options) -> bytes:
    """Trains a model file; `options` are further options of SentencePiece's trainer."""
    stored = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([problems.GENERATOR.problem("train", i).question for i in range(200)]),
        model_writer=stored,
        hard_vocab_limit=False,
        add_dummy_prefix=options.pop("add_dummy_prefix", False),
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return stored.getvalue()
