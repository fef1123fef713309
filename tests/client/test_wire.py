"""Bytes on the wire: what goes in comes out, and nothing else gets in."""

import dataclasses
import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from serl_client import Outcome, Stamp, messages, wire
from serl_client.episode import COLUMNS
from serl_client.errors import MessageError
from serl_client.messages import Ack, Heartbeat, Hello, InferenceRequest, Push
from serl_client.names import MAX_NAME
from serl_client.spec import DTYPES

from tests.shared.data import BAD_NAMES

names = st.text("abc.é", min_size=1, max_size=8)
arrays = hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def joined(*records):
    """The bytes of encoded records, one after the other."""
    return b"".join(bytes(part) for record in records for part in record)


def same(one, other):
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=5), plain, max_size=5), st.dictionaries(names, arrays, max_size=5))
def test_what_is_packed_comes_out_as_it_was_and_joined_in_two_frames_too(header, named):
    packed = wire.pack(header, named)
    joined = wire.joined(packed)
    assert len(joined) == 1 + bool(named)
    for frames in ([bytes(frame) for frame in packed], joined):
        unpacked, copies = wire.unpack(frames)
        assert (unpacked, list(copies)) == (header, list(named))
        assert all(same(copies[name], named[name]) for name in named)


def test_large_arrays_are_not_copied_to_be_joined():
    frames = wire.pack({}, {name: np.zeros(wire.JOIN_BELOW, np.uint8) for name in "ab"})
    assert wire.joined(frames) is frames


@pytest.mark.parametrize("change", [-8, 8])
def test_a_frame_of_joined_arrays_of_another_length_is_refused(change):
    header, body = wire.joined(wire.pack({}, {"a": np.zeros(3), "b": np.zeros(5, np.uint8)}))
    with pytest.raises(MessageError, match="longer than its"):
        wire.unpack([header, body[:change] if change < 0 else body + bytes(change)])


@given(st.dictionaries(names, arrays, max_size=4), st.integers(0, 2**64 - 1), st.integers(1, 3))
def test_encoded_records_follow_each_other_in_one_run_of_bytes(named, seq, count):
    data = joined(*[wire.encode_record(seq, {"a": 1}, named)] * count)
    records = list(wire.decode_records(data))
    assert [number for number, _, _ in records] == [seq] * count
    for _, header, copies in records:
        assert header == {"a": 1}
        assert all(same(copies[name], named[name]) for name in named)


def test_an_array_that_is_not_contiguous_travels_as_it_reads():
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T[::2]
    _, copies = wire.unpack(wire.pack({}, {"a": array}))
    assert np.array_equal(copies["a"], array)


@pytest.mark.parametrize("kind", messages.TYPES, ids=lambda kind: kind.__name__)
def test_every_message_travels(kind):
    values = {str: "x", int: 3, bool: True, int | None: None}
    wanted = messages.FIELDS[kind].items()
    fields = {name: values.get(of, [1, 2] if "Sequence" in str(of) else {"k": 1}) for name, of in wanted}
    if "protocol" in fields:
        fields["protocol"] = list(messages.PROTOCOL)
    if "arrays" in kind.__dataclass_fields__:
        fields["arrays"] = {"a": np.arange(3)}
    message = messages.decode([bytes(frame) for frame in messages.encode(kind(**fields))])
    assert type(message) is kind
    for name, value in fields.items():
        got = getattr(message, name)
        assert same(got["a"], value["a"]) if name == "arrays" else got == value


@pytest.mark.parametrize("size", [1, 7, 32, 100])
def test_records_are_read_however_they_are_cut_into_buffers(make_segment, size):
    data = joined(messages.encode_record(5, make_segment()), messages.encode_record(6, make_segment(start=4)))
    parts = [data[begin : begin + size] for begin in range(0, len(data), size)]
    for (seq, header, arrays), (number, other, copies) in zip(
        wire.decode_records(data), wire.decode_records(*parts), strict=True
    ):
        assert (seq, header, arrays.keys()) == (number, other, copies.keys())
        assert all(same(array, copies[name]) for name, array in arrays.items())
    with pytest.raises(MessageError, match="cut off"):
        list(wire.decode_records(*parts[:-1]))
    damaged = [*parts[:-1], bytes([parts[-1][0] ^ 1]) + parts[-1][1:]]
    with pytest.raises(MessageError, match="damaged"):
        list(wire.decode_records(*damaged))


def test_parts_are_gathered_in_order_into_as_many_frames_as_a_message_has():
    large = bytes(wire.COPY_BELOW)
    assert wire.gathered([b"a", b"b", large, b"", large, b"c", b""]) == [b"ab", large, large, b"c"]
    assert wire.gathered([]) == []
    assert [len(part) for part in wire.gathered([large] * 255)] == [wire.COPY_BELOW] * 255
    (one,) = wire.gathered([large] * 256)
    assert len(one) == 256 * wire.COPY_BELOW


def test_records_travel(make_segment):
    segment = make_segment(steps=5, ends="terminated", weights=1)
    outcome = Outcome("e0", None, discard=True, judged_by="operator")
    data = joined(messages.encode_record(0, segment), messages.encode_record(1, outcome))
    (first, copy), (second, other) = messages.records(data)
    assert (first, second, other) == (0, 1, outcome)
    assert (copy.stamp, copy.terminated, copy.truncated) == (Stamp(1, "practise", 1), True, False)
    for column in ("action", *COLUMNS):
        assert same(getattr(copy, column), getattr(segment, column))
    assert same(copy.observation["observation.state"], segment.observation["observation.state"])


@pytest.mark.parametrize("ends", ["", "truncated"])
def test_every_flipped_bit_of_an_encoded_record_is_noticed(make_segment, ends):
    data = bytearray(joined(messages.encode_record(7, make_segment(steps=1, ends=ends))))
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        try:
            seqs = [seq for seq, _, _ in wire.decode_records(data)]
        except MessageError:
            seqs = []
        assert seqs != [7], f"bit {bit} of {len(data) * 8}"  # another number is a gap, which the receiver notices
        data[bit // 8] ^= 1 << bit % 8


def test_a_record_that_was_cut_off_anywhere_is_refused(make_segment):
    data = joined(messages.encode_record(0, make_segment(steps=2)))
    for length in range(1, len(data)):
        with pytest.raises(MessageError):
            list(wire.decode_records(data[:length]))


HOSTILE = {
    "an array of 4 GiB": [["a", "float64", [2**29]]],
    "an array of 4 TiB": [["a", "float32", [2**40]]],
    "no entry of a size that overflows": [["a", "float32", [0, 2**26, 2**26, 2**26]]],
    "a product that overflows": [["a", "uint8", [2**26, 2**26, 2**26]]],
    "a negative size": [["a", "uint8", [-1]]],
    "a size that is no number": [["a", "uint8", ["1"]]],
    "a size that is true": [["a", "uint8", [True]]],
    "nine dimensions": [["a", "uint8", [1] * 9]],
    "a dtype that runs code": [["a", "object", [1]]],
    "a dtype of numpy's": [["a", ">f8", [1]]],
    "a structured dtype": [["a", [["x", "u1"]], [1]]],
    "a name that is no text": [[7, "uint8", [1]]],
    "one name twice": [["a", "uint8", [1]], ["a", "uint8", [1]]],
}


@pytest.mark.parametrize("layout", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_layout_is_refused_before_anything_is_allocated(layout):
    frames = [msgpack.packb([{"type": "Push", "session": "e"}, layout]), *[b"x"] * len(layout)]
    tracemalloc.start()
    with pytest.raises(MessageError):
        messages.decode(frames)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_message_has_limits_in_frames_header_and_bytes(monkeypatch):
    with pytest.raises(MessageError, match="frames"):
        wire.unpack([b"x"] * (wire.MAX_FRAMES + 1))
    with pytest.raises(MessageError, match="header"):
        wire.unpack([bytes(wire.MAX_HEADER + 1)])
    monkeypatch.setattr(wire, "MAX_MESSAGE", 100)
    with pytest.raises(MessageError, match="MiB"):
        wire.unpack(wire.pack({}, {"a": np.zeros(100, np.uint8)}))
    with pytest.raises(MessageError):
        wire.record_length(struct.pack("<4sIQQQ", wire.MAGIC, 10, 101, 0, 0) + bytes(200))


HELLO, ACK = Hello(messages.PROTOCOL, "viewer", "x"), Ack("e", 7)
QUESTION = InferenceRequest(0, 1, False, True, "x" * MAX_NAME, {})
NO_PROTOCOLS = (None, [], [4], [4, 4, 4], ["4", "4"], [True, 4], [4, True], {"4": 4}, 4)


@pytest.mark.parametrize(
    ("message", "change", "reason"),
    [
        *((ACK, {"type": kind}, "no known kind") for kind in ("Evil", None, [])),
        *((ACK, {"expected": number}, "of type int") for number in ("7", True)),
        (ACK, {"extra": 1}, "has the fields"),
        *((HELLO, {"protocol": wrong}, ".") for wrong in NO_PROTOCOLS),
        *((Heartbeat({}), {"report": wrong}, "report of a Heartbeat should be of type") for wrong in (5, [1], None)),
        *((QUESTION, {"task": task}, "of type str") for task in (3, None)),
        *((Heartbeat({}), {"report": {"a": wrong}}, "a report holds numbers") for wrong in ([], {}, b"")),
        *((QUESTION, {"task": bad}, "at most 200 characters") for bad in BAD_NAMES),
    ],
)
def test_a_message_with_a_wrong_field_is_refused(message, change, reason):
    kind = type(message)
    header = {"type": kind.__name__, **{name: getattr(message, name) for name in messages.FIELDS[kind]}}
    assert type(messages.decode(wire.pack(header, {}))) is kind
    with pytest.raises(MessageError, match=reason):
        messages.decode(wire.pack(header | change, {}))


PUSH = messages.encode(Push("e", {"records": np.zeros(9, np.uint8)}))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (wire.pack({"type": "Push"}, {"records": np.zeros(1, np.uint8)}), "has the fields"),
        (wire.pack({"type": "Bye"}, {"a": np.zeros(1)}), "no arrays"),
        ([PUSH[0], b"12345678"], "bytes"),
        (PUSH[:1], "arrays"),
        ([b"\x91" * 5000 + b"\x90"], "."),
        (wire.pack({"type": "Bye", **dict.fromkeys(map(str, range(wire.MAX_PARTS)))}, {}), "max_map_len"),
    ],
)
def test_a_message_that_lacks_something_or_has_too_much_is_refused(frames, reason):
    with pytest.raises(MessageError, match=reason):
        messages.decode(frames)


@pytest.mark.parametrize(
    "change", [{"judged_by": 3}, {"success": 1}, {"discard": None}, {"episode": b"x"}, {"more": 1}]
)
def test_an_encoded_record_of_wrong_types_is_refused(change):
    header = dataclasses.asdict(Outcome("e", True)) | change
    with pytest.raises(MessageError):
        list(messages.records(joined(wire.encode_record(0, header, {}))))


def test_arrays_are_not_copied_on_their_way():
    array = np.arange(1000, dtype=np.float32)
    head, frame = messages.encode(InferenceRequest(0, 1, False, True, "reach", {"a": array}))
    assert np.shares_memory(np.frombuffer(frame, np.uint8), array)
    assert np.shares_memory(messages.decode([head, frame]).arrays["a"], array)
