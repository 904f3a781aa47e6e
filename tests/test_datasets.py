"""The batches of the command line: real, endless, the same for the same seed, and refused in time."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from outgrow.cli.datasets import (
    DataError,
    Part,
    Shape,
    default_data,
    open_data,
    read_image,
    standard_library_text,
)
from outgrow.networks import find

IMAGE, MASK, TEXT = find("resnet-50"), find("unet"), find("gpt-2x64")


def take(count, data, network, shape, seed=0):
    return list(islice(open_data(str(data), network, shape, seed), count))


def equal(left, right):
    return all(torch.equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """Two classes, three images each, one colour a class."""
    for name, colour in (("rose", (250, 10, 10)), ("iris", (10, 10, 250))):
        (tmp_path / name).mkdir()
        for index in range(3):
            Image.new("RGB", (20 + index, 30), colour).save(tmp_path / name / f"{index}.png")
    return tmp_path


@pytest.mark.parametrize(
    ("data", "network", "shape", "input_shape", "target_shape"),
    [
        ("digits", IMAGE, Shape(5, 24, 1000), (5, 3, 24, 24), (5,)),
        ("digits", MASK, Shape(5, 24, 2), (5, 3, 24, 24), (5, 24, 24)),
        ("text", TEXT, Shape(5, 24, 256), (5, 24), (5, 24)),
        ("synthetic", IMAGE, Shape(5, 24, 10), (5, 3, 24, 24), (5,)),
        ("synthetic", MASK, Shape(5, 24, 2), (5, 3, 24, 24), (5, 24, 24)),
        ("synthetic", TEXT, Shape(5, 24, 256), (5, 24), (5, 24)),
    ],
)
def test_batches_have_the_shape_and_classes_that_the_network_needs(data, network, shape, input_shape, target_shape):
    for given, target in take(2, data, network, shape):
        assert given.shape == input_shape
        assert target.shape == target_shape
        assert target.dtype == torch.int64
        assert 0 <= target.min() <= target.max() < shape.classes


@pytest.mark.parametrize(("data", "network"), [("digits", IMAGE), ("text", TEXT), ("synthetic", IMAGE)])
def test_the_seed_decides_the_batches(data, network):
    shape = Shape(4, 16, 256)
    assert equal(take(3, data, network, shape, seed=1), take(3, data, network, shape, seed=1))
    assert not equal(take(3, data, network, shape, seed=1), take(3, data, network, shape, seed=2))


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    take(2, "digits", IMAGE, Shape(4, 16, 10))
    take(2, "text", TEXT, Shape(4, 16, 256))
    take(2, "synthetic", IMAGE, Shape(4, 16, 10))
    assert torch.equal(before, torch.get_rng_state())


def test_every_digit_is_seen_once_before_any_is_seen_again():
    batches = take(4, "digits", IMAGE, Shape(599, 8, 10))  # 1797 = 3 x 599 digits
    first = torch.cat([given for given, _ in batches[:3]]).flatten(1)
    everything = torch.from_numpy(_digit_images()).flatten(1)
    assert sorted(map(tuple, _ranks(first).tolist())) == sorted(map(tuple, _ranks(everything).tolist()))
    assert batches[3][0].shape[0] == 599  # and then it goes on


@pytest.mark.parametrize(("data", "network"), [("digits", IMAGE), ("text", TEXT)])
def test_parts_together_are_the_whole_batch(data, network):
    whole = take(3, data, network, Shape(6, 16, 256), seed=1)
    parts = [list(islice(open_data(data, network, Shape(2, 16, 256), 1, Part(index, 3)), 3)) for index in range(3)]
    for step, (given, target) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), given)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), target)


def test_parts_of_noise_differ():
    one, other = (next(open_data("synthetic", IMAGE, Shape(2, 16, 10), 1, Part(index, 2)))[0] for index in range(2))
    assert not torch.equal(one, other)


def _digit_images():
    from sklearn.datasets import load_digits

    return np.repeat(load_digits().images[:, None], 3, axis=1).astype(np.float32)


def _ranks(images):
    """Normalised images back as the integers from 0 to 16 that they were."""
    low, high = images.min(), images.max()
    return ((images - low) / (high - low) * 16).round().int()


def test_digits_are_normalised():
    given, _ = take(1, "digits", IMAGE, Shape(512, 8, 10))[0]
    assert abs(given.mean().item()) < 0.1
    assert abs(given.std().item() - 1) < 0.1


def test_a_mask_is_the_ink_of_the_digit():
    (given, mask), (_, label) = (
        take(1, "digits", network, Shape(64, 16, 11))[0] for network in (MASK, IMAGE)
    )  # the same seed: the same digits
    assert torch.equal(mask.flatten(1).amax(1), label + 1)
    assert (given[:, 0][mask > 0]).min() > (given[:, 0][mask == 0]).max()


def test_the_target_of_a_text_is_the_next_token():
    given, target = take(1, "text", TEXT, Shape(3, 32, 256))[0]
    assert torch.equal(given[:, 1:], target[:, :-1])
    assert given.untyped_storage().data_ptr() != target.untyped_storage().data_ptr()
    source = standard_library_text().numpy().tobytes()
    assert all(row.to(torch.uint8).numpy().tobytes() in source for row in given)


def test_the_text_is_capped():
    assert len(standard_library_text(1000)) == 1000
    assert len(standard_library_text()) > 10**6


def test_an_image_folder_gives_a_class_to_each_subfolder_in_order_of_name(flowers):
    given, target = take(1, flowers, IMAGE, Shape(6, 8, 1000))[0]
    assert sorted(target.tolist()) == [0, 0, 0, 1, 1, 1]
    red, blue = given[:, 0].mean((1, 2)), given[:, 2].mean((1, 2))
    assert torch.equal(target, (red > blue).long())  # iris is class 0


def test_an_image_is_resized_and_has_three_channels(tmp_path):
    Image.new("L", (3, 5), 255).save(tmp_path / "gray.png")
    assert torch.equal(read_image(tmp_path / "gray.png", 4), torch.ones(3, 4, 4))


def test_text_networks_train_on_text_and_the_others_on_digits_by_default():
    assert [default_data(network) for network in (IMAGE, MASK, TEXT)] == ["digits", "digits", "text"]


@pytest.mark.parametrize(
    ("data", "network", "message"),
    [
        ("text", IMAGE, "takes images"),
        ("digits", TEXT, "takes text"),
        ("./photos", TEXT, "takes text"),
        ("/no/such/folder", IMAGE, "no such folder"),
    ],
)
def test_data_of_the_wrong_kind_is_refused_when_it_is_opened(data, network, message):
    with pytest.raises(DataError, match=message):
        open_data(data, network, Shape(2, 16, 256), 0)


def test_a_file_is_no_image_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        open_data(str(tmp_path / "file"), IMAGE, Shape(2, 16, 10), 0)


def test_an_image_folder_needs_subfolders(tmp_path):
    with pytest.raises(DataError, match="no subfolders"):
        open_data(str(tmp_path), IMAGE, Shape(2, 16, 10), 0)


def test_every_class_needs_an_image(flowers):
    (flowers / "tulip").mkdir()
    (flowers / "tulip" / "notes.txt").write_text("none yet")
    with pytest.raises(DataError, match=r"tulip has no image"):
        open_data(str(flowers), IMAGE, Shape(2, 16, 10), 0)


def test_a_folder_may_not_have_more_classes_than_the_network(flowers):
    with pytest.raises(DataError, match="2 classes, and resnet-50 tells 1 apart"):
        open_data(str(flowers), IMAGE, Shape(2, 16, 1), 0)


def test_a_folder_of_classes_does_not_train_a_segmentation(flowers):
    with pytest.raises(DataError, match="label for each pixel"):
        open_data(str(flowers), MASK, Shape(2, 16, 2), 0)


@pytest.mark.parametrize("damage", ["not an image", "cut short"])
def test_an_unreadable_image_is_named(flowers, damage):
    victim = flowers / "rose" / "1.png"
    victim.write_bytes(b"hello" if damage == "not an image" else victim.read_bytes()[:45])
    with pytest.raises(DataError, match=r"rose/1\.png"):
        take(2, flowers, IMAGE, Shape(6, 8, 10))
