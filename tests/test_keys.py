"""Keys: published test vectors, and every primitive against a second library."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
from Crypto.Cipher import AES
from Crypto.Hash import SHA256
from Crypto.Protocol.KDF import HKDF
from Crypto.Signature import eddsa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedmpi.crypto import keys
from fedmpi.crypto.hkdf import hkdf
from fedmpi.crypto.keys import (
    AEAD_OVERHEAD,
    Agreement,
    Channel,
    bind,
    commit,
    derive,
    opens,
    public_key,
    sign,
    signing_public,
    verify,
)
from fedmpi.errors import CryptoError

DH = pytest.importorskip("Crypto.Protocol.DH")
if not hasattr(DH, "import_x25519_private_key"):
    pytest.skip("this pycryptodome has no X25519 to compare with", allow_module_level=True)

VECTORS = json.loads((Path(__file__).parent / "vectors" / "crypto.json").read_text())
key32 = st.binary(min_size=32, max_size=32)
hexed = bytes.fromhex


# --- the second implementation ---


def second_public(private):
    return DH.import_x25519_private_key(private).public_key().export_key(format="raw")


def agree(private, public):
    return Agreement(private).shared(public)


def second_agree(private, public):
    mine, theirs = DH.import_x25519_private_key(private), DH.import_x25519_public_key(public)
    return bytes(DH.key_agreement(static_priv=mine, static_pub=theirs, kdf=lambda z: z))


def second_hkdf(secret, salt, info, length):
    return HKDF(secret, length, salt, SHA256, context=info)


def second_seal(key, plaintext, associated, nonce=bytes(12)):
    cipher = AES.new(key, AES.MODE_GCM, nonce=nonce)
    cipher.update(associated)
    return b"".join(cipher.encrypt_and_digest(plaintext))


def second_sign(private, message):
    return eddsa.new(eddsa.import_private_key(private), "rfc8032").sign(message)


def second_signing_public(private):
    return eddsa.import_private_key(private).public_key().export_key(format="raw")


def seal(key, plaintext, associated):
    """From the first end of a channel, where the nonce is zero."""
    return Channel(key, True, associated, b"").seal(plaintext)


def open_sealed(key, sealed, associated):
    return Channel(key, False, b"", associated).open(sealed)


# --- published vectors; each against both libraries, so that a slip in one of them or in the table shows ---


@pytest.mark.parametrize(
    "scalar, u, out",
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_x25519_rfc7748_section_5_2(scalar, u, out):
    assert agree(hexed(scalar), hexed(u)) == hexed(out) == second_agree(hexed(scalar), hexed(u))


def test_x25519_rfc7748_section_5_2_iterated():
    k = u = hexed("09" + "00" * 31)
    after = {}
    for i in range(1, 1001):
        k, u = agree(k, u), k
        after[i] = k.hex()
    assert after[1] == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert after[1000] == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


def test_x25519_rfc7748_section_6_1():
    alice = hexed("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = hexed("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    alice_public = hexed("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    bob_public = hexed("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    shared = hexed("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert public_key(alice) == alice_public == second_public(alice)
    assert public_key(bob) == bob_public == second_public(bob)
    assert agree(alice, bob_public) == agree(bob, alice_public) == shared == second_agree(alice, bob_public)


@pytest.mark.parametrize(
    "secret, salt, info, out",
    [
        (
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)),
            bytes(range(0x60, 0xB0)),
            bytes(range(0xB0, 0x100)),
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            b"\x0b" * 22,
            b"",
            b"",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
    ids=["case 1", "case 2", "case 3"],
)
def test_hkdf_rfc5869(secret, salt, info, out):
    expected = hexed(out)
    assert hkdf(secret, salt, info, len(expected)) == expected == second_hkdf(secret, salt, info, len(expected))


@pytest.mark.parametrize(
    "plaintext, sealed",
    [
        (b"", "530f8afbc74536b9a963b4f1c4cb738b"),
        (bytes(16), "cea7403d4d606b6e074ec5d3baf39d18" + "d0d1c8a799996bf0265b98b5d48ab919"),
    ],
    ids=["case 13", "case 14"],
)
def test_aes_256_gcm_of_the_zero_key(plaintext, sealed):
    """McGrew and Viega, test cases 13 and 14: the nonce is zero there too."""
    assert seal(bytes(32), plaintext, b"") == hexed(sealed) == second_seal(bytes(32), plaintext, b"")
    assert open_sealed(bytes(32), hexed(sealed), b"") == plaintext


@pytest.mark.parametrize(
    "private, public, message, signature",
    [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
            "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
        ),
    ],
    ids=["test 1", "test 2", "test 3"],
)
def test_ed25519_rfc8032_section_7_1(private, public, message, signature):
    private, public, message, signature = map(hexed, (private, public, message, signature))
    assert signing_public(private) == public == second_signing_public(private)
    assert sign(private, message) == signature == second_sign(private, message)
    assert verify(public, message, signature)


# --- any input, both libraries ---


@settings(deadline=None, max_examples=40)
@given(key32, key32)
def test_x25519_agrees_with_the_second_library_and_with_the_peer(mine, theirs):
    assert public_key(mine) == second_public(mine)
    shared = agree(mine, public_key(theirs))
    assert shared == Agreement(theirs).shared(public_key(mine)) == second_agree(mine, public_key(theirs))


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=80), st.binary(max_size=40), st.binary(max_size=80), st.integers(1, 200))
def test_hkdf_agrees_with_the_second_library(secret, label, context, length):
    assert derive(secret, label, context, length) == second_hkdf(secret, b"", bind(label, context), length)


@settings(deadline=None)
@given(key32, st.binary(max_size=300), st.binary(max_size=100))
@example(bytes(32), b"", b"")
def test_aead_agrees_with_the_second_library(key, plaintext, associated):
    sealed = seal(key, plaintext, associated)
    assert sealed == second_seal(key, plaintext, associated)
    assert len(sealed) == len(plaintext) + AEAD_OVERHEAD
    assert open_sealed(key, sealed, associated) == plaintext


@given(key32, st.binary(max_size=80), st.binary(max_size=20), st.binary(max_size=20))
def test_the_way_back_has_another_nonce(key, plaintext, there, back):
    first, second = Channel(key, True, there, back), Channel(key, False, back, there)
    assert second.seal(plaintext) == second_seal(key, plaintext, back, bytes(11) + b"\x01")
    assert first.open(second.seal(plaintext)) == second.open(first.seal(plaintext)) == plaintext
    for end in (first, second):
        with pytest.raises(CryptoError, match="does not authenticate"):
            end.open(end.seal(plaintext))  # reflected


@settings(deadline=None, max_examples=25)
@given(key32, st.binary(max_size=100))
def test_ed25519_agrees_with_the_second_library(private, message):
    public, signature = signing_public(private), sign(private, message)
    assert (public, signature) == (second_signing_public(private), second_sign(private, message))
    eddsa.new(eddsa.import_public_key(public), "rfc8032").verify(message, signature)
    assert verify(public, message, signature)


@given(key32, st.binary(max_size=100))
def test_a_commitment_is_sha256_over_label_context_and_secret(secret, context):
    framed = b"s\0\0\0\x13fedmpi/commitment/1" + b"s" + len(context).to_bytes(4, "big") + context + b"s\0\0\0 " + secret
    assert commit(secret, context) == hashlib.sha256(framed).digest() == SHA256.new(framed).digest()


# --- what must fail ---

LOW_ORDER = [
    "00" * 32,  # 0
    "01" + "00" * 31,  # 1
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",  # order 8
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",  # order 8
    "ec" + "ff" * 30 + "7f",  # p - 1
    "ed" + "ff" * 30 + "7f",  # p, another 0
    "ee" + "ff" * 30 + "7f",  # p + 1, another 1
]


@pytest.mark.parametrize("top_bit", [0, 0x80])
@pytest.mark.parametrize("point", LOW_ORDER)
def test_x25519_refuses_points_of_low_order(point, top_bit):
    """Every u of low order below 2^255, and the same with the bit that X25519 ignores."""
    public = bytearray.fromhex(point)
    public[31] |= top_bit
    for private in (os.urandom(32), bytes(range(32))):
        with pytest.raises(CryptoError, match="low order") as caught:
            agree(private, bytes(public))
        assert private.hex() not in str(caught.value) and caught.value.__cause__ is None


@settings(deadline=None)
@given(key32, st.binary(max_size=60), st.binary(max_size=60), st.data())
def test_a_sealed_message_opens_only_as_it_was_sealed(key, plaintext, associated, data):
    sealed = seal(key, plaintext, associated)
    flip = data.draw(st.integers(0, 8 * len(sealed) - 1))
    forged = bytearray(sealed)
    forged[flip // 8] ^= 1 << flip % 8
    other_key = bytes([key[0] ^ 1]) + key[1:]
    for case in (
        (key, bytes(forged), associated),
        (key, sealed[:-1], associated),
        (key, sealed + b"\0", associated),
        (key, sealed, associated + b"\0"),
        (other_key, sealed, associated),
    ):
        with pytest.raises(CryptoError, match="does not authenticate"):
            open_sealed(*case)


@settings(deadline=None, max_examples=25)
@given(key32, st.binary(max_size=60), st.data())
def test_a_signature_is_good_for_one_message_and_key(private, message, data):
    public, signature = signing_public(private), sign(private, message)
    flip = data.draw(st.integers(0, 511))
    forged = bytearray(signature)
    forged[flip // 8] ^= 1 << flip % 8
    assert not verify(public, message, bytes(forged))
    assert not verify(public, message + b"\0", signature)
    assert not verify(signing_public(bytes([private[0] ^ 1]) + private[1:]), message, signature)
    assert not verify(public, message, signature[:-1])
    assert not verify(b"\x02" + bytes(31), message, signature)  # not a point of the curve


@given(key32, st.binary(max_size=20))
def test_a_commitment_opens_to_its_secret_only(secret, context):
    commitment = commit(secret, context)
    assert opens(commitment, secret, context)
    assert not opens(commitment, bytes([secret[0] ^ 1]) + secret[1:], context)
    assert not opens(commitment, secret, context + b"\0")
    assert not opens(commitment[:-1], secret, context)


@pytest.mark.parametrize(
    "call",
    [
        lambda key: Agreement(key),
        lambda key: agree(key, bytes(32)),
        lambda key: Agreement(bytes(32)).shared(key),
        lambda key: seal(key, b"", b""),
        lambda key: open_sealed(key, bytes(16), b""),
        lambda key: signing_public(key),
        lambda key: sign(key, b""),
        lambda key: verify(key, b"", bytes(64)),
    ],
)
@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_keys_of_another_size_are_refused(call, size):
    """16 in particular: the library would take it for an AES-128 key."""
    with pytest.raises(CryptoError, match=f"32 bytes, not {size}"):
        call(b"k" * size)


@pytest.mark.parametrize("size", [0, 8, 15])
def test_a_secret_that_could_be_guessed_is_not_committed_to(size):
    with pytest.raises(CryptoError, match=f"16 bytes or more, not {size}"):
        commit(bytes(size), b"")


@pytest.mark.parametrize("length", [0, -1, 255 * 32 + 1])
def test_hkdf_has_an_end(length):
    with pytest.raises(CryptoError, match="1 to 8160 bytes"):
        derive(bytes(32), b"label", b"", length)


# --- contexts ---


parts = st.lists(st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=12)), max_size=4)


@given(parts, parts)
@example([b"ab", b"c"], [b"a", b"bc"])
@example([b""], [])
@example([1, 2], [b"\0" * 7 + b"\x01", 2])
def test_different_parts_are_different_contexts(left, right):
    assert (bind(*left) == bind(*right)) == (left == right)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_number_that_does_not_fit_is_refused(number):
    with pytest.raises(CryptoError, match="64 bits"):
        bind(number)


def test_label_context_and_direction_all_separate_keys():
    shared = bytes(range(32))
    session = b"session"
    places = [bind(session, 1, 2, 3), bind(session, 1, 3, 2), bind(session, 2, 2, 3), bind(b"other", 1, 2, 3)]
    labels = [keys.PAIR_MASK, keys.SELF_MASK, keys.SHARE_BUNDLE]
    derived = {derive(secret, label, place) for secret in (shared, bytes(32)) for label in labels for place in places}
    assert len(derived) == 2 * len(labels) * len(places)


# --- secrets stay inside ---


def test_an_agreement_shows_no_key():
    private = bytes(range(32))
    agreement = Agreement(private)
    assert private.hex() not in repr(agreement) and repr(private) not in repr(agreement)
    with pytest.raises(TypeError, match="never serialised"):
        pickle.dumps(agreement)


def test_a_channel_shows_no_key():
    channel = Channel(bytes(range(32)), True, b"", b"")
    assert repr(channel) == "Channel(secret)"
    with pytest.raises(TypeError, match="never serialised"):
        pickle.dumps(channel)


# --- the format ---


@pytest.mark.parametrize("case", VECTORS["derive"], ids=lambda case: case["name"])
def test_derived_keys_are_what_they_were(case):
    context = bind(hexed(case["session"]), *case["numbers"])
    assert context.hex() == case["context"]
    label = case["label"].encode()
    assert label in (keys.PAIR_MASK, keys.SELF_MASK, keys.SHARE_BUNDLE)
    shared = agree(hexed(case["private"]), hexed(case["peer_public"])) if "private" in case else hexed(case["secret"])
    assert derive(shared, label, context, case["length"]).hex() == case["key"]


@pytest.mark.parametrize("case", VECTORS["seal"], ids=lambda case: case["name"])
def test_sealed_messages_are_what_they_were(case):
    key, plaintext, associated = (hexed(case[name]) for name in ("key", "plaintext", "associated"))
    assert seal(key, plaintext, associated).hex() == case["sealed"] == second_seal(key, plaintext, associated).hex()


@pytest.mark.parametrize("case", VECTORS["commit"], ids=lambda case: case["name"])
def test_commitments_are_what_they_were(case):
    assert commit(hexed(case["secret"]), hexed(case["context"])).hex() == case["commitment"]
