"""The counter-based generator: published vectors, and numbers that follow from index and nonce."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import Level
from tsfunc.ops.philox import Philox, philox

# Random123's known answers for Philox 4x32-10: counter, key, result.
ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> torch.Tensor:
    return torch.tensor([int(word, 16) for word in text.split()])


@pytest.mark.parametrize(("counter", "key", "expected"), ANSWERS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    c = words(counter)
    found = philox(c[[0, 2], None], c[[1, 3], None], words(key)[:, None])
    assert torch.equal(found[0], words(expected))


def test_many_counters_at_once() -> None:
    even, odd = torch.randint(1 << 32, (2, 3, 5)), torch.randint(1 << 32, (2, 3, 5))
    key = torch.randint(1 << 32, (2, 1, 1))
    found = philox(even, odd, key)
    assert found.shape == (3, 5, 4)
    one = philox(even[:, 1:2, 3:4], odd[:, 1:2, 3:4], key)
    assert torch.equal(found[1, 3], one[0, 0])


def test_words_follow_from_the_nonce_and_the_index() -> None:
    def draw(size: int, count: int) -> list[torch.Tensor]:
        torch.manual_seed(1)
        one = Philox(Level(size, "split"), torch.device("cpu"))
        return [one.words(count), one.words(count)]

    first, second = draw(6, 10)
    assert first.shape == (6, 10) and not torch.equal(first, second)
    assert len({*first.flatten().tolist(), *second.flatten().tolist()}) == 120
    for got, want in zip(draw(3, 7), (first, second), strict=True):
        assert torch.equal(got, want[:3, :7])
    assert int(first.min()) >= 0 and int(first.max()) < 1 << 32


def test_the_generator_that_is_named_gives_the_nonce() -> None:
    level = Level(2, "split")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(5)
    one = Philox(level, torch.device("cpu"), generator).words(4)
    two = Philox(level, torch.device("cpu"), generator).words(4)
    assert torch.equal(before, torch.get_rng_state()) and not torch.equal(one, two)
    again = Philox(level, torch.device("cpu"), torch.Generator().manual_seed(5)).words(4)
    assert torch.equal(one, again)
