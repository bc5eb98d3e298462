"""Masks: known key streams, both libraries, every lane and length, any number of threads."""

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from Crypto.Cipher import AES
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.crypto import masks
from fedmpi.crypto.masks import BACKENDS, add_masks
from fedmpi.errors import CryptoError

LANES = ["uint8", "uint16", "uint32", "uint64"]
KEY = bytes(range(16))
VECTORS = json.loads((Path(__file__).parent / "vectors" / "crypto.json").read_text())
key16 = st.binary(min_size=16, max_size=16)


def reference(key, size, first_block=0):
    """The key stream as a mode of a library, in one call: no chunks, no prepared counters."""
    return AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=first_block).encrypt(bytes(size))


def add_mask(total, key, sign=1):
    add_masks(total, [key], [sign])


def expand(key, count, lane, backend=BACKENDS[0]):
    """The mask itself."""
    mask = np.zeros(count, lane)
    add_masks(mask, [key], [1], backend=backend)
    return mask


def keys_of(count):
    return [bytes([i, 7]) * 8 for i in range(count)]


# --- the key stream ---


def test_aes_128_ctr_nist_sp_800_38a_f_5_1():
    """The primitive itself in both libraries, as mode and as encryption of counter blocks."""
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    secret = bytes.fromhex(
        "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
        "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"
    )
    first = int.from_bytes(counter, "big")
    stream = bytes(a ^ b for a, b in zip(plain, secret))
    assert reference(key, 64, first) == stream
    assert Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update(bytes(64)) == stream
    blocks = b"".join((first + i).to_bytes(16, "big") for i in range(4))
    assert AES.new(key, AES.MODE_ECB).encrypt(blocks) == stream


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_blocks_under_the_zero_key(backend):
    """From the GCM test cases 1 and 2 (McGrew and Viega): the encryptions of 0 (H), of 1 (the tag of nothing) and of 2
    (the ciphertext of zeros) are the first three blocks of a mask."""
    stream = expand(bytes(16), 48, np.uint8, backend=backend).tobytes().hex()
    assert stream == (
        "66e94bd4ef8a2c3b884cfa59ca342b2e58e2fccefa7e3061367f1d57a4e7455a0388dace60b6a392f328c2b971b2fe78"
    )


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None)
@given(key=key16, size=st.integers(0, 200))
def test_a_mask_is_the_stream_of_counter_mode(backend, key, size):
    assert expand(key, size, np.uint8, backend=backend).tobytes() == reference(key, size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", [-17, -16, -1, 0, 1, 15, 16, 17])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_mask_goes_on_across_chunks(backend, chunks, extra):
    size = chunks * masks._CHUNK + extra
    assert expand(KEY, size, np.uint8, backend=backend).tobytes() == reference(KEY, size)


def test_counters_carry_beyond_four_bytes():
    """No vector in a test is that long: the counters of far chunks, by themselves, forwards and backwards."""
    work = masks._Workspace()
    for chunk in (0, 1, 2**18 - 1, 2**18, 2**45 + 3, 7, 0):
        first = chunk * masks._CHUNK_BLOCKS
        assert bytes(work.counters(chunk)) == b"".join(
            (first + i).to_bytes(16, "big") for i in range(masks._CHUNK_BLOCKS)
        )


def test_an_interrupt_leaves_no_wrong_counters(monkeypatch):
    work = masks._Workspace()
    right = bytes(work.counters(3))

    change = np.bitwise_xor

    def interrupted(*args, **options):
        change(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "bitwise_xor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work.counters(4)
    assert bytes(work.counters(3)) == right


# --- lanes ---


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lane", LANES)
def test_lanes_of_any_width_read_the_same_stream(lane, backend):
    width = np.dtype(lane).itemsize
    mask = expand(KEY, 1001, lane, backend=backend)
    stream = reference(KEY, 1001 * width)
    assert mask.dtype == lane
    assert mask.tolist() == [int.from_bytes(stream[i : i + width], "little") for i in range(0, len(stream), width)]


@settings(deadline=None)
@given(st.sampled_from(LANES), st.integers(0, 60), st.lists(st.tuples(key16, st.sampled_from([1, -1])), max_size=6))
def test_masks_add_up_modulo_the_lane(lane, count, signed):
    modulus = 2 ** (8 * np.dtype(lane).itemsize)
    start = np.arange(count).astype(lane)
    total = start.copy()
    add_masks(total, [key for key, _ in signed], [sign for _, sign in signed])
    added = [(expand(key, count, lane).tolist(), sign) for key, sign in signed]
    expected = [int(value) + sum(sign * mask[i] for mask, sign in added) for i, value in enumerate(start)]
    assert total.tolist() == [value % modulus for value in expected]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("count", [0, 1, 3, 1000, 200_003])
def test_what_was_added_can_be_taken_back(lane, count):
    start = np.random.default_rng(1).integers(0, 2**8, count).astype(lane)
    total = start.copy()
    add_mask(total, KEY)
    assert count < 3 or not np.array_equal(total, start)
    add_mask(total, KEY[::-1])
    add_mask(total, KEY, sign=-1)
    add_mask(total, KEY[::-1], sign=-1)
    assert np.array_equal(total, start)


def test_pair_masks_cancel_in_the_sum():
    """MMF (8): u adds the mask it shares with v if u < v and takes it away if u > v."""
    generator = np.random.default_rng(2)
    inputs = generator.integers(0, 2**32, (5, 1000), dtype=np.uint32)
    masked = inputs.copy()
    for u in range(5):
        others = [v for v in range(5) if v != u]
        shared = [bytes([min(u, v), max(u, v)]) * 8 for v in others]
        add_masks(masked[u], shared, [1 if u < v else -1 for v in others])
        assert not np.array_equal(masked[u], inputs[u])
    assert np.array_equal(masked.sum(axis=0, dtype=np.uint32), inputs.sum(axis=0, dtype=np.uint32))


# --- many masks, threads ---


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("size", [0, 10, 4_000, masks._CHUNK, masks._CHUNK + 24, 1_100_008, 1_700_008])
def test_the_result_does_not_depend_on_threads_or_library(lane, size):
    count = size // np.dtype(lane).itemsize
    keys, signs = keys_of(4), [1, -1, -1, 1]
    expected = np.arange(count).astype(lane)
    for key, sign in zip(keys, signs):
        stream = np.frombuffer(reference(key, count * expected.itemsize), dtype=expected.dtype.newbyteorder("<"))
        expected = expected + stream if sign > 0 else expected - stream
    for threads in (1, 2, 3, 50):
        for backend in BACKENDS:
            total = np.arange(count).astype(lane)
            add_masks(total, keys, signs, threads=threads, backend=backend)
            assert np.array_equal(total, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_masks(threads):
    """More than there are ciphers prepared at a time."""
    keys = [i.to_bytes(16, "big") for i in range(2 * masks._CIPHERS + 5)]
    signs = [1 if i % 3 else -1 for i in range(len(keys))]
    count = 2 * masks._CHUNK // 4
    total = np.zeros(count, np.uint32)
    add_masks(total, keys, signs, threads=threads)
    expected = np.zeros(count, np.uint32)
    for key, sign in zip(keys, signs):
        add_mask(expected, key, sign)
    assert np.array_equal(total, expected)


def test_callers_in_several_threads_do_not_disturb_each_other():
    expected = [expand(key, 300_000, np.uint32) for key in keys_of(4)]
    totals = np.zeros((4, 300_000), dtype=np.uint32)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        callers = [threading.Thread(target=add_mask, args=(totals[i], key)) for i, key in enumerate(keys_of(4))]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        sys.setswitchinterval(interval)
    assert np.array_equal(totals, expected)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch):
    def broken(key, first_block, backend):
        if first_block:
            raise RuntimeError("no cipher")
        return lambda source, target: None

    monkeypatch.setattr(masks, "_prepared", broken)
    with pytest.raises(RuntimeError, match="no cipher"):
        add_masks(np.zeros(2 * masks._CHUNK, np.uint8), [KEY], [1], threads=2)


# --- arguments ---


def frozen():
    vector = np.zeros(4, np.uint32)
    vector.flags.writeable = False
    return vector


@pytest.mark.parametrize(
    "total",
    [
        np.zeros(4, np.int32),
        np.zeros(4, np.float32),
        np.zeros(4, np.dtype(np.uint32).newbyteorder()),
        np.zeros(4, bool),
        np.zeros((2, 2), np.uint32),
        np.zeros(8, np.uint32)[::2],
        frozen(),
    ],
    ids=["int32", "float32", "foreign byte order", "bool", "matrix", "strided", "read-only"],
)
def test_vectors_that_take_no_mask(total):
    with pytest.raises(CryptoError, match="contiguous, writeable vector"):
        add_mask(total, KEY)
    assert not total.any()


@pytest.mark.parametrize(
    "keys, signs, options, message",
    [
        ([KEY], [], {}, "as many signs"),
        ([KEY], [0], {}, "each 1 or -1"),
        ([KEY], [2], {}, "each 1 or -1"),
        ([KEY, b"k" * 32], [1, 1], {}, "16 bytes, not 32"),
        ([KEY, b""], [1, 1], {}, "16 bytes, not 0"),
        ([KEY], [1], {"backend": "xor"}, "pycryptodome or cryptography"),
        ([KEY], [1], {"threads": 0}, "at least one thread"),
    ],
)
def test_arguments_that_make_no_mask(keys, signs, options, message):
    total = np.zeros(100, np.uint32)
    with pytest.raises(CryptoError, match=message) as caught:
        add_masks(total, keys, signs, **options)
    assert not total.any() and "kkkk" not in str(caught.value)


# --- the format ---


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", VECTORS["mask"], ids=lambda case: f"{case['lane']} from {case['first']}")
def test_masks_are_what_they_were(case, backend):
    values = case["values"]
    mask = expand(bytes.fromhex(case["key"]), case["first"] + len(values), case["lane"], backend=backend)
    assert mask[case["first"] :].tolist() == values
