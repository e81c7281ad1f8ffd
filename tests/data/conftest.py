"""The tokenizer that comes with podrl, as a fixture."""

import pytest
from embedded import TINY

from podrl.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY)
