"""Bytes of text as batches."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from zoo.text import batches, read_bytes


def test_default_is_real_source_text_and_the_same_each_time() -> None:
    text = read_bytes()
    assert b"import " in bytes(text[:10_000].tolist())
    assert text.shape[0] == 4 << 20
    assert text.equal(read_bytes())


def test_labels_are_the_next_byte_and_pieces_do_not_overlap() -> None:
    text = torch.arange(25, dtype=torch.uint8)
    drawn = list(islice(batches(text, 2, 4), 4))
    for tokens, labels in drawn:
        assert tokens.dtype == labels.dtype == torch.int64
        assert labels.equal(tokens + 1)
    starts = torch.cat([tokens[:, 0] for tokens, _ in drawn])
    assert starts.tolist() == [0, 4, 8, 12, 16, 20, 0, 4]


@pytest.mark.parametrize(("content", "message"), [(None, "cannot read .*missing"), (b"", "is empty")])
def test_missing_and_empty_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "missing.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"text: .*{message}"):
        read_bytes(path)


def test_a_text_shorter_than_a_sequence() -> None:
    with pytest.raises(ValueError, match="text: 8 bytes are too few for sequences of 8"):
        batches(torch.zeros(8, dtype=torch.uint8), 1, 8)
    next(batches(torch.zeros(9, dtype=torch.uint8), 1, 8))
