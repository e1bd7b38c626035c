"""`python -m scripts.trace`: what it records, which tile it blames, and the page in a browser."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from attention import BACKENDS, Recorder, attention, get_backend
from attention.look.trace import Trace
from config import AttentionConfig, DataConfig, ModelConfig, RunConfig
from data import build_data
from examples.numpy_attention import standard_attention
from model import GPT
from scripts import trace, trace_page
from scripts.arguments import read_settings
from tests.browser import in_browser, needs_browser
from tests.run_folder import write_run

SHAPE = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=32, max_seq_len=48)
OBSERVABLE = [name for name, backend in BACKENDS.items() if backend.observable]
SLOW = pytest.mark.slow


@pytest.fixture
def page_of(typed, tmp_path):
    """page_of("key=value", ...): the page that it wrote."""

    def run(*arguments: str) -> Path:
        typed("trace", *arguments, f"out={tmp_path / 'page.html'}")
        return tmp_path / "page.html"

    return run


def look(*arguments: str) -> tuple[trace.Call, Trace]:
    typed = [*" ".join(arguments).split(), "device=cpu"]
    call, _, found = trace.look(read_settings(trace.Options, typed))
    return call, found


def embedded(page: str) -> dict:
    return json.loads(re.search(r"^const DATA = (.*);$", page, re.MULTILINE)[1])


def test_worked_example_by_hand():
    """The first query's maximum moves from 0.8 to 1.2, so the past is worth 0.670 of what it was:
    2.754 becomes 3.930.
    """
    call, found = look("attention=tiled")
    assert (found.row, found.tiles) == (0, [(0, 4), (4, 8)]) and not call.arguments["causal"]
    first, second = found.found
    scores = torch.cat((first.scores[0], second.scores[0]))
    assert torch.allclose(scores, torch.tensor([0.8, 0.3, -0.1, 0.5, 1.2, -0.4, 0.6, 0.1]))
    assert [x.row_max[0].item() for x in (first, second)] == pytest.approx([0.8, 1.2])
    assert [round(x.row_sum[0].item(), 3) for x in (first, second)] == [2.754, 3.930]
    assert first.alpha[0] == 0 and round(second.alpha[0].item(), 3) == 0.670
    assert second.out[0, 3] == pytest.approx(1.0) and second.out[0, :2].sum() == pytest.approx(1.0)
    assert set(found.fates) == {"right"} and found.breaks == [None] * 4 and found.first is None


@pytest.mark.parametrize("name", OBSERVABLE)
def test_the_last_output_is_the_calls_and_an_exact_one_is_right(name):
    shape = ("inputs=growing", "seq_len=50", "block_kv=12")
    call, found = look(f"attention={name}", "dtype=fp16", *shape)
    backend = get_backend(name, block_q=16, block_kv=12)
    out = attention(call.q, call.k, call.v, backend=backend).out[0, 0]
    rows = slice(found.rows.start, found.rows.stop)
    assert torch.equal(found.found[-1].out.nan_to_num(7.0), out[rows].nan_to_num(7.0))
    if backend.exact:
        assert set(found.fates) == {"right"}, Counter(found.fates)
        assert found.first is None and set(found.breaks) == {None}


@pytest.mark.parametrize("name", ["tiled", "kv_outer", "lazy_rescale", "no_rescale"])
def test_p_and_alpha_are_the_ones_that_were_used(name):
    """They rebuild each state from the one before, also where a tile holds a single key."""
    for block_kv in (1, 12):
        call, found = look(f"attention={name} inputs=growing seq_len=25", f"block_kv={block_kv}")
        row_sum, acc = torch.zeros(len(found.rows)), torch.zeros(len(found.rows), 16)
        for step in found.found:
            row_sum = step.alpha * row_sum + step.p.sum(-1)
            acc = step.alpha[:, None] * acc + step.p @ call.v[0, 0, slice(*step.keys)]
            assert torch.allclose(row_sum, step.row_sum, rtol=1e-5)
            assert torch.allclose(acc, step.acc, rtol=1e-4, atol=1e-5)


def test_reference_is_attention_over_the_keys_so_far():
    call, found = look("attention=relative_mask", "inputs=normal", "seq_len=40", "row=20")
    q, k, v = (x[0, 0].double().numpy() for x in (call.q, call.k, call.v))
    assert found.rows == range(16, 32) and found.tiles[-1] == (32, 40)
    assert found.exact[2] is None  # the future
    ends = [end for _, end in found.tiles]
    for end, reference, error, step in zip(
        ends, found.reference, found.error, found.found, strict=True
    ):
        for at, i in enumerate(found.rows):
            seen = slice(min(end, i + 1))
            expected = torch.from_numpy(standard_attention(q[i : i + 1], k[seen], v[seen])[0])
            assert torch.allclose(reference[at], expected, atol=1e-12)
            apart = (step.out[at].double() - expected).abs().max().item()
            assert error[at].item() == pytest.approx(apart, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "fates"),
    [
        ("dtype=fp16 inputs=large", {"NaN", "inf"}),
        ("dtype=fp16 inputs=growing softmax_dtype=input", {"NaN", "zero"}),
        ("dtype=fp32 inputs=up", {"NaN"}),
        ("dtype=bf16 inputs=down", {"NaN"}),
    ],
)
def test_fates_and_the_first_tile(arguments, fates):
    """Against the output alone, and against the other walk that looks for a breakdown."""
    call, found = look("attention=no_max", arguments)
    options = {"softmax_dtype": "input"} if "softmax_dtype=input" in arguments else {}
    backend = get_backend("no_max", block_q=16, block_kv=16, **options)
    out = attention(call.q, call.k, call.v, backend=backend).out[0, 0]
    for fate, row in zip(found.fates, out, strict=True):
        assert (fate == "NaN") == row.isnan().any().item()
        assert (fate == "zero") == (row == 0).all().item()
    assert fates <= set(found.fates)
    queries, keys, cause, score = found.first
    if cause == "row_sum = 0":
        assert (queries, keys) == (range(16), (0, 16)) and score < -104
        return
    recorder = Recorder(backend)
    recorder.backend.fn(*call[:3], **call.arguments, scale=0.25, **backend.options)
    other = recorder.breakdowns[0]
    assert (other.queries, other.keys) == ((queries.start, queries.stop), keys)
    assert other.max_score == pytest.approx(score) or cause == "row_sum"


def test_a_row_without_weight_at_first_is_not_blamed():
    """exp(-110) is 0 in float32, so no_max has 0/0 after the first tile; the later keys bring
    weight, and the end is right.
    """
    q = torch.ones(1, 1, 1, 4)
    k = torch.cat((torch.full((1, 1, 2, 4), -55.0), torch.ones(1, 1, 2, 4)), 2)
    backend, exact = (get_backend(name, block_q=1, block_kv=2) for name in ("no_max", "tiled"))
    found = trace.trace(q, k, k, backend=backend, exact=exact, causal=False, scale=0.5)
    assert found.found[0].out.isnan().all() and found.found[0].broken().all()
    assert found.fates == ["right"] and found.first is None and found.breaks == [None]


def test_the_page_needs_nothing_from_outside_and_data_cannot_end_its_script(tmp_path, page_of):
    folder = tmp_path / "</script><b>"
    write_model(folder)
    page = page_of(f"run={folder}").read_text()
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert page.count("</script>") == 1 and str(folder) in json.dumps(embedded(page))


def test_a_large_tile_is_cut_around_the_row(page_of, monkeypatch):
    arguments = ("attention=no_max", "dtype=fp16", "inputs=large", "seq_len=64", "row=62")
    whole = embedded(page_of(*arguments).read_text())
    assert whole["rows"] == list(range(48, 64)) and whole["row"] == 14
    assert all(number in json.dumps(whole["steps"]) for number in ('"inf"', '"nan"'))
    monkeypatch.setattr(trace_page, "MAX_NUMBERS", 2200)
    cut = embedded(page_of(*arguments).read_text())
    assert cut["rows"] == list(range(60, 64)) and cut["row"] == 2
    assert cut["steps"][1]["found"]["scores"] == whole["steps"][1]["found"]["scores"][12:]
    assert cut["fates"] == whole["fates"][12:] and cut["breaks"] == whole["breaks"][12:]


def write_model(run_dir: Path, **settings) -> GPT:
    """A run of a model with two query heads to a key/value head."""
    task = {"attention": AttentionConfig(block_kv=8), "data": DataConfig(source="last_write")}
    settings = task | {"dtype": "fp32"} | settings
    return write_run(run_dir, shape=SHAPE, std=0.5, **settings)


def test_takes_q_k_v_of_a_run(tmp_path):
    model = write_model(tmp_path / "run")
    call, found = look(f"run={tmp_path}/run", "layer=1", "head=2")
    data = build_data(DataConfig(source="last_write"), RunConfig().tokenizer, seq_len=48, seed=0)
    with torch.no_grad():
        tokens = data.val_batch(64).inputs[:1]
        x = model.token_embedding(tokens) + model.position_embedding(torch.arange(48))
        x = model.blocks[0](x, None, None, None)
        block = model.blocks[1]
        qkv = block.attention.qkv(block.attention_norm(x))  # (1, 48, 4 * 8 + 2 * 8 + 2 * 8)
    for x, start in ((call.q, 16), (call.k, 40), (call.v, 56)):
        assert torch.allclose(x[0, 0], qkv[0, :, start : start + 8], atol=1e-5)
    assert call.arguments == {"causal": True} and call.attention == "tiled"
    assert found.tiles[0] == (0, 8) and set(found.fates) == {"right"}
    for word in ("layer 1", "head 2", f"{tmp_path}/run", "3 steps"):
        assert word in call.source


@needs_browser
def test_every_way_to_step(page_of):
    walked, start, broken, say, played, query, chosen = in_browser(
        page_of("attention=no_max", "dtype=fp16", "inputs=growing"),
        """const at = () => +$("slider").value, walked = [at()];
           const press = key => document.body.dispatchEvent(
             new KeyboardEvent("keydown", {key, bubbles: true}));
           const set = (id, value, event) => {
             $(id).value = value;
             $(id).dispatchEvent(new Event(event));
           };
           for (const act of [
             () => press("ArrowRight"), () => press("ArrowRight"), () => press("ArrowLeft"),
             () => press("End"), () => set("slider", 3, "input"), () => $("back").click(),
             () => document.querySelectorAll("#walk button")[4].click(),
           ]) { act(); walked.push(at()); }
           $("jump").click();
           const start = at(), say = $("say").innerText;
           const broken = [...$("walk").children].map(x => x.classList.contains("broken"));
           $("play").click();
           await new Promise(done => setTimeout(done, 1300));
           const played = at();
           set("row", 3, "change");
           const query = $("found").innerText;
           press("ArrowUp");
           return [walked, start, broken, say, played, query, $("row").value];""",
    )
    assert walked == [0, 1, 2, 1, 7, 3, 2, 4]
    assert broken == [i >= start for i in range(8)] and "65504" in say
    assert played == start + 1 and "query 115" in query and chosen == "2"


@needs_browser
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", ("0.8", "1.2", "0.670", "3.930", "4.837")),  # the worked example
        ("attention=relative_mask inputs=normal seq_len=48", ()),
        pytest.param("attention=tiled inputs=spike block_kv=1 seq_len=12", (), marks=SLOW),
        pytest.param("attention=no_scale inputs=huge seq_len=1", (), marks=SLOW),
    ],
)
def test_every_step_of_every_query_draws(page_of, arguments, told):
    """On a phone: nothing is cut off, and no number reaches the page unexplained."""
    words, hidden, markup, broken = in_browser(
        page_of(*arguments.split()),
        """document.documentElement.style.width = "375px";
           const words = [];
           for (let r = 0; r < DATA.rows.length; r++) for (let i = 0; i <= last; i++) {
             go(i, r);
             words.push(document.body.innerText);
           }
           const hidden = document.body.scrollWidth - document.body.clientWidth;
           const markup = [...document.querySelectorAll("svg")].map(x => x.outerHTML);
           go(last, 0);
           const broken = ["exact", "found"].map(id => $(id).classList.contains("broken"));
           return [words, hidden, markup, broken];""",
        size="500,844",  # a headless browser has no narrower window
        dark=True,
    )
    assert not any(wrong in text for text in words for wrong in ("undefined", "null", "[object"))
    assert hidden == 0
    assert not re.search(r'(x|y|width|height|cx|cy|d)="[^"]*NaN', "".join(markup))
    if told:
        assert all(number in words[1] for number in told) and broken == [False, True]
