"""Tokenised data in every form becomes the same arrays."""

import numpy as np
import pytest

from dualfluence.adapters import tokenised

ROWS = [
    {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": 1, "text": "one"},
    {"input_ids": [8, 9], "attention_mask": [1, 1], "labels": 0, "text": "two"},
]
IDS, MASK = [[5, 6, 7], [8, 9, 0]], [[1, 1, 1], [1, 1, 0]]


class Columns:
    """As `datasets.Dataset` is read: names of columns, and a slice as a dict."""

    column_names = ("input_ids", "attention_mask", "labels", "text")

    def __getitem__(self, rows):
        return {name: [row[name] for row in ROWS][rows] for name in self.column_names}


class Output:
    """As a tokenizer returns them: not a dict, but with its `items`, and the dict in `data`."""

    def __init__(self):
        self.data = {"input_ids": np.array(IDS), "attention_mask": np.array(MASK), "labels": [1, 0]}

    def items(self):
        return self.data.items()


class Tensor:
    """As a tensor of PyTorch is read."""

    def __init__(self, value):
        self.value = np.asarray(value)

    def __len__(self):
        return len(self.value)

    def __getitem__(self, key):
        return Tensor(self.value[key])

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return self.value


PADDED = {"input_ids": Tensor(IDS), "attention_mask": Tensor(MASK), "labels": Tensor([1, 0])}


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        iter(ROWS),
        Columns(),
        Output(),
        PADDED,
        {"input_ids": [r["input_ids"] for r in ROWS], "labels": np.array([1, 0])},
        [{name: [row[name]] for name in row} for row in ROWS],
    ],
    ids=["rows", "iterator", "dataset", "tokenizer", "tensors", "no mask", "batches"],
)
def test_every_form_is_the_same_arrays(data):
    x, y = tokenised(data)
    assert set(x) == {"input_ids", "attention_mask"}
    np.testing.assert_array_equal(x["input_ids"], IDS)
    np.testing.assert_array_equal(x["attention_mask"], MASK)
    np.testing.assert_array_equal(y, [1, 0])


def test_causal_targets_are_the_next_tokens_and_padding_counts_for_nothing():
    rows = [{"input_ids": row["input_ids"]} for row in ROWS]
    x, y = tokenised(rows, causal=True)
    np.testing.assert_array_equal(x["attention_mask"], MASK)
    np.testing.assert_array_equal(y, [[6, 7, -100], [9, -100, -100]])
    labels = [rows[0] | {"labels": [-100, 6, 7]}, rows[1] | {"labels": [-100, 9]}]
    np.testing.assert_array_equal(
        tokenised(labels, causal=True)[1], [[6, 7, -100], [9, -100, -100]]
    )
    np.testing.assert_array_equal(tokenised(labels)[1], [[-100, 6, 7], [-100, 9, -100]])


def test_queries_take_the_length_of_the_training_sequences():
    x, y = tokenised(ROWS, causal=False, length=4)
    assert x["input_ids"].shape == x["attention_mask"].shape == (2, 4)
    x, y = tokenised([{"input_ids": [5, 6]}], causal=True, length=4)
    np.testing.assert_array_equal(x["input_ids"], [[5, 6, 0, 0]])
    np.testing.assert_array_equal(y, [[6, -100, -100, -100]])
    with pytest.raises(ValueError, match=r"a sequence of 3 tokens, length=2"):
        tokenised(ROWS, length=2)


def test_the_decoder_reads_its_labels_behind_the_first_token():
    rows = [
        {"input_ids": [5, 6, 7], "labels": [8, 9]},
        {"input_ids": [5, 6], "labels": [7, 8, 9, 10]},
    ]
    x, y = tokenised(rows, decoder_start=2)
    np.testing.assert_array_equal(x["decoder_input_ids"], [[2, 8, 0, 0], [2, 7, 8, 9]])
    np.testing.assert_array_equal(y, [[8, 9, -100, -100], [7, 8, 9, 10]])
    assert x["input_ids"].shape == (2, 3)
    x, y = tokenised(rows, decoder_start=2, length=5)  # that of the labels
    assert x["input_ids"].shape == (2, 3)
    assert x["decoder_input_ids"].shape == y.shape == (2, 5)


def test_text_that_ends_alike_is_not_padding():
    rows = {"input_ids": [[9, 4, 4], [4, 9, 8], [7, 9, 9]]}
    assert (tokenised(rows, causal=True)[0]["attention_mask"] == 1).all()


PADDED_ROWS = {"input_ids": [[5, 6, 0, 0], [7, 8, 9, 0]]}
MASKED = PADDED_ROWS | {"attention_mask": [[1, 1, 0, 0], [1, 1, 1, 0]]}


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (
            PADDED_ROWS,
            {"causal": True},
            "no attention_mask, but 1 sequences end with token 0 up to 2",
        ),
        (
            {"input_ids": [[3, 3, 5], [3, 7, 8]]},
            {"causal": True},
            "sequences begin with token 3 up to 2 times",
        ),
        (
            MASKED | {"labels": PADDED_ROWS["input_ids"]},
            {"causal": True},
            "labels of sequence 0 are not -100 at token 2, where attention_mask is 0",
        ),
        (
            [{"input_ids": [1, 2, 3], "labels": [1, 2]}],
            {"causal": True},
            "sequence 0 has 3 tokens but 2 labels.*decoder_start_token_id",
        ),
        (ROWS[:1], {"causal": True, "decoder_start": 0}, "models without an encoder"),
        ([{"input_ids": []}], {"causal": True}, "sequence 0 has no tokens"),
    ],
)
def test_padding_and_labels_that_do_not_belong_are_said(data, options, said):
    with pytest.raises(ValueError, match=said):
        tokenised(data, **options)


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        ([], ValueError, "got none"),
        (["a text"], TypeError, "expected dicts of columns, got str"),
        ([{"tokens": [1]}], ValueError, "a column input_ids, got tokens"),
        ([{"input_ids": [1, 2]}], ValueError, "no column 'labels'.*causal=True"),
        ([ROWS[0], {"input_ids": [1], "attention_mask": [1]}], ValueError, "1 has no labels"),
        ({"input_ids": [[1], [2]], "labels": [1]}, ValueError, "different lengths"),
    ],
)
def test_bad_data_are_said(data, error, said):
    with pytest.raises(error, match=said):
        tokenised(data)
