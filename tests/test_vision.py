"""Networks, flat views and Top-k masks."""

import math
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedmpi.data.images import catalog
from fedmpi.errors import ConfigError
from fedmpi.vision import architecture
from fedmpi.vision.device import local_rank, pick_device
from fedmpi.vision.flat import FlatClassifier, FlatNetwork
from fedmpi.vision.models import Classifier, ResNet20, SmallCNN, build_extractor, initialise
from fedmpi.vision.reparam import kept, public_support, sparse_spans, topk_masks
from fedmpi.vision.training import Head, batches

pytestmark = pytest.mark.slow


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_resnet20_is_he_2016_with_option_a():
    net = ResNet20(3, "batch")
    # He 2016, table 6: 0.27 M with the head; 269,722 with 10 classes (64 * 10 + 10 of them in the head).
    assert count(net) + 64 * 10 + 10 == 269_722
    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 19
    assert all(layer.kernel_size == (3, 3) and layer.bias is None for layer in convolutions)
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 64)
    assert ResNet20(1, "group")(torch.zeros(2, 1, 28, 28)).shape == (2, 64)


def test_option_a_passes_the_input_through_with_zero_channels():
    block = ResNet20(3, "batch").blocks[3]  # 16 -> 32 channels, stride 2
    nn.init.zeros_(block.conv2.weight)  # leaves norm2(0) = 0: only the shortcut remains
    x = torch.rand(1, 16, 8, 8)
    out = block.eval()(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any() and not out[:, 24:].any()


@pytest.mark.parametrize("network, channels, size", [("cnn", 1, 8), ("resnet20", 3, 32)])
def test_the_flat_vector_is_the_network(network, channels, size):
    torch.manual_seed(0)
    module = build_extractor(network, channels, "batch")
    initialise(module, torch.Generator().manual_seed(1))
    x = torch.rand(4, channels, size, size)
    before = module.train()(x).detach().clone()
    flat = FlatNetwork(module, torch.device("cpu"))
    assert flat.dimension == count(module)
    assert torch.equal(flat.module.train()(x), before)
    flat.load(torch.zeros(flat.dimension))
    assert not flat.module(x).any()


@pytest.mark.parametrize("network, number", [("cnn", 4), ("resnet20", 19)])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sizes_that_are_known_without_torch_are_those_of_the_network(network, number, norm, channels):
    module = build_extractor(network, channels, norm)
    kernels = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Conv2d)}
    spans, at = [], 0
    for parameter in module.parameters():
        if id(parameter) in kernels:
            spans.append(slice(at, at + parameter.numel()))
        at += parameter.numel()
    assert len(spans) == number and architecture.conv_spans(network, channels) == spans
    assert architecture.extractor_size(network, channels) == at
    head = nn.Linear(module.features, 10)
    assert (
        architecture.head_size(10)
        == count(head)
        == FlatClassifier(Classifier(module, head.weight.data, head.bias.data), torch.device("cpu")).dimension - at
    )


@pytest.mark.parametrize("network", ["cnn", "resnet20"])
@pytest.mark.parametrize("shape", sorted({catalog.get(name).shape for name in catalog.known()}))
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_either_network_takes_the_images_of_every_data_set(network, shape, norm):
    """Both average over what is left of the image, so any size will do, and a batch of one as well."""
    net = build_extractor(network, shape[0], norm).train()
    for count_ in (1, 3):
        features = net(torch.rand(count_, *shape))
        assert features.shape == (count_, net.features) and torch.isfinite(features).all()
        features.sum().backward()


def test_gradients_land_in_the_flat_vector():
    flat = FlatNetwork(SmallCNN(1, "batch"), torch.device("cpu"))
    flat.module.train()(torch.rand(4, 1, 8, 8)).square().sum().backward()
    assert flat.gradients.abs().sum() > 0
    expected = torch.cat([parameter.grad.reshape(-1) for parameter in flat.module.parameters()])
    assert torch.equal(flat.gradients, expected)


def test_refreshed_statistics_are_those_of_the_data_alone():
    flat = FlatNetwork(nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2)), torch.device("cpu"))
    x = torch.rand(8, 1, 4, 4)
    with torch.no_grad():
        seen = flat.module[0](x)
    flat.statistics.fill_(99)  # whatever was there before must not matter
    flat.refresh_statistics(x.split(8))
    assert torch.allclose(flat.module[1].running_mean, seen.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(flat.module[1].running_var, seen.var((0, 2, 3), unbiased=True), atol=1e-6)


def test_both_networks_start_from_the_same_weights_for_the_same_seed():
    one, two = SmallCNN(1, "batch"), SmallCNN(1, "batch")
    for net in (one, two):
        initialise(net, torch.Generator().manual_seed(7))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@given(st.integers(1, 5000), st.floats(0.001, 1))
def test_kept_is_the_ceiling(size, density):
    assert abs(kept(size, density) - density * size) < 1 + 1e-6
    assert kept(size, density) >= density * size - 1e-6
    assert 1 <= kept(size, density) <= size


def test_kept_on_the_papers_layers():
    assert kept(36_864, 0.05) == 1844 and kept(20, 0.05) == 1 and kept(100, 1.0) == 100


@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=10, max_size=60), st.floats(0.05, 0.95))
def test_top_k_keeps_the_largest_and_breaks_ties_by_position(values, density):
    theta = np.array(values, np.float32)
    span = slice(4, len(values))
    support = public_support(theta, [span], density)
    inside = support[support >= 4] - 4
    assert np.array_equal(support[support < 4], np.arange(4)), "everything outside the sparse layers is dense"
    layer = np.abs(theta[span])
    assert len(inside) == kept(layer.size, density)
    by_rule = sorted(range(layer.size), key=lambda i: (-layer[i], i))[: len(inside)]
    assert sorted(by_rule) == inside.tolist()
    masks = torch.ones(len(values))
    topk_masks(torch.from_numpy(theta), [span], density, masks)
    chosen = layer[masks[4:].numpy() == 1]
    assert sorted(chosen) == sorted(layer[inside]), "the same magnitudes, whichever of equal ones"


def test_only_the_last_k_layers_are_sparse():
    spans = [slice(0, 5), slice(5, 9), slice(10, 20)]
    assert sparse_spans(spans, 2, 0.1) == spans[1:]
    assert sparse_spans(spans, 9, 0.1) == spans
    assert sparse_spans(spans, 0, 0.1) == [] == sparse_spans(spans, 2, 1.0)


def test_the_written_out_head_gradient_is_autograds():
    rng = np.random.default_rng(0)
    features, labels = torch.randn(40, 6), torch.randint(0, 3, (40,))
    head = Head.new(6, 3, rng, torch.device("cpu"))
    other = nn.Linear(6, 3)
    other.weight.data, other.bias.data = head.weight.clone(), head.bias.clone()
    head.train(features, labels, 3, 16, 0.1, np.random.default_rng(5))
    order, optimiser = np.random.default_rng(5), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        for batch in batches(40, 16, order):
            optimiser.zero_grad()
            nn.functional.cross_entropy(other(features[batch]), labels[batch]).backward()
            optimiser.step()
    assert torch.allclose(head.weight, other.weight, atol=1e-6) and torch.allclose(head.bias, other.bias, atol=1e-6)
    correct, loss = head.test(features, labels)
    assert 0 <= correct <= 40 and math.isfinite(loss)


@given(st.integers(1, 70), st.integers(2, 20))
def test_an_epoch_visits_every_sample_once_and_never_trains_on_one(count_, size):
    seen = [batch.tolist() for batch in batches(count_, size, np.random.default_rng(0))]
    flat = [index for batch in seen for index in batch]
    assert len(set(flat)) == len(flat) >= count_ - 1
    assert all(len(batch) > 1 for batch in seen) or count_ == 1


@pytest.mark.parametrize(
    "setting, env, gpus, device",
    [
        ("auto", {}, 0, "cpu"),
        ("cpu", {}, 4, "cpu"),
        ("auto", {"OMPI_COMM_WORLD_LOCAL_RANK": "5"}, 4, "cuda:1"),
        ("auto", {"SLURM_LOCALID": "2"}, 4, "cuda:2"),
        ("cuda", {"MPI_LOCALRANKID": "3"}, 2, "cuda:1"),
        ("auto", {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 2, "cuda:1"),
        ("auto", {"SLURM_LOCALID": "nonsense"}, 2, "cuda:0"),
        ("cuda:1", {}, 2, "cuda:1"),
    ],
)
def test_a_rank_takes_its_own_gpu(setting, env, gpus, device):
    assert pick_device(setting, env, gpus) == device


@pytest.mark.parametrize(
    "setting, gpus, said", [("cuda", 0, "no GPU"), ("cuda:5", 2, "2 GPUs"), ("tpu", 1, "must be auto")]
)
def test_a_device_that_is_not_there_is_refused(setting, gpus, said):
    with pytest.raises(ConfigError, match=said):
        pick_device(setting, {}, gpus)


def test_local_rank_without_a_launcher_is_zero():
    assert local_rank({}) == 0


# ---- memory ----

FAULTS = """
import resource, torch
from fedmpi.vision.device import keep_freed_memory
keep = {keep}
assert not keep or keep_freed_memory()
for _ in range(10):  # until the heap has found its shape
    torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(10_000_000)  # 40 MB, written once and freed
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is what is told")
def test_freed_memory_is_used_again_and_not_mapped_anew():
    by_default, kept = (
        int(subprocess.check_output([sys.executable, "-c", FAULTS.format(keep=keep)])) for keep in (False, True)
    )
    pages = 20 * 40_000_000 // os.sysconf("SC_PAGESIZE")
    assert by_default > 0.8 * pages, "the default has changed: is this still worth it?"
    assert kept < 0.5 * by_default, "most pages were there already"
