"""Which package may import which, read from the source of every file; and what a fresh process
loads.

attention < conformance; attention < model; data alone; training above model and data; scripts and
train.py above training; lab above everything. What is optional or slow to import is imported where
it is used.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {
    "attention",
    "config",
    "data",
    "hydra_plugins",
    "model",
    "scripts",
    "training",
    "train",
    "tests",
    "conformance",
    "lab",
    "docs",
    "examples",
}
# what a package may import of ours, besides itself
MAY_IMPORT = {
    "config": set(),
    "attention": set(),
    "conformance": {"attention"},
    "data": {"config"},
    "model": {"attention", "config"},
    "training": {"attention", "config", "data", "model"},
    "hydra_plugins": {"attention", "config", "training"},
    "train": {"config", "hydra_plugins", "training"},
    "scripts": {"attention", "conformance", "config", "data", "model", "training"},
    "docs": set(),
    "examples": {"attention"},
}
# modules of attention that everything in it may import, and what single ones may import besides
SHARED = {"blame", "decoding", "interface", "mask", "online_softmax", "own", "ring", "sinks"}
ALSO = {
    "context": {"exchange"},
    "exact_variants": {"tiled"},
    "defects": {"tiled", "kernels"},
    "diagnose": {"tiled", "naive"},
    "played_ring": {"defects", "tiled"},
    "probe": {"diagnose"},
    "tile_op": {"backends", "tiled"},
}
LAZY = {
    "triton",
    "wandb",
    "wandb_workspaces",
    "datasets",
    "huggingface_hub",
    "tiktoken",
    "matplotlib",
    "tensorboard",
}
LAZY |= {"transformers"}
HF = Path("attention/hf.py")  # imported by its users alone


class Import(NamedTuple):
    file: Path  # relative to the root
    line: int
    module: str  # dotted
    names: tuple[str, ...]  # of `from module import names`; empty for `import module`
    at_import: bool  # whether it runs when the file is imported

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(file: Path) -> Iterator[Import]:
    relative = file.relative_to(ROOT)

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(relative, child.lineno, alias.name, (), at_import)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{relative}:{child.lineno} is a relative import"
                yield Import(
                    relative,
                    child.lineno,
                    child.module,
                    tuple(alias.name for alias in child.names),
                    at_import,
                )
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue  # never runs
            else:
                yield from walk(
                    child,
                    at_import
                    and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)),
                )

    yield from walk(ast.parse(file.read_text()), True)


def sources(*names: str) -> list[Path]:
    """The files of these packages and modules of ours."""
    return [
        file
        for name in names
        for file in (
            [ROOT / f"{name}.py"]
            if (ROOT / f"{name}.py").exists()
            else sorted((ROOT / name).rglob("*.py"))
        )
    ]


def imports(*names: str) -> list[Import]:
    found = [found for file in sources(*names) for found in imports_of(file)]
    assert found, f"no imports in {names}: the walk is broken"
    return found


def refuse(found: list[Import]) -> None:
    assert not found, "\n".join(map(str, found))


def test_every_folder_with_code_is_walked():
    folders = {
        file.parent.relative_to(ROOT).parts[0]
        for file in ROOT.glob("*/*.py")
        if not file.parent.name.startswith(".")
    }
    assert folders <= OURS, "a new package needs its line in MAY_IMPORT"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_direction(package):
    refuse(
        [
            x
            for x in imports(package)
            if x.top in OURS - MAY_IMPORT[package] - {package}
            # run() calls the story that train.py tells
            and (str(x.file), x.module) != ("training/job.py", "train")
        ]
    )


def test_attention_needs_torch_and_numpy_only():
    foreign = {
        x
        for x in imports("attention")
        if x.top not in {*sys.stdlib_module_names, "torch", "numpy", "attention"}
    }
    in_kernels = {
        x
        for x in foreign
        if x.top == "triton" and x.file.parts[1] == "kernels" and x.file.name != "__init__.py"
    }
    assert in_kernels, "the kernels import triton"
    in_hf = {x for x in foreign if x.top == "transformers" and x.file == HF}
    refuse(sorted(foreign - in_kernels - in_hf))


def test_backends_do_not_import_one_another():
    for x in imports("attention"):
        module = x.file.relative_to("attention").parts[0].removesuffix(".py")
        # hf stands outside: nothing of the package imports it, see the next test
        if module in ("__init__", "backends", "hf") or x.top != "attention":
            continue
        used = x.module.split(".")[1:2]
        assert used, f"{x}: only a submodule can be imported from inside the package"
        own_folder = module == "kernels" == used[0]
        assert own_folder or used[0] in (
            SHARED if module not in SHARED else SHARED - {module}
        ) | ALSO.get(module, set()), x


def test_nothing_imports_what_needs_transformers():
    found = imports(*OURS - {"tests"})
    refuse([x for x in found if x.module == "attention.hf" or "hf" in x.names])


def test_model_knows_attention_by_its_public_names():
    import attention

    found = [x for x in imports("model") if x.top == "attention"]
    assert found
    # the kernels for Hopper use the helpers of the attention's
    apart = {Path(f"model/{name}.py") for name in ("gelu", "loss_hopper_kernel", "mlp_kernel")}
    refuse(
        [
            x
            for x in found
            if not (x.file in apart and x.module.startswith("attention.kernels."))
            and (x.module != "attention" or not set(x.names) <= set(attention.__all__))
        ]
    )


def test_hydra_stays_at_the_edge():
    edge = {"train.py", "config.py"} | {
        f"training/{name}.py" for name in ("command_line", "job", "sweep", "trained")
    }
    ours = imports("attention", "conformance", "config", "data", "model", "training", "train")
    assert [x for x in ours if x.top == "hydra"]
    refuse([x for x in ours if x.top in {"hydra", "omegaconf"} and str(x.file) not in edge])


def test_what_is_optional_or_slow_is_imported_where_it_is_used():
    names = (
        "forward.py",
        "backward.py",
        "decoding.py",
        "softmax.py",
        "defects.py",
        "score_mods.py",
        "portable.py",
        "intervals.py",
        "offline.py",
        "parts.py",
    )
    names += tuple(
        f"hopper/{name}.py"
        for name in (
            *("primitives", "forward", "backward", "pre_post", "launch", "offline", "score_mods"),
        )
    )
    kernels = {Path("attention/kernels") / name for name in names} | {
        Path(f"model/{name}_kernel.py")
        for name in ("embedding", "gelu", "loss", "loss_hopper", "mlp", "norm", "step")
    }
    found = [x for x in imports(*OURS - {"tests"}) if x.at_import and x.top in LAZY]
    allowed = {("triton", file) for file in kernels} | {("transformers", HF)}
    refuse([x for x in found if (x.top, x.file) not in allowed])
    # a mistyped key is answered before torch is loaded
    refuse(
        [
            x
            for x in imports("train", "config")
            if x.at_import
            and x.top in {"torch", "numpy", "attention", "data", "model", "training"}
            and x.module not in ("training.command_line", "training.interrupt")
        ]
    )


def loaded(code: str, *arguments: str) -> set[str]:
    """The top-level modules that a fresh process has imported after running `code`."""
    end = (
        "print('\\nLOADED', *{name.partition('.')[0] for name, module in sys.modules.items() if "
        "module is not None})"
    )
    command = [
        sys.executable,
        "-c",
        f"import sys, atexit\natexit.register(lambda: {end})\n{code}",
        *arguments,
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].removeprefix("LOADED ").split())


TRAIN = (
    "import runpy; sys.argv = ['train.py', *sys.argv[1:]]; runpy.run_path('train.py', "
    "run_name='__main__')"
)


@pytest.mark.parametrize(
    ("code", "arguments", "needed", "refused"),
    [
        ("import attention", [], {"torch"}, LAZY | {"hydra"}),
        ("import model", [], {"torch"}, LAZY | {"hydra"}),
        ("import data", [], {"numpy"}, LAZY | {"hydra", "torch"}),
        ("import config; config.register()", [], {"hydra"}, LAZY | {"torch"}),
        (TRAIN, ["--help"], {"hydra"}, LAZY | {"torch"}),
        (TRAIN, ["--cfg", "job", "attention=triton"], {"hydra"}, LAZY),
    ],
    ids=[
        "import-attention",
        "import-model",
        "import-data",
        "config",
        "train-help",
        "train-cfg-job",
    ],
)
def test_a_fresh_process_loads(code, arguments, needed, refused):
    found = loaded(code, *arguments)
    assert needed <= found
    assert not found & refused


def test_attention_works_where_triton_is_absent():
    code = (
        "sys.modules['triton'] = None\nimport torch, attention\nq = torch.ones(1, 1, 4, "
        "16)\nattention.attention(q, q, q, backend='tiled')"
    )
    assert "triton" not in loaded(code)
