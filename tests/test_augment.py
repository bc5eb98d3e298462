"""Augmentation: what it does to an image, where it is applied, and that without it nothing changes."""

import numpy as np
import pytest
import torch

from fedmpi.algorithm import load_method, method_names
from fedmpi.data.images import catalog
from fedmpi.data.images.spec import PartitionSpec
from fedmpi.data.images.store import Store
from fedmpi.data.prepared import prepare
from fedmpi.runtime import build
from fedmpi.vision.augment import Augmentation
from fedmpi.vision.methods._extractor import ExtractorMethod
from fedmpi.vision.training import PartyData


def generator(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def candidates(image, border, margin, mirrors):
    """Every image that the augmentation may make of this one, by hand."""
    channels, height, width = image.shape
    padded = torch.empty(channels, height + 2 * margin, width + 2 * margin)
    padded[:] = border[:, None, None]
    padded[:, margin : margin + height, margin : margin + width] = image
    for down in range(2 * margin + 1):
        for right in range(2 * margin + 1):
            crop = padded[:, down : down + height, right : right + width]
            yield (down - margin, right - margin, False), crop
            if mirrors:
                yield (down - margin, right - margin, True), crop.flip(2)


@pytest.mark.parametrize(
    "shape, margin, mirrors", [((3, 32, 32), 4, True), ((1, 8, 8), 2, False), ((1, 28, 28), 2, True)]
)
def test_an_image_is_moved_and_mirrored_and_nothing_else(shape, margin, mirrors):
    torch.manual_seed(0)
    border = torch.randn(shape[0])
    augment = Augmentation(margin, mirrors, border)
    batch = torch.randn(12, *shape)
    before = batch.clone()
    out = augment(batch, generator())
    assert torch.equal(batch, before) and out.shape == batch.shape and out.is_contiguous()
    made = []
    for image, result in zip(batch, out, strict=True):
        fits = [how for how, other in candidates(image, border, margin, mirrors) if torch.equal(other, result)]
        assert len(fits) == 1
        made += fits
    assert len(set(made)) > 6, "each image has a draw of its own"
    assert torch.equal(out, augment(batch, generator())) and not torch.equal(out, augment(batch, generator(1)))


def test_all_offsets_and_both_sides_are_about_as_frequent():
    image = torch.arange(25.0).reshape(1, 5, 5)
    out = Augmentation(1, True, torch.zeros(1))(image.expand(9000, 1, 5, 5), generator())
    counts = {
        how: int((out == other).all(dim=(1, 2, 3)).sum()) for how, other in candidates(image, torch.zeros(1), 1, True)
    }
    assert len(counts) == 18 and sum(counts.values()) == 9000
    assert min(counts.values()) > 400 and max(counts.values()) < 600  # 500 expected, deviation 22


def test_what_each_data_set_allows():
    by_name = {name: catalog.get(name) for name in catalog.known()}
    assert {name for name, source in by_name.items() if source.mirrors} == {"cifar10", "cifar100", "fashion-mnist"}
    assert {name: source.margin for name, source in by_name.items() if source.margin != 2} == {
        "cifar10": 4,
        "cifar100": 4,
    }
    assert [name for name, source in by_name.items() if source.background] == ["femnist"]


def test_the_background_moves_in_from_outside(tmp_path):
    """A blank image stays blank, in the units of a party's normalised data."""
    store = Store.open(prepare(PartitionSpec(dataset="digits", parties=5), tmp_path))
    shard = store.shard(0)
    data = PartyData.load(shard, store.mean, store.std, torch.device("cpu"))
    augment = Augmentation.of(store, torch.device("cpu"))
    blank = data.train_x[:1, :, :1, :1].expand(4, 1, 8, 8)
    assert shard.train_x[0, 0, 0, 0] == 0
    assert torch.equal(augment(blank, generator()), blank)


# ---- in a run ----


@pytest.mark.parametrize("method", ["dp-pfeddsu", "centaur"])
def test_it_does_not_depend_on_placement(method, make_config, run_in_memory):
    flags = f"--method {method} --augment --batch-size 8 --local-epochs 1"
    summaries = [run_in_memory(make_config(flags), ranks) for ranks in (5, 2)]
    for field in ("model_sha256", "accuracy", "accuracy_local_only"):
        assert len({summary[field] for summary in summaries}) == 1


@pytest.mark.parametrize("name", method_names(("fedmpi.vision.methods",)))
def test_every_method_of_images_takes_the_option(name, make_config):
    support = load_method(name).supports[-1]
    on, off = (
        build.algorithm(make_config(f"--method {name} --support {support} --epsilon inf {flag}"), device="cpu")
        for flag in ("--augment", "--no-augment")
    )
    theta = on.initial()
    assert not np.array_equal(on.work(0, theta, 1).values, off.work(0, theta, 1).values)


def test_an_augmented_run_goes_on_after_an_interruption_as_if_there_had_been_none(make_config):
    """What round 2 draws follows from seed, party and round; a party's state holds nothing of it."""
    config = make_config("--augment")
    through, later = build.algorithm(config, device="cpu"), build.algorithm(config, device="cpu")
    theta = through.initial()
    through.work(1, theta, 1)
    later.load_party_state(1, through.party_state(1))
    assert np.array_equal(through.work(1, theta, 2).values, later.work(1, theta, 2).values)


@pytest.mark.parametrize("method", ["dp-pfeddsu", "centaur"])
def test_without_it_nothing_is_drawn_and_nothing_changes(method, make_config, run_in_memory, monkeypatch):
    """The code as it would be without augmentation gives the same bytes."""
    flags = f"--method {method} --ext-epochs 2 --batch-size 8 --local-epochs 1"
    off = build.algorithm(make_config(flags), device="cpu")
    rng, batch = generator(), torch.zeros(3, 1, 8, 8)
    assert off.augmented(batch, rng) is batch and rng.bit_generator.state["buffer_pos"] == 4, "no word was taken"
    with_option = run_in_memory(make_config(flags), 2)
    monkeypatch.setattr(ExtractorMethod, "augmented", lambda self, images, rng: images)
    without = run_in_memory(make_config(flags), 2)
    assert with_option["model_sha256"] == without["model_sha256"]
    assert with_option["accuracy_local_only"] == without["accuracy_local_only"]


@pytest.mark.parametrize("method", ["dp-pfeddsu", "centaur"])
def test_phase_one_and_tests_see_the_images_as_they_are(method, make_config):
    """A method that cannot augment can still tune heads and test; it fails where the extractor is trained."""
    on, off = (
        build.algorithm(make_config(f"--method {method} {flag}"), device="cpu")
        for flag in ("--augment", "--no-augment")
    )

    def stop(images, rng):
        raise ZeroDivisionError

    theta = on.initial()
    head_losses = [one.work(0, theta, 1).figures["head_loss"] for one in (on, off)]
    assert head_losses[0] == head_losses[1], "phase 1 comes before anything that augmentation changes"
    on._augmentation = stop
    for party in (1, 2):  # whose heads are still new on both
        assert on.evaluate(party, theta, 1) == off.evaluate(party, theta, 1)
        assert on.references(party, theta) == off.references(party, theta)
    with pytest.raises(ZeroDivisionError):
        on.work(1, theta, 1)


@pytest.mark.parametrize("batch_size", [8, 64])
def test_every_batch_of_phase_two_is_augmented(batch_size, make_config, monkeypatch):
    method = build.algorithm(make_config(f"--augment --ext-epochs 3 --batch-size {batch_size}"), device="cpu")
    seen = []
    augment = method._augmentation
    monkeypatch.setattr(method, "_augmentation", lambda images, rng: seen.append(len(images)) or augment(images, rng))
    method.work(0, method.initial(), 1)
    assert sum(seen) == 3 * len(method._party(0)[0].train_y)
