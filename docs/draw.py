"""Draws the pictures of the documentation, readable on light and dark pages: `python docs/draw.py` writes pictures/."""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURES = Path(__file__).with_name("pictures")
STYLE = """
  .paper { fill: #fbfbfa } .box { fill: #eef1f4; stroke: #5b6770 } .text { fill: #1d2429 } .quiet { fill: #57636c }
  .line { stroke: #5b6770; fill: none } .head { fill: #5b6770 } .R1 { fill: #0b7285 } .R2 { fill: #a61e4d }
  .R3 { fill: #9c4a00 } .R4 { fill: #5f3dc4 } .stream { stroke: #0b7285; stroke-width: 7; fill: none }
  .held { fill: #0b7285; fill-opacity: .75 } .mark { fill: #ffffff; font-weight: 600 } .strong { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1b2025 } .box { fill: #2a323a; stroke: #93a1ac } .text { fill: #e9edf0 } .quiet { fill: #a9b5be }
    .line { stroke: #93a1ac } .head { fill: #93a1ac } .R1 { fill: #1098ad } .R2 { fill: #d6336c } .R3 { fill: #d9730d }
    .R4 { fill: #845ef7 } .stream { stroke: #1098ad } .held { fill: #1098ad }
  }
"""
"""What every class of shapes looks like; the paper is drawn too, so that the page around it does not matter."""


def picture(title: str, width: int, height: int, *shapes: str) -> str:
    """Return a whole picture; sizes in pixels, `title` is what a screen reader says."""
    arrow = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="14">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        f'<defs>{arrow}<path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>\n'
        f'<rect class="paper" width="{width}" height="{height}" rx="10"/>\n'
    )
    return head + "\n".join(shapes) + "\n</svg>\n"


def text(x: float, y: float, words: str, kind: str = "text", anchor: str = "middle", size: int = 14) -> str:
    """Return one line of words; `kind` names classes of the style."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def box(x: float, y: float, width: float, *lines: str, height: float = 40) -> str:
    """Return a box with lines of words in its middle, (x, y) its upper left corner; later lines are quieter."""
    first = y + height / 2 + 5 - 8 * (len(lines) - 1)
    words = [
        text(x + width / 2, first + 17 * index, line, "quiet" if index else "text", size=12 if index else 14)
        for index, line in enumerate(lines)
    ]
    frame = f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    return "\n".join([frame, *words])


def mark(x: float, y: float, name: str) -> str:
    """Return a rotation's mark around (x, y), in its color."""
    return f'<rect class="{name}" x="{x - 16}" y="{y - 12}" width="32" height="24" rx="12"/>' + text(
        x, y + 5, name, "mark"
    )


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through points, with an arrow's head at its end."""
    path = " L".join(f"{x},{y}" for x, y in points)
    return f'<path class="line" stroke-width="1.6" d="M{path}" marker-end="url(#arrow)"/>'


def rotations() -> str:
    """Return where R1, R2, R3 and R4 act in a decoder layer."""
    stream = 74
    return picture(
        "A decoder layer: R1 turns the residual stream, R2 values, R3 queries and keys, R4 the down projection's input",
        960,
        500,
        text(480, 28, "the residual stream, turned by R1: what writes to it turns, what reads it turns back", "quiet"),
        f'<path class="stream" d="M130,{stream} L832,{stream}"/>',
        box(24, stream - 24, 106, "embedding", "E R1", height=48),
        box(832, stream - 24, 106, "head", "W R1", height=48),
        mark(200, stream, "R1"),
        mark(480, stream, "R1"),
        mark(770, stream, "R1"),
        # Attention
        arrow((170, stream + 4), (170, 130)),
        box(130, 130, 80, "norm"),
        arrow((170, 170), (170, 206), (80, 206), (80, 226)),
        arrow((170, 206), (170, 226)),
        arrow((170, 206), (260, 206), (260, 226)),
        box(40, 226, 80, "q", "W R1", height=46),
        box(130, 226, 80, "k", "W R1", height=46),
        box(220, 226, 80, "v", "R2ᵀ W R1", height=46),
        arrow((80, 272), (80, 300)),
        arrow((170, 272), (170, 300)),
        text(125, 293, "RoPE", "quiet", size=12),
        mark(80, 314, "R3"),
        mark(170, 314, "R3"),
        arrow((80, 326), (80, 356)),
        arrow((170, 326), (170, 356)),
        arrow((260, 272), (260, 356)),
        mark(260, 314, "R2"),
        '<path class="line" stroke-width="1.6" stroke-dasharray="4 3" d="M148,339 L288,339"/>',
        text(294, 343, "KV cache", "quiet", anchor="start", size=12),
        box(40, 356, 260, "softmax(q kᵀ) v"),
        arrow((300, 376), (356, 376)),
        mark(328, 376, "R2"),
        box(356, 352, 92, "output", "R1ᵀ W R2", height=48),
        arrow((402, 352), (402, stream + 6)),
        text(412, 250, "writes", "quiet", anchor="start", size=12),
        # MLP
        arrow((560, stream + 4), (560, 130)),
        box(520, 130, 80, "norm"),
        arrow((560, 170), (560, 206), (515, 206), (515, 226)),
        arrow((560, 206), (605, 206), (605, 226)),
        box(475, 226, 80, "gate", "W R1", height=46),
        box(565, 226, 80, "up", "W R1", height=46),
        arrow((515, 272), (515, 300), (548, 300), (548, 356)),
        arrow((605, 272), (605, 300), (572, 300), (572, 356)),
        box(496, 356, 128, "act(gate) · up"),
        arrow((624, 376), (724, 376)),
        mark(672, 376, "R4"),
        box(724, 352, 92, "down", "R1ᵀ W R4", height=48),
        arrow((770, 352), (770, stream + 16)),
        text(780, 250, "writes", "quiet", anchor="start", size=12),
        # Legend
        mark(48, 434, "R1"),
        text(70, 439, "hidden × hidden, one for the model; trained, merged", anchor="start", size=13),
        mark(48, 468, "R2"),
        text(70, 473, "head_dim × head_dim, one a layer; trained, merged", anchor="start", size=13),
        mark(520, 434, "R3"),
        text(542, 439, "Hadamard of each head of q and k; online, cancels in q kᵀ", anchor="start", size=13),
        mark(520, 468, "R4"),
        text(542, 473, "Hadamard of the MLP's inner width; online, inverse merged", anchor="start", size=13),
    )


def merging() -> str:
    """Return what a merge does to one linear."""
    return picture(
        "While training a linear works between two rotations; a merge leaves one weight in their place",
        960,
        236,
        text(24, 34, "while training", "text strong", anchor="start"),
        arrow((150, 29), (552, 29)),
        text(350, 22, "merge", size=13),
        text(568, 34, "merged", "text strong", anchor="start"),
        text(44, 82, "x R", size=13),
        arrow((24, 92), (66, 92)),
        box(68, 72, 64, "Q"),
        arrow((132, 92), (174, 92)),
        box(176, 60, 232, "Q( Lᵀ W R )", "W is frozen, L and R are trained", height=64),
        text(430, 82, "y L", size=13),
        arrow((408, 92), (452, 92)),
        text(292, 148, "L and R live in the bank, once each", "quiet", size=13),
        text(588, 82, "x R", size=13),
        arrow((568, 92), (610, 92)),
        box(612, 72, 64, "Q"),
        arrow((676, 92), (718, 92)),
        box(720, 60, 140, "Q( W′ )", "W′ = Lᵀ W R", height=64),
        text(882, 82, "y L", size=13),
        arrow((860, 92), (904, 92)),
        text(790, 148, "a plain checkpoint: same names and shapes", "quiet", size=13),
        text(480, 188, "without the quantizers Q both give the float model's logits, which the run proves", "quiet"),
        text(480, 212, "R3 and R4 stay online; R4's inverse is in the down projection's W′", "quiet"),
    )


PHASES = (
    ("load", "structure, no memory", "rotations placed"),
    ("shard", "mesh, guard,", "weights read"),
    ("baseline", "float and", "quantized rows"),
    ("prepare", "norms folded,", "invariance proven"),
    ("hadamard", "the row of random", "rotations"),
    ("train", "forward, backward,", "consolidate, step"),
    ("average", "EMA's row,", "if there is one"),
    ("save", "rotations and", "trained weights"),
    ("merge", "baked in,", "proven again"),
    ("evaluate", "the row of the", "merged model"),
)


def life() -> str:
    """Return one life of a run: who does what, and the phases on every rank."""
    shapes = [
        box(24, 24, 210, "python -m rotexp.train", "compose, check, claim the folder", height=56),
        arrow((234, 52), (300, 52)),
        box(300, 24, 210, "launch", "start or adopt the ranks", height=56),
        arrow((510, 52), (576, 52)),
        box(576, 24, 360, "every rank: the same config, the same folder", "processes of this run alone", height=56),
    ]
    for index, (name, first, second) in enumerate(PHASES):
        x, y = 24 + 186 * (index % 5), 126 + 112 * (index // 5)
        shapes.append(box(x, y, 168, name, first, second, height=76))
        if index % 5:
            shapes.append(arrow((x - 18, y + 38), (x, y + 38)))
    shapes += [
        arrow((756, 80), (756, 102), (108, 102), (108, 126)),
        arrow((852, 202), (852, 220), (108, 220), (108, 238)),
        text(
            24,
            350,
            "metrics.jsonl, summary.json, rotations.safetensors and checkpoints/ are the truth; W&B mirrors them",
            "quiet",
            "start",
        ),
    ]
    return picture("One life of a run, from the command to its last phase", 960, 370, *shapes)


STRATEGIES = (
    ("no_shard", 1, "the whole weights", "none"),
    ("full", 4, "a shard; whole in forward, and again in backward", "two of a unit"),
    ("zero2", 4, "a shard; whole from forward to backward", "one of a unit"),
    ("zero2_master", 1, "whole weights; shards of master and moments", "one of what was stepped"),
    ("hybrid", 2, "a shard of its group's, as full", "two of a unit, in a group"),
    ("hybrid_zero2", 2, "a shard of its group's, as zero2", "one of a unit, in a group"),
)


def sharding() -> str:
    """Return what each of four ranks holds of the weights at rest under every strategy."""
    shapes = [
        text(24, 34, "sharding", "text strong", "start"),
        text(186, 34, "weights at rest, 4 ranks", "text strong", "start"),
        text(400, 34, "a rank holds", "text strong", "start"),
        text(752, 34, "gathers in a step", "text strong", "start"),
    ]
    for row, (name, count, holds, gathers) in enumerate(STRATEGIES):
        y = 52 + 46 * row
        shapes.append(text(24, y + 22, name, anchor="start"))
        for rank in range(4):
            x, part = 186 + 50 * rank, 30 / count
            shapes.append(f'<rect class="box" x="{x}" y="{y}" width="40" height="30"/>')
            shapes.append(f'<rect class="held" x="{x}" y="{y + part * (rank % count)}" width="40" height="{part}"/>')
        shapes.append(text(400, y + 21, holds, anchor="start", size=13))
        shapes.append(text(752, y + 21, gathers, "quiet", "start", size=13))
    shapes.append(
        text(
            24,
            348,
            "rotations are whole on every rank, outside FSDP2, and kept alike by the coordinator",
            "quiet",
            "start",
        )
    )
    return picture("What each of four ranks holds of the weights under every sharding strategy", 960, 366, *shapes)


DRAWINGS = {"rotations": rotations, "merge": merging, "life": life, "sharding": sharding}


def main() -> None:
    """Write every picture."""
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
