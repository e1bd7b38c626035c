"""How commands end that cannot go on: in one line, before the work where that can be known, and
what was there before stays.
"""

import os
import shutil
from dataclasses import replace

import pytest

from config import DataConfig
from scripts.arguments import NoOptions, check_out, command
from tests.command import contents
from tests.run_folder import SMALL, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of each kind: on text, on packed text, on a task, without biases, without a checkpoint,
    killed; and a folder without any.
    """
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "text")
    write_run(folder / "packed", data=DataConfig(source="stdlib", documents=True))
    write_run(folder / "task", data=DataConfig(source="last_write"))
    write_run(folder / "odd", shape=replace(SMALL, bias=False))
    shutil.copytree(folder / "text", folder / "begun", ignore=lambda *_: ["checkpoint"])
    shutil.copytree(folder / "text", folder / "killed", ignore=lambda *_: ["summary.json"])
    (folder / "none").mkdir()
    return folder


# what is typed after `python -m scripts.`, and what the refusal names; of two mistakes the one that
# is found before the work
REFUSED = {
    "agree {runs}/text under=naive,tield": ("tield",),
    "agree {runs}/packed": ("documents",),
    "agree {runs}/nowhere": ("nowhere",),
    "benchmark attention=tiled:block=64": ("'block'",),
    "benchmark window=8 causal=false check=false": ("window=8",),
    "benchmark groups=3 check=false": ("H_kv=5",),
    "benchmark attention=flex seq_len=8 head_dim=8 check=false": ("attention=flex",),
    "benchmark memory_gib=8": ("max_length=true",),
    "benchmark device=cuda": ("GPU",),
    "benchmark attention=flash out=x.txt": ("x.txt",),
    "benchmark seq_len=8 check=false out={runs}/text/loss_curve.json": ("loss_curve.png",),
    "cross_eval {runs}/nowhere": ("nowhere",),
    "cross_eval {runs}/none": ("{runs}/none",),
    "cross_eval {runs}/begun": ("{runs}/begun", "checkpoint"),
    # a regression test: it was said to have no checkpoint
    "cross_eval {runs}/killed": ("{runs}/killed", "unfinished"),
    "cross_eval {runs}/text under=tiled:tile=3": ("tile",),
    "cross_eval {runs}/text out=x.txt": ("x.txt",),
    # regression tests: the result took the place of the run's own file
    "cross_eval {runs}/text out={runs}/text/summary.json": ("text/summary.json",),
    "agree {runs}/text out={runs}/text/checkpoint/meta.json": ("checkpoint/meta.json",),
    "verify attention=naive cases=0 out={runs}/text/env.json": ("text/env.json",),
    "export run={runs}/text out={runs}/text": ("out={runs}/text",),
    "export run={runs}/odd out=x": ("gpt2", "model.bias=true"),
    "plan model=gpt3": ("gpt2",),
    "plan attention=flash": ("tiled",),
    "plan gpu=voodoo2": ("a100-40",),
    "plan attention=naive attention.block_q=16": ("block_q",),
    "plan ranks=2": ("ranks=2",),
    "plan resume=outputs/x": ("resume=outputs/x",),
    "profile modl=gpt2": ("modl",),
    "profile warmup=0": ("warmup=0",),
    "profile out=": ("out=",),
    "recall {runs}/task lengths=32,33": ("33 tokens",),
    "recall {runs}/task lengths=1": ("seq_len=1",),
    "recall {runs}/text": ("data=stdlib",),
    "report {runs}/none": ("{runs}/none",),
    "report {runs}/nowhere": ("{runs}/nowhere",),
    "report {runs}/text out=x.txt": ("x.txt",),
    "runs": ("multirun",),
    "runs nowhere": ("nowhere",),
    "sample run={runs}/text temperature=-1": ("temperature=-1.0",),
    "sample run={runs}/text attention=magic": ("attention=magic",),
    "sample run={runs}/text device=cuda": ("device=cuda",),
    "sample run={runs}": ("{runs}/",),  # it holds runs
    "sample run={runs}/task": ("last_write",),  # whose tokens are no text
    "sample run={runs}/begun": ("checkpoint",),
    "trace attention=sdpa": ("attention=sdpa", "tiled"),
    "trace attention=tests.user_backends:RIGHT": ("observer=",),
    "trace inputs=normal seq_len=100000": ("seq_len=100000", "16384"),
    "trace seq_len=64": ("seq_len=64", "random inputs="),
    "trace row=8": ("row=8",),
    "trace attention=flash out=x.txt": ("x.txt",),
    "trace run=nowhere": ("nowhere", "checkpoint"),
    "trace run={runs}/packed": ("data.documents=true",),
    "trace run={runs}/text layer=1": ("layer=1", "0 to 0"),
    "trace run={runs}/text head=2": ("head=2", "0 to 1"),
    # a regression test: without out= it replaced the shipped vocabulary
    "train_bpe vocab_size=300": ("out=",),
    "train_bpe out=x.json": ("x.json", ".tiktoken"),
    "train_bpe vocab_size=10": ("vocab_size=10", "256"),
    "tune head_dim=64": ("GPU",),
    "verify attention=flash": ("attention=flash", "naive, tiled"),
    "verify attention=no_such:BACKEND": ("attention=no_such:BACKEND", "ModuleNotFoundError"),
    "verify attention=tiled:block_q=[": ("attention=tiled:block_q=[",),
    "verify attention=flash out=x.txt": ("x.txt",),
    "verify device=cuda": ("device=cuda",),
    "verify dtype=int8": ("dtype=int8", "fp32", "bf16", "fp16"),
    "verify cases=-1": ("cases=-1", "0"),
    "verify seed=9999999999999": ("seed=9999999999999", "1000000000000"),
}


@pytest.mark.parametrize(("line", "named"), REFUSED.items(), ids=REFUSED)
def test_refused_in_one_line_and_nothing_is_written(
    line, named, typed, runs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command, *arguments = line.format(runs=runs).split()
    before = contents(runs)
    with pytest.raises(SystemExit) as ended:
        typed(command + ".__main__" * (command == "report"), *arguments)
    told = ended.value.code
    assert told.startswith(f"{command}: ") and "\n" not in told
    assert all(name.format(runs=runs) in told for name in named), told
    assert contents(runs) == before and not os.listdir(tmp_path)


def test_a_file_is_tried_without_being_touched_and_named_if_it_is_replaced(tmp_path, capsys):
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "folder.json").mkdir()
    for name in ("old.json", "new/x.json"):
        check_out(tmp_path / name)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(tmp_path / "old.json"))
    # a file of another kind, a folder, and a file in place of the folder
    for name in ("old.png", "folder.json", "old.json/x.json"):
        with pytest.raises((ValueError, OSError), match=str(tmp_path)):
            check_out(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder.json", "new", "old.json"]
    assert (tmp_path / "old.json").read_text() == "old" and os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (OSError("/nowhere is\ngone"), "test_endings: /nowhere is gone"),
        (MemoryError("no more"), "test_endings: out of memory: no more; ask for smaller sizes"),
        (KeyboardInterrupt, 130),
    ],
)
def test_an_error_is_one_line_and_ctrl_c_exit_code_130(capsys, error, ends):
    @command
    def main(options: NoOptions) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == ends
    if ends == 130:
        assert capsys.readouterr().err.startswith("test_endings: ")
