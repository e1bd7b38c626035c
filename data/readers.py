"""How files are read: as one text, or as a table with a document in each row.

    .jsonl .ndjson .jsonlines .json     objects, one a line, or one array of them
    .csv .tsv                           with the names of the columns in the first row
    .parquet
    anything else                       UTF-8 text

All but parquet may be compressed: .gz, .bz2 or .zst. Only the column that is read decides whether a
table is accepted. The others may hold anything.
"""

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

Row = dict[str, Any]

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
JSON = (".jsonl", ".ndjson", ".jsonlines", ".json")
TABLES = (*JSON, ".csv", ".tsv", ".parquet")


def kind_of(file: Path) -> str:
    """The ending that says how to read a file: in lower case, without that of a compression."""
    name = file.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return Path(name).suffix


def open_file(file: Path) -> BinaryIO:
    """The bytes of a file, after decompression."""
    import pyarrow

    compression = COMPRESSIONS.get(file.suffix.lower())
    return io.BufferedReader(pyarrow.input_stream(str(file), compression=compression))


def read_text(file: Path) -> str:
    """A file as text. Raises UnicodeDecodeError for a file that is not UTF-8 text."""
    with open_file(file) as opened:
        raw = opened.read()
    # NUL is valid UTF-8, but text does not contain it: the file is binary, or UTF-16
    if (position := raw.find(b"\0")) >= 0:
        raise UnicodeDecodeError("utf-8", raw, position, position + 1, "NUL")
    return raw.decode("utf-8-sig")


def read_rows(file: Path, field: str) -> Iterator[Row]:
    """The rows of a table; of a parquet file the column `field` alone, if it is there."""
    kind = kind_of(file)
    if file.stat().st_size == 0:
        return
    if kind == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as table:
            columns = [field] if field in table.schema_arrow.names else None
            for batch in table.iter_batches(1024, columns=columns):
                yield from batch.to_pylist()
        return
    with open_file(file) as lines:
        if kind in JSON:
            yield from json_rows(lines)
            return
        csv.field_size_limit(2**31 - 1)  # its default is 128 KiB
        with io.TextIOWrapper(lines, "utf-8-sig", newline="") as text:
            delimiter = "\t" if kind == ".tsv" else ","
            yield from csv.DictReader(text, delimiter=delimiter, strict=True)


def json_rows(lines: BinaryIO) -> Iterator[Row]:
    filled = (line for line in lines if not line.isspace())
    first = next(filled, b"").removeprefix(b"\xef\xbb\xbf")
    if first.lstrip().startswith(b"["):
        rows = iter(json.loads(first + lines.read()))
    else:
        rows = map(json.loads, itertools.chain([first], filled) if first else ())
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError("it is no JSON object")
        yield row


def texts(rows: Iterable[Row], field: str, *, may_lack: bool = False) -> Iterator[str]:
    """The texts of one column; a missing one is "".

    Raises ValueError, naming the row by its number from 0, for a row that cannot be read or holds
    no text, and for a table without this column. may_lack: rows may lack it, as objects can.
    """
    remaining = iter(rows)
    columns: dict[str, None] = {}
    for number in itertools.count():
        try:
            row = next(remaining, None)
            text = row.get(field) if row is not None else None
            if isinstance(text, str):
                text.encode()  # half of a surrogate pair, as JSON can hold it, is no text
        except (OSError, ValueError, RecursionError, csv.Error) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"row {number} cannot be read ({reason})") from error
        if field not in columns:
            columns |= dict.fromkeys(row or ())
        if row is None or field not in columns and not may_lack:
            break
        if not isinstance(text, str | None):
            raise ValueError(
                f"row {number} of data.field={field} is not text but {type(text).__name__}"
            )
        yield text or ""
    if columns and field not in columns:
        raise ValueError(f"no column is data.field={field}; there are: {', '.join(columns)}")
