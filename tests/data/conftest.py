"""The tokenizer that comes with podrl, as a fixture."""

import pathlib

import pytest

import podrl
from podrl.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(pathlib.Path(podrl.__file__).parent / "assets" / "tiny")
