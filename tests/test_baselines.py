"""The baselines: what each shares, keeps and noises, and what it becomes when its own part is switched off."""

import json

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from fedmpi.errors import ConfigError, ProtocolError
from fedmpi.runtime import build
from fedmpi.vision import architecture
from fedmpi.vision.training import batches

FREE = "--epsilon inf --clip 64"  # no noise, and the bound of the methods that have none


def built(config):
    return build.algorithm(config, device="cpu")


def whole_gradient(method, weights, batch, data):
    """The loss and its gradient at `weights`, by autograd over a copy of the vector."""
    variable = weights.clone().requires_grad_(True)
    named, at = {}, 0
    for name, parameter in method.net.module.named_parameters():
        named[name] = variable[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    logits = functional_call(method.net.module.train(), named, (data.train_x[batch],))
    return variable, F.cross_entropy(logits, data.train_y[batch])


# ---- the whole network as one vector ----


@pytest.mark.parametrize("network", ["cnn", "resnet20"])
def test_the_head_is_the_end_of_the_vector(network, make_config):
    flags = f"--network {network} --samples-per-party 5"
    whole, extractor = (built(make_config(f"{flags} --method {name}")) for name in ("dp-fedavg-fb", "centaur"))
    size, start = architecture.head_size(10), whole.net.head_start
    assert start == extractor.dimension and whole.dimension == start + size
    assert np.array_equal(whole.initial()[:start], extractor.initial()), "the same extractor to start from"
    theta = np.arange(whole.dimension, dtype=np.float32)
    whole.net.load(whole.net.from_numpy(theta))
    head = whole.net.head()
    assert np.array_equal(head.weight.numpy().ravel(), theta[start:-10]) and np.array_equal(head.bias, theta[-10:])


def test_every_party_starts_from_one_head(make_config):
    """DSU, Algorithm 1: one initial model [theta_ext^0, theta_cls^0]. Heads drawn apart pull the extractor apart."""
    whole, extractor = (built(make_config(f"--method {name} --seed 4")) for name in ("dp-fedavg-fb", "centaur"))
    heads = [
        np.concatenate([state["head_weight"].ravel(), state["head_bias"]])
        for state in map(extractor.party_state, range(3))
    ]
    assert all(np.array_equal(head, whole.initial()[whole.net.head_start :]) for head in heads)
    other = built(make_config("--method centaur --seed 5"))
    assert not np.array_equal(other.party_state(0)["head_weight"], extractor.party_state(0)["head_weight"])


def test_reference_lines_do_not_depend_on_what_is_shared(make_config):
    config = "--local-epochs 2 --samples-per-party 40"
    lines = set()
    for flags in ("--method centaur", "--method dp-fedavg-fb", "--method ppsgd", "--method pmtl-ft"):
        method = built(make_config(f"{config} {flags}"))
        lines.add(method.references(1, method.initial()))
    assert len(lines) == 1


# ---- DP-FedAvg-fb and FedAvg ----


def test_fedavg_fb_shares_the_head_and_tunes_a_copy_of_it(make_config):
    method = built(make_config("--method dp-fedavg-fb --head-epochs 5 --head-lr 0.1"))
    theta = method.initial()
    update = method.work(0, theta, 1).values
    assert np.count_nonzero(update[method.net.head_start :]) > 500, "the head leaves its party too"
    assert method.party_state(0) == {}, "nothing is kept"

    # A head that is only ever tuned locally would not see what the shared one holds.
    biased = theta.copy()
    biased[-10:] = [50, *[0] * 9]
    as_it_is = built(make_config("--method dp-fedavg-fb --head-epochs 0"))
    assert as_it_is.evaluate(0, biased, 1).loss > 10 > as_it_is.evaluate(0, theta, 1).loss
    assert method.evaluate(0, theta, 1).loss < as_it_is.evaluate(0, theta, 1).loss


def test_fedavg_is_its_model_tested_as_it_is(make_config, run_in_memory):
    plain = run_in_memory(make_config("--method fedavg --epsilon inf"), 3)
    tuned = run_in_memory(make_config(f"--method dp-fedavg-fb {FREE}"), 3)
    assert plain["model_sha256"] == tuned["model_sha256"]
    method = built(make_config("--method fedavg --epsilon inf"))
    untuned = built(make_config("--method dp-fedavg-fb --head-epochs 0"))
    theta = method.initial()
    assert method.evaluate(0, theta, 1) == untuned.evaluate(0, theta, 1)


# ---- PPSGD ----


def test_ppsgd_moves_both_parts_by_the_gradient_at_their_sum(make_config):
    """w and v_i literally, with autograd, from an offset that is not zero; only w's part is in the update."""
    method = built(make_config("--method ppsgd --personal-rate 0.3 --batch-size 8 --ext-lr 0.05 --head-lr 0.2"))
    theta = method.initial()
    offset = np.random.default_rng(0).normal(0, 0.01, theta.size).astype(np.float32)
    method.load_party_state(0, {"personal": offset})
    update = method.work(0, theta, 1).values
    kept = method.party_state(0)["personal"]

    rates = torch.full((theta.size,), 0.05)
    rates[method.net.head_start :] = 0.2
    w, v, data = torch.from_numpy(theta), torch.from_numpy(offset), method._shard(0)
    for batch in batches(len(data.train_y), 8, method._rng("train", 0, 1)):
        variable, loss = whole_gradient(method, w + v, batch, data)
        loss.backward()
        w, v = w - rates * variable.grad, v - 0.3 * rates * variable.grad
    np.testing.assert_allclose(update, (w - torch.from_numpy(theta)).numpy(), rtol=1e-3, atol=2e-6)
    np.testing.assert_allclose(kept, v.numpy(), rtol=1e-3, atol=2e-6)
    np.testing.assert_allclose(kept - offset, 0.3 * update, atol=2e-6)


def test_ppsgd_predicts_with_the_sum(make_config):
    flags = "--samples-per-party 20"
    additive = built(make_config(f"{flags} --method ppsgd"))
    theta = additive.initial()
    for round in (1, 2):
        additive.work(0, theta, round)
    offset = additive.party_state(0)["personal"]
    assert np.abs(offset).max() > 0.01
    plain = built(make_config(f"{flags} --method fedavg --epsilon inf"))
    assert additive.evaluate(0, theta, 2) == plain.evaluate(0, theta + offset, 2) != plain.evaluate(0, theta, 2)
    # a party that never joined has no offset
    assert additive.evaluate(1, theta, 2) == plain.evaluate(1, theta, 2)


def test_without_offsets_ppsgd_is_dp_fedavg_bit_for_bit(make_config, run_in_memory):
    off = run_in_memory(make_config("--method ppsgd --personal-rate 0"), 3)
    assert off["model_sha256"] == run_in_memory(make_config("--method dp-fedavg-fb"), 3)["model_sha256"]
    assert off["model_sha256"] != run_in_memory(make_config("--method ppsgd"), 3)["model_sha256"]


# ---- PMTL-FT ----


def test_pmtl_descends_the_loss_and_the_pull(make_config):
    """The objective literally, with autograd, from a w_i away from the mean."""
    method = built(make_config("--method pmtl-ft --mu 2 --batch-size 8 --ext-lr 0.05 --head-lr 0.2"))
    mean = method.initial()
    own = mean + np.random.default_rng(0).normal(0, 0.02, mean.size).astype(np.float32)
    method.load_party_state(0, {"personal": own})
    sent = method.work(0, mean, 1)

    rates = torch.full((mean.size,), 0.05)
    rates[method.net.head_start :] = 0.2
    w, centre, data = torch.from_numpy(own), torch.from_numpy(mean), method._shard(0)
    for batch in batches(len(data.train_y), 8, method._rng("train", 0, 1)):
        variable, loss = whole_gradient(method, w, batch, data)
        (loss + 2 / 2 * (variable - centre).square().sum()).backward()
        w = w - rates * variable.grad
    np.testing.assert_allclose(sent.values, (w - centre).numpy(), rtol=1e-3, atol=5e-6)
    np.testing.assert_allclose(method.party_state(0)["personal"], w.numpy(), rtol=1e-3, atol=5e-6)
    assert sent.figures["penalty"] == pytest.approx(float((w - centre).square().sum()), rel=1e-3)


def test_pmtls_mean_is_the_mean_of_the_personal_networks(make_config):
    """Without clipping and noise, in every round and not only in the first."""
    method = built(make_config("--method pmtl-ft"))
    theta = method.initial()
    for round in (1, 2, 3):
        updates = [method.work(party, theta, round).values for party in range(4)]
        theta = method.step(theta, np.sum(updates, axis=0, dtype=np.float64), 1 / 4, None)
        networks = [method.party_state(party)["personal"] for party in range(4)]
        np.testing.assert_allclose(theta, np.mean(networks, axis=0), atol=1e-6)
    assert np.ptp(networks, axis=0).max() > 0.01, "and they are not one and the same"


@pytest.mark.parametrize("mu, learns", [(0, False), (1, True)])
def test_only_the_pull_tells_a_party_of_the_mean(mu, learns, make_config):
    def network(shift):
        method = built(make_config(f"--method pmtl-ft --mu {mu}"))
        method.work(0, method.initial() + np.float32(shift), 1)
        return method.party_state(0)["personal"]

    assert np.array_equal(network(0), network(0.1)) != learns


def test_pmtl_tests_the_personal_network(make_config):
    method = built(make_config("--method pmtl-ft"))
    theta = method.initial()
    method.work(0, theta, 1)
    own = method.party_state(0)["personal"]
    assert method.evaluate(0, theta, 1) == method.evaluate(0, theta + 1, 1)
    tuned = built(make_config("--method dp-fedavg-fb"))
    assert method.evaluate(0, theta, 1) == tuned.evaluate(0, own, 1) != tuned.evaluate(0, theta, 1)


# ---- references without privacy ----


def test_fedrep_is_centaur_without_noise_and_clipping(make_config, run_in_memory):
    config = make_config("--method fedrep --epsilon inf --clip 1e-9")  # not looked at
    ours = run_in_memory(config, 3)
    centaur = run_in_memory(make_config(f"--method centaur {FREE}"), 3)
    assert ours["model_sha256"] == centaur["model_sha256"] and ours["accuracy"] == centaur["accuracy"]
    rows = [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert all(row["clipped"] == 0 for row in rows)
    assert ours["epsilon_kind"] == "none"
    mechanism = json.loads((config.out / "privacy.json").read_text())["mechanism"]
    assert (mechanism["clip"], mechanism["noise"]) == (64, "none")


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "local-only"])
def test_a_method_without_noise_refuses_an_epsilon(name, make_config, run_in_memory):
    with pytest.raises(ConfigError) as caught:
        run_in_memory(make_config(f"--method {name} --epsilon 8"), 3)
    assert str(caught.value) == f"epsilon = 8: {name} adds no noise and promises no epsilon; take inf"


@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_an_update_beyond_the_range_ends_the_run_and_is_not_shortened(name, aggregation, make_config, run_in_memory):
    flags = f"--method {name} --epsilon inf --aggregation {aggregation} --batch-size 4 --ext-lr 50"
    with pytest.raises(ProtocolError, match=r"norm .*, more than the 64 that a method without clipping can send"):
        run_in_memory(make_config(flags), 3)


# ---- local only ----


def test_local_only_is_fedrep_with_the_mean_left_out(make_config):
    flags = "--rounds 3 --epsilon inf"
    alone, shared = (built(make_config(f"{flags} --method {name}")) for name in ("local-only", "fedrep"))
    theta = own = alone.initial()
    for round in (1, 2, 3):
        own = own + shared.work(2, own, round).values
    assert alone.evaluate(2, theta, 3) == shared.evaluate(2, own, 3)


def test_local_only_sends_nothing_and_is_one_evaluation(make_config, run_in_memory):
    config = make_config("--method local-only --epsilon inf --rounds 3 --local-epochs 2 --aggregation secure")
    summary = run_in_memory(config, 3)
    rows = [json.loads(line) for line in (config.out / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [3] and rows[0]["skipped"] == "local-only shares nothing"
    sent = {line.split(",")[3] for line in (config.out / "messages.csv").read_text().splitlines()[1:] if ",up," in line}
    assert sent == {"Ready", "EvalReport", "Tally"}
    assert 0 <= summary["accuracy"] <= 1 and "accuracy_local_only" not in summary


# ---- DP-pFedHome ----


def home(make_config, ratio, flags=""):
    method = built(make_config(f"--method dp-pfedhome --samples-per-party 20 {flags}"))
    method.noise_ratio = ratio
    return method


def theta_after_round_1(config):
    with np.load(config.out / "checkpoint" / "1" / "server.npz") as arrays:
        return arrays["theta"].astype(np.float64)


@pytest.mark.parametrize("flags", [FREE, "--epsilon 8 --noise-budget 1000"])
def test_home_is_centaur_within_its_noise_budget(flags, make_config, run_in_memory):
    both = (f"--method dp-pfedhome {flags}", f"--method centaur {flags.partition('--noise-budget')[0]}")
    runs = [run_in_memory(make_config(each), 3) for each in both]
    assert runs[0]["model_sha256"] == runs[1]["model_sha256"] and runs[0]["accuracy"] == runs[1]["accuracy"]


def test_home_damps_a_step_by_the_budget_over_the_ratio(make_config, run_in_memory):
    flags = "--epsilon 1 --rounds 2 --checkpoint-every 1 --support dense --method"
    config, same = (make_config(f"{flags} {name}") for name in ("dp-pfedhome --noise-budget 2", "centaur"))
    for each in (config, same):
        run_in_memory(each, 3)
    ratio = json.loads((config.out / "privacy.json").read_text())["mechanism"]["noise_to_signal"]
    assert ratio > 20
    first = built(same).initial().astype(np.float64)
    damped, full = theta_after_round_1(config) - first, theta_after_round_1(same) - first
    assert np.abs(full).max() > 0.05 and np.allclose(damped, full * 2 / ratio, atol=1e-7)


def test_the_margin_of_the_noise_is_in_the_ratio(make_config, run_in_memory):
    ratios = []
    for margin in (0, 0.5):
        config = make_config(f"--method dp-pfedhome --support dense --noise-margin {margin}")
        run_in_memory(config, 3)
        ratios.append(json.loads((config.out / "privacy.json").read_text())["mechanism"]["noise_to_signal"])
    assert ratios[1] == pytest.approx(2**0.5 * ratios[0])


def test_home_is_tested_after_rounds_that_a_party_keeps_to_itself(make_config):
    near, far = home(make_config, 4.0), home(make_config, 4.001, "--home-rounds 2")
    centaur = built(make_config("--method centaur --samples-per-party 20"))
    theta = near.initial()
    assert near.evaluate(2, theta, 3) == centaur.evaluate(2, theta, 3)
    score, own = far.evaluate(2, theta, 3), theta
    assert score != near.evaluate(2, theta, 3)
    data, head = centaur._party(2)
    for step in (1, 2):  # what FedRep would send is kept instead
        rng, received = centaur._rng("home", 2, step), centaur.net.from_numpy(own)
        centaur._tune_head(head, data, received, rng)
        own = own + centaur.train_extractor(data, head, received, rng)[0]
    assert score == centaur.evaluate(2, own, 3)
    unsaid, said = home(make_config, 4.001, "--rounds 3"), home(make_config, 4.001, "--home-rounds 3")
    assert unsaid.evaluate(2, theta, 3) == said.evaluate(2, theta, 3) != score  # as many as the run has
