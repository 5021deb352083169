"""Sources: every record of every kind of file comes out once, in order, whatever the chunk size."""

from __future__ import annotations

import bz2
import contextlib
import csv
import datetime
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from padless.packer.errors import CutError, InputError
from padless.packer.sources import BadRecord, Records, read_chunk, resolve_sources, walk

ROWS = [{"a": 1}, {"a": "x"}, {"b": [1, {"a": None}]}]


def read_all(
    path: Path, *, chunk_bytes: int = 512 * 1024, text_by: str = "line", exact_cuts: bool = True
) -> Records:
    """All records of one file through resolve, walk and read; lines None where it has none."""
    files = resolve_sources([str(path)], text_by=text_by)
    rows: list[Any] = []
    lines: list[int] = []
    replaced = 0
    chunks = walk(files, chunk_bytes=chunk_bytes, text_by=text_by, exact_cuts=exact_cuts)
    for index, chunk in enumerate(chunks):
        assert chunk.index == index
        records = read_chunk(chunk)
        assert records.rows, "a chunk without records"
        rows += records.rows
        if records.lines is not None:
            assert len(records.lines) == len(records.rows)
            lines += records.lines
        replaced += records.replaced
    return Records(rows=rows, lines=lines or None, replaced=replaced)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# Text made of what could be taken for structure, escapes and characters of 1 to 4 bytes.
TRICKY = st.lists(
    st.sampled_from(
        ['},{"instruction":', '"}, {"a":', "]", "[", "\\", '"', "\n", "\r\n", ",", "é", "漢", "🙂"]
    )
    | st.text(max_size=4),
    max_size=5,
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TRICKY, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": TRICKY}), min_size=1, max_size=3
)
RECORDS = st.one_of(
    st.fixed_dictionaries({"instruction": TRICKY, "output": TRICKY}),
    st.fixed_dictionaries({"messages": MESSAGES}),
    st.fixed_dictionaries({"role": TRICKY, "messages": MESSAGES}),
    st.dictionaries(TRICKY, VALUES, max_size=3),
    TRICKY,
)
CHUNK_BYTES = st.integers(16, 400)
many_files = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@many_files
@given(
    rows=st.lists(RECORDS, min_size=1, max_size=12),
    chunk_bytes=CHUNK_BYTES,
    indent=st.sampled_from([None, 0, 4]),
    ascii_only=st.booleans(),
    compact=st.booleans(),
    blanks=st.sampled_from(["", "\n \r\n"]),
)
def test_json_array_gives_what_json_loads_gives(
    tmp_path, rows, chunk_bytes, indent, ascii_only, compact, blanks
):
    separators = (",", ":") if compact else None
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only, separators=separators)
    data = (blanks + text + blanks).encode("utf-8", "surrogatepass")
    path = write(tmp_path / "a.json", data)
    records = read_all(path, chunk_bytes=chunk_bytes)
    assert records.rows == json.loads(data)
    # An element's line is the one on which an incremental parse finds it.
    decoder, whole, at, lines = json.JSONDecoder(), data.decode(), len(blanks) + 1, []
    for _ in rows:
        at += len(whole[at:]) - len(whole[at:].lstrip(", \r\n"))
        lines.append(whole.count("\n", 0, at) + 1)
        _, at = decoder.raw_decode(whole, at)
    assert records.lines == lines
    with contextlib.suppress(CutError):  # cuts on trust give the same, or say that they do not
        on_trust = read_all(path, chunk_bytes=chunk_bytes, exact_cuts=False)
        assert (on_trust.rows, on_trust.lines) == (records.rows, records.lines)


def test_a_cut_on_trust_inside_a_record_is_found_out(tmp_path):
    turns = [{"a": [{"b": 1}]}] * 6
    path = write(tmp_path / "a.json", json.dumps([*turns[:3], {"a": turns}, *turns[:3]]).encode())
    assert len(read_all(path, chunk_bytes=48).rows) == 7
    with pytest.raises(CutError):
        read_all(path, chunk_bytes=48, exact_cuts=False)


@many_files
@given(
    rows=st.lists(RECORDS, min_size=1, max_size=12),
    chunk_bytes=CHUNK_BYTES,
    newline=st.sampled_from(["\n", "\r\n", "\n\n"]),
    final=st.booleans(),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_jsonl_gives_every_line_with_its_number(tmp_path, rows, chunk_bytes, newline, final, mark):
    text = newline.join(json.dumps(row, ensure_ascii=False) for row in rows)
    path = write(tmp_path / "a.jsonl", mark + (text + newline * final).encode())
    records = read_all(path, chunk_bytes=chunk_bytes)
    assert records.rows == rows
    step = newline.count("\n")
    assert records.lines == [1 + step * i for i in range(len(rows))]


CELLS = st.lists(
    st.sampled_from(['"', ",", "\t", "\n", "\r\n", "é", "漢", " "])
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=4),
    max_size=4,
).map("".join)


@many_files
@given(
    table=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=10),
    chunk_bytes=CHUNK_BYTES,
    delimiter=st.sampled_from([",", "\t"]),
    ending=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_csv_gives_what_the_csv_module_gives(tmp_path, table, chunk_bytes, delimiter, ending, mark):
    path = tmp_path / ("a.csv" if delimiter == "," else "a.tsv")
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(mark)
        writer = csv.writer(file, delimiter=delimiter, lineterminator=ending)
        writer.writerows([("text", "label"), *table])
    with open(path, encoding="utf-8-sig", newline="") as file:
        expected = list(csv.DictReader(file, delimiter=delimiter))
    assert read_all(path, chunk_bytes=chunk_bytes).rows == expected


TEXT_LINES = st.lists(
    st.sampled_from(["", "", " ", "# one", "## two", "words é 漢 🙂", "  indented", "\u2028x", "\x0c"]),
    max_size=14,
)


def paragraphs(lines: list[str]) -> list[str]:
    """Runs of lines that are not blank, one after the other."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        else:
            found.append([])
    return ["\n".join(run) for run in found if run]


def headed(lines: list[str]) -> list[str]:
    """Runs of lines that begin with one that starts "# ", blank ends trimmed."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("# "):
            found.append([])
        found[-1].append(line)
    for run in found:
        while run and not run[-1].strip():
            run.pop()
        while run and not run[0].strip():
            run.pop(0)
    return ["\n".join(run) for run in found if run]


TEXT_MODES: dict[str, Callable[[list[str]], list[str]]] = {
    "line": lambda lines: [line for line in lines if line.strip()],
    "blank": paragraphs,
    "file": lambda lines: ["\n".join(lines)],
    "# ": headed,
}


@pytest.mark.parametrize("text_by", TEXT_MODES)
@many_files
@given(lines=TEXT_LINES, chunk_bytes=CHUNK_BYTES, newline=st.sampled_from(["\n", "\r\n"]))
def test_text_records_do_not_depend_on_chunks(tmp_path, text_by, lines, chunk_bytes, newline):
    lines = [*lines, "the end"]
    path = write(tmp_path / "a.txt", newline.join(lines).encode())
    records = read_all(path, chunk_bytes=chunk_bytes, text_by=text_by)
    assert records.rows == TEXT_MODES[text_by](lines)
    assert records.lines is not None
    if text_by != "file":
        first_lines = [row.split("\n")[0] for row in records.rows]
        assert [lines[number - 1] for number in records.lines] == first_lines


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
PLAIN = {
    "a.json": json.dumps(ROWS * 20, indent=2).encode(),
    "a.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS * 20),
    "a.csv": b"x,y\r\n" + b'1,"two\r\nlines"\r\n' * 20,
    "a.txt": b"some text\n\nmore text\n" * 20,
}


@pytest.mark.parametrize("extension", COMPRESS)
@pytest.mark.parametrize("name", PLAIN)
def test_compressed_files_give_the_same_records(tmp_path, name, extension):
    plain = write(tmp_path / name, PLAIN[name])
    half = len(PLAIN[name]) // 2
    # Two members one after the other, as tools that append write them.
    parts = [COMPRESS[extension](part) for part in (PLAIN[name][:half], PLAIN[name][half:])]
    packed = write(tmp_path / (name + extension), b"".join(parts))
    expected, found = (read_all(path, chunk_bytes=50) for path in (plain, packed))
    assert list(found.rows) == list(expected.rows)
    assert found.lines == expected.lines


@pytest.mark.parametrize("extension", COMPRESS)
def test_a_cut_compressed_file_is_refused(tmp_path, extension):
    whole = COMPRESS[extension](PLAIN["a.jsonl"])
    path = write(tmp_path / f"a.jsonl{extension}", whole[: len(whole) - 12])
    with pytest.raises(InputError, match="cannot be decompressed"):
        read_all(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_the_walk_leaves_the_facts_of_the_raw_file(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"x": range(9)}), path)
    else:
        path.write_bytes(gzip.compress(b'{"x":1}\n' * 9) if name.endswith("gz") else b'{"x":1}\n' * 9)
    (file,) = resolve_sources([str(path)])
    chunks = list(walk([file], chunk_bytes=16))
    assert file.bytes == path.stat().st_size
    assert file.checksum == f"xxh3:{xxhash.xxh3_128_hexdigest(path.read_bytes())}"
    assert file.chunks == len(chunks) > 1


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_text_and_not_the_extension_tells_the_layout(tmp_path, name, mark, newline):
    array = json.dumps(ROWS, indent=1).replace("\n", newline).encode()
    lines = newline.join(map(json.dumps, ROWS)).encode()
    for data in (array, lines):
        assert read_all(write(tmp_path / name, mark + data)).rows == ROWS


def test_one_object_over_several_lines_is_one_record(tmp_path):
    path = write(tmp_path / "a.json", json.dumps({"rows": ROWS}, indent=2).encode())
    assert read_all(path, chunk_bytes=16).rows == [{"rows": ROWS}]


def test_objects_over_several_lines_without_an_array_are_refused_where_the_second_begins(tmp_path):
    one = json.dumps({"a": 1}, indent=2)
    path = write(tmp_path / "a.json", f"{one}\n{one}\n".encode())
    with pytest.raises(InputError, match="line 4, column 1: not valid JSON"):
        read_all(path)


def test_a_lone_surrogate_becomes_one_replacement_character_and_is_counted(tmp_path):
    line = b'{"text": "w10 \\ud8a1 w11 \\ud83d\\ude42", "\\udc00": 1}'
    right = {"text": "w10 \ufffd w11 🙂", "\ufffd": 1}
    for name, data in (("a.jsonl", line), ("b.json", b"[" + line + b', {"a": 2}]')):
        records = read_all(write(tmp_path / name, data), chunk_bytes=16)
        assert records.rows[0] == right
        assert records.replaced == 2


@pytest.mark.parametrize("before", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5000])
@pytest.mark.parametrize("number", [-(10**19) + 1, -(2**63) - 1, 2**64, 10**40])
def test_integers_of_more_than_64_bits_stay_integers(tmp_path, number, before):
    line = b'{"a": "%s", "n": %d, "b": "%s"}' % (b"x" * before, number, b"y" * 5000)
    for data in (line, line.replace(b"y", b"")):
        row = read_all(write(tmp_path / "a.jsonl", data)).rows[0]
        assert type(row["n"]) is int and row["n"] == number


def test_nan_is_a_number(tmp_path):
    row = read_all(write(tmp_path / "a.jsonl", b'{"text": "x", "score": NaN}')).rows[0]
    assert row["text"] == "x" and row["score"] != row["score"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"a": 1', "Expecting ',' delimiter at column 8"),
        (b'{"a": "\xe9"}', "byte 0xe9 is not UTF-8 at column 8"),
        (b"{'a': 1}", "at column 2"),
        (b'{"a": 1} {"a": 2}', "Extra data"),
        (b"17", "a number where a record"),
        (b"null", "null where a record"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_jsonl_line_spoils_only_itself(tmp_path, bad, reason):
    path = write(tmp_path / "a.jsonl", b'{"a": 0}\n\n' + bad + b'\n{"a": 2}\n')
    first, broken, last = read_all(path, chunk_bytes=16).rows
    assert (first, last) == ({"a": 0}, {"a": 2})
    assert isinstance(broken, BadRecord)
    assert broken.line == 3
    assert reason in broken.message


def test_a_truncated_last_line_is_a_bad_record(tmp_path):
    rows = read_all(write(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": "tw')).rows
    assert rows[0] == {"a": 1}
    assert isinstance(rows[1], BadRecord) and rows[1].line == 2


def test_array_elements_that_are_no_records_are_bad_records_with_their_lines(tmp_path):
    path = write(tmp_path / "a.json", b'[\n{"a": 1},\n17,\n"text",\n[{}, 2],\nnull\n]')
    for chunk_bytes in (16, 500):
        rows = read_all(path, chunk_bytes=chunk_bytes).rows
        assert rows[0] == {"a": 1} and rows[2] == "text"
        bad = [row for row in rows if isinstance(row, BadRecord)]
        assert [row.line for row in bad] == [3, 5, 6]


@pytest.mark.parametrize("chunk_bytes", [16, 40, 4096])
@pytest.mark.parametrize(
    ("tail", "line", "column"),
    [
        ('{"é": 1 2}]', 21, 9),
        ('{"a": 1}', 21, 9),
        ('{"a": "open', 21, 7),
        ('{"a": 1}] x', 21, 11),
        ('{"a": 1}]]', 21, 10),
        ('{"a": 1}, ]', 21, 11),
        ('{"a": 1}}, {"a": 2}]', 21, 9),
        (', {"a": 2}]', 21, 1),
        ("{'a': 1}]", 21, 2),
    ],
)
def test_a_malformed_array_is_refused_with_line_and_column(tmp_path, tail, line, column, chunk_bytes):
    text = "[" + '{"a": "漢 }, {"},\n'.replace('"}', '\\"}').replace('\\"},', '"},') * 20 + tail
    path = write(tmp_path / "a.json", text.encode())
    with pytest.raises(InputError) as error:
        read_all(path, chunk_bytes=chunk_bytes)
    assert f"{path}, line {line}, column {column}" in str(error.value)


@many_files
@given(
    rows=st.lists(RECORDS, min_size=1, max_size=6),
    indent=st.sampled_from([None, 1]),
    chunk_bytes=CHUNK_BYTES,
    place=st.floats(0, 1),
    cut=st.integers(0, 6),
    extra=st.sampled_from(["", "", *'{}[],"\\ 1', '{"a":1}', '},{"a":', "][", "],["]),
)
def test_a_damaged_array_is_refused_just_when_json_refuses_it(
    tmp_path, rows, indent, chunk_bytes, place, cut, extra
):
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    at = 1 + int(place * (len(text) - 1))
    text = text[:at] + extra + text[at + cut :]
    path = write(tmp_path / "a.json", text.encode())
    try:
        expected = json.loads(text)
    except ValueError:
        expected = []
    if expected:
        found = read_all(path, chunk_bytes=chunk_bytes).rows
        as_given = [isinstance(row, dict | str) for row in expected]
        assert [not isinstance(row, BadRecord) for row in found] == as_given
        assert [row for row in found if not isinstance(row, BadRecord)] == [
            row for row in expected if isinstance(row, dict | str)
        ]
    else:
        with pytest.raises(InputError, match="not valid JSON|has no records"):
            read_all(path, chunk_bytes=chunk_bytes)


def test_a_long_record_grows_the_block_and_no_more(tmp_path):
    long = "x" * 2_000_000
    data = json.dumps([{"a": 1}, {"a": long}, {"a": 2}]).encode()
    assert [len(str(row["a"])) for row in read_all(write(tmp_path / "a.json", data)).rows] == [
        1,
        len(long),
        1,
    ]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.txt"])
def test_the_walk_holds_a_few_chunks_and_not_the_file(tmp_path, name):
    words = "words " * 30
    body = {
        "a.json": "[" + ",\n".join([json.dumps({"a": words})] * 50_000) + "]",
        "a.jsonl": (json.dumps({"a": words}) + "\n") * 50_000,
        "a.csv": "a\n" + f"{words}\n" * 50_000,
        "a.txt": f"{words}\n" * 50_000,
    }[name]
    files = resolve_sources([str(write(tmp_path / name, body.encode()))])
    tracemalloc.start()
    chunks = sum(1 for _ in walk(files, chunk_bytes=64 * 1024))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert chunks > 100
    # A read ahead of 1 MiB, once or twice while it is put back.
    assert peak < 4_000_000 < len(body) // 2


def test_csv_rows_of_another_width_are_bad_records(tmp_path):
    path = write(tmp_path / "a.csv", b'a,b\n1,2\n3\n"4\n",5\n6,7,8\n\n,\n')
    for chunk_bytes in (16, 500):
        records = read_all(path, chunk_bytes=chunk_bytes)
        assert records.rows == [
            {"a": "1", "b": "2"},
            BadRecord(3, "1 fields where the header has 2"),
            {"a": "4\n", "b": "5"},
            BadRecord(6, "3 fields where the header has 2"),
            {"a": "", "b": ""},
        ]
        assert records.lines == [2, 3, 4, 6, 8]


def test_a_csv_cell_may_be_a_long_document(tmp_path):
    cell = "word " * 100_000
    assert read_all(write(tmp_path / "a.csv", f"a\n{cell}\n".encode())).rows == [{"a": cell}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'a,b\n1,2\n3,"4\n5,6\n', "line 3: a quoted field of this row is never closed"),
        (b"a,b,a\n1,2,3\n", "names 'a' more than once"),
        (b"a,b\n1,caf\xe9\n", "line 2: byte 0xe9 is not UTF-8"),
        (b"a,b\n", "has no records"),
    ],
)
def test_a_csv_file_that_would_be_misread_is_refused(tmp_path, data, message):
    with pytest.raises(InputError, match=message):
        read_all(write(tmp_path / "a.csv", data))


@pytest.mark.parametrize("kind", ["parquet", "file", "stream", "feather"])
def test_tables_give_their_rows_with_none_kept_and_times_as_text(tmp_path, kind):
    when = datetime.datetime(2024, 1, 2, 3, 4, 5, 678_000)
    rows = [
        {"text": f"row {i}", "tools": {"x": i, "y": None}, "when": when, "days": [when.date()]}
        for i in range(5_000)
    ]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(2, "when", table["when"].cast(pa.timestamp("ns")))
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "feather":
        pyarrow.feather.write_feather(table, str(path), compression="zstd")
    else:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    files = resolve_sources([str(path)])
    chunks = list(walk(files, chunk_bytes=20_000))
    assert len(chunks) > 5
    assert [chunk.start for chunk in chunks[1:]] == [chunk.stop for chunk in chunks[:-1]]
    found = [row for chunk in chunks for row in read_chunk(chunk).rows]
    text = {"when": "2024-01-02T03:04:05.678000", "days": ["2024-01-02"]}
    assert found == [row | text for row in rows]


def test_a_broken_table_is_refused(tmp_path):
    good = tmp_path / "good.parquet"
    pq.write_table(pa.table({"x": range(1000)}), good)
    for name in ("a.parquet", "a.arrow"):
        path = write(tmp_path / name, good.read_bytes()[:-20])
        with pytest.raises(InputError, match="cannot be read as a table"):
            read_all(path)


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "a.txt", b"one\ntwo\ncaf\xe9\n")
    for chunk_bytes in (16, 500):
        with pytest.raises(InputError, match=r"a\.txt, line 3: byte 0xe9 is not UTF-8.*iconv"):
            read_all(path, chunk_bytes=chunk_bytes)


def test_utf16_is_refused_with_the_way_out(tmp_path):
    for name in ("a.json", "a.csv", "a.txt"):
        path = write(tmp_path / name, '[{"a": 1}]'.encode("utf-16"))
        with pytest.raises(InputError, match="iconv -f UTF-16"):
            read_all(path)


@pytest.mark.parametrize(("name", "data"), [("a.json", b"[ ]"), ("a.jsonl", b"\n \n"), ("a.txt", b" \n\t\n")])
def test_a_file_without_records_is_refused(tmp_path, name, data):
    with pytest.raises(InputError, match="has no records"):
        read_all(write(tmp_path / name, data))


def test_a_file_that_shrinks_after_the_walk_is_told(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n' * 10)
    chunks = list(walk(resolve_sources([str(path)])))
    path.write_bytes(b'{"a": 1}\n')
    with pytest.raises(InputError, match="changed during the build"):
        read_chunk(chunks[0])


def test_folders_and_globs_are_sorted_and_named_below_their_common_folder(tmp_path):
    for name in ("b/2.jsonl", "b/10.jsonl", "a.csv", ".hidden/x.jsonl", "b/.y.jsonl", "b/z.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, b"x")
    write(tmp_path / "README.md", b"about")
    names = ["a.csv", "b/10.jsonl", "b/2.jsonl"]
    assert [file.name for file in resolve_sources([str(tmp_path)])] == names
    globbed = resolve_sources([f"{tmp_path}/**/*.jsonl"], eval_specs=[str(tmp_path / "a.csv")])
    assert [(file.name, file.split, file.kind) for file in globbed] == [
        ("b/10.jsonl", "train", "json"),
        ("b/2.jsonl", "train", "json"),
        ("a.csv", "validation", "csv"),
    ]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    path = write(tmp_path / "a[1].jsonl", b'{"a": 1}')
    assert read_all(path).rows == [{"a": 1}]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["alpaca_dta.json"], r"there is no file .*near it: .*alpaca_data\.json"),
        (["nowhere/a.json"], r"the folder .*nowhere is missing too"),
        (["*.csv"], "nothing matches"),
        (["bare"], "holds no file to read; known extensions: .json"),
        (["empty.jsonl"], r"empty \(0 bytes\)"),
        (["model.bin"], r"rename it to one of \.json, .*\.parquet"),
        (["table.parquet.gz"], "cannot be told"),
        (["alpaca_data.json", "*.json"], "is given twice"),
        (["alpaca_data.json", "link.json"], "link.json is given twice .also as"),
        (["lost.json"], "link to a file that is not there"),
        ([], "no source"),
    ],
)
def test_what_cannot_be_a_source_is_refused_with_the_way_out(tmp_path, specs, message):
    write(tmp_path / "alpaca_data.json", b"[]")
    write(tmp_path / "empty.jsonl", b"")
    write(tmp_path / "model.bin", b"x")
    write(tmp_path / "table.parquet.gz", b"x")
    (tmp_path / "bare").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "alpaca_data.json")
    (tmp_path / "lost.json").symlink_to(tmp_path / "gone.json")
    with pytest.raises(InputError, match=message):
        resolve_sources([str(tmp_path / spec) for spec in specs])


def test_the_same_file_for_training_and_evaluation_is_refused(tmp_path):
    path = str(write(tmp_path / "a.jsonl", b'{"a": 1}'))
    with pytest.raises(InputError, match="given twice"):
        resolve_sources([path], eval_specs=[path])


def test_a_bad_expression_is_refused_before_any_file_is_read(tmp_path):
    path = write(tmp_path / "a.txt", b"x")
    with pytest.raises(InputError, match="no regular expression"):
        resolve_sources([str(path)], text_by="(")


@pytest.mark.shared
@pytest.mark.parametrize("chunk_bytes", [3_000, 512 * 1024])
def test_real_arrays_are_read_whole(shared, chunk_bytes):
    for name in ("alpaca/alpaca_data.json", "chat/glaive_toolcall_en_demo.json"):
        path = shared / "data" / name
        assert read_all(path, chunk_bytes=chunk_bytes).rows == json.loads(path.read_bytes())


@pytest.mark.shared
def test_jsonl_and_parquet_of_gsm8k_are_the_same_rows(shared):
    folder = shared / "data" / "rl"
    rows = read_all(folder / "gsm8k_test.jsonl", chunk_bytes=5_000).rows
    assert len(rows) == 1319
    assert read_all(folder / "gsm8k_test.parquet", chunk_bytes=50_000).rows == rows


@pytest.mark.shared
def test_real_csv_and_gzip_are_read_whole(shared):
    path = shared / "data" / "short" / "banking77_train.csv"
    with open(path, encoding="utf-8", newline="") as file:
        expected = list(csv.DictReader(file))
    assert len(expected) == 10_003
    assert read_all(path, chunk_bytes=20_000).rows == expected
    path = shared / "data" / "code" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        assert read_all(path, chunk_bytes=20_000).rows == [json.loads(line) for line in lines]


@pytest.mark.shared
def test_wikitext_in_every_text_mode(shared):
    path = shared / "data" / "pretrain" / "wikitext2_valid.txt"
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    by_line = read_all(path, chunk_bytes=10_000).rows
    assert by_line == [line for line in lines if line.strip()]
    assert len(by_line) == 2_461
    assert read_all(path, chunk_bytes=10_000, text_by="blank").rows == paragraphs(lines)
    assert read_all(path, text_by="file").rows == [text]
    articles = read_all(path, chunk_bytes=10_000, text_by=" = [^=]").rows
    assert len(articles) == 60
    assert all(article.startswith(" = ") for article in articles)
