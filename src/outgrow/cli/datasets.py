"""Batches for the command line: real data that needs no download, and noise. `job` opens them.

Each data set is checked when it is opened and then goes on without end. It holds the samples as they are
stored, and decodes and resizes them by the batch, so that the memory of a run is the training's.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outgrow.errors import OutgrowError
from outgrow.networks import Network

Batch = tuple[Tensor, Tensor]

NAMED = ("digits", "synthetic", "text")
TEXT_CAP_BYTES = 8 * 10**6
FOREGROUND_THRESHOLD = 0.5  # of a pixel's range: what counts as ink in the mask of a digit

_IMAGE_SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
# Mean and deviation of ImageNet's channels, which networks for photographs are trained with.
_PHOTO_MEAN = (0.485, 0.456, 0.406)
_PHOTO_DEVIATION = (0.229, 0.224, 0.225)


class DataError(OutgrowError, ValueError):
    """The data that `--data` asks for is missing, unreadable, or of no use to the network."""


@dataclass(frozen=True)
class Shape:
    """What a batch has to look like.

    `image_size` is height = width in pixels, for a text the number of tokens; `classes` is what the
    network tells apart, for a text its vocabulary.
    """

    batch: int
    image_size: int
    classes: int


@dataclass(frozen=True)
class Part:
    """Which part of each step's samples a process takes, counted from 0, and how many parts there are.

    All parts together are the stream that one process would get with a batch as large as all of theirs.
    """

    index: int = 0
    count: int = 1

    def of(self, whole: Tensor) -> Tensor:
        """This part of what there is for all of them, cut along the first dimension."""
        size = len(whole) // self.count
        return whole[self.index * size : (self.index + 1) * size]


WHOLE = Part()


def default_data(network: Network) -> str:
    """What `--data` is when it is not given."""
    return "text" if network.kind == "text" else "digits"


def open_data(data: str, network: Network, shape: Shape, seed: int, part: Part = WHOLE) -> Iterator[Batch]:
    """An endless stream of (input, target) batches, the same for the same seed.

    Args:
        data: "digits", "synthetic", "text", or a folder with one subfolder of images for each class.
        network: whose input and target the batches are for.
        shape: size of a batch.
        seed: of the order of the samples; the global random state is neither read nor changed.
        part: of the samples, where several processes share them.

    Raises:
        DataError: there is no such data, or it does not fit the network. An image that cannot be read
            raises it from the stream.
    """
    generator = torch.Generator().manual_seed(seed)
    if data == "synthetic":
        return _synthetic(network, shape, _own_generator(generator, part))
    if data == "text":
        if network.kind != "text":
            raise DataError(f"--data text is for text networks, and {network.name} takes images: try digits")
        return _windows(standard_library_text(), shape, generator, part)
    if network.kind == "text":
        raise DataError(f"{network.name} takes text, and {data!r} is images: use --data text or synthetic")
    if data == "digits":
        return _digits(network, shape, generator, part)
    return _folder(Path(data), network, shape, generator, part)


def epoch_samples(data: str, network: Network, image_size: int) -> int | None:
    """How many samples the data has; None if it has no end.

    Raises:
        DataError: as `open_data`.
    """
    if data == "synthetic":
        return None
    if data == "text":
        return max(1, len(standard_library_text()) // image_size)
    if data == "digits":
        return len(_load_digits().images)
    return len(_list_images(Path(data), network, network.classes)[0])


def standard_library_text(cap: int = TEXT_CAP_BYTES) -> Tensor:
    """The source of Python's standard library, its top-level modules by name, as one uint8 tensor.

    Cut off after `cap` bytes.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= cap:
            break
    if not text:
        raise DataError(f"found no Python source in {folder}: use --data synthetic")
    return torch.frombuffer(text, dtype=torch.uint8)[:cap]


def _own_generator(generator: torch.Generator, part: Part) -> torch.Generator:
    """A generator for a part of its own, where nothing but noise is drawn; the only part keeps the one there is."""
    if part.count == 1:
        return generator
    seeds = torch.randint(2**63 - 1, (part.count,), generator=generator)
    return torch.Generator().manual_seed(int(seeds[part.index]))


def _synthetic(network: Network, shape: Shape, generator: torch.Generator) -> Iterator[Batch]:
    while True:
        yield network.sample(shape.batch, shape.image_size, shape.classes, generator=generator)


def _windows(text: Tensor, shape: Shape, generator: torch.Generator, part: Part) -> Iterator[Batch]:
    """Windows at random places; the target is the window moved on by one."""
    length = shape.image_size
    if shape.classes < 256:
        raise DataError(f"text is bytes, and a vocabulary of {shape.classes} does not hold all 256")
    if len(text) <= length:
        raise DataError(f"the text has {len(text)} bytes, too few for windows of {length}")
    return _sample_windows(text, shape, generator, part)


def _sample_windows(text: Tensor, shape: Shape, generator: torch.Generator, part: Part) -> Iterator[Batch]:
    length = shape.image_size
    span = torch.arange(length + 1)
    while True:
        starts = part.of(torch.randint(len(text) - length, (shape.batch * part.count, 1), generator=generator))
        tokens = text[starts + span].long()
        # Copies, not views: input and target must not share a storage.
        yield tokens[:, :-1].clone(), tokens[:, 1:].clone()


def _shuffled(count: int, batch: int, generator: torch.Generator, part: Part) -> Iterator[Tensor]:
    """Indices of each batch: one random order of all samples after another, every batch full."""
    waiting = torch.empty(0, dtype=torch.long)
    of_all = batch * part.count
    while True:
        while len(waiting) < of_all:
            waiting = torch.cat((waiting, torch.randperm(count, generator=generator)))
        yield part.of(waiting[:of_all])
        waiting = waiting[of_all:]


def _load_digits() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            '--data digits needs scikit-learn: pip install "outgrow[digits]", or use --data synthetic'
        ) from error
    return load_digits()


def _digits(network: Network, shape: Shape, generator: torch.Generator, part: Part) -> Iterator[Batch]:
    bunch = _load_digits()
    images = torch.from_numpy(bunch.images).float() / 16  # 1797 images of 8 x 8 pixels from 0 to 16
    labels = torch.from_numpy(bunch.target).long()
    count = int(labels.max()) + 1
    if network.kind == "image" and count > shape.classes:
        raise DataError(f"the digits have {count} classes, and {network.name} tells {shape.classes} apart")
    return _digit_batches(images, labels, network, shape, generator, part)


def _digit_batches(
    images: Tensor, labels: Tensor, network: Network, shape: Shape, generator: torch.Generator, part: Part
) -> Iterator[Batch]:
    mean, deviation = images.mean(), images.std()
    size = (shape.image_size, shape.image_size)
    for picked in _shuffled(len(images), shape.batch, generator, part):
        gray = F.interpolate(images[picked].unsqueeze(1), size=size, mode="bilinear", align_corners=False)
        target = labels[picked]
        if network.kind == "segmentation":
            target = _ink_mask(gray.squeeze(1), target, shape.classes)
        yield gray.sub_(mean).div_(deviation).repeat(1, 3, 1, 1), target


def _ink_mask(gray: Tensor, digits: Tensor, classes: int) -> Tensor:
    """A label for each pixel: 0 for paper, for ink the digit's class, counted round within the classes."""
    if classes < 2:
        raise DataError("a mask has a background and a foreground: it needs at least 2 classes")
    ink = 1 + digits % (classes - 1)
    return (gray > FOREGROUND_THRESHOLD) * ink.view(-1, 1, 1)


def _folder(root: Path, network: Network, shape: Shape, generator: torch.Generator, part: Part) -> Iterator[Batch]:
    if not root.exists():
        raise DataError(f"--data {root}: no such folder, and none of {', '.join(NAMED)}")
    if not root.is_dir():
        raise DataError(f"--data {root} is a file: give the folder that holds one subfolder for each class")
    if network.kind == "segmentation":
        raise DataError(
            f"{network.name} needs a label for each pixel, which an image folder has not: "
            "use --data digits or synthetic"
        )
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise DataError('an image folder needs Pillow: pip install "outgrow[images]"') from error
    try:
        paths, labels = _list_images(root, network, shape.classes)
    except OSError as error:
        raise DataError(f"cannot read the folder {root}: {error}") from error
    return _folder_batches(paths, labels, shape, generator, part)


def _list_images(root: Path, network: Network, classes: int) -> tuple[list[Path], list[int]]:
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise DataError(f"{root} has no subfolders: it needs one for each class, with that class's images")
    if len(folders) > classes:
        raise DataError(f"{root} has {len(folders)} classes, and {network.name} tells {classes} apart")
    paths: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _IMAGE_SUFFIXES)
        if not found:
            known = ", ".join(sorted(suffix[1:] for suffix in _IMAGE_SUFFIXES))
            raise DataError(f"{folder} has no image (a file that ends in {known})")
        paths += found
        labels += [label] * len(found)
    return paths, labels


def _folder_batches(
    paths: list[Path], labels: list[int], shape: Shape, generator: torch.Generator, part: Part
) -> Iterator[Batch]:
    mean = torch.tensor(_PHOTO_MEAN).view(3, 1, 1)
    deviation = torch.tensor(_PHOTO_DEVIATION).view(3, 1, 1)
    targets = torch.tensor(labels)
    for picked in _shuffled(len(paths), shape.batch, generator, part):
        images = torch.empty(shape.batch, 3, shape.image_size, shape.image_size)
        for row, index in enumerate(picked.tolist()):
            images[row] = read_image(paths[index], shape.image_size)
        yield images.sub_(mean).div_(deviation), targets[picked]


def read_image(path: Path, size: int) -> Tensor:
    """A picture from a file as (3, size, size), float32 from 0 to 1, squeezed into the square.

    Raises:
        DataError: the file cannot be read as an image.
    """
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            square = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        pixels = np.asarray(square)
    # Pillow's decoders raise any of these on a damaged file.
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read the image {path}: {error}") from error
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float().div_(255)
