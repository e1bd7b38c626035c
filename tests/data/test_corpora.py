"""Which documents a local source yields, and one clear error for each wrong way to name one."""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from config import DataConfig
from data.corpora import Corpus
from tests.command import run, summary, tiny


def rows(**settings) -> dict[str, str]:
    return dict(Corpus(DataConfig(**settings)).documents())


def read(path) -> dict[str, str]:
    return rows(source="text", path=str(path))


def write(folder, **files):
    """Write files; the argument a__b_txt stands for a/b.txt."""
    for name, content in files.items():
        file = folder / name.replace("__", "/").replace("_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def lines(*table) -> str:
    return "".join(json.dumps(row) + "\n" for row in table)


def parquet(file, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


# which files


def test_stdlib_is_the_core_of_the_standard_library():
    corpus = rows(source="stdlib")
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= set(corpus)
    left_out = ("test/", "idlelib/", "lib2to3/", "ensurepip/", "site-packages/", "encodings/")
    left_out += ("pydoc_data/", "config-", "_sysconfigdata")
    assert not [path for path in corpus if path.startswith(left_out) or "/tests/" in path]
    assert corpus["json/decoder.py"] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert list(corpus) == sorted(corpus, key=lambda path: path.split("/"))
    assert all(path.endswith(".py") and text for path, text in corpus.items())


def test_torch_source():
    corpus = rows(source="torch_source")
    assert len(corpus) > 40 and "__init__.py" in corpus and "version.py" not in corpus


FOUND = {
    "b.txt": ["b.txt"],
    "*.txt": ["b.txt", "c.txt"],
    "**/*.txt": ["a/x.txt", "b.txt", "c.txt"],
    "*/**/*.txt": ["x.txt"],
    "a": ["x.txt"],
}


def test_path_forms(tmp_path):
    write(tmp_path, b_txt="two", c_txt="three", a__x_txt="one", d_md="four")
    assert {path: list(read(tmp_path / path)) for path in FOUND} == FOUND


def test_a_folder_and_a_pattern_read_the_same(tmp_path):
    """In order, without hidden and empty files, caches, pipes and broken links."""
    write(tmp_path, b_txt="two", a__x_md="one", c_txt="", _hidden="no", a___DS="no")
    write(tmp_path, __pycache____z_txt="no")
    (tmp_path / "c.d").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "gone.txt")
    for path in ("", "**", "**/*"):
        assert read(tmp_path / path) == {"a/x.md": "one", "b.txt": "two"}, path


@pytest.mark.parametrize("path", ["", "**/*.txt"], ids=["folder", "pattern"])
def test_a_file_counts_once_whatever_leads_to_it(tmp_path, path):
    """Regression tests: a folder left out linked folders, and a pattern read a text 40 times, so
    that held-out texts were trained on.
    """
    corpus = tmp_path / "corpus"
    write(corpus, b_txt="b", z__y_txt="y")
    write(tmp_path, elsewhere__x_txt="x", elsewhere__back__w_txt="w")
    links = {"a.txt": "b.txt", "c": "z", "self": "."}
    if not path:  # circles of several links
        links |= {"z/up": "../..", "z/self": "..", "z/home": "../../elsewhere/back/home"}
    links |= {"shards": "../elsewhere", "shards2": "../elsewhere"}
    for name, target in links.items():
        (corpus / name).symlink_to(target)
    if not path:
        (tmp_path / "elsewhere/back/home").symlink_to(corpus)
    os.link(corpus / "b.txt", corpus / "d.txt")
    found = {"b.txt": "b", "z/y.txt": "y", "shards/x.txt": "x", "shards/back/w.txt": "w"}
    assert read(corpus / path) == found


def test_a_link_that_joins_moves_no_document(tmp_path):
    """A document is held out by its path."""
    write(tmp_path, real__x_txt="x", y_txt="y")
    before = read(tmp_path)
    (tmp_path / "a.txt").symlink_to("y.txt")
    (tmp_path / "b").symlink_to("real")
    assert read(tmp_path) == read(tmp_path / "**/*.txt") == before
    assert list(read(tmp_path / "b")) == list(read(tmp_path / "**/b/*.txt")) == ["x.txt"]


def test_relative_and_home_paths(tmp_path, monkeypatch):
    write(tmp_path, b_txt="two")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("b.txt") == read("~/b.txt") == read("./*.txt") == {"b.txt": "two"}


def test_a_relative_path_is_looked_for_where_it_was_typed(tmp_path):
    """A regression test: with hydra.job.chdir=true it was looked for in the run's folder."""
    asked = ("hydra.job.chdir=true", "data=text", "data.path=data/tokenizer.py")
    for overrides in (tiny(tmp_path / "run", *asked), [f"resume={tmp_path}/run", "steps=5"]):
        done = run(*overrides)
        assert done.code == 0, done.output
    assert summary(tmp_path / "run")["steps_done"] == 5


# how they are read


def test_byte_order_mark_is_dropped_and_line_ends_are_kept(tmp_path):
    write(tmp_path, a_txt=b"\xef\xbb\xbfna\xc3\xafve\r\n")
    assert read(tmp_path) == {"a.txt": "naïve\r\n"}


TABLE = [{"text": "one", "n": 1}, {"text": None, "n": 2}, {"text": "", "n": 3}, {"text": "two, 2"}]
CSV = 'n,text\n1,one\n2,\n3,""\n4,"two, 2"\n'
FORMS = {
    "ndjson": lines(*TABLE),
    "jsonlines": "\ufeff" + lines(*TABLE).replace("\n", "\r\n\n"),
    "JSONL": lines(*TABLE),
    "json": json.dumps(TABLE, indent=1),
    "csv": CSV,
    "CSV": "\ufeff\n" + CSV.replace("\n", "\r\n"),
    "tsv": "n\ttext\n1\tone\n2\t\n3\t\n4\ttwo, 2\n",
}


def test_tables_give_one_document_a_row(tmp_path):
    """Regression tests: the syntax of .ndjson, .JSONL and .csv was trained on."""
    parquet(tmp_path / "a::b [1].parquet", text=["one", None, "", "two, 2"], n=[1, 2, 3, 4])
    for form, content in FORMS.items():
        (tmp_path / f"a::b [1].{form}").write_bytes(content.encode())
    for form in (*FORMS, "parquet"):
        file = tmp_path / f"a::b [1].{form}"
        assert read(file) == {f"{file.name}:0": "one", f"{file.name}:3": "two, 2"}


def test_only_the_column_that_is_read_decides(tmp_path):
    """A regression test: above 10 MiB the other columns refused a corpus."""
    long = "x" * (11 << 20)
    table = [{"text": None, "note": long}, {"text": long, "tags": []}, {"tags": ["a"], "text": "y"}]
    table += [{"text": "z", "score": 1, "note": None}, {"text": "z", "score": "n/a", "note": "s"}]
    write(tmp_path, a_jsonl=lines(*table))
    assert list(read(tmp_path).values()) == [long, "y", "z", "z"]


def test_files_without_rows_refuse_no_corpus(tmp_path):
    write(tmp_path, a_jsonl="", b_jsonl="\n \n", c_json="[]", d_csv="", e_csv="n,other\n")
    parquet(tmp_path / "f.parquet", text=pyarrow.array([], "string"))
    parquet(tmp_path / "g.parquet", other=pyarrow.array([], "int32"))
    write(tmp_path, i_txt="", j_jsonl=lines({"text": "one"}))
    assert read(tmp_path) == {"j.jsonl:0": "one"}


def test_the_column_is_chosen_by_field(tmp_path):
    write(tmp_path, a_txt="", b_txt="1", c_jsonl=lines({"body": "2"}, {"body": "3"}), d_txt="4")
    found = rows(source="text", path=str(tmp_path), field="body")
    assert found == {"b.txt": "1", "c.jsonl:0": "2", "c.jsonl:1": "3", "d.txt": "4"}


GOOD = lines(*[{"text": "x" * 100}] * 1000)
# the files, the path in their folder, and what the error must name
BAD = {
    "missing": ({}, "nowhere.txt", r"nowhere\.txt "),
    "glob-without-match": ({}, "*.txt", r"/\*\.txt .*/\*\*/\*\.txt"),
    "empty-folder": ({}, "", "data.path="),
    "pipe": ({}, "pipe", "pipe names no file"),
    "nul-bytes": ({"a_txt": "fine", "b_txt": b"text\0more"}, "", r"b\.txt.*position 4: NUL"),
    "latin-1": ({"b_txt": "naïve".encode("latin-1")}, "", r"b\.txt.*utf-8.*position 2"),
    "no-column": ({"a_jsonl": lines({"body": "x", "n": 1})}, "", r"row 0 .*field=text.*body, n"),
    "no-column-later": ({"a_jsonl": lines({"text": "x"}, {"body": "x"})}, "", "row 1 .*body"),
    "column-of-numbers": ({"a_jsonl": '{"text": 3}\n'}, "", r"row 0 .*field=text.*int"),
    "no-object": ({"a_jsonl": '"text"\n'}, "", r"a\.jsonl.*row 0 "),
    "half-a-line": ({"a_jsonl": GOOD + '{"text": "x"\n'}, "", r"a\.jsonl.*row 1000 "),
    "half-a-pair": ({"a_jsonl": GOOD + r'{"text": "\ud83d"}'}, "", "row 1000 .*ud83d"),
    "deep": ({"a_jsonl": GOOD + "[" * 100_000}, "", "row 1000 "),
    "one-name-twice": ({"a_csv": "text,text\nx,y\n"}, "", r"a\.csv.*text, text"),
    "unquoted-comma": ({"a_csv": "n,text\n1,x\n2,y, z\n"}, "", r"a\.csv.*row 1 .*2 columns"),
    "missing-cell": ({"a_csv": "n,text\n1\n"}, "", r"a\.csv.*row 0 .*2 columns"),
    "open-quote": ({"a_csv": 'text\nx\n"y\n'}, "", r"a\.csv.*row 1 "),
    "broken-parquet": ({"a_parquet": "nonsense"}, "", r"a\.parquet"),
}


@pytest.mark.parametrize("files, path, message", BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_error(tmp_path, capfd, files, path, message):
    """A row is named by its number in the file, not in a block of it. A pipe is no file: reading
    one that nobody writes to would never end.
    """
    write(tmp_path, **files)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path / path)
    assert f"data.path={tmp_path}" in str(error.value) and "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")
