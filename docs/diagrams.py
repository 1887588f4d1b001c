"""Draw the pictures that explain: exact_weights.svg, packing.svg and choice.svg."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from docs.drawing import FAINT, INK, canvas
from pretrain.optimizer.exact_weights import join, split

WEIGHT, REMAINDER, LOST = "#0072B2", "#A9D3EF", "#D55E00"
# A weight and an update that is smaller than half of the distance between BF16 numbers there.
FIRST, UPDATE, UPDATES = 0.1, 1e-4, 12


def bits_of(value: float) -> str:
    """Return the 16 bits of the BF16 weight and the 16 bits of the remainder of an FP32 value."""
    parts = split(torch.tensor(value))
    return "".join(f"{int(part.view(torch.int16)) % 2**16:016b}" for part in parts)


def trained_weights() -> dict[str, list[float]]:
    """Return the values after each update of an exact weight, its BF16 part, and a BF16 weight."""
    exact = torch.tensor(FIRST)
    weight, remainder = split(exact)
    plain = weight.clone()
    values: dict[str, list[float]] = {"exact": [], "part": [], "plain": []}
    for _ in range(UPDATES + 1):
        values["exact"].append(float(join(weight, remainder)))
        values["part"].append(float(weight))
        values["plain"].append(float(plain))
        weight, remainder = split(join(weight, remainder) + UPDATE)
        plain = plain + UPDATE
    return values


def exact_weights() -> Figure:
    """Return the two parts of an exact BF16 weight, and small updates with and without them."""
    height = 4.3
    figure, axes = canvas(height)
    size, left, top = 11.2, 12, 244
    for place, bit in enumerate(bits_of(FIRST)):
        color = WEIGHT if place < 16 else REMAINDER
        x = left + place * size
        axes.add_patch(Rectangle((x, top), size, 18, facecolor=color, edgecolor="white"))
        ink = "white" if place < 16 else INK
        axes.text(x + size / 2, top + 8.5, bit, color=ink, ha="center", va="center", fontsize=8.5)
    middle = left + 16 * size
    axes.text(left, top + 48, "An exact BF16 weight has two parts", weight="bold", fontsize=10.5)
    axes.text(left, top + 24, "16 bits: the BF16 weight", color=WEIGHT)
    axes.text(middle, top + 24, "16 bits: the remainder")
    axes.text(left, top - 14, "The matrix products read it.", color=FAINT, fontsize=9)
    axes.text(middle, top - 14, "Only the optimizer reads it.", color=FAINT, fontsize=9)
    values = trained_weights()
    panel = figure.add_axes((0.14, 0.125, 0.83, 0.46))
    steps = range(UPDATES + 1)
    panel.plot(steps, values["exact"], color=REMAINDER, linewidth=5, label="both parts")
    panel.step(steps, values["part"], where="post", color=WEIGHT, linewidth=2, label="BF16 weight")
    panel.plot(steps, values["plain"], "--", color=LOST, linewidth=2, label="plain BF16")
    panel.set_xlabel(f"updates of {UPDATE:.4f}")
    panel.set_yticks([0.1, 0.1005, 0.101])
    panel.set_xlim(0, UPDATES)
    panel.set_xticks(range(0, UPDATES + 1, 3))
    panel.set_ylim(0.0998, 0.1014)
    panel.set_title("weight: plain BF16 loses each update", loc="left", fontsize=9.5)
    panel.legend(frameon=False, loc="upper left")
    return figure


# Documents of a pack: the first letter of the tokens, the number of tokens, and a color. The last
# document is cut at the end of the pack.
DOCUMENTS = (("a", 5, "#0072B2"), ("b", 3, "#E69F00"), ("c", 4, "#009E73"))


def packing() -> Figure:
    """Return a pack of three documents with its positions, labels and attention mask."""
    cell, left, rows = 23, 78, 12
    height = 5.35
    figure, axes = canvas(height)
    top = height * 72 - 48
    axes.text(12, top + 30, "A pack of three documents", weight="bold", fontsize=10.5)
    tokens = []
    for letter, length, color in DOCUMENTS:
        for place in range(length):
            is_last = place == length - 1 and letter != "c"
            tokens.append((letter, place, color, "end" if is_last else f"{letter}{place + 1}"))
    # A label is the next token. No token has the first token of another document as its label. The
    # last token of a pack has no label, because the next token is in another pack.
    names = [name for *_, name in tokens]
    labels = [following[3] if following[1] else "–" for following in tokens[1:]] + ["–"]
    lines = (
        ("tokens", names),
        ("positions", [str(place) for _, place, *_ in tokens]),
        ("labels", labels),
    )
    for line, (title, texts) in enumerate(lines):
        y = top - line * 21
        axes.text(left - 6, y + 9, title, ha="right", va="center")
        for column, text in enumerate(texts):
            color = tokens[column][2] if line == 0 else "#F2F2F2"
            ink = "white" if line == 0 else INK
            draw_cell(axes, left + column * cell, y, cell, 18, color)
            axes.text(
                left + (column + 0.5) * cell,
                y + 8.5,
                text,
                ha="center",
                va="center",
                color=ink,
                fontsize=8.5,
            )
    bottom = top - 3 * 21 - 18
    axes.text(left, bottom + 10, "attention: which tokens (columns) a token (row) sees", fontsize=9)
    side = 19
    for row in range(rows):
        y = bottom - (row + 1) * side
        axes.text(left - 6, y + side / 2, names[row], ha="right", va="center", fontsize=8.5)
        for column in range(rows):
            is_seen = column <= row and tokens[column][0] == tokens[row][0]
            color = tokens[row][2] if is_seen else "#F2F2F2"
            draw_cell(axes, left + column * cell, y, cell, side, color)
    return figure


def draw_cell(axes: Axes, x: float, y: float, width: float, height: float, color: str) -> None:
    """Draw a filled rectangle with a white border."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white"))


# Questions of the picture of the choice: the question, and the answer if it is "no".
QUESTIONS = (
    ("Does the GPU compute FP8?\nAda, Hopper, Blackwell: yes.\nA100, RTX 30: no.", "bf16"),
    ("Has the model at least\n0.1 billion parameters?", "bf16: FP8\ngains little"),
    ("Is the model dense?", "ask which:\nexperts gain\nless speed"),
    ("May the training loss\nrise by 0.1 to 0.3 %?", "bf16"),
    (
        "Has the table a similar model\nand a similar training?",
        "ask which:\nthe loss\nis not known",
    ),
)


def choice() -> Figure:
    """Return the choice of a precision as a chain of questions."""
    step, box = 66, 46
    height = (len(QUESTIONS) * step + 84) / 72
    figure, axes = canvas(height)
    axes.text(12, height * 72 - 18, "Which precision?", weight="bold", fontsize=10.5)
    center, width = 112, 196
    for place, (question, otherwise) in enumerate(QUESTIONS):
        y = height * 72 - 78 - place * step
        draw_box(axes, center, y + box / 2, width, box, question, "#EEF3F7", INK)
        axes.annotate(
            "",
            (266, y + box / 2),
            (center + width / 2 + 3, y + box / 2),
            arrowprops={"arrowstyle": "-|>", "color": FAINT},
        )
        axes.text(237, y + box / 2 + 4, "no", ha="center", color=FAINT)
        is_bf16 = otherwise.startswith("bf16")
        color = "#DDE1E6" if is_bf16 else "#FBE3C4"
        draw_box(axes, 320, y + box / 2, 102, box, otherwise, color, INK)
        axes.annotate(
            "",
            (center, y - (step - box) + 2),
            (center, y - 3),
            arrowprops={"arrowstyle": "-|>", "color": FAINT},
        )
        axes.text(center + 8, y - 14, "yes", color=FAINT)
    last = height * 72 - 78 - len(QUESTIONS) * step
    text = "delayed, and for more speed\nfp8_config.scope=linear+head"
    draw_box(axes, center, last + box / 2, width, box, text, WEIGHT, "white")
    return figure


def draw_box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, ink: str
) -> None:
    """Draw a rounded box with text around its center."""
    style = "round,pad=0,rounding_size=5"
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(corner, width, height, style, facecolor=color, edgecolor="none"))
    axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=9, linespacing=1.25)
