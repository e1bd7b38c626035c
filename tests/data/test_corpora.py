"""Which documents a local source yields, and one clear error for each wrong way to name one."""

import json
import os
from pathlib import Path

import pytest

from config import DataConfig
from data.corpora import Corpus
from data.local_files import text_files
from tests import processes


def rows(**settings) -> dict[str, str]:
    return {row["path"]: row["text"] for row in Corpus(DataConfig(**settings)).documents()}


def write(folder, **files):
    """Write files; the argument a__b_txt stands for a/b.txt."""
    for name, content in files.items():
        file = folder / name.replace("__", "/").replace("_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_documents_are_a_datasets_stream():
    import datasets

    stream = Corpus(DataConfig(source="stdlib", max_documents=2)).documents()
    assert isinstance(stream, datasets.IterableDataset)
    assert list(next(iter(stream))) == ["path", "text"]


def test_stdlib_is_the_core_of_the_standard_library():
    corpus = rows(source="stdlib")
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= set(corpus)
    left_out = (
        "test/",
        "idlelib/",
        "lib2to3/",
        "ensurepip/",
        "site-packages/",
        "encodings/",
        "pydoc_data/",
        "config-",
        "_sysconfigdata",
    )
    assert not [
        path
        for path in corpus
        if path.startswith(left_out) or "/test/" in path or "/tests/" in path
    ]
    assert corpus["json/decoder.py"] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert list(corpus) == sorted(corpus, key=lambda path: path.split("/"))
    assert all(path.endswith(".py") and text for path, text in corpus.items())
    assert len(corpus) <= Corpus(DataConfig(source="stdlib")).max_documents() < 1.05 * len(corpus)


def test_torch_source():
    settings = dict(source="torch_source", max_documents=40)
    corpus = rows(**settings)
    assert len(corpus) == 40 == Corpus(DataConfig(**settings)).max_documents()
    assert "__init__.py" in corpus and "version.py" not in corpus


def test_folder_is_read_in_order_without_hidden_and_empty_files(tmp_path):
    write(
        tmp_path,
        b_txt="two",
        a__x_md="one",
        c_txt="",
        _hidden="no",
        a___DS="no",
        __pycache____z_txt="no",
    )
    (tmp_path / "c.d").mkdir()
    assert rows(source="text", path=str(tmp_path)) == {"a/x.md": "one", "b.txt": "two"}


@pytest.mark.parametrize(
    "path, expected",
    [
        ("b.txt", ["b.txt"]),
        ("*.txt", ["b.txt", "c.txt"]),
        ("**/*.txt", ["a/x.txt", "b.txt", "c.txt"]),
        ("a", ["x.txt"]),
    ],
    ids=["file", "glob", "deep-glob", "folder"],
)
def test_path_forms(tmp_path, path, expected):
    write(tmp_path, b_txt="two", c_txt="three", a__x_txt="one", d_md="four")
    assert list(rows(source="text", path=str(tmp_path / path))) == expected


def test_relative_and_home_paths(tmp_path, monkeypatch):
    write(tmp_path, b_txt="two")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        rows(source="text", path="b.txt")
        == rows(source="text", path="~/b.txt")
        == rows(source="text", path="./*.txt")
        == {"b.txt": "two"}
    )


def test_byte_order_mark_is_dropped_and_line_ends_are_kept(tmp_path):
    write(tmp_path, a_txt=b"\xef\xbb\xbfna\xc3\xafve\r\n")
    assert rows(source="text", path=str(tmp_path)) == {"a.txt": "naïve\r\n"}


def test_tables_give_one_document_a_row(tmp_path):
    import datasets

    table = [
        {"text": "one", "n": 1},
        {"text": None, "n": 2},
        {"text": "", "n": 3},
        {"text": "two", "n": 4},
    ]
    write(
        tmp_path,
        a_jsonl="".join(json.dumps(row) + "\n" for row in table),
        b_json=json.dumps(table[:1]),
        e_jsonl="",
    )
    datasets.Dataset.from_list(table).to_parquet(tmp_path / "c [1].parquet")
    write(tmp_path, d_txt="plain")
    expected = {
        "a.jsonl:0": "one",
        "a.jsonl:3": "two",
        "b.json:0": "one",
        "c [1].parquet:0": "one",
        "c [1].parquet:3": "two",
        "d.txt": "plain",
    }
    assert rows(source="text", path=str(tmp_path)) == expected


def test_column_is_chosen_by_field(tmp_path):
    write(tmp_path, a_jsonl='{"title": "t", "body": "b"}\n')
    assert rows(source="text", path=str(tmp_path), field="body") == {"a.jsonl:0": "b"}


def test_max_documents_counts_documents_with_text(tmp_path):
    write(tmp_path, a_txt="", b_txt="1", c_jsonl='{"text": "2"}\n{"text": "3"}\n', d_txt="4")
    assert list(rows(source="text", path=str(tmp_path), max_documents=2).values()) == ["1", "2"]


def test_identity_follows_the_files_and_the_settings(tmp_path):
    def known(**settings):
        return Corpus(DataConfig(source="text", path=str(tmp_path), **settings)).identity()

    write(tmp_path, a_txt="one")
    before = known()
    assert before == known() != known(max_documents=1)
    write(tmp_path, a_txt="eno")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    changed = known()
    write(tmp_path, b_txt="two")
    assert len({before, changed, known()}) == 3


def test_reading_is_silent(tmp_path, capfd):
    write(tmp_path, a_jsonl='{"text": "one"}\n', b_txt="two")
    assert len(rows(source="text", path=str(tmp_path))) == 2
    assert capfd.readouterr() == ("", "")


# the files, the path in their folder, and what the error must name
BAD = {
    "missing": (dict(), "nowhere.txt", r"data\.path=.*nowhere\.txt "),
    "glob-without-match": (dict(), "*.txt", r"data\.path=.*/\*\.txt .*/\*\*/\*\.txt"),
    "empty-folder": (dict(), "", r"data\.path="),
    "nul-bytes": (dict(a_txt="fine", b_txt=b"text\0more"), "", r"b\.txt .*byte 4: NUL"),
    "latin-1": (dict(b_txt="naïve".encode("latin-1")), "", r"b\.txt .*UTF-8 .*byte 2"),
    "utf-16": (dict(b_txt="naive".encode("utf-16")), "b.txt", r"b\.txt .*UTF-8 "),
    "no-such-column": (
        dict(a_jsonl='{"body": "x", "n": 1}\n'),
        "",
        r"a\.jsonl .*data\.field=text.*body, n",
    ),
    "column-of-numbers": (dict(a_jsonl='{"text": 3}\n'), "", r"row 0 .*data\.field=text .*int"),
    "broken-jsonl": (dict(a_jsonl='{"text": "x"\nnonsense\n'), "", r"a\.jsonl .*json"),
    "broken-parquet": (dict(a_parquet="nonsense"), "", r"a\.parquet .*parquet"),
}


@pytest.mark.parametrize("files, path, message", BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_error(tmp_path, capfd, files, path, message):
    write(tmp_path, **files)
    with pytest.raises(ValueError, match=message) as error:
        rows(source="text", path=str(tmp_path / path))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_broken_table_is_reported_once(tmp_path):
    """`datasets` logs an error that it raises.

    In a fresh process, because its log keeps the stderr that it saw first.
    """
    write(tmp_path, a_jsonl='{"text": "x"\nnonsense\n')
    config = DataConfig(source="text", path=str(tmp_path))
    code = (
        "from config import DataConfig; from data.corpora import Corpus; "
        f"list(Corpus({config!r}).documents())"
    )
    errors = processes.run("-c", code).stderr.strip().splitlines()
    assert "JSON" not in errors[0] and errors[-1].startswith(f"ValueError: {tmp_path}")


@pytest.mark.parametrize("file", ["a.txt", "a.jsonl"])
def test_permission_denied(tmp_path, monkeypatch, file):
    """Permissions do not stop root, so Python's and datasets' functions refuse."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    write(tmp_path, **{file.replace(".", "_"): '{"text": "x"}\n'})
    path = str(tmp_path / file)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    if file.endswith("jsonl"):
        import datasets

        monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=rf"{file} .*Permission denied.*data\.path"):
        rows(source="text", path=path)


def test_a_package_file_in_an_old_encoding_is_skipped(tmp_path, monkeypatch):
    """Embedded sources must work on every installation; only the user's own files are refused."""
    import sysconfig

    write(tmp_path, a_py="one = 1\n", b_py=b"# na\xefve, in latin-1\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert rows(source="stdlib") == {"a.py": "one = 1\n"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are Unix's")
def test_what_is_no_file_is_left_out(tmp_path):
    """Reading a pipe that nobody writes to would never end; a broken link cannot be read."""
    (tmp_path / "text.txt").write_text("words")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "gone.txt")
    assert text_files(str(tmp_path)) == [tmp_path / "text.txt"]
    with pytest.raises(ValueError, match="pipe.txt"):
        text_files(str(tmp_path / "pipe.txt"))
