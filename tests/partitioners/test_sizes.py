"""Sizes as people write them."""

import pytest

from partitioners import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("12 B", 12),
        ("512 KiB", 512 * 2**10),
        ("64MiB", 64 * 2**20),
        ("64mib", 64 * 2**20),
        (" 16GiB ", 16 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("2TiB", 2 * 2**40),
        ("1PB", 10**15),
        ("1.1PB", 11 * 10**14),
        ("1.1KiB", 1126),
    ],
)
def test_a_size_is_an_int_or_a_number_with_a_unit(written, num_bytes):
    assert parse_bytes(written, "memory") == num_bytes


NO_TYPE = (True, False, 1.5, None)
NOT_POSITIVE = (0, -1, "0", "0MiB", "0.0001KB", "-1MiB")
MALFORMED = ("", "1.5", "1.5B", "16G", "512k", "MiB", "1 2MiB", "1e9", "٣", "1.MiB", ".5MiB", "64MiB!")


@pytest.mark.parametrize("written", [*NO_TYPE, *NOT_POSITIVE, *MALFORMED])
def test_anything_else_is_refused_with_field_value_and_examples(written):
    with pytest.raises(ValueError, match="memory: ") as caught:
        parse_bytes(written, "memory")
    assert repr(written) in str(caught.value)
    assert "'64MiB'" in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536 * 2**20, "1.5 GiB"),
        (64 * 2**20, "64 MiB"),
        (2**20 - 1, "1 MiB"),
        (-(2**10), "-1 KiB"),
        (3 * 2**60, "3072 PiB"),
    ],
)
def test_bytes_print_with_the_largest_unit_that_leaves_a_whole_part(num_bytes, text):
    assert format_bytes(num_bytes) == text
