"""How files are read: as one text, or as a table with a document in each row.

    .jsonl .ndjson .jsonlines .json     objects, one a line, or one array of them
    .csv .tsv                           with the names of the columns in the first line
    .parquet
    anything else                       UTF-8 text

Only the column that is read decides whether a table is accepted. The others may hold anything.
"""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

Row = dict[str, Any]

JSON = (".jsonl", ".ndjson", ".jsonlines", ".json")
TABLES = (*JSON, ".csv", ".tsv", ".parquet")


def is_table(file: Path) -> bool:
    return file.suffix.lower() in TABLES


def read_text(file: Path) -> str:
    """A file as text. Raises UnicodeDecodeError for a file that is not UTF-8 text."""
    raw = file.read_bytes()
    # NUL is valid UTF-8, but text does not contain it: the file is binary, or UTF-16
    if (position := raw.find(b"\0")) >= 0:
        raise UnicodeDecodeError("utf-8", raw, position, position + 1, "NUL")
    return raw.decode("utf-8-sig")


def read_rows(file: Path, field: str) -> Iterator[Row]:
    """The rows of a table; of a parquet file the column `field` alone, if it is there."""
    kind = file.suffix.lower()
    if kind == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as table:
            columns = [field] if field in table.schema_arrow.names else None
            for batch in table.iter_batches(1024, columns=columns):
                yield from batch.to_pylist()
    elif kind in JSON:
        with open(file, "rb") as lines:
            yield from json_rows(lines)
    else:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            yield from csv_rows(lines, delimiter="\t" if kind == ".tsv" else ",")


def json_rows(lines: BinaryIO) -> Iterator[Row]:
    filled = (line for line in lines if not line.isspace())
    first = next(filled, b"[]")
    if first.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
        yield from json.loads(first + lines.read())
    else:
        yield from map(json.loads, itertools.chain([first], filled))


def csv_rows(lines: TextIO, delimiter: str) -> Iterator[Row]:
    """Raises csv.Error for a row with more or fewer cells than there are columns: an unquoted comma
    would cut a text off.
    """
    csv.field_size_limit(2**31 - 1)  # its default is 128 KiB
    filled = itertools.dropwhile(str.isspace, lines)
    rows = csv.DictReader(filled, delimiter=delimiter, strict=True)
    names = rows.fieldnames or []
    if len(set(names)) < len(names):
        raise csv.Error(f"two columns have one name: {', '.join(names)}")
    for row in rows:
        # DictReader puts None where a name or a cell is missing
        if None in row or None in row.values():
            raise csv.Error(f"it has more or fewer cells than the {len(names)} columns")
        yield row


def texts(rows: Iterable[Row], field: str) -> Iterator[str]:
    """The texts of one column; null is "".

    Raises ValueError, naming the row by its number from 0, for a row that cannot be read, lacks the
    column or holds no text in it.
    """
    number = 0
    try:
        for row in rows:
            yield text_of(row, field)
            number += 1
    except Exception as error:  # a row can hold anything, and so fail in many ways
        raise ValueError(f"row {number} cannot be read as data.field={field}: {error}") from error


def text_of(row: Row, field: str) -> str:
    if field not in row:
        raise ValueError(f"there is no such column in it, but: {', '.join(row)}")
    text = row[field] or ""
    text.encode()  # half of a surrogate pair, as JSON can hold it, is no text
    return text
