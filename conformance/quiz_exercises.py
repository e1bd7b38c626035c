"""The exercises of `attn-conform quiz`, from easy to hard: each is one edit of quiz_attention.py.

`shows` is a property that the edit turns red; most turn several.
"""

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("quiz_attention.py").read_text()


@dataclass(frozen=True)
class Exercise:
    level: str  # easy, medium or hard
    before: str  # the code in quiz_attention.py
    after: str  # the code that replaces it in the exercise
    shows: str
    says: str  # the answer

    @property
    def source(self) -> str:
        assert SOURCE.count(self.before) == 1, self.before
        return SOURCE.replace(self.before, self.after)

    @property
    def function(self) -> str:
        """The function that the edit is in."""
        above = SOURCE[: SOURCE.index(self.before) + len(self.before)]
        name = above.rpartition("def ")[2].partition("(")[0]
        return f"FlashAttention.{name}" if name in ("forward", "backward") else name


ALPHA = "alpha = torch.exp(row_max - shift)"
P = "p = torch.exp(scores - shift)"
SUM = "row_sum = alpha * row_sum + p.sum(-1, keepdim=True)"
ACC = "acc = alpha * acc + p.to(v.dtype).to(dtype) @ v_keys"
NEXT_MAX = "next_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))"
SHIFT = "shift = torch.where(next_max == -torch.inf, 0.0, next_max)"
OUT = "out[..., rows, :] = (acc / row_sum).to(q.dtype)"
LSE = "(row_max + torch.log(row_sum)).squeeze(-1)"
SCORES = "scores = q_rows @ k_keys.mT * scale"
HIDDEN = "scores.masked_fill(~seen, -torch.inf)"
DS = "ds = p * (do_rows @ v_keys.mT - delta) * derivative * scale"
DQ = "dq[..., rows, :] += ds @ k_keys"
DK = "dk[..., keys, :] += (ds.mT @ q_rows).sum(2, keepdim=True)"
DV = "dv[..., keys, :] += (p.mT @ do_rows).sum(2, keepdim=True)"
D_LSE = "delta = delta - d_lse[..., rows, None]"
GRADIENTS = "dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))"
POSITIONS = "torch.arange(rows.start, rows.stop)[:, None] + num_keys - num_queries"
KEPT = "keys.start < last and keys.stop > first"
RETURNED = "dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)"

EASY = (
    (SCORES, SCORES.removesuffix(" * scale"), "forward", "The scores are not scaled."),
    (OUT, OUT.replace("(acc / row_sum)", "acc"), "rows sum to one", "acc is never divided."),
    (SCORES, SCORES + " * scale", "forward", "The scores are scaled twice."),
    (
        "seen &= j <= i",
        "seen &= j < i",
        "mask positions",
        "A query does not see its own key.",
    ),
    ("seen &= j <= i", "seen &= j >= i", "mask positions", "The causal mask is upside down."),
    (LSE, LSE.replace("row_max + ", ""), "lse", "lse lacks the maximum that was subtracted."),
    (LSE, LSE.replace("torch.log(row_sum)", "row_sum"), "lse", "lse adds the sum, not its log."),
    (SUM, SUM.replace("p.sum", "p.mean"), "rows sum to one", "row_sum adds the mean of a tile."),
    (
        SUM,
        SUM.replace("alpha * row_sum + ", ""),
        "rows sum to one",
        "row_sum forgets earlier tiles.",
    ),
    (ACC, ACC.replace("alpha * acc + ", ""), "forward", "acc forgets the earlier tiles."),
    (
        "scores = softcap * capped",
        "scores = capped",
        "optional arguments",
        "tanh is not multiplied by the cap.",
    ),
    (
        "torch.tanh(scores / softcap)",
        "torch.tanh(scores / scale / softcap)",
        "optional arguments",
        "The cap is on scores that are not scaled.",
    ),
    (DS, DS.removesuffix(" * scale"), "gradients", "The gradient of the scores is not scaled."),
    (DS, DS.replace(" - delta", ""), "gradients", "The softmax's own derivative lacks delta."),
    (DQ, DQ.replace("+=", "="), "gradients", "dq keeps the last tile of keys alone."),
    (ACC, ACC + ".roll(1, -2)", "forward", "Every key gets its neighbour's value."),
    (DS, DS.replace("v_keys", "k_keys"), "gradients", "dp is made from k instead of v."),
    (
        RETURNED,
        RETURNED.replace("dk", "dx").replace("dv", "dk").replace("dx", "dv"),
        "gradients",
        "dk and dv are returned in the other's place.",
    ),
)
MEDIUM = (
    (
        NEXT_MAX,
        "next_max = scores.amax(-1, keepdim=True)",
        "large logits",
        "The maximum is that of the tile: it may fall, and exp(row_max - next_max) then overflows.",
    ),
    (
        NEXT_MAX,
        NEXT_MAX.replace("amax(-1, keepdim=True)", "amax((-2, -1), keepdim=True)"),
        "large logits",
        "All rows of a tile share one maximum.",
    ),
    (ACC, ACC.replace("alpha * ", ""), "forward", "The earlier acc is not rescaled."),
    (SUM, SUM.replace("alpha * ", ""), "rows sum to one", "The earlier row_sum is not rescaled."),
    (
        ALPHA,
        "alpha = torch.exp(shift - row_max.clamp_min(-1e30))",
        "forward",
        "alpha is upside down.",
    ),
    (ALPHA, ALPHA.replace("exp", "exp2"), "forward", "alpha is a power of two, p one of e."),
    (
        P,
        "p = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(-1e30))",
        "forward",
        "p subtracts the tile's own maximum.",
    ),
    (
        "row_max = next_max\n",
        "row_max = row_max + 0 * next_max\n",
        "forward",
        "The new maximum is not kept.",
    ),
    (
        HIDDEN,
        HIDDEN.replace("-torch.inf", "0.0"),
        "mask positions",
        "Hidden scores are 0, which exp makes 1.",
    ),
    (
        "seen &= j > i - window",
        "seen &= j >= i - window",
        "mask positions",
        "The window is a key too wide.",
    ),
    (
        "i = positions(rows, num_queries, num_keys)\n    j =",
        "i = torch.arange(rows.stop - rows.start)[:, None]\n    j =",
        "mask positions",
        "The mask counts queries from the start of the tile.",
    ),
    (
        "j = torch.arange(keys.start, keys.stop)",
        "j = torch.arange(keys.stop - keys.start)",
        "mask positions",
        "The mask counts keys from the start of the tile.",
    ),
    (
        POSITIONS,
        "torch.arange(rows.start, rows.stop)[:, None]",
        "N != M",
        "Queries are aligned with the first keys.",
    ),
    (
        "for i in range(0, length, block)]",
        "for i in range(0, length - block + 1, block)]",
        "ragged tails",
        "A last tile that is not full is left out.",
    ),
    (
        "last = int(i[-1]) + 1",
        "last = int(i[0]) + 1",
        "forward",
        "The last tile of keys is chosen for the tile's first query.",
    ),
    (LSE, LSE.replace("torch.log", "torch.log2"), "lse", "Half of lse is in base two."),
    (D_LSE, "pass", "gradients", "What flows back through lse is lost."),
    (
        D_LSE,
        D_LSE.replace("delta - ", "delta + "),
        "gradients",
        "What flows back through lse has the wrong sign.",
    ),
    (
        "derivative = 1 - capped**2",
        "derivative = 1 - capped",
        "optional arguments",
        "The derivative of tanh is 1 - tanh squared.",
    ),
    (DV, DV.replace("+=", "="), "gradients", "dv keeps the last tile of queries alone."),
    (DS, DS.replace(" * derivative", ""), "optional arguments", "The softcap has no derivative."),
    (DK, DK.replace("@ q_rows", "@ q_rows * scale"), "gradients", "dk is scaled twice."),
    (ALPHA, ALPHA + " ** 2", "forward", "The earlier sums are rescaled twice."),
    (
        "scores, derivative = tile_scores(q_rows, k_keys, seen,",
        "scores, derivative = tile_scores(q_rows, k_keys, torch.ones_like(seen),",
        "gradients",
        "The backward pass does not mask.",
    ),
    (DK, DK.replace("ds.mT", "p.mT"), "gradients", "dk is made from p, not from its gradient."),
)
HARD = (
    (
        NEXT_MAX,
        "next_max = torch.where(row_max == -torch.inf, scores.amax(-1, keepdim=True), row_max)",
        "large logits",
        "The maximum of the first tile is kept for good.",
    ),
    (
        "row_max = torch.full((*q_rows.shape[:-1], 1), -torch.inf, dtype=dtype)",
        "row_max = torch.full((*q_rows.shape[:-1], 1), 0.0, dtype=dtype)",
        "logits - 120",
        "row_max starts at 0, which scores far below it never reach.",
    ),
    (
        "row_max = torch.full((*q_rows.shape[:-1], 1), -torch.inf, dtype=dtype)",
        "row_max = torch.full((*q_rows.shape[:-1], 1), -1e4, dtype=dtype)",
        "rows without a key",
        "row_max starts at -1e4, so a row without a key is not recognised.",
    ),
    (
        SHIFT,
        SHIFT + ".clamp(-88, 88)",
        "large logits",
        "What is subtracted is clamped to where exp alone would be finite.",
    ),
    (SHIFT, "shift = next_max", "first tile masked", "-inf - -inf is not caught."),
    (
        HIDDEN,
        HIDDEN.replace("-torch.inf", "-1e4"),
        "rows without a key",
        "Hidden scores are -1e4: a row of them alone becomes the mean of the values.",
    ),
    (
        "first = max(0, int(i[0]) + 1 - window)",
        "first = max(0, int(i[-1]) + 1 - window)",
        "mask positions",
        "The first tile of keys is chosen for the tile's last query.",
    ),
    (
        KEPT,
        "keys.start < last and keys.start >= first",
        "mask positions",
        "A tile that begins before a window and ends inside is skipped.",
    ),
    (
        "dtype = torch.promote_types(q.dtype, torch.float32)\n        out",
        "dtype = q.dtype\n        out",
        "float32 statistics",
        "Scores and sums are kept in the inputs' dtype.",
    ),
    (
        "q = q.unflatten(1, (k.shape[1], -1))",
        "q = q.unflatten(1, (-1, k.shape[1])).transpose(1, 2)",
        "grouped heads",
        "Query heads take the key/value heads in turn.",
    ),
    (
        DK,
        DK.replace(".sum(2, keepdim=True)", ".mean(2, keepdim=True)"),
        "grouped heads",
        "dk is the mean over the query heads of a group.",
    ),
    (
        DV,
        DV.replace(".sum(2, keepdim=True)", "[:, :, :1]"),
        "grouped heads",
        "dv counts the first query head of a group alone.",
    ),
    (
        "lse_rows = torch.where(lse_rows == -torch.inf, torch.inf, lse_rows)\n",
        "lse_rows = lse_rows + 0\n",
        "rows without a key",
        "A row without a key rebuilds p from lse = -inf.",
    ),
    (
        "p = torch.exp(scores - lse_rows)",
        "p = torch.exp(scores) / torch.exp(lse_rows)",
        "logits + 100",
        "exp(a) / exp(b) overflows where exp(a - b) does not.",
    ),
    (
        GRADIENTS,
        GRADIENTS.replace("zeros_like", "empty_like"),
        "poisoned memory",
        "Gradients are added to memory that nobody has cleared.",
    ),
    (
        "ctx.settings = causal",
        "type(ctx).settings = causal",
        "call history",
        "The backward pass takes the settings of the last forward pass.",
    ),
    (
        KEPT,
        KEPT.replace("keys.start <", "keys.start + 1 <"),
        "ragged tails",
        "A tile of which one key is seen is skipped.",
    ),
)


LEVELS = {"easy": EASY, "medium": MEDIUM, "hard": HARD}
EXERCISES = tuple(Exercise(level, *each) for level, group in LEVELS.items() for each in group)
