"""Settings of the training data that are refused, and the defaults of the others."""

import pytest

from prolip.data.config import chunks_ahead
from prolip.data.loader import DataConfig


def test_a_batch_that_workers_do_not_divide_is_refused_with_what_fits():
    for size, said in (
        (100, "use --batch-size 96 or 104, or --workers 5$"),
        (7, "use --batch-size 8, or --workers 7$"),
    ):
        with pytest.raises(ValueError, match=f"-size {size} is not divisible by 8 workers: {said}$"):
            DataConfig(batch_size=size, workers=8)


def test_settings_are_checked_when_they_are_made():
    for settings, message in (
        ({"dataset_type": "tfds"}, "use one of auto, webdataset"),
        ({"batch_size": 0}, "--batch-size 0: give a number of at least 1"),
        ({"workers": -1}, "--workers -1: give a number of at least 0"),
        ({"prefetch": 0}, "--prefetch 0: give a number of at least 1"),
        ({"max_bad_fraction": 2}, "--max-bad-fraction 2: give a number of at least 0 and at most 1"),
        ({"train_num_samples": 0}, "--train-num-samples 0: give"),
        ({"word_drop": 1.0}, "--word-drop 1.0: give a number of at least 0 and below 1, such as 0.1"),
        ({"word_drop": 0.1, "captions": 0}, "--word-drop 0.1: no captions are read"),
        ({"word_drop": 0.1, "dataset_type": "synthetic"}, "--word-drop 0.1: no captions are read"),
        ({"csv_separator": ", "}, "not one character"),
        ({"csv_separator": '"'}, "not one character that may stand between cells"),
        ({"csv_separator": "\n"}, "not one character that may stand between cells"),
        ({"caption_sampling": "name:x"}, "the weight 'x' is no number"),
        ({"select": "group"}, "is no condition"),
        ({"train_data_upsampling_factors": "1::2", "train_data": "a::b"}, "add --dataset-resampled"),
        (
            {"train_data_upsampling_factors": "1", "train_data": "a::b", "dataset_resampled": True},
            "give 2 positive numbers",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**settings)
    assert DataConfig(csv_separator=r"\t").csv_separator == "\t"


@pytest.mark.parametrize(
    ("batch_size", "ahead"), [(1, 32), (64, 32), (65, 32), (67, 31), (512, 4), (1023, 3), (1024, 2), (9999, 2)]
)
def test_small_batches_are_prepared_further_ahead(batch_size, ahead):
    assert chunks_ahead(None, batch_size) == ahead
    assert ahead in (2, 32) or (ahead - 1) * batch_size < 2048 <= ahead * batch_size
    assert chunks_ahead(1, batch_size) == 1 and chunks_ahead(100, batch_size) == 100


def test_every_setting_has_its_help():
    from dataclasses import fields

    assert all(field.metadata["help"] for field in fields(DataConfig))
