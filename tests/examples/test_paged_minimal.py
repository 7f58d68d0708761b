"""The script of a walkthrough: its tokens are those of contiguous caches, whoever ends before."""

import sys

import pytest

from .test_examples import EXAMPLES, MODEL, DenseAttention

sys.path.append(str(EXAMPLES))

import paged_minimal

PROMPTS = ["def main(", "import os\nimport sys\n\n\ndef read_file(path"]


def grown(block_size=4):
    """The script's batch after its loop, and the lengths of the prompts."""
    batch = paged_minimal.Batch(PROMPTS, block_size)
    batch.run()
    batch.cm.cache.check()
    return batch, batch.input_text_mask.sum(1).tolist()


@pytest.fixture(autouse=True)
def _a_few_tokens(monkeypatch):
    monkeypatch.setattr(paged_minimal, "MAX_NEW_TOKENS", 12)


def test_tokens_are_those_of_contiguous_caches():
    batch, lens = grown()
    for row, length in zip(batch.tokens.tolist(), lens, strict=True):
        attend = DenseAttention(MODEL, MODEL.context)
        attend.extend(len(row))
        expected = MODEL.forward(row, attend, range(len(row))).argmax(axis=-1)
        assert row[length:] == expected[length - 1 : -1].tolist()
        assert len(row) == max(lens) + 12


def test_a_sequence_that_ends_leaves_the_others_be(monkeypatch):
    before, lens = grown()
    first, second = before.tokens.tolist()
    at = next(i for i in range(lens[0], len(first) - 4) if first[i] not in [*first[lens[0] : i], *second])
    monkeypatch.setattr(paged_minimal, "END", first[at])
    after, _ = grown()
    assert after.tokens[0, : at + 1].tolist() == first[: at + 1]
    assert after.tokens[1].tolist() == second
    assert after.cm.get_last_pos().tolist() == [3, len(second) - 1]
    assert after.cm.cache.num_free > before.cm.cache.num_free


def test_the_script_prints_the_texts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["paged_minimal.py", *PROMPTS])
    paged_minimal.main()
    texts = capsys.readouterr().out.split(f"\n{'-' * 50}\n")
    assert [text.startswith(prompt) for text, prompt in zip(texts, PROMPTS, strict=False)] == [True, True]
    assert texts[2].startswith("Fragmented Memory: ")
