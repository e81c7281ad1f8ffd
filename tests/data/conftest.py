"""The tokenizer that comes with podrl, for the tests of what it is used on."""

import pathlib

import pytest

import podrl
from podrl.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(pathlib.Path(podrl.__file__).parent / "assets" / "tiny")
