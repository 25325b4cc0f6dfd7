"""Settings of the training data that are refused, and the defaults of the others."""

from dataclasses import fields

import pytest

from prolip.data.config import DataConfig, chunks_ahead


def test_settings_are_checked_when_they_are_made():
    noise, factors = {"noise_ratio": 0.2}, {"train_data": "a::b", "train_data_upsampling_factors": "1"}
    for settings, message in (
        (
            {"batch_size": 100, "workers": 8},
            "is not divisible by 8 workers: use --batch-size 96 or 104, or --workers 5$",
        ),
        ({"batch_size": 7, "workers": 8}, "use --batch-size 8, or --workers 7$"),
        ({"dataset_type": "tfds"}, "use one of auto, webdataset"),
        ({"batch_size": 0}, "--batch-size 0: give a number of at least 1"),
        ({"workers": -1}, "--workers -1: give a number of at least 0"),
        ({"max_bad_fraction": 2}, "--max-bad-fraction 2: give a number of at least 0 and at most 1"),
        ({"word_drop": 1.0}, "--word-drop 1.0: give a number of at least 0 and below 1, such as 0.1"),
        ({"word_drop": 0.1, "captions": 0}, "--word-drop 0.1: no captions are read"),
        ({"word_drop": 0.1, "dataset_type": "synthetic"}, "--word-drop 0.1: no captions are read"),
        ({"csv_separator": ", "}, "not one character"),
        ({"csv_separator": "\n"}, "not one character that may stand between cells"),
        ({"caption_sampling": "name:x"}, "holds the weight 'x'"),
        ({"select": "group"}, "is no condition"),
        (factors, "add --dataset-resampled"),
        (factors | {"dataset_resampled": True}, "give 2 positive numbers"),
        ({"captions": 2, "known_matches": True}, "captions is 2 with known matches: give 1"),
        ({"unpaired": True, "known_matches": True}, "two samples or more for each worker, and no known matches"),
        ({"unpaired": True, "batch_size": 2, "workers": 2}, "two samples or more for each worker"),
        ({"noise_ratio": 1.5}, "--noise-ratio 1.5: give a number of at least 0 and at most 1"),
        ({"noise_ratio": float("nan")}, "--noise-ratio nan"),
        (noise | {"noise_seed": -1}, "--noise-seed -1: give a number of at least 0"),
        (noise | {"dataset_resampled": True}, "--noise-ratio 0.2: --dataset-resampled .* leave one"),
        (noise | {"dataset_type": "synthetic"}, "synthetic data has no captions"),
        (noise | {"captions": 0}, "reads no captions"),
        (noise | {"unpaired": True}, "pairs no image with its own"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**{"batch_size": 4, "workers": 1} | settings)
    assert DataConfig(csv_separator=r"\t").csv_separator == "\t"


def test_small_batches_are_prepared_further_ahead():
    for batch_size, ahead in ((1, 32), (65, 32), (67, 31), (512, 4), (1023, 3), (1024, 2), (9999, 2)):
        assert chunks_ahead(None, batch_size) == ahead
        assert chunks_ahead(1, batch_size) == 1 and chunks_ahead(100, batch_size) == 100


def test_every_setting_has_its_help():
    assert all(field.metadata["help"] for field in fields(DataConfig))
