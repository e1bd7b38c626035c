"""The findings of docs/findings/, in small."""

import json

import pytest
import torch

from lab.findings import lazy_rescaling, polynomial_exp2
from tests.scripts.test_sample import write_run


def test_lazy_rescaling_breaks_where_the_dtype_ends(tmp_path):
    out = tmp_path / "lazy.json"
    sizes = ["lengths=256", "thresholds=0,8,9,10", "offsets=0", "seeds=0"]
    lazy_rescaling.main([*sizes, f"out={out}"])
    regions = {each["dtype"]: each for each in json.loads(out.read_text())["regions"]}
    assert (regions["e4m3"]["last_safe"], regions["e4m3"]["first_broken"]) == (8, 9)
    assert all(regions[name]["first_broken"] is None for name in ("fp16", "bf16", "e5m2"))
    assert out.with_name("lazy.png").is_file()


def test_it_needs_a_threshold_to_compare_with():
    with pytest.raises(SystemExit, match="thresholds= needs 0"):
        lazy_rescaling.main(["thresholds=8"])


def test_a_polynomial_is_as_good_as_its_degree():
    x = torch.linspace(-140, 0, 5001)
    errors = [
        ((polynomial_exp2.exp2(x, degree) - x.exp2()) / x.exp2())[x > -126].abs().max()
        for degree in (1, 2, 3, 4, 5)
    ]
    assert all(more > 8 * less for more, less in zip(errors, errors[1:], strict=False))
    assert errors[2] < 2e-4 and errors[-1] < 1e-6
    ends = torch.tensor([-torch.inf, -1e4])
    assert polynomial_exp2.exp2(ends, 3).tolist() == [0, 0]


def test_a_polynomial_changes_a_model_by_its_degree(tmp_path):
    """Of a model whose weights are large and random."""
    write_run(tmp_path / "run")
    asked = ["degrees=1,3", "eighths=8", "sequences=2", f"out={tmp_path / 'found.json'}"]
    polynomial_exp2.main([str(tmp_path / "run"), *asked])
    exact, rough, fine = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert exact["out"] < fine["out"] < 1e-3 < rough["out"]
    assert fine["log_p"]["mean"] < rough["log_p"]["mean"] / 10
    with pytest.raises(SystemExit, match="eighths=9"):
        polynomial_exp2.main([str(tmp_path / "run"), "eighths=9"])
