from __future__ import annotations

import collections
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ray_jax_ckpt.arrays.tree import decode_value, encode_value
from ray_jax_ckpt.errors import DataStateError
from ray_jax_ckpt.values import dtype_name, with_article

ML_DTYPES = ["bfloat16", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"]


def through_json(x):
    return decode_value(json.loads(json.dumps(encode_value(x), allow_nan=False)))


def same(a, b) -> bool:
    """Equal in type, structure and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(map(type, a)) == list(map(type, b)) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


numpy_dtypes = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    npst.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    npst.unicode_string_dtypes(max_len=4),
    npst.byte_string_dtypes(max_len=4),
    npst.datetime64_dtypes(max_period="s", min_period="s"),
)
texts = st.text(st.characters(exclude_categories=()), max_size=8) | st.just("$") | st.just("\ud83d\ude00")
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**200), max_value=2**200),
    st.floats(),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]),
    st.complex_numbers(),
    texts,
    st.binary(max_size=16),
    numpy_dtypes.flatmap(lambda d: npst.arrays(d, npst.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3))),
    numpy_dtypes.flatmap(lambda d: npst.arrays(d, (1,))).map(lambda array: array[0]),
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(texts | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=120, deadline=None)
@given(trees)
def test_anything_encodable_comes_back_bit_for_bit_through_strict_json(x):
    assert same(through_json(x), x)


@pytest.mark.parametrize(("name", "said"), [("object", "an object"), ("dict", "a dict"), ("Array", "an Array")])
def test_names_have_their_article(name, said):
    assert with_article(name) == said


@pytest.mark.parametrize("name", ML_DTYPES)
def test_small_floats_and_integers_of_accelerators(name):
    array = np.array([1, 0, 1]).astype(name)
    assert same(through_json(array), array)
    assert same(through_json(array[0]), array[0])


@pytest.mark.parametrize("x", [np.float64(0.5), np.str_("a\0"), np.bytes_(b"a\0"), np.bool_(True), np.complex128(1j)])
def test_numpy_scalars_are_not_taken_for_the_python_types_that_they_extend(x):
    assert same(through_json(x), x)


def test_nan_payload_and_negative_zero():
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0001))[0]
    assert same(through_json([payload, -0.0, -math.inf]), [payload, -0.0, -math.inf])


def test_integers_beyond_pythons_limit_for_decimal_text():
    assert through_json(7**9000) == 7**9000


def test_random_state_of_numpy_as_data_state():
    state = np.random.Generator(np.random.PCG64(3)).bit_generator.state
    other = np.random.Generator(np.random.PCG64(4))
    other.bit_generator.state = through_json(state)
    assert other.bit_generator.state == state
    legacy = np.random.RandomState(5).get_state()
    assert same(through_json(legacy), legacy)


def test_decoded_arrays_are_writable_and_their_own():
    encoded = encode_value(np.arange(3))
    first, second = decode_value(encoded), decode_value(encoded)
    first[0] = 9
    assert second[0] == 0


@pytest.mark.parametrize(
    ("x", "where"),
    [
        ({"a": [1, {2, 3}]}, r"\['a'\]\[1\]"),
        ({"a": {"b": object()}}, r"\['a'\]\['b'\]"),
        ({"a": {1.5: 0}}, r"\['a'\].*1\.5"),
        ({True: 0}, "True"),
        ([np.array([object()])], r"\[0\].*object"),
        ([np.zeros(2, [("x", "i4")])], r"\[0\]"),
        ([np.ma.masked_array([1, 2])], r"\[0\].*MaskedArray"),
        (collections.OrderedDict(a=1), "the top"),
        ((1, bytearray(b"x")), r"\[1\].*bytearray"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_path(x, where):
    with pytest.raises(DataStateError, match=where):
        encode_value(x)


def test_a_list_that_contains_itself():
    x: list = []
    x.append(x)
    with pytest.raises(DataStateError, match="contains itself"):
        encode_value(x)


@pytest.mark.parametrize(
    "j",
    [
        {"$": "unknown", "v": 1},
        {"$": "np", "d": "object", "v": ""},
        {"$": "np", "d": "int32", "s": [2], "v": "AAAA"},
        {"$": "np", "d": "int32", "s": [-1], "v": "AAAAAA=="},
        {"$": "np", "d": "int8", "s": [10**12], "v": "AA=="},
        {"$": "np", "d": "no dtype", "v": ""},
        {"$": "bytes", "v": "%"},
        {"$": "int"},
        {"$": "tuple", "v": 3},
        object(),
    ],
)
def test_damaged_encodings_are_refused(j):
    with pytest.raises(DataStateError, match="damaged"):
        decode_value(j)


@pytest.mark.parametrize("dtype", ["float32", ">f4", "<U3", "M8[ns]", "bool", *ML_DTYPES])
def test_dtype_names_give_the_same_dtype(dtype):
    assert np.dtype(dtype_name(np.dtype(dtype))) == np.dtype(dtype)
