"""Class folders: the classes of torchvision's ImageFolder, with the right names."""

import miniatures as mini
import pytest
from open_clip.zero_shot_metadata import OPENAI_IMAGENET_TEMPLATES
from torchvision.datasets import ImageFolder

from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.own import open_folder

FOLDERS = ("zebra", "ant_hill", "Bee")


@pytest.fixture
def root(tmp_path):
    return mini.class_folders(tmp_path / "val", FOLDERS)


def test_classes_are_numbered_as_torchvision_numbers_them_and_named_by_files_first(root):
    dataset, theirs = open_folder(root), ImageFolder(str(root))
    samples = list(dataset.samples())
    assert [s.label for s in samples] == theirs.targets and dataset.size == 6
    assert [str(root / s.key) for s in samples] == [path for path, _ in theirs.samples]
    assert dataset.classnames == ("Bee", "ant hill", "zebra") and dataset.templates == ("{c}", "a photo of a {c}.")
    assert samples[0].image == (root / samples[0].key).read_bytes()
    (root.parent / "classnames.txt").write_text("a bee\nan ant hill\na zebra\n")
    (root / "zeroshot_classification_templates.txt").write_text("look: {c}\n")
    named = open_folder(root)
    assert named.classnames == ("a bee", "an ant hill", "a zebra") and named.templates == ("look: {c}",)
    assert named.fingerprint == dataset.fingerprint  # of the images: their sizes, not their place
    other = mini.class_folders(root.parent / "b", FOLDERS)
    assert open_folder(other).fingerprint == dataset.fingerprint
    (other / "zebra" / "val_0_0.JPEG").write_bytes(mini.picture(0, "JPEG", size=30))
    assert open_folder(other).fingerprint != dataset.fingerprint


def test_folders_of_imagenet_get_openclips_names_and_prompts(tmp_path):
    some = ["n01443537", "n02123045", "n07753592"]  # goldfish, tabby, banana
    dataset = open_folder(mini.class_folders(tmp_path / "val", some, images=1))
    assert dataset.classnames == ("goldfish", "tabby cat", "banana")
    assert dataset.templates == tuple(t("{c}") for t in OPENAI_IMAGENET_TEMPLATES) and len(dataset.templates) == 80
    with pytest.raises(ValueError, match="1 folders of .* are not classes of ImageNet-1k .n99999999"):
        open_folder(mini.class_folders(tmp_path / "val", ["n99999999"], images=1))


@pytest.mark.parametrize("link", ["zebra/other.JPEG", "zebra/more", "lion"])
def test_links_are_followed_inside_the_folder_alone(root, tmp_path, link):
    (root / "zebra" / "again.JPEG").symlink_to("val_0_0.JPEG")
    assert open_folder(root).size == 7
    out = mini.class_folders(tmp_path / "out", ["lion"]) / "lion"
    (root / link).symlink_to(out / "val_0_0.JPEG" if link.endswith("JPEG") else out)
    with pytest.raises(ValueError, match=f"{root}/{link} is a link to {out}.*, outside {root}"):
        open_folder(root)


@pytest.mark.parametrize(
    "spoil, error, message",
    [
        (lambda f: (f / "empty").mkdir(), DamagedData, "class folder .*empty has no image"),
        (lambda f: (f / "Bee/val_2_0.JPEG").write_bytes(b""), DamagedData, "1 of 6 files are empty: .*val_2"),
        (lambda f: (f / "classnames.txt").write_text("one\ntwo"), ValueError, "2 class names for 3 classes"),
        (lambda f: (f / "zeroshot_classification_templates.txt").write_text("it"), DamagedData, "'it' has no {c}"),
    ],
)
def test_what_is_wrong_is_known_before_anything_is_read(root, spoil, error, message):
    spoil(root)
    with pytest.raises(error, match=message):
        open_folder(root)


def test_splits_are_not_taken_for_classes_and_a_class_not_for_the_set(tmp_path):
    for split in ("train", "val"):
        mini.class_folders(tmp_path / split, ["n01440764", "n01443537"], images=1)
    with pytest.raises(ValueError, match=rf"one level too high .it has train, val.: give {tmp_path}/val$"):
        open_folder(tmp_path)
    with pytest.raises(ValueError, match=rf"it is one class, give {tmp_path}/val$"):
        open_folder(tmp_path / "val" / "n01440764")
    with pytest.raises(FileNotFoundError, match="no image folder"):
        open_folder(tmp_path / "none")
    assert open_folder(mini.class_folders(tmp_path / "pets", ["test", "train"])).size == 4  # classes of these names
